"""Rows to be registered, sent tasks, the files of an archive, and Spark tasks that fail when they have written."""

import base64
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from outbox.base.values import shown
from outbox.message import TASK_ID_ATTRIBUTE
from outbox.program.settings import DatabaseSettings
from outbox.rows.task_table import Transaction
from outbox_pipeline import cli, schemas
from outbox_pipeline.job_settings import ArchiveSettings, AuditSettings, ReplaySettings
from outbox_pipeline.jobs import archive as archive_job
from outbox_pipeline.jobs import audit as audit_job
from outbox_pipeline.jobs import replay as replay_job
from outbox_pipeline.jobs.archive_files import read_archive
from outbox_pipeline.jobs.register import Registered, read, register
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
ROWS = StructType([field for field in schemas.INPUT if field.name not in ("created_at", "file", "line", "reason")])


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

    @property
    def files(self) -> "Files":
        """Return the files of the archive in the folder of the test."""
        return Files(self.folder)

    def insert(self, rows: Iterable[Mapping[str, Any]]) -> None:
        insert(self.database, rows)

    def rows(self) -> dict[str, dict[str, Any]]:
        return rows_of(self.database)

    def options(self, **given: Any) -> dict[str, str]:
        """Return the options of a job, with texts of times."""
        times = {name: shown(value) for name, value in given.items() if isinstance(value, datetime)}
        return options(self.target, **given | times)

    def job(self, name: str, *words: object, **given: Any) -> int:
        """Run the command of a job, with flags for the given options that have a value. Return its exit code."""
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in self.options(**given).items() if value]
        return cli.main([name, *flags, *map(str, words)])

    def register(self, rows: DataFrame, **given: Any) -> Registered:
        return register(rows, rejects=str(self.folder), **options(self.target), **given)

    def archive(
        self, *, to: Path | None = None, late: bool = False, purge: bool = False, **given: Any
    ) -> dict[str, Any]:
        """Archive the windows until the end of DAY, or those that are given, to the folder of the test or another."""
        archive = self.options(archive=str(to or self.folder), **{"until": NEXT_DAY, **given})
        return archive_job.run(self.spark, ArchiveSettings.read(archive, {}), late=late, purge=purge)

    def replay(self, **given: Any) -> dict[str, Any]:
        how = {name: given.pop(name) for name in ("dry_run", "reason", "to") if name in given}
        settings = ReplaySettings.read(self.options(archive=str(self.folder), **given), {})
        return replay_job.run(self.spark, settings, **how)

    def audit(self, **given: Any) -> dict[str, Any]:
        """Compare the tasks of DAY, or of another window, with the received messages in the folder of the test."""
        usual = {"since": DAY, "until": NEXT_DAY, "output": f"{self.folder}/report"}
        usual |= {"received": f"{self.folder}/received.jsonl"}
        return audit_job.run(self.spark, AuditSettings.read(self.options(**usual | given), {}))

    def operations(self) -> list[dict[str, Any]]:
        """Return the records of operations, in the order in which they began."""
        names = ("OperationId", "Operation", "StartedAt", "FinishedAt", "Reason", "Selection", "Tasks")
        found = query(self.database, f"SELECT {', '.join(names)} FROM AsynchronousTaskOperations ORDER BY StartedAt")
        return [dict(zip(names, each, strict=True)) for each in found]


def read_rows(spark: SparkSession, path: object, format: str = "auto", **how: Any) -> list[Any]:
    """Return the rows of files to register, which are the same with `--select "*"`."""
    found, again = (read(spark, str(path), format, select=select, **how).collect() for select in ("", "*"))
    assert sorted(map(repr, again)) == sorted(map(repr, found))
    return found


def counts(done: Registered) -> tuple[int, int, int, int, int]:
    return (done.read, done.registered, done.existing, done.repeated, done.rejected)


def rejects(folder: object) -> list[dict[str, Any]]:
    """Return the rejected rows in a folder, in the order of their reasons."""
    lines = [line for file in Path(str(folder)).glob("**/part-*.json") for line in file.read_text("utf-8").splitlines()]
    return sorted(map(json.loads, lines), key=lambda each: str(each["reason"]))


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


def fail_half_way(work: Callable[..., Iterator[Rows]], *given: Any) -> Iterator[Rows]:
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


class Commit(dict[str, Any]):
    """The details of a commit of an archive."""

    def __init__(self, file: Path) -> None:
        self.file = file
        super().__init__(json.loads(file.read_text().splitlines()[0])["commitInfo"].get("outbox", {}))

    def edit(self, **changes: Any) -> None:
        first, *others = self.file.read_text().splitlines(keepends=True)
        commit = json.loads(first)
        commit["commitInfo"]["outbox"] |= changes
        self.file.write_text("".join([json.dumps(commit) + "\n", *others]))


@dataclasses.dataclass(frozen=True)
class Files:
    """The files of an archive."""

    folder: Path

    def tasks(self, spark: SparkSession) -> list[Published]:
        return sent_of(read_archive(spark, str(self.folder)))

    def runs(self) -> list[Path]:
        """Return the folders of data, also of runs that did not end."""
        return sorted(self.folder.glob("window=*/run=*"))

    def commits(self, name: str) -> list[Commit]:
        """Return the commits with this detail."""
        found = map(Commit, sorted(self.folder.glob("_delta_log/*.json")))
        return [each for each in found if name in each]

    def windows(self) -> list[Commit]:
        return self.commits("since")

    def purges(self) -> list[Commit | None]:
        """Return the first note that the purge of a window ended, if there is one, for each window."""
        notes = {each["purged"]: each for each in reversed(self.commits("purged"))}
        return [notes.get(each["since"]) for each in self.windows()]


def remove(file: Path) -> None:
    """Remove a file that Spark has written, with its checksum."""
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
