"""The command `archive --purge`, killed while it deletes, and run again."""

import signal
from datetime import timedelta
from pathlib import Path

import pytest
from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database
from pyspark.sql import SparkSession

from outbox.emulators import Emulators
from outbox.settings import DatabaseSettings
from outbox.states import NEVER
from outbox.times import shown
from outbox_pipeline.jobs.archive import run
from tests.support.archives import DAY, MICROSECOND, NEXT_DAY, archived, purges, sent, settings_of
from tests.support.operations import insert, row, rows_of
from tests.support.processes import started
from tests.support.spanner import INSTANCE, PROJECT
from tests.support.waiting import eventually

#: Seconds in which Spark starts, and does the work; a machine may be slow.
SECONDS = 200.0
TASKS = 2_000


def number_of(database: Database) -> int:
    """Return how many tasks there are; a query would keep the emulator busy, which the job needs."""
    with database.snapshot() as snapshot:
        return len(list(snapshot.read("AsynchronousTasks", ("Id",), KeySet(all_=True))))


@pytest.mark.timeout(2 * SECONDS)
def test_a_purge_that_was_killed_is_ended_by_the_next_run(
    spark: SparkSession, emulators: Emulators, target: DatabaseSettings, database: Database, tmp_path: Path
) -> None:
    """Nothing is deleted before all of it can be read, nothing is written again, and what is not archived stays."""
    tasks = [sent(f"{number:05d}", DAY + MICROSECOND * number) for number in range(TASKS)]
    insert(database, tasks)
    insert(database, [row("waits"), row("dead", AvailableAt=NEVER), sent("next", NEXT_DAY + timedelta(hours=1))])
    everything = [(each["Id"], each["SentAt"]) for each in tasks]
    command = (
        "outbox_pipeline", "archive", "--project", PROJECT, "--instance", INSTANCE, "--database", database.database_id,
        "--archive", str(tmp_path), "--until", shown(NEXT_DAY), "--purge", "--read-late",
    )  # fmt: skip

    with started(*command, environment=emulators.environment()) as deletes:
        deletes.wait_for_text(f"archived {TASKS:,} tasks", SECONDS)
        eventually(lambda: number_of(database) < TASKS, seconds=SECONDS)
        deletes.stop(signal.SIGKILL)
        deletes.wait()
    assert archived(spark, tmp_path) == everything, "nothing is deleted before all of it can be read"

    done = run(spark, settings_of(target, tmp_path), purge=True)
    assert (done.windows, done.written, done.until) == (0, 0, NEXT_DAY)
    assert archived(spark, tmp_path) == everything
    assert sorted(rows_of(database)) == ["dead", "next", "waits"]
    [note] = purges(tmp_path)
    assert note is not None
    assert (note["deleted"] + note["missing"], note["changed"]) == (TASKS, 0)
