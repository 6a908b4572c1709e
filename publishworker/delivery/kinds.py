"""The other two kinds of delivery: `MarkFirst`, at most once, and `Deferral`, which publishes nothing."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from publishworker.delivery import rules
from publishworker.delivery.delivery import Delivery, Tools
from publishworker.delivery.marking import MAX_REFUSED, MarkRetry
from publishworker.pubsub.failures import is_refused
from publishworker.spanner.write_errors import NotWritten, StoreError, WriteRefused
from publishworker.types import (
    MARKED,
    Answer,
    CancelledTask,
    Claim,
    Deferred,
    Delivered,
    Failed,
    LockedRow,
    NotSent,
    Published,
    RowChange,
    Skipped,
    TransactionError,
)

#: If Spanner refuses the mark of a task, the worker leaves the task alone for this many seconds.
HOLD_SECONDS = 60.0


class MarkFirst(Delivery):
    """Marks tasks and then publishes them: one can be lost, but is never published twice.

    If Pub/Sub refuses a message, its mark is undone.
    """

    def __init__(self, claim: Claim, tools: Tools) -> None:
        super().__init__(claim, tools)
        self._unconfirmed: list[str] = []
        #: By ID, each row as it was before its mark, and the commit timestamp of the mark.
        self._marked: dict[str, tuple[LockedRow, datetime]] = {}
        #: The parts that Spanner refuses to mark, and the error.
        self._held: dict[Claim, WriteRefused] = {}
        self._hold_until = float("inf")

    def deliver(self) -> Delivered:
        """Mark and publish. Divide what Spanner refuses to mark, so that other tasks do not wait for a refused row."""
        parts = deque([self.claim])
        while parts:
            part = parts.popleft()
            try:
                self._send(part)
            except StoreError as error:
                divides = isinstance(error, WriteRefused) and self._tools.marking.refused_rows < MAX_REFUSED
                singles = part.single_claims() if divides else ()
                parts.extend(singles)  # in any order: a batch has one at-most-once task of a key that may be sent
                if not singles:
                    self._stop(part, error)
        self._undo()
        return replace(self._delivered(), unconfirmed=tuple(self._unconfirmed))

    def write_again(self, claim: Claim) -> Mapping[str, CancelledTask]:
        """Undo the marks of a part. Raises StoreError. A task that is marked first cannot be cancelled.

        A part that Spanner refused to mark has no marks: raise its error until the hold is over or the worker exits, so
        that the batch keeps its tasks. Then do nothing, so that polls find them again.
        """
        if self._marked.keys().isdisjoint(claim.ids):
            if self._tools.host.clock() < self._hold_until and not self._tools.marking.is_shutting_down:
                self._timing.transactions += 1  # a batch that waits is not stuck
                raise self._held.get(claim) or next(iter(self._held.values()))
        else:
            self._change_rows(claim, lambda rows, now: self._undo_marks(claim, rows, now))
        return {}

    def _send(self, part: Claim) -> None:
        marked: dict[str, LockedRow] = {}

        def decide(rows: Sequence[LockedRow], now: datetime) -> dict[str, RowChange]:
            nonlocal marked
            eligible = self._eligible_rows(part, rows, now)
            unanswered = self._results.rows_to_publish(part, eligible, now)
            self._results.answers |= self._tools.publisher.refusals(part.destination, unanswered)
            marked = {row.id: row for row in self._results.rows_to_publish(part, eligible, now)}
            return self._row_changes(eligible, now) | dict.fromkeys(marked, MARKED)

        try:
            committed = self._change_rows(part, decide)
        except StoreError as error:
            self._unconfirmed += [] if isinstance(error, NotWritten) else marked
            raise
        self._publish(list(marked.values()))
        self._marked |= {id: (row, committed) for id, row in marked.items()}

    def _stop(self, part: Claim, error: StoreError) -> None:
        if isinstance(error, WriteRefused):
            self._held[part] = error
            self._tools.marking.refused_rows += len(part.tasks)
        else:
            self._error = TransactionError(part, self._timing.last_phase, str(error))
        self._results.forget_unwritten(part.locks)

    def _undo(self) -> None:
        """Undo the marks of messages that Pub/Sub certainly has not accepted: not requested, or refused."""
        answers = self._results.answers
        not_sent = {id: answer for id in self._marked if not isinstance(answer := answers.get(id), Published)}
        to_undo = {id for id, answer in not_sent.items() if answer is None or is_refused(answer.reason)}
        self._unconfirmed += [id for id in not_sent if id not in to_undo]
        self._marked = {id: marked for id, marked in self._marked.items() if id in to_undo}
        self._hold_until = self._tools.host.clock() + HOLD_SECONDS
        parts = (self.claim.part(to_undo), *self._held)
        self._mark_retry = MarkRetry(self, parts, self._tools.marking, state="marked", of=to_undo, refused=self._held)
        self._mark_retry.try_once()

    def _undo_marks(self, claim: Claim, rows: Sequence[LockedRow], now: datetime) -> dict[str, RowChange]:
        """Return changes that clear SentAt of rows that still have the mark of this batch, and record failures."""
        before = [
            self._marked[row.id][0]
            for row in rules.in_key_order(claim, rows)
            if row.id in self._marked and row.sent_at == self._marked[row.id][1]
        ]
        recorded = {id: change for id, change in self._row_changes(before, now).items() if isinstance(change, NotSent)}
        self._results.forget_unwritten(claim.locks)
        self._results.note(recorded)
        changes: dict[str, RowChange] = {
            row.id: recorded.get(row.id) or _restored(row, self._results.answers.get(row.id)) for row in before
        }
        return changes


def _restored(row: LockedRow, answer: Answer | None) -> NotSent:
    """Return the change that restores the row, with a LastError that says what happened.

    A deferred row becomes ready.
    """
    error = rules.last_error(answer) if isinstance(answer, Failed) else None
    return NotSent(row.attempts, None if row.deferred else row.available_at, row.expires_at, error, row.due_at)


class Deferral(Delivery):
    """The first task of the claim is a key head. If it is unsent and not due, the others are deferred."""

    def _decide(self, rows: Sequence[LockedRow], now: datetime) -> dict[str, RowChange]:
        self._results.begin_attempt(self.claim.locks, rows)
        reasons = rules.skip_reasons(self.claim, rows, now, {}, self._policy)
        blocked = [row for row in rules.in_key_order(self.claim, rows) if reasons.get(row.id) == Skipped("blocked")]
        head = next((row for row in rows if row.id == self.claim.ids[0]), None)
        deferred: dict[str, Deferred] = {}
        if head is not None and head.available_at is not None:
            deferrals = self._policy.deferrals(head, head.available_at, now)
            waiting = [row for row in blocked if row.is_due(now) or row.deferred]
            pairs = zip(waiting, deferrals, strict=False)
            # A task that becomes due before its deferral would end keeps its own time.
            deferred = {
                row.id: deferral
                for row, deferral in pairs
                if row.available_at is None or not now < row.available_at <= deferral.available_at
            }
        self._results.note(deferred)
        return {**deferred}
