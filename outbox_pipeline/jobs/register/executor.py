"""What a Spark task does with rows to be registered: check each as `outbox.register` does, and insert them in chunks.

A task may run again, and a row may come twice: a row whose task is there is not inserted again, and if the task is
another one, it is refused.
"""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pyarrow as pa
from pyspark.sql.types import LongType, StructField, StructType

from outbox import InvalidMessage, OutboxError, Priority, register
from outbox.message import parsed
from outbox.registration import COLUMNS
from outbox.shared.settings import DatabaseSettings
from outbox_pipeline import schemas
from outbox_pipeline.spanner import Table, table_of
from outbox_pipeline.spark.pacing import Pace

#: Tasks, and bytes of messages, in one commit: small ones share with others, and few are tried again if one is there.
CHUNK_ROWS, CHUNK_BYTES = 100, 4_000_000
#: Max attempts for a chunk whose IDs appear and disappear between the read and the insert.
TRIES = 10
_TAG = "outbox-pipeline-register"

COUNTS = ("registered", "existing", "repeated")
#: A row of counts, or one that was refused, with its reason.
ANSWER = StructType([*(StructField(name, LongType(), nullable=False) for name in COUNTS), *schemas.INPUT.fields])

_ID, _TOPIC, _DATA, _KEY = 0, 1, 2, 4
#: The columns of an existing task that are compared with those to be inserted. Nothing changes them later.
_SAME = ("Id", "Topic", "Data", "OrderingKey", "CreatedAt")
_Row = tuple[Any, ...]


@dataclass(frozen=True)
class Registration:
    """Given to `mapInArrow`; `began` is the database's time at which the job began, `rate` of this task, 0 is none."""

    database: DatabaseSettings
    began: datetime
    rate: float = 0.0

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Register the rows of `schemas.INPUT`; yield ANSWER."""
        writer = Writer(table_of(self.database), self.began, Pace(self.rate))
        answer = schemas.arrow(ANSWER)
        # In UTC whatever the session's zone is, where the last hours of the year 9999 may be in the next one.
        rows = schemas.arrow(schemas.INPUT)
        for batch in batches:
            for row in batch.cast(rows).to_pylist():
                writer.add(row)
            yield pa.RecordBatch.from_pylist(writer.answers(), answer)
        writer.flush()
        yield pa.RecordBatch.from_pylist(writer.answers(), answer)


@dataclass
class Writer:
    """Collects rows, writes them in chunks, and keeps what came of them until it is asked."""

    table: Table
    began: datetime
    pace: Pace = field(default_factory=Pace)
    _chunk: dict[str, tuple[_Row, dict[str, Any]]] = field(default_factory=dict)
    _bytes: int = 0
    _counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    _rejects: list[dict[str, Any]] = field(default_factory=list)
    #: Whether to read before inserting: at the beginning, and while existing tasks are found.
    _look: bool = True
    _last: _Row | None = None

    def add(self, row: dict[str, Any]) -> None:
        """Take one row of `schemas.INPUT`."""
        if row["reason"] is not None:
            self._reject(row, row["reason"])
            return
        try:
            made = _made(row)
        except (InvalidMessage, TypeError) as error:
            self._reject(row, str(error))
            return
        before = self._chunk[made[_ID]][0] if made[_ID] in self._chunk else self._last
        if before is not None and before[_ID] == made[_ID]:
            self._again(made, row, before)
            return
        self._chunk[made[_ID]] = (made, row)
        self._bytes += len(made[_DATA])
        if len(self._chunk) >= CHUNK_ROWS or self._bytes >= CHUNK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is collected. Raises NotReached, OutboxError."""
        chunk, self._chunk, self._bytes = self._chunk, {}, 0
        if not chunk:
            return
        self.pace.wait(len(chunk))
        self._last = next(reversed(chunk.values()))[0]
        for _ in range(TRIES):
            if self._look:
                self._look = self._leave_out(chunk)
            rows = [row for row, _ in chunk.values()]
            if not rows or self.table.insert(COLUMNS, rows, _TAG):
                self._counts["registered"] += len(rows)
                return
            self._look = True
        raise OutboxError(f"ids come and go while they are registered, such as {rows[0][_ID]!r}: are two jobs at work?")

    def answers(self) -> list[dict[str, Any]]:
        """Return what came of the rows since the last call."""
        counted = {**dict.fromkeys(schemas.INPUT.fieldNames()), **self._counts}
        found = [counted, *self._rejects]
        self._counts, self._rejects = dict.fromkeys(COUNTS, 0), []
        return found

    def _leave_out(self, chunk: dict[str, tuple[_Row, dict[str, Any]]]) -> bool:
        """Take those tasks out of the chunk that are there; return whether there were any."""
        found = self.table.of_ids(_SAME, chunk, _TAG)
        for id, topic, data, key, created in found:
            made, row = chunk.pop(id)
            if not _same(made, (id, topic, data, None, key)):
                self._reject(row, f"a task {id!r} is there with another message, topic or ordering key")
            else:
                # Of this job: an earlier run of this Spark task wrote it.
                self._counts["registered" if created >= self.began else "existing"] += 1
        return bool(found)

    def _again(self, made: _Row, row: dict[str, Any], before: _Row) -> None:
        if _same(made, before):
            self._counts["repeated"] += 1
        else:
            self._reject(row, f"{made[_ID]!r} comes twice, with another message, topic or ordering key")

    def _reject(self, row: dict[str, Any], reason: str) -> None:
        self._rejects.append({**row, "reason": reason, **dict.fromkeys(COUNTS, 0)})


class _Collector:
    """A transaction for `outbox.register`, which keeps the row."""

    row: _Row = ()

    def insert(self, _table: str, _columns: Sequence[str], rows: Sequence[_Row]) -> None:
        [self.row] = rows


def _made(row: dict[str, Any]) -> _Row:
    """Return the row as it is inserted. Raises InvalidMessage, TypeError: what `outbox.register` refuses."""
    collector = _Collector()
    if row["task_id"] is None:
        raise InvalidMessage("task_id is NULL")
    if row["data"] is None:
        raise InvalidMessage("data is NULL: an empty message has empty data")
    register(
        collector,
        row["topic"],
        row["data"],
        dict(row["attributes"] or ()),
        priority=Priority.NORMAL if row["priority"] is None else row["priority"],
        ordering_key=row["ordering_key"] or "",
        available_at=row["available_at"],
        expires_at=row["expires_at"],
        at_most_once=bool(row["at_most_once"]),
        task_id=row["task_id"],
    )
    return collector.row


def _same(one: _Row, other: _Row) -> bool:
    """Tell whether two rows of an id are one task, however their messages are serialized."""
    return (
        one[_TOPIC] == other[_TOPIC]
        and one[_KEY] == other[_KEY]
        and (one[_DATA] == other[_DATA] or parsed(_bytes(one[_DATA])) == parsed(_bytes(other[_DATA])))
    )


def _bytes(data: bytes) -> bytes:
    return base64.b64decode(data)
