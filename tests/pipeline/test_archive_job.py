"""The job `archive` on Spark and the emulator: windows, interrupted runs and purges."""

import base64
import json
import os
import re
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from google.cloud.spanner_v1.database import Database
from pyspark.errors import PythonException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.testing import assertDataFrameEqual, assertSchemaEqual

from outbox.admin import operations
from outbox.base.times import shown
from outbox.errors import OutboxError, SettingError
from outbox.program.settings import DatabaseSettings
from outbox.table.ddl import CANCELLED
from outbox.table.states import NEVER
from outbox_pipeline import read_archive, schemas
from outbox_pipeline.jobs.archive import job
from outbox_pipeline.jobs.archive.job import purge_chunk, run
from outbox_pipeline.jobs.archive.log import Log, Window
from outbox_pipeline.jobs.archive.windows import Archive, checksum_columns, floor
from outbox_pipeline.spanner import Table, open_table
from tests.support.archives import (
    DAY,
    MICROSECOND,
    NEXT_DAY,
    archived,
    commits,
    data_folders,
    edit,
    first_try_fails,
    ids,
    purges,
    rewrite,
    sent,
    settings_of,
    window_folders,
    windows_of,
)  # fmt: skip
from tests.support.fakes import serialized
from tests.support.operations import CREATED, Watch, delete, insert, insert_cancelled, row, rows_of, update
from tests.support.pipeline import meddle, noted, write_half_and_fail
from tests.support.spanner import query
from tests.support.waiting import eventually

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
#: An hour later, clocks in New York show this time again.
TWICE = datetime.fromisoformat("2025-11-02T05:30:00Z")
#: Names that a path, a reader of paths or a pattern may take for something else.
TOPICS = (
    "projects/shop/topics/orders", "a%2Fb", "100%", "a+b c", "007", "1e5", "2026-10-20", "true", "null", "a=b", "..",
    "{x}", "[a-z]*", "née", "a:b", "#?&", "\t", "'\"", "\\", "", "__HIVE_DEFAULT_PARTITION__",
    *("t" * length for length in (72, 73, 255)), f"projects/{'p' * 30}/topics/{'%' * 255}", "%" * 72, "é" * 255,
)  # fmt: skip


def as_the_table_has_them(spark: SparkSession, database: Database, day: datetime) -> DataFrame:
    """Return the expected archive of all rows, which were sent on one day, without using our own reader."""
    names = schemas.TABLE.fieldNames()
    with database.snapshot() as snapshot:
        found = list(snapshot.execute_sql(f"SELECT {', '.join(names)} FROM AsynchronousTasks"))
    data = names.index("Data")
    rows = [(*values[:data], base64.b64decode(values[data]), *values[data + 1 :], None, day.date()) for values in found]
    return spark.createDataFrame(rows, schemas.ARCHIVED, verifySchema=False)


def test_archived_rows_equal_the_table_in_every_column(
    spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path
):
    """In every time zone of the session."""
    late = NEXT_DAY - MICROSECOND
    odd = [sent(f"topic {number}", late, Topic=topic) for number, topic in enumerate(TOPICS)]
    full = {
        "OrderingKey": "k\0", "Sequence": -(2**63), "Priority": 2**63 - 1, "AtMostOnce": True, "Attempts": 3,
        "LastError": "", "AvailableAt": TWICE + HOUR, "ExpiresAt": NEVER, "CreatedAt": TWICE + MICROSECOND,
    }  # fmt: skip
    messages = {"nul": b"\0" * 3, "empty": b"", "large": os.urandom(8_000_000), "bytes": bytes(range(256))}
    insert(database, odd)
    insert(database, [sent(id, DAY, Data=data) for id, data in messages.items()])
    insert(database, [sent("full", DAY + MICROSECOND, **full), sent("é\n", DAY + HOUR * 12)])
    expected = as_the_table_has_them(spark, database, DAY)
    # Tasks of other days, and unsent tasks.
    insert(database, [sent("before", DAY - MICROSECOND), sent("after", NEXT_DAY)])
    insert(database, [row("ready"), row("dead", AvailableAt=NEVER), row("due", CreatedAt=DAY, AvailableAt=DAY)])

    checksum = expected.select(*checksum_columns()).first()
    try:
        for zone in ("America/New_York", "Pacific/Kiritimati"):
            spark.conf.set("spark.sql.session.timeZone", zone)
            archive = tmp_path / zone
            done = run(spark, settings_of(target, archive, since=shown(DAY + HOUR * 7)), late=True)
            assert (done.windows, done.written) == (1, len(odd) + len(messages) + 2)
            assert [(each["rows"], each["checksum"]) for each in windows_of(archive)] == [checksum], zone
        found = read_archive(spark, str(archive)).cache()
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assertSchemaEqual(found.schema, schemas.ARCHIVED)
    # A digest instead of 8 MB, because the comparison writes each value as a text.
    micros = {name: f.unix_micros(name) for name in ("CreatedAt", "AvailableAt", "ExpiresAt", "SentAt")}
    assertDataFrameEqual(*(each.withColumns(micros | {"Data": f.sha2("Data", 256)}) for each in (found, expected)))
    days = [day.name for folder in tmp_path.glob("*/*/window=*/run=*") for day in folder.iterdir() if day.is_dir()]
    assert days == ["SentDate=2026-10-20"] * 2


