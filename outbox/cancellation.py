"""Cancel a task inside the caller's own Spanner transaction."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from google.cloud.spanner_v1 import KeySet

from outbox.errors import InvalidTransaction
from outbox.message import check_task_id
from outbox.registration import TABLE
from outbox.table.layouts import Layout
from outbox.table.shared_sql import LAYOUTS, LOCK_UNSENT, NEXT_OF_KEYS, RELEASED, parameters
from outbox.table.transactions import (
    IN_TRANSACTION_SECONDS,
    PrimaryKey,
    SupportsCancel,
    SupportsDelete,
    check_transaction,
    deleted,
    inserted,
    retry_and_timeout,
)

#: The options of the requests, except for retries and timeouts.
REQUEST_OPTIONS = {"request_options": {"request_tag": "outbox-cancel"}}

#: Runs a statement with its parameters, and returns the rows.
Query = Callable[[str, Mapping[str, Any]], Sequence[Sequence[Any]]]


def cancel(transaction: SupportsCancel, task_id: str) -> bool:
    """Delete an unsent task in `transaction`. Return False if it is sent or does not exist.

    The task may be in any unsent state: pending, retrying, scheduled, blocked or dead. If the transaction commits,
    workers do not publish it any more. If it is the head of an ordering key, the same transaction releases the next
    task of the key.

    No cancel takes a message back. The call locks the row for the transaction. If a batch of a worker holds the lock,
    the younger of the two transactions waits. So a transaction that begins with the call waits until the batch has
    committed, usually for less than a second, and gets False if the task was sent. A transaction that has read before
    can be older. Then Spanner aborts the batch, which may have published the task: the call returns True, although
    subscribers receive the message. The same happens to a task that is in doubt. So call `cancel` first in the
    transaction. A worker logs the ID of each task that it finds deleted after it has published it.

    To replace a task, cancel it, and then register another one with a new ID. The inbox of a subscriber that has
    received the cancelled one would ignore the same ID for 32 days.

    `transaction` is the Spanner Transaction that `database.run_in_transaction` passes to its function. Call `cancel`
    before any DML that writes PENDING_COMMIT_TIMESTAMP() to the table. If the client uses a database role, the role
    needs the optional grants of `outbox_application`.

    Raises:
        InvalidMessage: `task_id` is not 1 to 64 characters.
        InvalidTransaction: `transaction` has registered the task itself, was committed or rolled back before, or
            belongs to a DB-API connection, which would drop the change after an abort.
        TypeError: `transaction` cannot read (a Batch, a MutationGroup) or cannot write.
        RetryError, DeadlineExceeded: from google.api_core. Spanner was unavailable, or another transaction held the
            row, for 30 s.
    """
    check_transaction(transaction, "cancel", reads=True)
    check_not_registered(check_task_id(task_id), inserted(transaction))

    def query(sql: str, values: Mapping[str, Any]) -> list[Sequence[Any]]:
        # Read to the end, because until then the client blocks the next statement of the transaction.
        options = {**REQUEST_OPTIONS, **retry_and_timeout(IN_TRANSACTION_SECONDS)}
        return list(transaction.execute_sql(sql, **parameters(values), **options))

    heads = next_heads(query, task_id, deleted(transaction))
    if heads is not None:
        delete(transaction, task_id, heads)
    return heads is not None


def check_not_registered(task_id: str, inserted: Collection[PrimaryKey]) -> None:
    """Raise InvalidTransaction if the transaction has inserted the task: its reads do not return it."""
    if (task_id,) in inserted:
        raise InvalidTransaction(
            f"task {task_id!r} was registered by the same transaction, so it is not in the table yet and cannot be "
            "cancelled. Roll back, or decide before you register it"
        )


def next_heads(query: Query, task_id: str, deleted_before: Collection[str] = ()) -> list[str] | None:
    """Lock a task. Return the IDs of the tasks to release when it is deleted, or None if it was sent or does not exist.

    `deleted_before` are the tasks that the transaction has deleted by mutations, because its reads still return them.
    """
    [[is_unsent, ordering_key]] = query(LOCK_UNSENT, {"id": task_id})
    if not is_unsent or task_id in deleted_before:
        return None
    if ordering_key is None:
        return []
    layout = Layout.usable(query(LAYOUTS, {}))
    return [id for (id,) in query(layout.sql(NEXT_OF_KEYS), {"ids": [*deleted_before, task_id]})]


def delete(transaction: SupportsDelete, task_id: str, heads: Iterable[str]) -> None:
    """Buffer the release of `heads`, and the deletion of a task."""
    if rows := [(id, None, None) for id in heads]:
        transaction.update(TABLE, ("Id", *RELEASED), rows)
    transaction.delete(TABLE, KeySet(keys=[[task_id]]))
    deleted(transaction).add(task_id)
