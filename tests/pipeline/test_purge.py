"""The purge of the job `archive`, and a purge that fails and is run again. See also test_archive_job.py."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
from google.cloud.spanner_v1.database import Database
from pyspark.errors import PythonException
from pyspark.sql import SparkSession

from outbox.admin import operations
from outbox.base.times import shown
from outbox.program.settings import DatabaseSettings
from outbox.table.states import NEVER
from outbox_pipeline.jobs.archive import job
from outbox_pipeline.jobs.archive.job import purge_chunk, run
from outbox_pipeline.spanner import Table
from tests.support.archives import DAY, MICROSECOND, NEXT_DAY, archived, purges, sent, settings_of
from tests.support.operations import Watch, insert, row, rows_of, update
from tests.support.pipeline import meddle, noted, purge_half_and_fail


def test_a_purge_keeps_a_task_that_is_reset_before_its_transaction(database: Database, monkeypatch: pytest.MonkeyPatch):
    insert(database, [sent("a", DAY), sent("b", DAY)])
    table = Table(Watch(database).database)
    operation = operations.begin(table, "purge", {}, Tasks=0).id
    meddle(monkeypatch, table, lambda: update(database, "a", SentAt=None))
    assert purge_chunk(table, {"a": DAY, "b": DAY}, operation) == {"deleted": 1, "resent": 1, "missing": 0}
    assert list(rows_of(database)) == ["a"]


def test_the_next_run_finishes_a_purge_whose_spark_tasks_failed(
    spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Half of the tasks are deleted, as after a kill, without _purged.json. The next run deletes the rest."""
    tasks = [sent(f"{number:03d}", DAY + MICROSECOND * number) for number in range(300)]
    everything = [(each["Id"], each["SentAt"]) for each in tasks]
    left = [row("waits"), row("dead", AvailableAt=NEVER), sent("next", NEXT_DAY + timedelta(hours=1))]
    insert(database, [*tasks, *left])
    monkeypatch.setattr(job, "purge_rows", purge_half_and_fail)
    with pytest.raises(PythonException, match="when it has deleted half of its rows"):
        run(spark, settings_of(target, tmp_path), purge=True, late=True)
    monkeypatch.undo()
    assert len(left) < len(rows_of(database)) < len(tasks)
    assert purges(tmp_path) == [None]
    [failed] = noted(database)
    assert failed["FinishedAt"] is None
    assert 0 < failed["Tasks"] == len(tasks) + len(left) - len(rows_of(database))
    assert archived(spark, tmp_path) == everything, "nothing is deleted before all of it can be read"
    done = run(spark, settings_of(target, tmp_path), purge=True)
    assert (done.windows, done.written, done.until) == (0, 0, NEXT_DAY)
    assert archived(spark, tmp_path) == everything
    [note] = purges(tmp_path)
    assert note is not None
    assert (note["deleted"] + note["missing"], note["resent"]) == (len(everything), 0)
    assert sorted(rows_of(database)) == ["dead", "next", "waits"]
    [finished] = noted(database)
    assert finished["OperationId"] == failed["OperationId"]
    assert (finished["Operation"], json.loads(finished["Selection"])["since"]) == ("purge", shown(DAY))
    assert finished["Tasks"] == len(everything), "those of all attempts"
    assert finished["FinishedAt"] is not None
