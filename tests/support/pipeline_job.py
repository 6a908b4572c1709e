"""`python -m tests.support.pipeline_job INPUT REJECTS DATABASE ROWS_PER_SECOND`: the job in a process of its own."""

import sys

from outbox_pipeline.jobs.register.job import run
from outbox_pipeline.settings import RegisterSettings
from outbox_pipeline.spark.session import session
from tests.support import spanner


def settings(input: str, rejects: str, database: str, rate: int = 0, **others: str) -> RegisterSettings:
    return RegisterSettings(
        project=spanner.PROJECT,
        instance=spanner.INSTANCE,
        database=database,
        database_role="",
        log_format="auto",
        log_level="info",
        input=input,
        input_format=others.get("input_format", "auto"),
        rejects=rejects,
        topic=others.get("topic", ""),
        key=others.get("key", ""),
        max_rows_per_second=rate,
    )


if __name__ == "__main__":
    given, rejects, database, rate = sys.argv[1:]
    print(run(session("register", "local[2,3]"), settings(given, rejects, database, int(rate))))
