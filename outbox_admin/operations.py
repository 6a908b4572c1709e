"""The record of changes: one row of AsynchronousTaskOperations for each change that an operator or a job makes."""

import dataclasses
import json
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet

from outbox.base.values import MAX_JSON, json_column, shown
from outbox.errors import OutboxError
from outbox.rows.task_table import SCAN_SECONDS, TaskTable, Transaction
from outbox.table.ddl import OPERATIONS
from outbox_admin import operation_sql
from outbox_admin.change_kinds import MATCHED_LATER

#: Max task IDs that the record of a selection contains.
RECORDED_IDS = 1_000
#: Max operations with the same first digit of the ID, of 16, with which a filter is compared.
COMPARED = 1_000
#: A running operation whose last chunk is older has probably lost its process. A chunk takes up to about a minute.
INTERRUPTED_AFTER = timedelta(minutes=1)
#: As the reason of an unchanged task: the preview counted it, and it did not match any more when the change began.
NO_LONGER_MATCHED = "changed since the preview"
#: Max reasons of unchanged tasks that a record has. The others are counted together.
MAX_REASONS, OTHER = 20, "other reasons"
OPERATIONS_TAG = "outbox-operations"


@dataclasses.dataclass(frozen=True, slots=True)
class Author:
    """Who makes a change, and why. Without a `principal`, it is that of the table's credentials."""

    principal: str | None = None
    reason: str | None = None


#: A change by the credentials, without a reason.
UNNAMED = Author()


class Operation(NamedTuple):
    """A row. `finished_at` is None while the change runs, or if it ended early. `selection` is JSON.

    `selected` is the number of tasks that a dry run counted. `seen_at` is the time of the last chunk. `position` has,
    as JSON, where the next chunk begins, and how many tasks are unchanged.
    """

    id: str
    operation: str
    started_at: datetime
    finished_at: datetime | None
    principal: str | None
    selection: str
    tasks: int | None
    reason: str | None
    selected: int | None
    seen_at: datetime | None
    stopped_at: datetime | None
    position: str | None = None

    @property
    def unchanged(self) -> dict[str, int]:
        """Return how many tasks of the preview are not changed, by reason."""
        return _unchanged(self.position)

    @property
    def has_ended(self) -> bool:
        return bool(self.finished_at or self.stopped_at)

    def state(self, now: datetime, *, is_here: bool = False) -> str:
        """Return `finished`, `stopped`, `running`, `interrupted`, or `unfinished` for an operation without chunks."""
        if self.has_ended:
            return "finished" if self.finished_at else "stopped"
        if self.seen_at is None:
            return "unfinished"
        # An operation that this process executes may wait for Spanner.
        return "running" if is_here or now - self.seen_at < INTERRUPTED_AFTER else "interrupted"


def new_id() -> str:
    """Return a UUID for a new row: a random digit, and then the time to the year 4147, in 1/4096 s.

    So the last operations come first in each of 16 ranges of the primary key, and no range gets all new rows. Almost
    all IDs that are random as a whole come after them.
    """
    digits, left = uuid.uuid4().hex, f"{2**48 - int(time.time() * 2**12):014x}"
    # The digit between them is the version of a UUID.
    return str(uuid.UUID(f"{digits[0]}{left[:11]}{digits[12]}{left[11:]}{digits[16:]}"))


def _unchanged(position: str | None) -> dict[str, int]:
    """Return the numbers of unchanged tasks by reason. Any program may write the column."""
    found = parsed(position or "{}")
    numbers = found.get("unchanged") if isinstance(found, dict) else None
    numbers = numbers if isinstance(numbers, dict) else {}
    return {reason: number for reason, number in numbers.items() if isinstance(number, int)}


