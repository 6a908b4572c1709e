"""Registers rows in a Spark task: checks each row like `outbox.register` and inserts the rows in chunks.

Spark can run a Spark task again, and a row can occur twice. A row whose task exists is not inserted again. If the
existing task is different, the row is rejected.
"""

from base64 import b64decode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pyspark.sql.types import StructType

from outbox import InvalidMessage, OutboxError, Priority, Task
from outbox.message import parsed
from outbox.program.settings import DatabaseSettings
from outbox.registration import COLUMNS, task_row
from outbox_pipeline import schemas
from outbox_pipeline.spanner import COMMIT_BYTES, Table, open_table
from outbox_pipeline.spark.spark_tasks import Pace, Rows

#: Max tasks in one commit. If one ID exists, the whole chunk is tried again.
REGISTER_ROWS = 100
#: Max attempts for a chunk whose IDs appear and disappear between the read and the insert.
TRIES = 10
_TAG = "outbox-pipeline-register"

COUNTS = ("registered", "existing", "repeated")
#: A row of counts, or a rejected row with its reason.
ANSWER = StructType([*schemas.counts(*COUNTS), *schemas.INPUT])

_ID, _TOPIC, _DATA, _KEY = 0, 1, 2, 4
#: The columns in which an existing task is compared with a row. They never change after the insert.
_SAME = ("Id", "Topic", "Data", "OrderingKey", "CreatedAt")
_Row = tuple[Any, ...]


def register_rows(database: DatabaseSettings, began: datetime, rate: float, batches: Iterator[Rows]) -> Iterator[Rows]:
    """Register rows of `schemas.INPUT` in a Spark task, and yield rows of ANSWER.

    `began` is the start of the job by the database's clock. `rate` is rows per second of this Spark task, 0 is no
    limit.
    """
    writer = Writer(open_table(database), began, Pace(rate))
    for rows in batches:
        for row in rows:
            writer.add(row)
        yield writer.answers()
    writer.flush()
    yield writer.answers()


@dataclass
class Writer:
    """Collects rows, writes them in chunks, and keeps the outcomes until `answers` is called."""

    table: Table
    began: datetime
    pace: Pace = field(default_factory=Pace)
    _chunk: dict[str, tuple[_Row, Mapping[str, Any]]] = field(default_factory=dict)
    _bytes: int = 0
    _counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    _rejects: list[dict[str, Any]] = field(default_factory=list)
    #: Whether to read before inserting: for the first chunk, and while chunks contain existing tasks.
    _read_first: bool = True
    _last: _Row | None = None

    def add(self, row: Mapping[str, Any]) -> None:
        """Add one row of `schemas.INPUT`."""
        try:
            task = _task(row)
        except (InvalidMessage, TypeError) as error:
            self._reject(row, str(error))
            return
        before = self._chunk[task[_ID]][0] if task[_ID] in self._chunk else self._last
        if before is not None and before[_ID] == task[_ID]:
            self._repeated(task, row, before)
            return
        self._chunk[task[_ID]] = (task, row)
        self._bytes += len(task[_DATA])
        if len(self._chunk) >= REGISTER_ROWS or self._bytes >= COMMIT_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the collected rows. Raises NotReached, OutboxError."""
        chunk, self._chunk, self._bytes = self._chunk, {}, 0
        if not chunk:
            return
        self.pace.wait(len(chunk))
        self._last = next(reversed(chunk.values()))[0]
        for _ in range(TRIES):
            if self._read_first:
                self._read_first = self._remove_existing(chunk)
            rows = [row for row, _ in chunk.values()]
            if not rows or self.table.insert(COLUMNS, rows, _TAG):
                self._counts["registered"] += len(rows)
                return
            self._read_first = True
        raise OutboxError(
            f"Task {rows[0][_ID]!r} was inserted and deleted {TRIES} times while this job registered it. Does another "
            "job register or purge the same tasks?"
        )

    def answers(self) -> list[dict[str, Any]]:
        """Return the outcomes of the rows since the last call."""
        counted = {**dict.fromkeys(schemas.INPUT.fieldNames()), **self._counts}
        found = [counted, *self._rejects]
        self._counts, self._rejects = dict.fromkeys(COUNTS, 0), []
        return found

    def _remove_existing(self, chunk: dict[str, tuple[_Row, Mapping[str, Any]]]) -> bool:
        """Remove the rows whose tasks exist from the chunk. Return whether there were any."""
        found = self.table.read_ids(_SAME, chunk, _TAG)
        for id, topic, data, key, created in found:
            task, row = chunk.pop(id)
            if not _same(task, (id, topic, data, None, key)):
                self._reject(row, f"task {id!r} exists with another message, topic or ordering key")
            else:
                # A task that was created since the job began was written by an earlier attempt of this Spark task.
                self._counts["registered" if created >= self.began else "existing"] += 1
        return bool(found)

    def _repeated(self, task: _Row, row: Mapping[str, Any], before: _Row) -> None:
        if _same(task, before):
            self._counts["repeated"] += 1
        else:
            self._reject(row, f"task ID {task[_ID]!r} occurs twice, with different messages, topics or ordering keys")

    def _reject(self, row: Mapping[str, Any], reason: str) -> None:
        self._rejects.append({**row, "reason": reason, **dict.fromkeys(COUNTS, 0)})


def _task(row: Mapping[str, Any]) -> _Row:
    """Return the row to insert. Raises InvalidMessage or TypeError if `outbox.register` refuses it."""
    if row["reason"] is not None:
        raise InvalidMessage(row["reason"])
    if row["task_id"] is None:
        raise InvalidMessage("task_id is NULL")
    if row["data"] is None:
        raise InvalidMessage("data is NULL. For a message without data, pass an empty string")
    task = Task(
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
    return task_row(task)


def _same(one: _Row, other: _Row) -> bool:
    """Tell whether two rows with the same ID are the same task, even if their messages are serialized differently."""
    if (one[_TOPIC], one[_KEY]) != (other[_TOPIC], other[_KEY]):
        return False
    return one[_DATA] == other[_DATA] or parsed(b64decode(one[_DATA])) == parsed(b64decode(other[_DATA]))
