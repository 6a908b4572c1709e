"""Cancelled tasks: move rows to AsynchronousTasksCancelled, and back as they were."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet

from outbox.admin import operator_sql
from outbox.admin.table import SCAN_SECONDS, TaskTable, Transaction
from outbox.base.values import chunked, json_texts
from outbox.registration import TABLE
from outbox.table import ddl
from outbox.table.ddl import CANCELLED, OPERATIONS

#: The columns that both tables have, without computed ones.
COLUMNS = tuple(name for name, text in ddl.columns().items() if " AS (" not in text and name != "SentAt")
#: What moves a task, and what puts it back.
MOVED = operator_sql.rows_by_ids(", ".join(COLUMNS))
KEPT = operator_sql.rows_by_ids(
    f"{', '.join(COLUMNS)}, OperationId, {operator_sql.STILL_HELD}, CURRENT_TIMESTAMP()", cancelled=True
)
#: The columns of a task that is restored as sent, because subscribers have its message: those of a mark.
_AS_SENT: Mapping[str, Any] = {
    "SentAt": COMMIT_TIMESTAMP, "AvailableAt": None, "DueAt": None, "BlockedBy": None, "ExpiresAt": None, "Attempts": 0,
    "LastError": None,
}  # fmt: skip
_PAGE = 1_000


def move(transaction: Transaction, ids: Sequence[str], operation: str) -> None:
    """Move tasks to the table of cancelled tasks, in the name of an operation."""
    rows = [(*row, operation, COMMIT_TIMESTAMP) for row in transaction.query(MOVED, {"ids": ids})]
    transaction.insert_or_update(CANCELLED, (*COLUMNS, "OperationId", "CancelledAt"), rows)
    transaction.delete(TABLE, KeySet(keys=[[id] for id in ids]))


def restore(transaction: Transaction, ids: Sequence[str]) -> None:
    """Move cancelled tasks back. A task that a worker had published before the cancel is marked as sent."""
    rows = transaction.query(KEPT, {"ids": ids})
    published = _published(transaction, {operation for *_, operation, _, _ in rows})
    found = {row[0]: dict(zip(COLUMNS, row, strict=False)) for row in rows}
    restored = [
        _restored(found, values, is_held=is_held, now=now)
        if values["Id"] not in published[operation]
        else {**values, **_AS_SENT, "TimesSent": values["TimesSent"] + 1}
        for values, (*_, operation, is_held, now) in zip(found.values(), rows, strict=True)
    ]
    columns = (*COLUMNS, "SentAt")
    transaction.insert(TABLE, columns, [[values.get(name) for name in columns] for values in restored])
    transaction.delete(CANCELLED, KeySet(keys=[[id] for id in ids]))


def _restored(
    found: Mapping[str, Mapping[str, Any]], values: Mapping[str, Any], *, is_held: bool, now: datetime
) -> Mapping[str, Any]:
    """Return the columns of a restored task, as they were.

    A deferred task whose head does not wait any more is released: the next commit of the head, which releases tasks,
    may not know it. Its head can be among the tasks that are restored with it.
    """
    head = found.get(values["BlockedBy"] or "")
    waits = is_held or (head is not None and head["AvailableAt"] is not None and head["AvailableAt"] > now)
    is_deferred = values["BlockedBy"] is not None and values["AvailableAt"] is not None and values["AvailableAt"] > now
    return values if waits or not is_deferred else {**values, "AvailableAt": None, "BlockedBy": None}


def _published(transaction: Transaction, operations: Collection[str]) -> dict[str, Mapping[str, str]]:
    """Return the tasks that workers had published before each operation cancelled them, with their message IDs."""
    keys = KeySet(keys=[[id] for id in sorted(operations)])
    found = dict(map(tuple, transaction.read(OPERATIONS, ("OperationId", "Published"), keys)))
    return {id: json_texts(found.get(id)) for id in operations}


def examine(table: TaskTable, chunks: Iterable[Sequence[str]], at: datetime | None) -> tuple[int, int]:
    """Return how many of these tasks have an ID that exists again, and how many are overtaken, as of a time."""
    exists = overtaken = 0
    for ids in chunks:
        values = {"ids": ids, "shard_count": table.layout.shards}
        [[more, later]] = table.query(operator_sql.EXAMINED, "outbox-count", values, at=at, seconds=SCAN_SECONDS)
        exists, overtaken = exists + more, overtaken + later
    return exists, overtaken


def in_key_order(table: TaskTable, ids: Sequence[str], at: datetime | None) -> list[str]:
    """Return the cancelled tasks among these in the order in which they are restored."""
    found: list[list[Any]] = []
    for chunk in chunked(ids, _PAGE):
        found += table.query(operator_sql.IN_KEY_ORDER, "outbox-restore", {"ids": chunk}, at=at)
    return [id for id, *_ in sorted(found, key=lambda row: (row[1], row[2] is not None, row[2] or 0, row[0]))]
