"""Decodes Spanner's protobuf values into tasks, and writes marks. Written for speed.

The Spanner client decodes each value with a function for its type and a datetime class of its own. This module needs
about half of that CPU: 2 us instead of 4 us for a candidate, and 5 us instead of 8 us for a locked row. A task takes
about 55 us of the worker's CPU (`python -m tests.benchmarks --only costs`, docs/benchmarks.md). Values are in
the order of the columns in `statements`.
"""

from base64 import b64decode
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, Mutation

from outbox.table.states import unsent_state
from publishworker.spanner import statements
from publishworker.types import MAX_INT64, Candidate, Deferred, Key, LockedRow, Mark, NotSent, QueuedTask, Sent


def candidates(values: Iterable[Sequence[Any]], first_shard: int = 0) -> dict[str, Candidate]:
    """Return the poll's candidates by ID, because two of its reads may return the same task."""
    found = {}
    for id, topic, shard, priority, created_at, available_at, ordering_key, size in values:
        found[id.string_value] = Candidate(
            id.string_value,
            topic.string_value,
            first_shard + int(shard.string_value),
            int(priority.string_value),
            datetime.fromisoformat(created_at.string_value),
            _time(available_at),
            ordering_key.string_value or None,
            int(size.string_value),
        )
    return found


def key_heads(values: Iterable[Sequence[Any]]) -> dict[Key, list[QueuedTask]]:
    """Return the first unsent tasks of each key, in order."""
    found: dict[Key, list[QueuedTask]] = {}
    for topic, key, id, size, is_due, deferred, expired in values:
        due = is_due.bool_value
        waiting = QueuedTask(
            id.string_value,
            int(size.string_value),
            sendable=due or (deferred.bool_value and not expired.bool_value),
            deferred=deferred.bool_value,
            expired_before_due=expired.bool_value and not due,
        )
        found.setdefault(Key(topic.string_value, key.string_value), []).append(waiting)
    return found


def locked(values: Iterable[Sequence[Any]]) -> tuple[list[LockedRow], datetime]:
    """Return the rows of the lock query, and the database's time. Without rows, the time has no meaning."""
    now = None
    rows = []
    for id, topic, data, key, created, available, sent, clean, attempts, *more in values:
        expires, once, deferred, times_sent, current = more
        now = now or _time(current)
        rows.append(
            LockedRow(
                id.string_value,
                topic.string_value,
                b64decode(data.string_value),
                key.string_value or None,
                datetime.fromisoformat(created.string_value),
                _time(available),
                _time(sent),
                clean.bool_value,
                int(attempts.string_value),
                _time(expires),
                once.bool_value,
                deferred.bool_value,
                int(times_sent.string_value),
            )
        )
    return rows, now or datetime.min.replace(tzinfo=UTC)


class UnsentRow(NamedTuple):
    """An unsent task, with the columns of the index AsynchronousTasksToSend."""

    id: str
    shard: int
    topic: str
    available_at: datetime | None
    priority: int
    created_at: datetime
    is_ordered: bool
    attempts: int
    is_blocked: bool

    @property
    def place(self) -> list[Any]:
        """Return the task's key in the index. Tasks of one transaction may have the same key."""
        return [self.shard, None, self.topic, self.available_at, self.priority, self.created_at]

    def state(self, now: datetime, paused: Collection[str] = ()) -> str:
        """Return the state, or `paused` for a task of a topic in `paused` that is not dead."""
        state = unsent_state(self, now)
        return "paused" if self.topic in paused and state != "dead" else state


def unsent(values: Iterable[Sequence[Any]]) -> list[UnsentRow]:
    """Return the rows of a read of unsent tasks."""
    return [
        UnsentRow(
            id.string_value,
            int(shard.string_value),
            topic.string_value,
            _time(available_at),
            int(priority.string_value),
            datetime.fromisoformat(created_at.string_value),
            key.string_value != "",
            int(attempts.string_value),
            blocked_by.string_value != "",
        )
        for id, shard, topic, available_at, priority, created_at, key, attempts, blocked_by in values
    ]


def _time(value: Any) -> datetime | None:
    text = value.string_value  # empty for NULL
    return datetime.fromisoformat(text) if text else None


def write_marks(transaction: Any, locked: Sequence[LockedRow], marks: Mapping[str, Mark]) -> None:
    """Buffer the marks of locked rows in the transaction."""
    clean: list[tuple[str, int]] = []
    others: list[tuple[Any, ...]] = []
    deferred: list[tuple[Any, ...]] = []
    for row in locked:
        match marks.get(row.id):
            case Sent() if row.clean:
                clean.append((row.id, times_sent(row, sent=True)))
            case Sent():
                others.append((row.id, COMMIT_TIMESTAMP, times_sent(row, sent=True), None, None, None, None, 0))
            case NotSent() as failure:
                times = failure.available_at, None, failure.expires_at
                others.append((row.id, None, times_sent(row, sent=False), *times, failure.error, failure.attempts))
            case Deferred() as deferral:
                deferred.append((row.id, deferral.available_at, deferral.head))
    if clean:
        # The client's `update` takes eight times the CPU (docs/decisions.md, 0009).
        transaction._mutations.append(_clean_marks(clean))  # noqa: SLF001 - no public method takes a mutation
    for columns, values in ((statements.MARK_COLUMNS, others), (statements.DEFER_COLUMNS, deferred)):
        if values:  # an update without rows is an error
            transaction.update("AsynchronousTasks", columns, values)


def times_sent(row: LockedRow, *, sent: bool) -> int:
    """Return the TimesSent to write to a row that becomes sent or unsent.

    Another writer may have set the column to an end of int64. There the count goes one back instead of overflowing,
    because a mark must change it: see `Version`.
    """
    change = int(sent) - (row.sent_at is not None)
    number = row.times_sent + change
    return number if -MAX_INT64 - 1 <= number <= MAX_INT64 else row.times_sent - change


def _clean_marks(tasks: Iterable[tuple[str, int]]) -> Mutation:
    """Return the mutation that sets SentAt and TimesSent, from the ID and TimesSent of each task."""
    mutation = Mutation()
    update: Any = Mutation.pb(mutation).update
    update.table = "AsynchronousTasks"
    update.columns.extend(statements.MARK_CLEAN_COLUMNS)
    for id, number in tasks:
        values = update.values.add().values
        values.add().string_value = id
        values.add().string_value = COMMIT_TIMESTAMP
        values.add().string_value = str(number)
    return mutation
