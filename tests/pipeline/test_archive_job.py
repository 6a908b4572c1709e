"""The job `archive` on Spark and the emulator: windows, interrupted runs and purges."""

import base64
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
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

from outbox.base.values import shown
from outbox.errors import OutboxError, SettingError
from outbox.table.states import NEVER
from outbox_admin import operations
from outbox_pipeline import read_archive, schemas
from outbox_pipeline.jobs import archive as job
from outbox_pipeline.jobs.archive import purge_chunk
from outbox_pipeline.jobs.archive_files import Archive, checksum_columns
from outbox_pipeline.jobs.archive_log import Log
from outbox_pipeline.jobs.archive_windows import ArchivedWindow, floor
from outbox_pipeline.spanner import Table, open_table
from tests.support.fakes import serialized
from tests.support.operations import CREATED, MICROSECOND, Watch, delete, insert, insert_cancelled, row, rows_of, update
from tests.support.pipeline import DAY, NEXT_DAY, Case, Files, fail_half_way, first_try_fails, meddle, remove, sent
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


def ids(names: Iterable[str], at: datetime) -> list[tuple[str, datetime]]:
    return sorted((id, at) for id in names)


def as_the_table_has_them(spark: SparkSession, database: Database, day: datetime) -> DataFrame:
    """Return the expected archive of all rows, which were sent on one day, without using our own reader."""
    names = schemas.STORED.fieldNames()
    with database.snapshot() as snapshot:
        found = list(snapshot.execute_sql(f"SELECT {', '.join(names)} FROM AsynchronousTasks"))
    data = names.index("Data")
    rows = [(*values[:data], base64.b64decode(values[data]), *values[data + 1 :], day.date()) for values in found]
    return spark.createDataFrame(rows, schemas.ARCHIVED, verifySchema=False)


def test_archived_rows_equal_the_table_in_every_column(case: Case):
    """In every time zone of the session."""
    late = NEXT_DAY - MICROSECOND
    odd = [sent(f"topic {number}", late, Topic=topic) for number, topic in enumerate(TOPICS)]
    full = {
        "OrderingKey": "k\0", "Sequence": -(2**63), "Priority": 2**63 - 1, "AtMostOnce": True, "Attempts": 3,
        "LastError": "", "AvailableAt": TWICE + HOUR, "ExpiresAt": NEVER, "CreatedAt": TWICE + MICROSECOND,
    }  # fmt: skip
    messages = {"nul": b"\0" * 3, "empty": b"", "large": os.urandom(8_000_000), "bytes": bytes(range(256))}
    case.insert(odd)
    case.insert([sent(id, DAY, Data=data) for id, data in messages.items()])
    case.insert([sent("full", DAY + MICROSECOND, **full), sent("é\n", DAY + HOUR * 12)])
    expected = as_the_table_has_them(case.spark, case.database, DAY)
    # Tasks of other days, and unsent tasks.
    case.insert([sent("before", DAY - MICROSECOND), sent("after", NEXT_DAY)])
    case.insert([row("ready"), row("dead", AvailableAt=NEVER), row("due", CreatedAt=DAY, AvailableAt=DAY)])

    checksum = expected.select(*checksum_columns()).first()
    try:
        for zone in ("America/New_York", "Pacific/Kiritimati"):
            case.spark.conf.set("spark.sql.session.timeZone", zone)
            archive = case.folder / zone
            done = case.archive(to=archive, since=DAY + HOUR * 7, late=True)
            assert (done["windows"], done["written"]) == (1, len(odd) + len(messages) + 2)
            assert [(each["rows"], each["checksum"]) for each in Files(archive).windows()] == [checksum], zone
        found = read_archive(case.spark, str(archive)).cache()
    finally:
        case.spark.conf.set("spark.sql.session.timeZone", "UTC")
    assertSchemaEqual(found.schema, schemas.ARCHIVED)
    # A digest instead of 8 MB, because the comparison writes each value as a text.
    micros = {name: f.unix_micros(name) for name in ("CreatedAt", "AvailableAt", "ExpiresAt", "SentAt")}
    assertDataFrameEqual(*(each.withColumns(micros | {"Data": f.sha2("Data", 256)}) for each in (found, expected)))
    days = [day.name for folder in case.folder.glob("*/*/window=*/run=*") for day in folder.iterdir() if day.is_dir()]
    assert days == ["SentDate=2026-10-20"] * 2


def failing(transform: Callable[[DataFrame], DataFrame], note: Path) -> Callable[[DataFrame], DataFrame]:
    def made(tasks: DataFrame) -> DataFrame:
        stored = transform(tasks)
        return stored.mapInArrow(partial(first_try_fails, note=note), stored.schema)

    return made


