"""The record of changes: one row of AsynchronousTaskOperations for each change that an operator or a job makes."""

import dataclasses
import json
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP

from outbox.admin import statements
from outbox.admin.table import TaskTable
from outbox.errors import OutboxError
from outbox.program.times import shown
from outbox.table.ddl import OPERATIONS

#: Max task IDs that the record of a selection contains.
RECORDED_IDS = 1_000
_TAG = "outbox-operations"


@dataclasses.dataclass(frozen=True, slots=True)
class Author:
    """Who makes a change, and why. Without a `principal`, it is that of the table's credentials."""

    principal: str | None = None
    reason: str | None = None


#: A change by the credentials, without a reason.
UNNAMED = Author()


class Operation(NamedTuple):
    """A row. `finished_at` is None while the change runs, or if it ended early. `selection` is JSON."""

    id: str
    operation: str
    started_at: datetime
    finished_at: datetime | None
    principal: str | None
    selection: str
    tasks: int | None
    reason: str | None


def latest(
    table: TaskTable,
    limit: int,
    *,
    operation: str | None = None,
    topic: str | None = None,
    principal: str | None = None,
    at: datetime | None = None,
) -> list[Operation]:
    """Return the last `limit` operations as they were `at` a time, newest first. Raises NotReached, OutboxError.

    Args:
        table: is only read.
        limit: max operations.
        operation: only those with this name, such as `retry`.
        topic: only those whose selection contains this text.
        principal: only those by an account that contains this text, ignoring case.
        at: by default now.
    """
    quoted = None if topic is None else json.dumps(topic, ensure_ascii=False)
    given = {"operation": operation, "topic": quoted, "principal": principal}
    values = {name: value for name, value in given.items() if value is not None}
    rows = table.query(statements.latest_operations(values), _TAG, {**values, "limit": limit}, at=at)
    return [Operation(*row) for row in rows]


def record(
    writer: Any, table: TaskTable, name: str, selection: Mapping[str, Any], author: Author = UNNAMED, **columns: Any
) -> None:
    """Buffer the row of a change that starts with this commit. `columns` are the values of further columns.

    `writer` is a Transaction, or a Batch of the client.
    """
    row: dict[str, Any] = {"OperationId": str(uuid.uuid4()), "Operation": name, "StartedAt": COMMIT_TIMESTAMP}
    row |= {"Principal": author.principal or table.principal, "Reason": author.reason}
    row |= {"Selection": as_json(selection), **columns}
    writer.insert(OPERATIONS, tuple(row), [tuple(row.values())])


def update(writer: Any, id: str, **columns: Any) -> None:
    """Buffer new values of the row."""
    writer.update(OPERATIONS, ("OperationId", *columns), [(id, *columns.values())])


def finish(table: TaskTable, id: str) -> str | None:
    """Set FinishedAt of the row. Return a warning if that failed."""
    try:
        table.transact(_TAG, lambda transaction: update(transaction, id, FinishedAt=COMMIT_TIMESTAMP))
    except OutboxError as error:
        return f"all tasks are changed, but operation {id} is not recorded as finished: {error}"
    return None


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
        value = json.loads(selection)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return selection
    return value