def failing(transform: Callable[[DataFrame], DataFrame], note: Path) -> Callable[[DataFrame], DataFrame]:
    def made(tasks: DataFrame) -> DataFrame:
        stored = transform(tasks)
        return stored.mapInArrow(partial(first_try_fails, note=note), stored.schema)

    return made


@pytest.mark.usefixtures("many_partitions")
def test_many_tasks_are_archived_once_despite_failed_spark_tasks(
    spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Spark retries a Spark task after its read and after its write. Almost all tasks have one topic."""
    number = 1_000
    ids = [f"{each * (2**32 // number):08x}" for each in range(number)]
    topics = ["orders" if each % 100 else f"rare-{each // 200}" for each in range(number)]
    tasks = [sent(ids[each], DAY + MICROSECOND * each, Topic=topics[each]) for each in range(number)]
    insert(database, tasks)
    failed = tmp_path / "a reading task failed", tmp_path / "a writing task failed"
    for name, note in zip(("archivable", "rebalanced"), failed, strict=True):
        monkeypatch.setattr(job, name, failing(getattr(job, name), note))
    done = run(spark, settings_of(target, tmp_path), late=True)
    assert all(note.exists() for note in failed)
    assert (done.windows, done.written) == (1, number)
    [window] = windows_of(tmp_path)
    assert window["rows"] == number
    assert archived(spark, tmp_path) == [(each["Id"], each["SentAt"]) for each in tasks]
    topics = read_archive(spark, str(tmp_path)).groupBy("Topic").count().collect()
    assert dict(topics) == {"orders": 990} | {f"rare-{each}": 2 for each in range(5)}

    [file] = tmp_path.rglob("*.parquet")
    stored = pq.read_table(file, columns=["Topic"], partitioning=None)["Topic"].to_pylist()
    assert stored == sorted(stored), "a reader of one topic can skip parts of the file"

    monkeypatch.undo()
    # The checksum is of the rows that were read back. Otherwise the purge would delete nothing.
    done = run(spark, settings_of(target, tmp_path), purge=True)
    assert (done.windows, done.purged_windows, done.deleted, done.resent, done.missing) == (0, 1, number, 0, 0)
    assert rows_of(database) == {}
    assert len(archived(spark, tmp_path)) == number


def test_windows_adjoin_and_only_archived_tasks_are_purged(
    spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A task that is sent again is in both windows, and stays in the table until the second one is purged."""
    insert(database, [sent(id, DAY + HOUR * 3.5) for id in ("again", "gone", "reset", "stays")])
    insert(database, [row("waits"), row("dead", AvailableAt=NEVER), row("old", SentAt=DAY + HOUR * 4)])
    caplog.set_level("INFO", "outbox_pipeline")
    settings = settings_of(target, tmp_path, window="1h", until=shown(DAY + HOUR * 4.9))
    first = run(spark, settings, late=True)
    assert (first.windows, first.written, first.until) == (1, 4, DAY + HOUR * 4)
    assert caplog.messages == [
        "archived 4 tasks sent or cancelled from 2026-10-20T03:00:00.000000Z to 2026-10-20T04:00:00.000000Z"
    ]

    delete(database, "gone", "old")
    update(database, "again", SentAt=DAY + HOUR * 7)
    update(database, "reset", SentAt=None)
    # --since applies to a new archive only. Windows of another length start at the end of the last one.
    insert(database, [sent("too old", DAY), sent("between", DAY + HOUR * 5)])
    settings = settings_of(target, tmp_path, window="3h", since=shown(DAY), until=shown(DAY + HOUR * 12))
    second = run(spark, settings, late=True, purge=True)
    assert (second.windows, second.written, second.until) == (3, 2, DAY + HOUR * 12)
    assert (second.purged_windows, second.deleted, second.resent, second.missing) == (4, 3, 2, 1)
    bounds = [DAY + HOUR * hours for hours in (3, 4, 6, 9, 12)]
    assert [(each["since"], each["until"], each["rows"]) for each in windows_of(tmp_path)] == [
        (shown(since), shown(until), rows)
        for since, until, rows in zip(bounds[:-1], bounds[1:], (4, 1, 1, 0), strict=True)
    ]
    counts = [{name: each[name] for name in ("deleted", "resent", "missing")} for each in purges(tmp_path) if each]
    assert counts == [
        {"deleted": 1, "resent": 2, "missing": 1},
        {"deleted": 1, "resent": 0, "missing": 0},
        {"deleted": 1, "resent": 0, "missing": 0},
        {"deleted": 0, "resent": 0, "missing": 0},
    ]
    assert caplog.messages[-2] == "purged 1 tasks sent from 2026-10-20T06:00:00.000000Z to 2026-10-20T09:00:00.000000Z"
    nothing = run(spark, settings, late=True)
    assert nothing.windows == 0
    assert (
        caplog.messages[-1]
        == f"No window has ended by {shown(DAY + HOUR * 12)}. The next one ends at {shown(DAY + HOUR * 15)}"
    )
    assert sorted(rows_of(database)) == ["dead", "reset", "too old", "waits"]
    both = [("again", DAY + HOUR * 3.5), ("again", DAY + HOUR * 7)]
    others = [("between", DAY + HOUR * 5), *ids(("gone", "reset", "stays"), DAY + HOUR * 3.5)]
    assert archived(spark, tmp_path) == sorted([*both, *others])

    # A window is purged once, so a task that gets the archived SentAt later stays.
    insert(database, [sent("stays", DAY + HOUR * 3.5)])
    third = run(spark, settings, late=True, purge=True)
    assert (third.windows, third.until, third.purged_windows, third.deleted) == (0, DAY + HOUR * 12, 0, 0)
    assert "stays" in rows_of(database)


def test_cancelled_tasks_are_archived_and_a_purge_keeps_a_restored_one(
    spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path
):
    """Their windows are by CancelledAt. The first window is that of the earliest one."""
    at, full = DAY + HOUR, {"OrderingKey": "k", "Sequence": 3, "LastError": "x", "AvailableAt": NEVER, "Attempts": 2}
    insert_cancelled(database, [row("cancelled", **full), row("restored")], at)
    insert_cancelled(database, [row("later")], NEXT_DAY)
    insert(database, [sent("sent", at + HOUR)])
    done = run(spark, settings_of(target, tmp_path), late=True)
    assert (done.windows, done.written, done.until) == (1, 3, NEXT_DAY)
    tasks = {
        each["Id"]: each for each in read_archive(spark, str(tmp_path), since=at, until=NEXT_DAY).toArrow().to_pylist()
    }
    assert {id: (each["CancelledAt"], each["SentAt"]) for id, each in tasks.items()} == {
        "cancelled": (at, None), "restored": (at, None), "sent": (None, at + HOUR),
    }  # fmt: skip
    assert (
        tasks["cancelled"].items()
        >= (full | {"Data": serialized(), "CreatedAt": CREATED, "SentDate": DAY.date()}).items()
    )
    assert 0 <= tasks["cancelled"]["Shard"] < 10

    insert(database, [row("restored")])
    done = run(spark, settings_of(target, tmp_path), purge=True)
    assert (done.deleted, done.resent, done.missing) == (1, 0, 0)
    assert rows_of(database).keys() == {"restored"}
    assert {id for (id,) in query(database, f"SELECT Id FROM {CANCELLED}")} == {"cancelled", "restored", "later"}


def test_a_window_is_read_as_of_when_its_marks_are_final(
    spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    final = timedelta(seconds=5)
    monkeypatch.setattr(job, "MARKS_FINAL_AFTER", final)
    table = open_table(target)
    length = timedelta(seconds=2)
    since = floor(table.now() - final, length) + length
    sent_at, until = since + MICROSECOND, since + length
    insert(database, [sent(id, sent_at) for id in ("again", "gone", "reset", "same")])
    assert table.now() < until + final, "too slow to write before the window may be read"
    eventually(lambda: table.now() > until + final)
    update(database, "again", SentAt=sent_at + timedelta(seconds=2.5))
    update(database, "reset", SentAt=None)
    delete(database, "gone")
    insert(database, [sent("too late", sent_at)])

    settings = settings_of(target, tmp_path, window="2s", since=shown(since), until=shown(until))
    done = run(spark, settings, purge=True)
    assert (done.windows, done.written, done.until) == (1, 4, until)
    assert archived(spark, tmp_path) == ids(("again", "gone", "reset", "same"), sent_at)
    assert [each["read_timestamp"] for each in windows_of(tmp_path)] == [shown(until + final)]
    assert (done.deleted, done.resent, done.missing) == (1, 2, 1)
    assert sorted(rows_of(database)) == ["again", "reset", "too late"]


def test_an_archive_that_cannot_run_says_what_to_do(
    spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # An at-most-once task is marked before it is published, and a failed publish takes the mark back.
    for until in ("59s", "0s", shown(open_table(target).now() - MINUTE + timedelta(seconds=20))):
        with pytest.raises(SettingError, match=r"^--until \S+ is less than a minute ago\. The database's time is "):
            run(spark, settings_of(target, tmp_path, until=until))
    # Without a sent task there is no first window.
    insert(database, [row("waits"), row("dead", AvailableAt=NEVER)])
    done = run(spark, settings_of(target, tmp_path, until="1m"), purge=True)
    assert (done.windows, done.written, done.until, done.purged_windows) == (0, 0, None, 0)
    found = read_archive(spark, str(tmp_path))
    assertSchemaEqual(found.schema, schemas.ARCHIVED)
    assert found.collect() == []

    insert(database, [sent("a", DAY)])
    with pytest.raises(OutboxError, match="is too long: Spanner deletes sent or cancelled tasks after 7 days, and"):
        run(spark, settings_of(target, tmp_path, window="7d", until=shown(DAY + HOUR * 24 * 14)), late=True)
    with monkeypatch.context() as patch:
        patch.setattr(job.schema, "retention", lambda _, table, **__: HOUR * 24 if table == CANCELLED else None)
        with pytest.raises(OutboxError, match="after 1 day, and the window is read a minute after its end"):
            run(spark, settings_of(target, tmp_path), late=True)
    with pytest.raises(OutboxError) as caught:
        run(spark, settings_of(target, tmp_path), purge=True)
    sentence = str(caught.value)
    window = "The window from 2026-10-20T00:00:00.000000Z to 2026-10-21T00:00:00.000000Z ended "
    assert sentence.startswith(window), sentence
    assert "Spanner keeps old versions of rows for 1h (version_retention_period)" in sentence
    assert "Pass --read-late to read the window as of now" in sentence
    assert list(tmp_path.iterdir()) == []

    other = Window("projects/p/instances/i/databases/other", DAY, NEXT_DAY, NEXT_DAY, 0, None, "", {}, NEXT_DAY)
    assert Log(str(tmp_path)).append(other, [])
    with pytest.raises(
        OutboxError, match=r"is the archive of projects/p/instances/i/databases/other, not of projects/"
    ):
        run(spark, settings_of(target, tmp_path, until=shown(NEXT_DAY + HOUR * 24)), purge=True, late=True)
    assert purges(tmp_path) == [None]
    assert sorted(rows_of(database)) == ["a", "dead", "waits"]


def test_old_versions_stay_gone_after_the_retention_period_was_raised(
    spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The window is within the new period, but Spanner deleted its versions under the former one."""
    insert(database, [sent("a", DAY)])
    monkeypatch.setattr(Table, "retention", lambda _: timedelta(days=1000))
    with pytest.raises(OutboxError, match=r"cannot be read as of .* does not bring back older ones"):
        run(spark, settings_of(target, tmp_path))
    assert run(spark, settings_of(target, tmp_path), late=True).written == 1


def test_an_unfinished_run_is_invisible_and_only_one_of_two_runs_finishes_a_window(
    spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The next run writes the window again, even if a third run finishes first."""
    insert(database, [sent("a", DAY), sent("b", DAY)])
    settings = settings_of(target, tmp_path)
    # The job commits after it has read the files back.
    with monkeypatch.context() as patch:
        read = Archive._tasks
        patch.setattr(Archive, "_tasks", lambda self, windows: read(self, windows).where("Id = 'a'"))
        with pytest.raises(OutboxError, match=r"contains 1 tasks, but its window has 2\. Restore its files"):
            run(spark, settings, late=True, purge=True)
    left = len(data_folders(tmp_path))
    append = Log.append

    def killed(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Log, "append", killed)
    with pytest.raises(KeyboardInterrupt):
        run(spark, settings, late=True, purge=True)
    assert len(data_folders(tmp_path)) == left + 1
    assert archived(spark, tmp_path) == []
    assert len(rows_of(database)) == 2

    def overtaken(*arguments: Any) -> bool:
        assert len(data_folders(tmp_path)) == left + 2
        monkeypatch.setattr(Log, "append", append)
        assert run(spark, settings, late=True).windows == 1
        return append(*arguments)

    monkeypatch.setattr(Log, "append", overtaken)
    with pytest.raises(OutboxError, match=r"Another run finished .* first"):
        run(spark, settings, late=True, purge=True)
    assert archived(spark, tmp_path) == ids("ab", DAY)
    assert len(rows_of(database)) == 2


def test_a_purge_deletes_only_tasks_whose_files_match_the_log(
    spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path
):
    """It continues after a window whose files do not match or cannot be read."""
    insert(database, [sent("a", DAY), sent("b", DAY, Topic="users"), sent("c", NEXT_DAY)])
    settings = settings_of(target, tmp_path, until=shown(NEXT_DAY + HOUR * 24))
    assert run(spark, settings, late=True).windows == 2
    first, _ = window_folders(tmp_path)

    def refused(sentence: str) -> None:
        with pytest.raises(OutboxError, match=sentence) as raised:
            run(spark, settings, purge=True)
        assert first.name in str(raised.value)
        assert [each is None for each in purges(tmp_path)] == [True, False]
        assert [each["purging"] for each in commits(tmp_path) if "purging" in each] == [shown(NEXT_DAY)]
        assert rows_of(database).keys() == {"a", "b"}

    one, other = sorted(first.rglob("*.parquet"))
    counted = "contains {} tasks, but its window has 2. Restore its files. Their tasks were not"
    content = other.read_bytes()
    for damaged in (content[:-20], content[:30] + bytes([content[30] ^ 255]) + content[31:]):
        other.write_bytes(damaged)
        refused("Checksum error.* Their tasks were not purged.*Restore the files")
    other.write_bytes(content)
    [data] = first.glob("run=*")
    gone = data.rename(tmp_path / "gone")
    refused("Path does not exist.* Their tasks were not purged.*Restore the files")
    gone.rename(data)
    more = one.with_name("more.parquet")
    shutil.copy(one, more)
    refused(counted.format(3))
    # The number of rows is right, but the rows are not.
    kept = tmp_path / "kept"
    other.rename(kept)
    refused(r"contains tasks with checksum -?\d+, but its window has -?\d+. Restore its files. Their tasks were not")
    more.unlink()
    refused(counted.format(1))
    rewrite(other, "PAR1 is how a file begins, and how it ends is PAR1")
    refused(re.escape(other.name) + ".*Restore it or write it again. Their tasks were not purged")
    rewrite(other, "PAR1")
    refused("is not a Parquet file.* Their tasks were not purged")
    kept.replace(other)

    [window, _] = windows_of(tmp_path)
    for wrong in ({"rows": 3}, {"rows": 0}, {"checksum": None}):
        edit(window, **(right := {name: window[name] for name in ("rows", "checksum")}) | wrong)
        refused("Their tasks were not purged")
    edit(window, **right)
    assert run(spark, settings, purge=True).deleted == 2


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
    """Half of the tasks are deleted, as after a kill. The next run deletes the rest."""
    tasks = [sent(f"{number:03d}", DAY + MICROSECOND * number) for number in range(300)]
    everything = [(each["Id"], each["SentAt"]) for each in tasks]
    left = [row("waits"), row("dead", AvailableAt=NEVER), sent("next", NEXT_DAY + timedelta(hours=1))]
    insert(database, [*tasks, *left])
    monkeypatch.setattr(job, "purge_rows", partial(write_half_and_fail, job.purge_rows))
    with pytest.raises(PythonException, match="when it has written half of its rows"):
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
