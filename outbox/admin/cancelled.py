"""Cancelled tasks: move rows to AsynchronousTasksCancelled, and back as they were."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet

from outbox.admin import operator_sql
from outbox.admin.table import Transaction
from outbox.base.values import json_texts
from outbox.registration import TABLE
from outbox.table import ddl
from outbox.table.ddl import CANCELLED, OPERATIONS

#: The columns that both tables have, without computed ones.
COLUMNS = tuple(name for name, text in ddl.columns().items() if " AS (" not in text and name != "SentAt")
#: What moves a task, and what puts it back.
MOVED = operator_sql.rows_by_ids(", ".join(COLUMNS), lock=True)
KEPT = operator_sql.rows_by_ids(f"{', '.join(COLUMNS)}, OperationId, CURRENT_TIMESTAMP()", cancelled=True, lock=True)
#: What tells whether the head of a deferred task still waits.
HEAD = ("Id", "Topic", "OrderingKey", "SentAt", "AvailableAt", "ExpiresAt")
#: The columns of a task that is restored as sent, because subscribers have its message: those of a mark.
_AS_SENT: Mapping[str, Any] = {
    "SentAt": COMMIT_TIMESTAMP, "AvailableAt": None, "DueAt": None, "BlockedBy": None, "ExpiresAt": None, "Attempts": 0,
    "LastError": None,
}  # fmt: skip


def move(transaction: Transaction, ids: Sequence[str], operation: str) -> None:
    """Move tasks to the table of cancelled tasks, in the name of an operation."""
    rows = [(*row, operation, COMMIT_TIMESTAMP) for row in transaction.query(MOVED, {"ids": ids})]
    transaction.insert_or_update(CANCELLED, (*COLUMNS, "OperationId", "CancelledAt"), rows)
    transaction.delete(TABLE, KeySet(keys=[[id] for id in ids]))


def restore(transaction: Transaction, ids: Sequence[str]) -> None:
    """Move cancelled tasks back. A task that a worker had published before the cancel is marked as sent.

    Not one that was sent before and then made unsent: the worker may have published it for the first time only.
    """
    rows = transaction.query(KEPT, {"ids": ids})
    found = [dict(zip((*COLUMNS, "OperationId", "Now"), row, strict=True)) for row in rows]
    published = _published(transaction, {values["OperationId"] for values in found})
    heads = {values["Id"]: values for values in [*_heads(transaction, found), *found]}
    restored = [
        {**values, **_AS_SENT, "TimesSent": values["TimesSent"] + 1}
        if values["Id"] in published[values["OperationId"]] and not values["TimesSent"]
        else _restored(values, heads.get(values["BlockedBy"] or ""))
        for values in found
    ]
    columns = (*COLUMNS, "SentAt")
    transaction.insert(TABLE, columns, [[values.get(name) for name in columns] for values in restored])
    transaction.delete(CANCELLED, KeySet(keys=[[id] for id in ids]))


def existing(transaction: Transaction, ids: Sequence[str]) -> set[str]:
    """Return which of the IDs exist, and lock them."""
    return {id for (id,) in transaction.read(TABLE, ("Id",), KeySet(keys=[[id] for id in ids]))}


def _heads(transaction: Transaction, found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tasks behind which cancelled ones were deferred, and lock them."""
    keys = [[id] for id in sorted({values["BlockedBy"] for values in found} - {None})]
    rows = transaction.read(TABLE, HEAD, KeySet(keys=keys)) if keys else []
    return [dict(zip(HEAD, row, strict=True)) for row in rows]


def _restored(values: Mapping[str, Any], head: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the columns of a restored task, as they were.

    A deferred task is released unless its head waits, in the table or among the tasks that are restored with it: the
    next commit of the head, which releases tasks, may not know the task.
    """
    now, available_at = values["Now"], values["AvailableAt"]
    if values["BlockedBy"] is None or available_at is None or available_at <= now or _waits(head, values, now):
        return values
    return {**values, "AvailableAt": None, "BlockedBy": None}


def _waits(head: Mapping[str, Any] | None, values: Mapping[str, Any], now: datetime) -> bool:
    if head is None or any(head[name] != values[name] for name in ("Topic", "OrderingKey")):
        return False
    is_later = head.get("SentAt") is None and head["AvailableAt"] is not None and head["AvailableAt"] > now
    return is_later and (head["ExpiresAt"] is None or head["ExpiresAt"] > now)


def _published(transaction: Transaction, operations: Collection[str]) -> dict[str, Mapping[str, str]]:
    """Return the tasks that workers had published before each operation cancelled them, with their message IDs."""
    keys = KeySet(keys=[[id] for id in sorted(operations)])
    found = dict(map(tuple, transaction.read(OPERATIONS, ("OperationId", "Published"), keys)))
    return {id: json_texts(found.get(id)) for id in operations}