def test_many_tasks_are_archived_once_despite_failed_spark_tasks(case: Case, monkeypatch: pytest.MonkeyPatch):
    """Spark retries a Spark task after its read and after its write. Almost all tasks have one topic."""
    number = 1_000
    ids = [f"{each * (2**32 // number):08x}" for each in range(number)]
    topics = ["orders" if each % 100 else f"rare-{each // 200}" for each in range(number)]
    tasks = [sent(ids[each], DAY + MICROSECOND * each, Topic=topics[each]) for each in range(number)]
    case.insert(tasks)
    failed = case.folder / "a reading task failed", case.folder / "a writing task failed"
    for name, note in zip(("archivable", "rebalanced"), failed, strict=True):
        monkeypatch.setattr(job, name, failing(getattr(job, name), note))
    done = case.archive(late=True)
    assert all(note.exists() for note in failed)
    assert (done["windows"], done["written"]) == (1, number)
    [window] = case.files.windows()
    assert window["rows"] == number
    assert case.files.tasks(case.spark) == [(each["Id"], each["SentAt"]) for each in tasks]
    topics = read_archive(case.spark, str(case.folder)).groupBy("Topic").count().collect()
    assert dict(topics) == {"orders": 990} | {f"rare-{each}": 2 for each in range(5)}

    [file] = case.folder.rglob("*.parquet")
    stored = pq.read_table(file, columns=["Topic"], partitioning=None)["Topic"].to_pylist()
    assert stored == sorted(stored), "a reader of one topic can skip parts of the file"

    monkeypatch.undo()
    # The checksum is of the rows that were read back. Otherwise the purge would delete nothing.
    done = case.archive(purge=True)
    nothing = {"windows": 0, "written": 0, "resent": 0, "missing": 0}
    assert done == {**nothing, "until": NEXT_DAY, "purged_windows": 1, "deleted": number}
    assert case.rows() == {}
    assert len(case.files.tasks(case.spark)) == number


def test_windows_adjoin_and_only_archived_tasks_are_purged(case: Case, caplog: pytest.LogCaptureFixture):
    """A task that is sent again is in both windows, and stays in the table until the second one is purged."""
    case.insert([sent(id, DAY + HOUR * 3.5) for id in ("again", "gone", "reset", "stays")])
    case.insert([row("waits"), row("dead", AvailableAt=NEVER), row("old", SentAt=DAY + HOUR * 4)])
    caplog.set_level("INFO", "outbox_pipeline")
    archive = partial(case.archive, window="1h", until=DAY + HOUR * 4.9)
    first = archive(late=True)
    assert (first["windows"], first["written"], first["until"]) == (1, 4, DAY + HOUR * 4)
    assert caplog.messages == [
        "archived 4 tasks sent or cancelled from 2026-10-20T03:00:00.000000Z to 2026-10-20T04:00:00.000000Z"
    ]

    delete(case.database, "gone", "old")
    update(case.database, "again", SentAt=DAY + HOUR * 7)
    update(case.database, "reset", SentAt=None)
    # --since applies to a new archive only. Windows of another length start at the end of the last one.
    case.insert([sent("too old", DAY), sent("between", DAY + HOUR * 5)])
    archive = partial(case.archive, window="3h", since=DAY, until=DAY + HOUR * 12)
    second = archive(late=True, purge=True)
    assert (second["windows"], second["written"], second["until"]) == (3, 2, DAY + HOUR * 12)
    assert (second["purged_windows"], second["deleted"], second["resent"], second["missing"]) == (4, 3, 2, 1)
    bounds = [DAY + HOUR * hours for hours in (3, 4, 6, 9, 12)]
    assert [(each["since"], each["until"], each["rows"]) for each in case.files.windows()] == [
        (shown(since), shown(until), rows)
        for since, until, rows in zip(bounds[:-1], bounds[1:], (4, 1, 1, 0), strict=True)
    ]
    counts = [{name: each[name] for name in ("deleted", "resent", "missing")} for each in case.files.purges() if each]
    assert counts == [
        {"deleted": 1, "resent": 2, "missing": 1},
        {"deleted": 1, "resent": 0, "missing": 0},
        {"deleted": 1, "resent": 0, "missing": 0},
        {"deleted": 0, "resent": 0, "missing": 0},
    ]
    assert caplog.messages[-2] == "purged 1 tasks of 2026-10-20T06:00:00.000000Z to 2026-10-20T09:00:00.000000Z"
    nothing = archive(late=True)
    assert nothing["windows"] == 0
    assert (
        caplog.messages[-1]
        == f"No window has ended by {shown(DAY + HOUR * 12)}. The next one ends at {shown(DAY + HOUR * 15)}"
    )
    assert sorted(case.rows()) == ["dead", "reset", "too old", "waits"]
    both = [("again", DAY + HOUR * 3.5), ("again", DAY + HOUR * 7)]
    others = [("between", DAY + HOUR * 5), *ids(("gone", "reset", "stays"), DAY + HOUR * 3.5)]
    assert case.files.tasks(case.spark) == sorted([*both, *others])

    # A window is purged once, so a task that gets the archived SentAt later stays.
    case.insert([sent("stays", DAY + HOUR * 3.5)])
    third = archive(late=True, purge=True)
    assert (third["windows"], third["until"], third["purged_windows"], third["deleted"]) == (0, DAY + HOUR * 12, 0, 0)
    assert "stays" in case.rows()


