"""Rows to be registered, a table in memory for them, and Spark tasks that fail when they have written."""

import base64
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from outbox.admin.table import Transaction
from outbox.program.settings import DatabaseSettings
from outbox_pipeline import schemas
from outbox_pipeline.job_settings import ReplaySettings
from outbox_pipeline.jobs.register.job import Registered, register
from outbox_pipeline.spanner import Table
from outbox_pipeline.spark.spark_tasks import Rows
from tests.support.spanner import query

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


def replay_settings(target: DatabaseSettings, **given: str) -> ReplaySettings:
    return ReplaySettings.read(options(target, **given), {})


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
    lines = (
        {
            "message_id": each.message_id,
            "publish_time": each.publish_time.isoformat(),
            "attributes": json.dumps(dict(each.attributes)),
            "data": base64.b64encode(each.data).decode(),
        }
        for each in messages
    )
    return write_lines(file, lines)


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
