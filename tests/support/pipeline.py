"""Rows to be registered, sent tasks, the files of an archive, and Spark tasks that fail when they have written."""

import base64
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from outbox.admin.table import Transaction
from outbox.base.values import shown
from outbox.message import TASK_ID_ATTRIBUTE
from outbox.program.settings import DatabaseSettings
from outbox_pipeline import schemas
from outbox_pipeline.job_settings import ArchiveSettings, ReplaySettings
from outbox_pipeline.jobs import archive as archive_job
from outbox_pipeline.jobs import replay as replay_job
from outbox_pipeline.jobs.archive import Archived
from outbox_pipeline.jobs.archive_files import read_archive
from outbox_pipeline.jobs.register import Registered, register
from outbox_pipeline.jobs.replay import Replayed
from outbox_pipeline.spanner import Table
from outbox_pipeline.spark.spark_tasks import Rows
from tests.support import operations
from tests.support.operations import insert, rows_of
from tests.support.spanner import place, query

#: The day of most tests. It is older than Spanner's versions, so that its windows are read late.
DAY = datetime(2026, 10, 20, tzinfo=UTC)
NEXT_DAY = DAY + timedelta(days=1)
MICROSECOND = timedelta(microseconds=1)

#: A Spark task, by its identity in an archive.
Published = tuple[str, datetime]

#: A user's columns, in the types that Spark reads from Parquet.
ROWS = StructType([field for field in schemas.INPUT if field.name not in ("line", "reason")])


def row(**columns: Any) -> dict[str, Any]:
    usual = {"task_id": "one", "topic": "orders", "data": b"data"}
    return dict.fromkeys(schemas.INPUT.fieldNames()) | usual | columns


def rows(spark: SparkSession, given: Iterable[dict[str, Any]], partitions: int = 2) -> Any:
    names = ROWS.fieldNames()
    values = [tuple(each.get(name) for name in names) for each in given]
    return spark.createDataFrame(spark.sparkContext.parallelize(values, partitions), ROWS)


def options(target: DatabaseSettings, **more: str) -> dict[str, Any]:
    return {"project": target.project, "instance": target.instance, "database": target.database, **more}


@dataclasses.dataclass(frozen=True)
class Case:
    """What a test of a job has: a Spark session, an empty database, and a folder."""

    spark: SparkSession
    database: Database
    folder: Path

    @property
    def target(self) -> DatabaseSettings:
        return place(self.database.database_id)

    def insert(self, rows: Iterable[Mapping[str, Any]]) -> None:
        insert(self.database, rows)

    def rows(self) -> dict[str, dict[str, Any]]:
        return rows_of(self.database)

    def options(self, **given: Any) -> dict[str, str]:
        """Return the options of a job, with texts of times."""
        times = {name: shown(value) for name, value in given.items() if isinstance(value, datetime)}
        return options(self.target, **given | times)

    def flags(self, **given: Any) -> list[str]:
        """Return the flags of a job, of those options that have a value."""
        return [f"--{name.replace('_', '-')}={value}" for name, value in self.options(**given).items() if value]

    def archive(self, *, to: Path | None = None, late: bool = False, purge: bool = False, **given: Any) -> Archived:
        """Archive the windows until the end of DAY, or those that are given, to the folder of the test or another."""
        archive = self.options(archive=str(to or self.folder), **{"until": NEXT_DAY, **given})
        return archive_job.run(self.spark, ArchiveSettings.read(archive, {}), late=late, purge=purge)

    def replay(self, **given: Any) -> Replayed:
        how = {name: given.pop(name) for name in ("dry_run", "resume", "reason", "to") if name in given}
        return replay_job.run(self.spark, ReplaySettings.read(self.options(**given), {}), **how)


def noted(database: Database) -> list[dict[str, Any]]:
    """Return the records of operations, in the order in which they began."""
    names = ("OperationId", "Operation", "StartedAt", "FinishedAt", "Principal", "Reason", "Selection", "Tasks")
    found = query(database, f"SELECT {', '.join(names)} FROM AsynchronousTaskOperations ORDER BY StartedAt")
    return [dict(zip(names, each, strict=True)) for each in found]


def registered(dataframe: Any, target: DatabaseSettings, rejects: object, **more: Any) -> Registered:
    return register(dataframe, rejects=str(rejects), **options(target), **more)


def counts(done: Registered) -> tuple[int, int, int, int, int]:
    return (done.read, done.registered, done.existing, done.repeated, done.rejected)