def test_cancelled_tasks_are_archived_and_purged_like_sent_ones(case: Case):
    """A purge keeps one that was restored since, and one that its worker has marked as sent."""
    at, full = DAY + HOUR, {"OrderingKey": "k", "Sequence": 3, "LastError": "x", "AvailableAt": NEVER, "Attempts": 2}
    insert_cancelled(case.database, [row("cancelled", **full), row("restored"), row("published")], at)
    insert_cancelled(case.database, [row("later")], NEXT_DAY)
    case.insert([sent("sent", at + HOUR)])
    done = case.archive(late=True)
    assert (done["windows"], done["written"], done["until"]) == (1, 4, NEXT_DAY)
    tasks = {
        each["Id"]: each
        for each in read_archive(case.spark, str(case.folder), since=at, until=NEXT_DAY).toArrow().to_pylist()
    }
    by = "an operation"
    assert {id: (each["SentAt"], each["CancelledBy"]) for id, each in tasks.items()} == {
        "cancelled": (at, by), "restored": (at, by), "published": (at, by), "sent": (at + HOUR, None),
    }  # fmt: skip
    assert (
        tasks["cancelled"].items()
        >= (full | {"Data": serialized(), "CreatedAt": CREATED, "SentDate": DAY.date()}).items()
    )
    assert 0 <= tasks["cancelled"]["Shard"] < 10

    update(case.database, "restored", SentAt=None, CancelledBy=None)
    update(case.database, "published", CancelledBy=None)
    done = case.archive(purge=True)
    assert (done["deleted"], done["resent"], done["missing"]) == (2, 2, 0)
    assert case.rows().keys() == {"restored", "published", "later"}


def test_a_window_is_read_as_of_when_its_marks_are_final(case: Case, monkeypatch: pytest.MonkeyPatch):
    final = timedelta(seconds=5)
    monkeypatch.setattr(job, "MARKS_FINAL_AFTER", final)
    table = open_table(case.target)
    length = timedelta(seconds=2)
    since = floor(table.now() - final, length) + length
    sent_at, until = since + MICROSECOND, since + length
    case.insert([sent(id, sent_at) for id in ("again", "gone", "reset", "same")])
    assert table.now() < until + final, "too slow to write before the window may be read"
    eventually(lambda: table.now() > until + final)
    update(case.database, "again", SentAt=sent_at + timedelta(seconds=2.5))
    update(case.database, "reset", SentAt=None)
    delete(case.database, "gone")
    case.insert([sent("too late", sent_at)])

    archive = partial(case.archive, window="2s", since=since, until=until)
    done = archive(purge=True)
    assert (done["windows"], done["written"], done["until"]) == (1, 4, until)
    assert case.files.tasks(case.spark) == ids(("again", "gone", "reset", "same"), sent_at)
    assert [each["read_timestamp"] for each in case.files.windows()] == [shown(until + final)]
    assert (done["deleted"], done["resent"], done["missing"]) == (1, 2, 1)
    assert sorted(case.rows()) == ["again", "reset", "too late"]


