"""`python -m tests.support.pipeline_job INPUT REJECTS DATABASE ROWS_PER_SECOND`: the job in a process of its own."""

import dataclasses
import sys
from typing import Any

from outbox_pipeline.jobs.register.job import run
from outbox_pipeline.settings import RegisterSettings
from outbox_pipeline.spark.session import session
from tests.support import spanner


def settings(input: str, rejects: str, database: str, rate: int = 0, **others: Any) -> RegisterSettings:
    given = {
        "project": spanner.PROJECT, "instance": spanner.INSTANCE, "database": database, "input": input,
        "rejects": rejects, "max_rows_per_second": str(rate),
    }  # fmt: skip
    return dataclasses.replace(RegisterSettings.read(given, {}), **others)


if __name__ == "__main__":
    given, rejects, database, rate = sys.argv[1:]
    print(run(session("register", "local[2,3]"), settings(given, rejects, database, int(rate))))
