"""Cancel tasks inside the caller's own Spanner transaction. A program that only registers does not load this."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP

from outbox import message as messages
from outbox.errors import InvalidTransaction
from outbox.registration import APPLICATION
from outbox.table import timeouts, transactions
from outbox.table.ddl import Layout
from outbox.table.shared_sql import CANCEL_COLUMNS, LAYOUTS, LOCK_UNSENT, NEXT_OF_KEYS, RELEASED, parameters
from outbox.table.states import TASKS_TABLE
from outbox.table.transactions import SupportsCancel, SupportsUpdate

#: The tag of the requests of a cancel.
CANCEL_TAG = "outbox-cancel"
#: Runs a statement with its parameters, and returns the rows.
Query = Callable[[str, Mapping[str, Any]], Sequence[Sequence[Any]]]


def cancel(transaction: SupportsCancel, task_id: str) -> bool:
    """Take an unsent task out in `transaction`. Return False if it is sent, cancelled already, or does not exist.

    The task may be in any unsent state: pending, retrying, scheduled, blocked or dead. Its row stays, with SentAt and
    CancelledBy. If the transaction commits, workers do not publish it any more, unless an operator restores it. If it
    is the head of an ordering key, the same transaction releases the next task of the key.

    No cancel takes a message back. The call locks the row for the transaction. If a batch of a worker holds the lock,
    the younger of the two transactions waits. So a transaction that begins with the call waits until the batch has
    committed, usually for less than a second, and gets False if the task was sent. A transaction that has read before
    can be older. Then Spanner aborts the batch, which may have published the task: the call returns True, although
    subscribers receive the message. The same happens to a task that is in doubt. So call `cancel` first in the
    transaction. A worker that has published a task and finds it cancelled marks it as sent, and logs its ID.

    To replace a task, cancel it, and then register another one with a new ID. The ID of the cancelled one is in use
    until its row is deleted.

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
    transactions.check_transaction(transaction, "cancel", reads=True)
    check_not_registered(messages.check_task_id(task_id), transactions.changes(transaction).inserted)

    def query(sql: str, values: Mapping[str, Any]) -> list[Sequence[Any]]:
        # Read to the end, because until then the client blocks the next statement of the transaction.
        return list(transaction.execute_sql(sql, **parameters(values), **timeouts.request(CANCEL_TAG)))

    with transactions.table_errors(TASKS_TABLE):
        heads = next_heads(query, task_id, transactions.changes(transaction).cancelled)
    if heads is not None:
        take_out(transaction, task_id, heads)
    return heads is not None


def check_not_registered(task_id: str, inserted: Collection[transactions.PrimaryKey]) -> None:
    """Raise InvalidTransaction if the transaction has inserted the task: its reads do not return it."""
    if (task_id,) in inserted:
        raise InvalidTransaction(
            f"task {task_id!r} was registered by the same transaction, so it is not in the table yet and cannot be "
            "cancelled. Roll back, or decide before you register it"
        )


def next_heads(query: Query, task_id: str, cancelled_before: Collection[str] = ()) -> list[str] | None:
    """Lock a task. Return the IDs of the tasks to release when it is taken out, or None if it is not unsent.

    `cancelled_before` are the tasks that the transaction has cancelled by mutations, because its reads still return
    them as unsent.
    """
    [[is_unsent, ordering_key]] = query(LOCK_UNSENT, {"id": task_id})
    if not is_unsent or task_id in cancelled_before:
        return None
    if ordering_key is None:
        return []
    layout = Layout.usable(query(LAYOUTS, {}))
    return [id for id, _ in query(layout.sql(NEXT_OF_KEYS), {"ids": [*cancelled_before, task_id]})]


def take_out(transaction: SupportsUpdate, task_id: str, heads: Iterable[str]) -> None:
    """Buffer the release of `heads`, and the cancel of a task by an application."""
    if rows := [(id, None, None) for id in heads]:
        transaction.update(TASKS_TABLE, ("Id", *RELEASED), rows)
    transaction.update(TASKS_TABLE, ("Id", *CANCEL_COLUMNS), [(task_id, COMMIT_TIMESTAMP, APPLICATION)])
    transactions.changes(transaction).cancelled.add(task_id)