def test_an_archive_that_cannot_run_says_what_to_do(case: Case, monkeypatch: pytest.MonkeyPatch):
    for until in ("59s", "0s", shown(open_table(case.target).now() - MINUTE + timedelta(seconds=20))):
        with pytest.raises(SettingError, match=r"^--until \S+ is less than a minute ago\. The database's time is "):
            case.archive(until=until)
    # Without a sent task there is no first window.
    case.insert([row("waits"), row("dead", AvailableAt=NEVER)])
    done = case.archive(until="1m", purge=True)
    assert (done["windows"], done["written"], done["until"], done["purged_windows"]) == (0, 0, None, 0)
    found = read_archive(case.spark, str(case.folder))
    assertSchemaEqual(found.schema, schemas.ARCHIVED)
    assert found.collect() == []

    case.insert([sent("a", DAY)])
    assert case.archive(since="0s", until="1m")["windows"] == 0
    with pytest.raises(OutboxError, match="is too long: Spanner deletes sent or cancelled tasks after 7 days, and"):
        case.archive(window="7d", until=DAY + HOUR * 24 * 14, late=True)
    with monkeypatch.context() as patch:
        patch.setattr(job.schema, "retention", lambda _, **__: HOUR * 24)
        with pytest.raises(OutboxError, match="after 1 day, and the window is read a minute after its end"):
            case.archive(late=True)
        patch.setattr(job.schema, "retention", lambda _, **__: timedelta())
        with pytest.raises(OutboxError, match="after 0 days, and the window is read a minute after its end"):
            case.archive(late=True)
    with pytest.raises(OutboxError) as caught:
        case.archive(purge=True)
    sentence = str(caught.value)
    window = "The window from 2026-10-20T00:00:00.000000Z to 2026-10-21T00:00:00.000000Z ended "
    assert sentence.startswith(window), sentence
    assert "Spanner keeps old versions of rows for 1h (version_retention_period)" in sentence
    assert "Pass --read-late to read the window as of now" in sentence
    assert list(case.folder.iterdir()) == []

    other = ArchivedWindow("projects/p/instances/i/databases/other", DAY, NEXT_DAY, NEXT_DAY, 0, None, "", {})
    assert Log(str(case.folder)).append(other, [])
    with pytest.raises(
        OutboxError, match=r"is the archive of projects/p/instances/i/databases/other, not of projects/"
    ):
        case.archive(until=NEXT_DAY + HOUR * 24, purge=True, late=True)
    assert case.files.purges() == [None]
    assert sorted(case.rows()) == ["a", "dead", "waits"]


def test_old_versions_stay_gone_after_the_retention_period_was_raised(case: Case, monkeypatch: pytest.MonkeyPatch):
    """The window is within the new period, but Spanner deleted its versions under the former one."""
    case.insert([sent("a", DAY)])
    monkeypatch.setattr(Table, "retention", lambda _: timedelta(days=1000))
    with pytest.raises(OutboxError, match=r"cannot be read as of .* does not bring back older ones"):
        case.archive()
    assert case.archive(late=True)["written"] == 1


def test_an_unfinished_run_is_invisible_and_only_one_of_two_runs_finishes_a_window(
    case: Case, monkeypatch: pytest.MonkeyPatch
):
    """The next run writes the window again, even if a third run finishes first."""
    case.insert([sent("a", DAY), sent("b", DAY)])
    archive = case.archive
    # The job commits after it has read the files back.
    with monkeypatch.context() as patch:
        read = Archive._tasks
        patch.setattr(Archive, "_tasks", lambda self, windows: read(self, windows).where("Id = 'a'"))
        with pytest.raises(OutboxError, match=r"contains 1 tasks, but its window has 2\. Restore its files"):
            archive(late=True, purge=True)
    left = len(case.files.runs())
    append = Log.append

    def killed(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Log, "append", killed)
    with pytest.raises(KeyboardInterrupt):
        archive(late=True, purge=True)
    assert len(case.files.runs()) == left + 1
    assert case.files.tasks(case.spark) == []
    assert len(case.rows()) == 2

    def overtaken(*arguments: Any) -> bool:
        assert len(case.files.runs()) == left + 2
        monkeypatch.setattr(Log, "append", append)
        assert archive(late=True)["windows"] == 1
        return append(*arguments)

    monkeypatch.setattr(Log, "append", overtaken)
    with pytest.raises(OutboxError, match=r"Another run finished .* first"):
        archive(late=True, purge=True)
    assert case.files.tasks(case.spark) == ids("ab", DAY)
    assert len(case.rows()) == 2


