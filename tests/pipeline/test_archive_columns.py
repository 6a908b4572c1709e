"""An archive whose files have a column more or less than the table: a later or an earlier version wrote it."""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.cloud.spanner_v1.database import Database
from pyspark.sql import SparkSession

from outbox.base.times import shown
from outbox.errors import OutboxError
from outbox.message import TASK_ID_ATTRIBUTE
from outbox.program.settings import DatabaseSettings
from outbox_pipeline.job_settings import AuditSettings
from outbox_pipeline.jobs.archive import job as archive
from outbox_pipeline.jobs.audit import job as audit
from outbox_pipeline.jobs.replay import job as replay
from tests.support.archives import DAY, edit, remove, sent, settings_of, windows_of
from tests.support.fakes import serialized
from tests.support.operations import insert, rows_of
from tests.support.pipeline import options, replay_settings, write_lines

AT = DAY + timedelta(hours=1)
#: Later columns than those without which there is no task. In the table, some have a default and others may be NULL.
LATER = ("AtMostOnce", "BlockedBy", "TimesSent", "CancelledAt")


def later(files: pa.Table) -> pa.Table:
    return files.append_column("Added", pa.array([7] * len(files)))


def archive_of(spark: SparkSession, target: DatabaseSettings, folder: Path, *, purge: bool) -> None:
    assert archive.run(spark, settings_of(target, folder), late=True, purge=purge).written == 2


def change(folder: Path, by: Callable[[pa.Table], pa.Table]) -> None:
    for file in folder.rglob("*.parquet"):
        files = by(pq.read_table(file, partitioning=None))
        remove(file)
        pq.write_table(files, file)


@pytest.fixture
def two(database: Database) -> None:
    tasks = ("received", "lost")
    insert(database, [sent(id, AT, CreatedAt=AT, Data=serialized(b"data"), OrderingKey="k") for id in tasks])


@pytest.mark.usefixtures("two")
def test_it_is_audited_and_replayed(spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path):
    before, files = rows_of(database), tmp_path / "archive"
    archive_of(spark, target, files, purge=True)
    change(files, lambda table: later(table.drop_columns(list(LATER))))
    message = {"message_id": "1", "publish_time": shown(AT), "attributes": {TASK_ID_ATTRIBUTE: "received"}}
    received = write_lines(tmp_path / "received.jsonl", [message | {"attributes": json.dumps(message["attributes"])}])
    given = {"received": str(received), "output": str(tmp_path / "report"), "tasks": "archive", "archive": str(files)}
    window = {"since": shown(DAY), "until": shown(DAY + timedelta(hours=20))}
    found = audit.run(spark, AuditSettings.read(options(target, **given, **window), {}))
    assert (found.tasks, found.delivered, found.lost) == (2, 1, 1)
    assert replay.run(spark, replay_settings(target, archive=str(files), where="true")).registered == 2
    after = rows_of(database)
    same = ("Id", "Topic", "Data", "OrderingKey", "CreatedAt", "Sequence", "Priority", "AtMostOnce", "BlockedBy")
    assert [[after[id][name] for name in same] for id in before] == [
        [before[id][name] for name in same] for id in before
    ]


@pytest.mark.usefixtures("two")
def test_it_is_purged_or_one_sentence_says_why_not(
    spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path
):
    """This version cannot prove a column that it does not know, so it deletes nothing."""
    archive_of(spark, target, tmp_path, purge=False)
    [window] = windows_of(tmp_path)
    change(tmp_path, later)
    edit(window, checksum="7")
    with pytest.raises(OutboxError, match=r"not purged.* If a later version of the package wrote them, upgrade this"):
        archive.run(spark, settings_of(target, tmp_path), purge=True)
    assert len(rows_of(database)) == 2
    edit(window, checksum=window["checksum"])
    change(tmp_path, lambda files: files.drop_columns(["Added", "BlockedBy", "CancelledAt"]))
    assert archive.run(spark, settings_of(target, tmp_path), purge=True).deleted == 2