def keyed_rows(topic: str, count: int) -> list[dict[str, Any]]:
    """Return rows of JSON lines, the first half of which have an ordering key."""
    rows: list[dict[str, Any]] = [{"topic": topic, "data": f"{n}", "task_id": f"{n:05d}"} for n in range(count)]
    for number, each in enumerate(rows[: count // 2]):
        each |= {"ordering_key": f"key-{number % 12}", "sequence": number}
    return rows


def write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return file


def write_received(file: Path, messages: Iterable[Any]) -> Path:
    """Write messages as the page of the audit shows them."""
    return write_lines(
        file,
        (
            {"message_id": each.message_id, "publish_time": each.publish_time.isoformat()}
            | {"attributes": json.dumps(dict(each.attributes)), "data": base64.b64encode(each.data).decode()}
            for each in messages
        ),
    )


def received(id: str, at: datetime, body: bytes = b"data", **attributes: str) -> dict[str, Any]:
    """Return a message as the page of the audit shows it."""
    return {
        "message_id": f"of {id} at {at}",
        "publish_time": at.isoformat(),
        "data": base64.b64encode(body).decode(),
        "attributes": json.dumps({TASK_ID_ATTRIBUTE: id, **attributes}),
    }


class FakeTable:
    """The rows of a table as `Writer` meets them; the contract tests hold it to the emulator."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        #: What was asked: ("look" or "insert", the ids, the tag).
        self.calls: list[tuple[str, list[str], str]] = []
        self.time = datetime(2026, 1, 1, tzinfo=UTC)

    def now(self) -> datetime:
        self.time += timedelta(microseconds=1)
        return self.time

    def insert(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], tag: str) -> bool:
        created = [dict(zip(columns, each, strict=True)) for each in rows]
        ids = [each["Id"] for each in created]
        self.calls.append(("insert", ids, tag))
        if self.rows.keys() & set(ids) or len(set(ids)) < len(ids):
            return False
        committed = self.now()
        for each in created:
            if each["CreatedAt"] == COMMIT_TIMESTAMP:
                each["CreatedAt"] = committed
            self.rows[each["Id"]] = each
        return True

    def read_ids(self, columns: Sequence[str], ids: Iterable[str], tag: str) -> list[list[Any]]:
        asked = list(ids)
        self.calls.append(("look", asked, tag))
        return [[self.rows[id][column] for column in columns] for id in asked if id in self.rows]

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.calls]


def meddle(monkeypatch: pytest.MonkeyPatch, table: Table, change: Callable[[], None]) -> None:
    transact, changes = table.transact, [change]

    def meddled(tag: str, work: Callable[[Transaction], Any]) -> Any:
        def after_another(transaction: Transaction) -> Any:
            while changes:
                changes.pop()()
            return work(transaction)

        return transact(tag, after_another)

    monkeypatch.setattr(table, "transact", meddled)


def fail_after_writes(work: Callable[..., Iterator[Rows]], *given: Any) -> Iterator[Rows]:
    """Write half of the rows at least, and fail, in the first two attempts of a Spark task; the third succeeds."""
    context = TaskContext.get()
    assert context is not None
    *arguments, batches = given
    attempt = context.attemptNumber()
    # The first attempt is cut short, the second writes all.
    taken = [_half(rows) if attempt == 0 else rows for rows in batches]
    answers = list(work(*arguments, iter(taken)))
    if attempt < 2 and taken:
        raise RuntimeError(f"attempt {attempt} of this task fails after its writes")
    yield from answers


def write_half_and_fail(work: Callable[..., Iterator[Rows]], *given: Any) -> Iterator[Rows]:
    """Write half of the rows of each batch and fail, in every attempt."""
    *arguments, batches = given
    yield from work(*arguments, map(_half, batches))
    raise RuntimeError("this task fails when it has written half of its rows")


def _half(rows: Rows) -> Rows:
    return rows[: (len(rows) + 1) // 2]


@dataclasses.dataclass
class FakeTime:
    now: float = 100.0
    slept: list[float] = dataclasses.field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def sent(id: str, at: datetime, **columns: Any) -> dict[str, Any]:
    return operations.row(id, SentAt=at, **columns)


def sent_of(tasks: DataFrame) -> list[Published]:
    rows = tasks.where("SentAt IS NOT NULL").select("Id", f.unix_micros("SentAt")).collect()
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    return sorted((id, epoch + timedelta(microseconds=micros)) for id, micros in rows)


def archived(spark: SparkSession, archive: Path) -> list[Published]:
    return sent_of(read_archive(spark, str(archive)))


def data_folders(archive: Path) -> list[Path]:
    return sorted(archive.glob("window=*/run=*"))


def commits(archive: Path) -> list[dict[str, Any]]:
    """Return the details of each commit that has some, with the path of its file."""
    found = []
    for file in sorted(archive.glob("_delta_log/*.json")):
        details = json.loads(file.read_text().splitlines()[0])["commitInfo"].get("outbox")
        found += [details | {"file": file}] if details else []
    return found


def windows_of(archive: Path) -> list[dict[str, Any]]:
    return [each for each in commits(archive) if "since" in each]


def purges(archive: Path) -> list[dict[str, Any] | None]:
    """Return the first note that the purge of a window ended, if there is one, for each window."""
    notes = {each["purged"]: each for each in reversed(commits(archive)) if "purged" in each}
    return [notes.get(each["since"]) for each in windows_of(archive)]


def edit(window: dict[str, Any], **changes: Any) -> None:
    """Change the details of a window in its commit."""
    first, *others = window["file"].read_text().splitlines(keepends=True)
    commit = json.loads(first)
    commit["commitInfo"]["outbox"] |= changes
    window["file"].write_text("".join([json.dumps(commit) + "\n", *others]))


def rewrite(file: Path, text: str) -> None:
    file.with_name(f".{file.name}.crc").unlink(missing_ok=True)
    file.write_text(text)


def remove(file: Path) -> None:
    file.with_name(f".{file.name}.crc").unlink(missing_ok=True)
    file.unlink()


def first_try_fails(batches: Iterator[Any], note: Path) -> Iterator[Any]:
    """Hand on a batch, and in the first task of a stage note that and fail; its next try hands on all."""
    context = TaskContext.get()
    assert context is not None
    for batch in batches:
        yield batch
        if context.partitionId() == 0 and context.attemptNumber() == 0:
            note.touch()
            raise RuntimeError("the first try of a task fails")


def ids(letters: Iterable[Any], at: datetime) -> list[Published]:
    return sorted((str(each), at) for each in letters)