def test_a_purge_deletes_only_tasks_whose_files_match_the_log(case: Case, monkeypatch: pytest.MonkeyPatch):
    """It continues after a window whose files do not match or cannot be read."""
    monkeypatch.setattr(job, "rebalanced", lambda tasks: tasks.repartitionByRange(2, "Id"))
    case.insert([sent("a", DAY), sent("b", DAY, Topic="users"), sent("c", NEXT_DAY)])
    archive = partial(case.archive, until=NEXT_DAY + HOUR * 24)
    assert archive(late=True)["windows"] == 2
    first, _ = sorted(case.folder.glob("window=*"))

    def refused(sentence: str) -> None:
        with pytest.raises(OutboxError, match=sentence) as raised:
            archive(purge=True)
        assert first.name in str(raised.value)
        assert [each is None for each in case.files.purges()] == [True, False]
        assert [each["purging"] for each in case.files.commits("purging")] == [shown(NEXT_DAY)]
        assert case.rows().keys() == {"a", "b"}

    one, other = sorted(first.rglob("*.parquet"))
    counted = "contains {} tasks, but its window has 2. Restore its files. Their tasks were not"
    content = other.read_bytes()
    for damaged in (content[:-20], content[:30] + bytes([content[30] ^ 255]) + content[31:]):
        other.write_bytes(damaged)
        refused("Checksum error.* Their tasks were not purged.*Restore the files")
    other.write_bytes(content)
    [data] = first.glob("run=*")
    gone = data.rename(case.folder / "gone")
    refused("Path does not exist.* Their tasks were not purged.*Restore the files")
    gone.rename(data)
    more = one.with_name("more.parquet")
    shutil.copy(one, more)
    refused(counted.format(3))
    # The number of rows is right, but the rows are not.
    kept = case.folder / "kept"
    shutil.copy(other, kept)
    remove(other)
    refused(r"contains tasks with checksum -?\d+, but its window has -?\d+. Restore its files. Their tasks were not")
    more.unlink()
    refused(counted.format(1))
    other.write_text("PAR1 is how a file begins, and how it ends is PAR1")
    refused(re.escape(other.name) + ".*Restore it or write it again. Their tasks were not purged")
    other.write_text("PAR1")
    refused("is not a Parquet file.* Their tasks were not purged")
    kept.replace(other)

    [window, _] = case.files.windows()
    for wrong in ({"rows": 3}, {"rows": 0}, {"checksum": None}):
        window.edit(**(right := {name: window[name] for name in ("rows", "checksum")}) | wrong)
        refused("Their tasks were not purged")
    window.edit(**right)
    assert archive(purge=True)["deleted"] == 2


def test_a_purge_keeps_a_task_that_is_reset_before_its_transaction(database: Database, monkeypatch: pytest.MonkeyPatch):
    insert(database, [sent("a", DAY), sent("b", DAY)])
    table = Table(Watch(database).database)
    operation = operations.begin(table, "purge", {}, Tasks=0).id
    meddle(monkeypatch, table, lambda: update(database, "a", SentAt=None))
    wanted = dict.fromkeys("ab", (DAY, None))
    assert purge_chunk(table, wanted, operation) == {"deleted": 1, "resent": 1, "missing": 0}
    assert list(rows_of(database)) == ["a"]


def test_the_next_run_finishes_a_purge_whose_spark_tasks_failed(case: Case, monkeypatch: pytest.MonkeyPatch):
    """Half of the tasks are deleted, as after a kill. The next run deletes the rest."""
    tasks = [sent(f"{number:03d}", DAY + MICROSECOND * number) for number in range(300)]
    everything = [(each["Id"], each["SentAt"]) for each in tasks]
    left = [row("waits"), row("dead", AvailableAt=NEVER), sent("next", NEXT_DAY + timedelta(hours=1))]
    case.insert([*tasks, *left])
    monkeypatch.setattr(job, "purge_rows", partial(fail_half_way, job.purge_rows))
    with pytest.raises(PythonException, match="when it has written half of its rows"):
        case.archive(purge=True, late=True)
    monkeypatch.undo()
    assert len(left) < len(case.rows()) < len(tasks)
    assert case.files.purges() == [None]
    [failed] = case.operations()
    assert failed["FinishedAt"] is None
    assert 0 < failed["Tasks"] == len(tasks) + len(left) - len(case.rows())
    assert case.files.tasks(case.spark) == everything, "nothing is deleted before all of it can be read"
    done = case.archive(purge=True)
    assert (done["windows"], done["written"], done["until"]) == (0, 0, NEXT_DAY)
    assert case.files.tasks(case.spark) == everything
    [note] = case.files.purges()
    assert note is not None
    assert (note["deleted"] + note["missing"], note["resent"]) == (len(everything), 0)
    assert sorted(case.rows()) == ["dead", "next", "waits"]
    [finished] = case.operations()
    assert finished["OperationId"] == failed["OperationId"]
    assert (finished["Operation"], json.loads(finished["Selection"])["since"]) == ("purge", shown(DAY))
    assert finished["Tasks"] == len(everything), "those of all attempts"
    assert finished["FinishedAt"] is not None