class NotContinued(OutboxError):
    """The operation was finished, stopped by a person, or continued by another process."""


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """The row of an operation that is executed in chunks, as this process has last written it."""

    id: str
    tasks: int = 0
    #: A JSON object: the position of `chunks.chunks`, in `unchanged` the numbers of unchanged tasks by reason, and in
    #: `by` the process that wrote it.
    position: str | None = None
    by: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex[:8], compare=False)

    def check(self, transaction: Transaction) -> None:
        """Lock the row. Raise NotContinued if this process must not go on.

        Two processes may work on one operation. Each chunk changes the row, so only one of them executes it.
        """
        if not self.is_last(transaction):
            raise NotContinued(
                f"operation {self.id} was stopped, finished, or continued by another process. See `outbox operations`"
            )

    def is_last(self, transaction: Transaction) -> bool:
        """Lock the row, and tell whether it is as this process has written it."""
        return self._row(transaction)[:4] == [self.tasks, self.position, None, None]

    def move(
        self, transaction: Transaction, tasks: int, unchanged: Mapping[str, int], position: str | None
    ) -> "Progress":
        """Record a chunk that has changed so many tasks, and where the next one begins. `check` comes before it."""
        after = self._after(tasks, unchanged, position)
        update(transaction, self.id, Tasks=after.tasks, Position=after.position, SeenAt=COMMIT_TIMESTAMP)
        return after

    def finish(self, transaction: Transaction, *, counts_left: bool) -> int:
        """Set FinishedAt of the row, unless an attempt whose commit was not answered has done it. Raises NotContinued.

        With `counts_left`, return and record the number of tasks that the preview counted and that no chunk has read,
        because they did not match any more.
        """
        *written, finished_at, selected = self._row(transaction)
        known = {reason: number for reason, number in _unchanged(self.position).items() if reason != MATCHED_LATER}
        left = (selected or 0) - self.tasks - sum(known.values()) if counts_left else 0
        after = self._after(0, {NO_LONGER_MATCHED: left} if left > 0 else {}, self.position)
        if finished_at is None or written != [after.tasks, after.position, None]:
            self.check(transaction)
            update(transaction, self.id, Position=after.position, FinishedAt=COMMIT_TIMESTAMP)
        return max(0, left)

    def _row(self, transaction: Transaction) -> list[Any]:
        columns = ("Tasks", "Position", "StoppedAt", "FinishedAt", "Selected")
        rows = transaction.read(OPERATIONS, columns, KeySet(keys=[[self.id]]))
        return rows[0] if rows else [None] * len(columns)

    def _after(self, tasks: int, unchanged: Mapping[str, int], position: str | None) -> "Progress":
        numbers = Counter(_unchanged(self.position)) + Counter(unchanged)
        largest = Counter(dict(numbers.most_common(MAX_REASONS)))  # a service may word each refusal in another way
        numbers = largest + Counter({OTHER: numbers.total() - largest.total()})
        texts: dict[str, Any] = json.loads(position or "{}") | ({"unchanged": numbers} if numbers else {})
        return Progress(self.id, self.tasks + tasks, json.dumps(texts | {"by": self.by}), self.by)


def latest(
    table: TaskTable,
    limit: int,
    *,
    operation: str | None = None,
    topic: str | None = None,
    principal: str | None = None,
    views: bool = True,
    at: datetime | None = None,
    characters: int = MAX_JSON,
) -> list[Operation]:
    """Return the last `limit` operations as they were `at` a time, newest first. Raises NotReached, OutboxError.

    Of those that began in the same millisecond as the last one, it returns any. A filter is compared with about the
    last 16,000: `operation` is a name, `topic` a part of the selection, `principal` a part of the account, ignoring
    case. Without `views`, it leaves out the records of messages that a person has looked at. Of a selection, it returns
    so many `characters`.
    """
    quoted = None if topic is None else json.dumps(topic, ensure_ascii=False)
    given = {"operation": operation, "topic": quoted, "principal": principal}
    values = {name: value for name, value in given.items() if value is not None}
    most = {"limit": limit, "ceiling": max(limit, COMPARED) if values else limit, "characters": characters}
    statement = operation_sql.latest_operations(values, views=views)
    rows = table.query(statement, OPERATIONS_TAG, values | most, at=at, seconds=SCAN_SECONDS)
    return [Operation(*row) for row in rows]


def operation(table: TaskTable, id: str) -> Operation | None:
    """Return one operation, or None if it does not exist. Raises NotReached, OutboxError."""
    rows = table.query(operation_sql.OPERATION, OPERATIONS_TAG, {"id": id, "characters": MAX_JSON})
    return Operation(*rows[0]) if rows else None


def beginning_with(table: TaskTable, prefix: str, limit: int) -> list[str]:
    """Return the IDs of the first `limit` operations that begin with `prefix`. Raises NotReached, OutboxError."""
    rows = table.query(operation_sql.BEGINNING_WITH, OPERATIONS_TAG, {"prefix": prefix, "limit": limit})
    return [id for (id,) in rows]


