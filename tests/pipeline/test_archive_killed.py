"""The job `archive --purge` that ends while it deletes, by a fault or killed, and is run again."""

import signal
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database
from pyspark.errors import PythonException
from pyspark.sql import SparkSession

from outbox.emulators import Emulators
from outbox.settings import DatabaseSettings
from outbox.states import NEVER
from outbox.times import shown
from outbox_pipeline.jobs import archive as job
from outbox_pipeline.jobs.archive import run
from tests.support.archives import DAY, MICROSECOND, NEXT_DAY, archived, purges, sent, settings_of
from tests.support.operations import insert, row, rows_of
from tests.support.pipeline import PurgeFails
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


def assert_ended(
    spark: SparkSession, target: DatabaseSettings, archive: Path, everything: list[tuple[str, datetime]]
) -> None:
    """Run the purge of a window anew: nothing is written again, all that is archived is deleted, and that is noted."""
    assert archived(spark, archive) == everything, "nothing is deleted before all of it can be read"
    done = run(spark, settings_of(target, archive), purge=True)
    assert (done.windows, done.written, done.until) == (0, 0, NEXT_DAY)
    assert archived(spark, archive) == everything
    [note] = purges(archive)
    assert note is not None
    assert (note["deleted"] + note["missing"], note["changed"]) == (len(everything), 0)


def test_a_purge_whose_spark_tasks_fail_is_ended_by_the_next_run(
    spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half is deleted and nothing is noted; the next run deletes the rest."""
    tasks = [sent(f"{number:03d}", DAY + MICROSECOND * number) for number in range(300)]
    insert(database, [*tasks, row("waits")])
    monkeypatch.setattr(job, "Purge", PurgeFails)
    with pytest.raises(PythonException, match="when it has deleted half of its rows"):
        run(spark, settings_of(target, tmp_path), purge=True, late=True)
    monkeypatch.undo()
    assert 1 < number_of(database) < len(tasks)
    assert purges(tmp_path) == [None]
    assert_ended(spark, target, tmp_path, [(each["Id"], each["SentAt"]) for each in tasks])
    assert list(rows_of(database)) == ["waits"]


@pytest.mark.long("test_a_purge_whose_spark_tasks_fail_is_ended_by_the_next_run leaves what a kill leaves")
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
    assert_ended(spark, target, tmp_path, everything)
    assert sorted(rows_of(database)) == ["dead", "next", "waits"]
