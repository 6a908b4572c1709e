"""Writes the marks of locked rows. Every number that derives from a row stays within its column."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, Mutation

from publishworker.spanner import statements
from publishworker.types import MAX_INT64, Deferred, LockedRow, Mark, NotSent, Sent


def write(transaction: Any, locked: Sequence[LockedRow], marks: Mapping[str, Mark]) -> None:
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