def found(table: TaskTable, id: str) -> Operation:
    """Return one operation. Raises NotReached, and OutboxError if it does not exist."""
    if (row := operation(table, id)) is None:
        raise OutboxError(f"operation {id} does not exist. See `outbox operations`")
    return row


def begin(
    table: TaskTable, name: str, selection: Mapping[str, Any], author: Author = UNNAMED, **columns: Any
) -> Operation:
    """Record a change that starts now, and return its row. Raises NotReached, OutboxError."""
    id = columns.setdefault("OperationId", new_id())
    table.transact(OPERATIONS_TAG, lambda writer: record(writer, table, name, selection, author, **columns))
    return found(table, id)


def end(table: TaskTable, id: str, **columns: Any) -> None:
    """Set FinishedAt and further columns of the row. Raises NotReached, OutboxError."""
    table.transact(OPERATIONS_TAG, lambda writer: update(writer, id, FinishedAt=COMMIT_TIMESTAMP, **columns))


def stop(table: TaskTable, id: str, author: Author) -> None:
    """Let no process execute a further chunk of an operation, and record who stopped it. Raises NotContinued."""
    _mark(table, id, "stop", author)


def proceed(table: TaskTable, id: str, author: Author) -> None:
    """Allow further chunks of an operation, and record who continues it. Raises NotContinued.

    The position changes, so a process that has not noticed the stop executes no further chunk.
    """
    _mark(table, id, "continue", author)


def _mark(table: TaskTable, of: str, name: str, author: Author) -> None:
    """Stop or continue an operation, and record that as an operation of its own. Raises NotContinued."""
    own = new_id()

    def work(transaction: Transaction) -> None:
        rows = transaction.read(OPERATIONS, ("FinishedAt", "Position"), KeySet(keys=[[of]]))
        if not rows or rows[0][0]:
            raise NotContinued(f"operation {of} is finished, or does not exist")
        columns: dict[str, Any] = {"StoppedAt": COMMIT_TIMESTAMP}
        if name == "continue":
            position = parsed(rows[0][1] or "{}")
            moved = json.dumps(position | {"by": own}) if isinstance(position, dict) else rows[0][1]
            columns = {"StoppedAt": None, "SeenAt": COMMIT_TIMESTAMP, "Position": moved}
        update(transaction, of, **columns)
        record(transaction, table, name, {"operation": of}, author, OperationId=own, FinishedAt=COMMIT_TIMESTAMP)

    table.transact(OPERATIONS_TAG, work)


def record(
    writer: Any, table: TaskTable, name: str, selection: Mapping[str, Any], author: Author = UNNAMED, **columns: Any
) -> None:
    """Buffer the row of a change that starts with this commit. `columns` are the values of further columns.

    `writer` is a Transaction, or a Batch of the client. It runs again if a commit is not answered, so OperationId is
    given, unless the row is of a change that only the first commit makes.
    """
    row: dict[str, Any] = {"OperationId": new_id(), "Operation": name, "StartedAt": COMMIT_TIMESTAMP}
    row |= {"Principal": author.principal or table.principal, "Reason": author.reason}
    row |= {"Selection": as_json(selection), **columns}
    writer.insert_or_update(OPERATIONS, tuple(row), [tuple(row.values())])


def update(writer: Any, id: str, **columns: Any) -> None:
    """Buffer new values of the row."""
    writer.update(OPERATIONS, ("OperationId", *columns), [(id, *columns.values())])


def as_json(selection: Mapping[str, Any]) -> str:
    """Return a selection as the column Selection stores it: without empty values, and with at most RECORDED_IDS IDs."""
    values = {name: value for name, value in selection.items() if value is not None}
    ids: Sequence[str] = values.get("ids", ())
    if len(ids) > RECORDED_IDS:
        values |= {"ids": ids[:RECORDED_IDS], "more_ids": len(ids) - RECORDED_IDS}
    return json.dumps(values, ensure_ascii=False, default=shown)


def parsed(selection: str) -> Any:
    """Return the value of the column Selection, or its text if that is no JSON: any program may write the column."""
    try:
        return json_column(selection)
    except ValueError:
        return selection
