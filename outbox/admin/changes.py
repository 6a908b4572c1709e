"""Changes by operators: retry, purge, cancel. They are made in chunks, and each chunk is one transaction.

Each transaction reads its tasks again under the lock, so a task that has left the selection meanwhile is not changed.
A change can be stopped between two chunks. Changed tasks leave the selection, so the same selection continues the work.
"""

import dataclasses
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from google.cloud.spanner_v1 import KeySet

from outbox.admin import operations, statements
from outbox.admin.backlog import COUNT_LIMIT, NO_LIMIT
from outbox.admin.operations import UNNAMED, Author
from outbox.admin.table import COUNT_SECONDS, SCAN_SECONDS, TaskTable, Transaction
from outbox.program.terminal import counted
from outbox.table.statements import NEXT_OF_KEYS, RELEASED
from outbox.table.states import CONDITIONS, STATES, UNSENT
from outbox.table.values import chunked

_TABLE = "AsynchronousTasks"
#: Tasks in one transaction. They need about ten thousand of the 80,000 mutations that a commit may have.
CHUNK = 500
#: Task IDs that one query reads.
PAGE = 20 * CHUNK
#: The state of a selection by `ids` that contains every unsent task.
ANY_UNSENT = "unsent"
_LONG_AGO = datetime(1, 1, 1, tzinfo=UTC)
#: The columns that a retry writes. `retry_values` returns the values.
RETRY_COLUMNS = ("Id", "SentAt", "BlockedBy", "ExpiresAt", "Attempts", "AvailableAt")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TaskSelection:
    """The tasks of a state or with one of the `ids`, narrowed by all other fields.

    `since` is inclusive, `until` exclusive. Both are compared with SentAt of sent tasks and CreatedAt of others.
    `error` is a part of LastError, ignoring case. With `ids` and no state, pending and blocked tasks are excluded: a
    pending task needs no retry, and a blocked one is released by the head of its key, unless this head is gone.
    Without `include_expired`, unsent tasks whose ExpiresAt has passed are excluded.
    """

    state: str | None = None
    ids: tuple[str, ...] | None = None
    topic: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    error: str | None = None
    ordering_key: str | None = None
    id_prefix: str | None = None
    include_expired: bool = True

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the conditions that narrow the selection."""
        return frozenset(self.values) | (frozenset() if self.include_expired or self.state == "sent" else {"unexpired"})

    @property
    def values(self) -> dict[str, Any]:
        """Return the values that narrow the selection, by parameter name."""
        named = ("topic", "since", "until", "error", "ordering_key", "id_prefix")
        return {name: value for name in named if (value := getattr(self, name)) is not None}

    @property
    def condition(self) -> str:
        """Return the selection as an SQL condition, without the IDs."""
        unheld = f"NOT ({CONDITIONS['pending']}) AND NOT ({statements.HELD})"
        state = (CONDITIONS | {ANY_UNSENT: "SentAt IS NULL"})[self.state] if self.state else unheld
        return state + statements.narrowed(self.state, self.names)


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """A number of tasks. If `at_least`, the count stopped early."""

    number: int
    at_least: bool = False

    def __str__(self) -> str:
        """Return text such as `1 task` or `at least 100,000 tasks`."""
        return f"{'at least ' if self.at_least else ''}{counted(self.number, 'task')}"


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one chunk: IDs that were changed, states of tasks that were not changed, and IDs without a row.

    `heads` are the IDs of the key heads that block unchanged tasks.
    """

    changed: tuple[str, ...]
    unchanged: Mapping[str, str]
    missing: tuple[str, ...]
    warning: str | None = None
    heads: frozenset[str] = frozenset()


class _Row(NamedTuple):
    """A row of `statements.by_ids`. `now` is the database's time.

    `expires_at` is in the future, or None.
    """

    id: str
    topic: str
    ordering_key: str | None
    shard: int
    state: str
    matches: bool
    now: datetime
    expires_at: datetime | None
    blocked_by: str | None


#: Buffers the writes of one transaction for its matching rows. Called only if there are some.
_Write = Callable[[Transaction, Sequence[_Row]], None]


def count(table: TaskTable, selection: TaskSelection, *, exact: bool) -> Count:
    """Return the number of selected tasks. Unless `exact`, count at most COUNT_LIMIT in each shard and topic."""
    if selection.ids is not None:
        statement = statements.by_ids(selection.condition)
        chunks = chunked(selection.ids, CHUNK)
        answers = (table.query(statement, "outbox-count", selection.values | {"ids": ids}) for ids in chunks)
        return Count(sum(_Row(*row).matches for rows in answers for row in rows))
    limit = NO_LIMIT if exact else COUNT_LIMIT
    statement = statements.count_of_states([_state(selection)], selection.names)
    values = selection.values | _ranges(table, selection) | {"limit": limit}
    seconds = COUNT_SECONDS if exact else SCAN_SECONDS
    numbers = [number for (number,) in table.query(statement, "outbox-count", values, seconds=seconds)]
    return Count(sum(numbers), limit in numbers)


def count_unsent(table: TaskTable, topic: str, *, exact: bool) -> Count:
    """Return the number of unsent tasks of a topic, of all states."""
    counts = [count(table, TaskSelection(state=state, topic=topic), exact=exact) for state in UNSENT]
    return Count(sum(each.number for each in counts), any(each.at_least for each in counts))


