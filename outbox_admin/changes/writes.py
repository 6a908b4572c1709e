"""What the changes of tasks write, in a transaction that has locked the rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet

from outbox.rows.task_table import Transaction
from outbox.table.shared_sql import CANCEL_COLUMNS, NEXT_OF_KEYS, RELEASED
from outbox.table.states import KEY_CHECK_SECONDS, NEVER, TASKS_TABLE
from outbox_admin.change_kinds import MADE_UNSENT
from outbox_admin.tasks.selected import Row

#: The columns that a retry writes. `retry_values` returns the values.
RETRY_COLUMNS = ("Id", "SentAt", "BlockedBy", "ExpiresAt", "Attempts", "AvailableAt", "DueAt")


def retry_values(
    id: str, now: datetime, expires_at: datetime | None = None, due_at: datetime | None = None
) -> tuple[object, ...]:
    """Return the values of RETRY_COLUMNS: unsent, due `now`, without failed attempts.

    Its age begins at `due_at`, or now.
    """
    return (id, None, None, expires_at, 0, now, due_at)


def _make_due(transaction: Transaction, rows: Sequence[Row], _operation: str) -> None:
    transaction.update(
        TASKS_TABLE, RETRY_COLUMNS, [retry_values(row.id, row.now, row.expires_at, row.due_at) for row in rows]
    )


def _delete(transaction: Transaction, rows: Sequence[Row], _operation: str) -> None:
    transaction.delete(TASKS_TABLE, KeySet(keys=[[row.id] for row in rows]))


def _cancel(transaction: Transaction, rows: Sequence[Row], operation: str) -> None:
    """Take tasks out. Release the next task of each key, unless all that are taken out of the key were blocked.

    Behind tasks that were all blocked, the task that blocks the key is still there. A cancelled task that another
    program has made unsent counts as one of them, because it blocks none. The next task stays blocked, so that a later
    chunk of a selection of blocked tasks finds it. But its deferral ends soon, because that of the tasks that are taken
    out may have been the first one to end.
    """
    keys = {(row.topic, row.ordering_key) for row in rows if row.state not in ("blocked", MADE_UNSENT)}
    with_key = [row for row in rows if row.ordering_key is not None]
    if ids := [row.id for row in with_key if (row.topic, row.ordering_key) in keys]:
        heads = transaction.query(NEXT_OF_KEYS, {"ids": ids})
        transaction.update(TASKS_TABLE, ("Id", *RELEASED), [(id, None, None) for id, _ in heads])
    if ids := [row.id for row in with_key if (row.topic, row.ordering_key) not in keys]:
        _end_soon(transaction, transaction.query(NEXT_OF_KEYS, {"ids": ids}), rows[0].now)
    transaction.update(TASKS_TABLE, ("Id", *CANCEL_COLUMNS), [(row.id, COMMIT_TIMESTAMP, operation) for row in rows])


def _restore(transaction: Transaction, rows: Sequence[Row], _operation: str) -> None:
    """Make cancelled tasks unsent, with all other columns as they were.

    But a deferral ends soon, because the commit that ends it for the other tasks of the key may have been before.
    """
    transaction.update(TASKS_TABLE, ("Id", *CANCEL_COLUMNS), [(row.id, None, None) for row in rows])
    _end_soon(transaction, [(row.id, row.available_at) for row in rows if row.blocked_by], rows[0].now)


def _end_soon(transaction: Transaction, deferred: Iterable[Sequence[Any]], now: datetime) -> None:
    """Let the deferrals of these tasks end within KEY_CHECK_SECONDS. A worker then reads their keys.

    `deferred` has the ID of each task and the end of its deferral. A dead task stays dead.
    """
    soon = now + timedelta(seconds=KEY_CHECK_SECONDS)
    earlier = [(id, soon) for id, ends in deferred if ends is not None and soon < ends < NEVER]
    transaction.update(TASKS_TABLE, ("Id", "AvailableAt"), earlier)


#: What each change does with the rows that match. The text is the ID of the operation.
WRITES: Mapping[str, Callable[[Transaction, Sequence[Row], str], None]] = {
    "retry": _make_due, "purge": _delete, "cancel": _cancel, "restore": _restore,
}  # fmt: skip