def retry(table: TaskTable, selection: TaskSelection, author: Author = UNNAMED) -> Iterator[Outcome]:
    """Make the selected tasks due now, with 0 failed attempts, chunk by chunk.

    A selection of sent tasks needs `until`. Otherwise it would also select the tasks that it sends again.
    """
    if selection.state == "pending" or (selection.state == "sent" and selection.until is None):
        raise ValueError("pending tasks need no retry, and a selection of sent tasks needs `until`")

    def write(transaction: Transaction, rows: Sequence[_Row]) -> None:
        transaction.update(_TABLE, RETRY_COLUMNS, [retry_values(row.id, row.now, row.expires_at) for row in rows])

    return _change(table, selection, "retry", write, author)


def retry_values(id: str, now: datetime, expires_at: datetime | None = None) -> tuple[object, ...]:
    """Return the values of RETRY_COLUMNS: unsent, due `now`, without failed attempts."""
    return (id, None, None, expires_at, 0, now)


def purge(table: TaskTable, selection: TaskSelection, author: Author = UNNAMED) -> Iterator[Outcome]:
    """Delete the selected tasks, chunk by chunk. Only sent tasks may be selected."""
    if selection.state != "sent":
        raise ValueError(f"purge is for sent tasks, not for {selection.state}")
    return _change(table, selection, "purge", _delete, author)


def cancel(
    table: TaskTable,
    selection: TaskSelection,
    author: Author = UNNAMED,
    log: Callable[[Sequence[str]], None] = lambda _ids: None,
) -> Iterator[Outcome]:
    """Delete the selected tasks, chunk by chunk, and release the next tasks of their keys. Only unsent tasks.

    Each transaction waits for the batches that hold its tasks, at most LOCK_SECONDS. `log` gets the IDs that it has
    deleted.
    """
    if selection.state not in (*UNSENT, ANY_UNSENT):
        raise ValueError(f"cancel is for unsent tasks, not for {selection.state}")

    def write(transaction: Transaction, rows: Sequence[_Row]) -> None:
        if any(row.ordering_key for row in rows):
            heads = transaction.query(NEXT_OF_KEYS, {"ids": [row.id for row in rows]})
            transaction.update(_TABLE, ("Id", *RELEASED), [(id, None, None) for (id,) in heads])
        _delete(transaction, rows)

    for outcome in _change(table, selection, "cancel", write, author):
        log(outcome.changed)
        yield outcome


def _delete(transaction: Transaction, rows: Sequence[_Row]) -> None:
    transaction.delete(_TABLE, KeySet(keys=[[row.id] for row in rows]))


def _change(table: TaskTable, selection: TaskSelection, name: str, write: _Write, author: Author) -> Iterator[Outcome]:
    """Change the selection with `write`, and record it as the operation `name` in the same transactions."""
    tag, operation_id, done = f"outbox-{name}", str(uuid.uuid4()), 0
    recorded = dataclasses.asdict(selection)
    chunks = _selected_ids(table, selection, tag) if selection.ids is None else chunked(selection.ids, CHUNK)
    statement = statements.by_ids(selection.condition, lock=True)
    for ids in chunks:
        # Sorted, so that two commands lock the rows in the same order.
        values = selection.values | {"ids": sorted(ids)}

        def work(transaction: Transaction, values: Mapping[str, Any] = values, done: int = done) -> list[_Row]:
            rows = [_Row(*row) for row in transaction.query(statement, values)]
            if matching := [row for row in rows if row.matches]:
                write(transaction, matching)
                tasks = done + len(matching)
                if done:
                    operations.update(transaction, operation_id, Tasks=tasks)
                else:
                    columns = {"OperationId": operation_id, "Tasks": tasks}
                    operations.record(transaction, table, name, recorded, author, **columns)
            return rows

        rows = table.transact(tag, work)
        unchanged, existing = [row for row in rows if not row.matches], {row.id for row in rows}
        outcome = Outcome(
            changed=tuple(row.id for row in rows if row.matches),
            unchanged={row.id: row.state for row in unchanged},
            missing=tuple(id for id in ids if id not in existing),
            heads=frozenset(row.blocked_by for row in unchanged if row.state == "blocked" and row.blocked_by),
        )
        done += len(outcome.changed)
        yield outcome
    if done and (warning := operations.finish(table, operation_id)):
        yield Outcome((), {}, (), warning)


def _selected_ids(table: TaskTable, selection: TaskSelection, tag: str) -> Iterator[Sequence[str]]:
    """Yield the IDs of the selection in chunks, shard by shard."""
    state = _state(selection)
    statement = statements.next_ids(state, selection.names)
    topics = {name: value for name, value in _ranges(table, selection).items() if name == "topics"}
    for shard in table.shards:
        values = selection.values | topics | {"shard": shard, "limit": PAGE}
        values |= {"after": selection.since or _LONG_AGO} if state == "sent" else {"after_id": ""}
        is_full = True
        while is_full and (rows := table.query(statement, tag, values, seconds=SCAN_SECONDS)):
            is_full = len(rows) == PAGE
            yield from chunked([id for id, _ in rows], CHUNK)
            values |= {"after": rows[-1][1]} if state == "sent" else {"after_id": rows[-1][0]}


def _ranges(table: TaskTable, selection: TaskSelection) -> dict[str, Any]:
    """Return the shards and topics of the index ranges to read. The range of sent tasks has no topics."""
    if selection.state == "sent":
        return {"shards": list(table.shards)}
    topics = [selection.topic] if selection.topic is not None else table.topics()
    return {"shards": list(table.shards), "topics": topics}


def _state(selection: TaskSelection) -> str:
    if selection.state not in STATES:
        raise ValueError(f"a selection without ids needs a state, not {selection.state}")
    return selection.state
