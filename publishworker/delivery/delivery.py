"""Deliver one batch: claim its rows, publish its messages and mark its tasks. If the commit fails, mark them again.

`Delivery` publishes and marks in one transaction. The other kinds of delivery are in `kinds`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from outbox.base.schedules import MARKING, Backoff
from outbox.table.states import first_due
from publishworker.delivery import rules
from publishworker.delivery.marking import MarkRetry, SharedMarking
from publishworker.delivery.rules import RetryPolicy
from publishworker.host import Host
from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.spanner.store import Decide, SpannerStore
from publishworker.spanner.write_errors import StoreError, WriteRefused
from publishworker.types import (
    CLAIM,
    COMMIT,
    MARKED,
    PUBLISH,
    Answer,
    Cancelled,
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
    Unmarked,
    Version,
)

#: Seconds to publish a batch. Its transaction is idle meanwhile, and Spanner may abort it after 10 s.
PUBLISH_SECONDS = 5.0

_T = TypeVar("_T", Skipped, NotSent, Deferred)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The services and the policy of a delivery."""

    store: SpannerStore
    publisher: PubSubPublisher
    policy: RetryPolicy
    #: What all batches share when they mark again.
    marking: SharedMarking
    host: Host = field(default_factory=Host)


class Delivery:
    """Delivers one batch, on a thread of its own.

    After an abort, the next attempt of the transaction locks the rows again. It publishes only tasks that have no
    answer yet, and failed tasks whose rows have changed since. It marks the tasks that any attempt has published, also
    if they were cancelled meanwhile, unless their rows are gone, sent, or hold another message now.
    """

    def __init__(self, claim: Claim, tools: Tools) -> None:
        self.claim = claim
        self._tools = tools
        self._timing = Timing(tools.host.clock)
        self._policy = tools.policy.for_topic(claim.controls)
        self._results = Results()
        #: Writes the marks again after the commit failed.
        self._mark_retry: MarkRetry | None = None
        self._is_committed = False
        self._error: TransactionError | None = None

    # The relay's thread reads these properties while the batch runs on its own. The batch replaces values as a whole,
    # so each is consistent at any time, and at most one step old.

    @property
    def unmarked(self) -> frozenset[str]:
        """Return the tasks whose rows are still to be written: marks, failed attempts and deferrals."""
        if self._mark_retry is not None:
            return self._mark_retry.unmarked
        return frozenset(() if self._is_committed else self.claim.ids)

    @property
    def aside(self) -> bool:
        """Tell whether the batch is aside (see `turn.in_flight.InFlight`)."""
        return self._mark_retry is not None and self._mark_retry.aside

    @property
    def transactions(self) -> int:
        """Return the number of transactions that have begun, and of waits on purpose.

        While it grows, the batch is not stuck.
        """
        return self._timing.transactions

    def give_up(self) -> list[Unmarked]:
        """Mark no more, because the process ends. Return what is not written. Callable on any thread."""
        return [] if self._mark_retry is None else self._mark_retry.give_up()

    def reports(self) -> Iterator[Delivered | Unmarked | Cancelled]:
        """Deliver. Yield what became of the tasks, and then what happens while the batch marks again."""
        yield self.deliver()
        yield from self.mark_again()

    def deliver(self) -> Delivered:
        """Claim, publish and mark, in one transaction."""
        try:
            self._change_rows(self.claim, self._decide)
            self._is_committed = True
            if self._timing.aborted:  # while there were no locks, other workers may have deferred key heads
                self._release_first_tasks()
        except StoreError as error:
            self._begin_marking(error)
        return self._delivered()

    def mark_again(self) -> Iterator[Unmarked | Cancelled]:
        """Mark again, in transactions that publish nothing.

        Yield an Unmarked for each row that cannot be written although others can, and for tasks that are given up.
        Yield a Cancelled for marked tasks that had been cancelled.
        """
        if self._mark_retry is not None:
            yield from self._mark_retry.run()
            if self._timing.transactions > 1:
                self._release_first_tasks()

    def write_again(self, claim: Claim) -> Mapping[str, CancelledTask]:
        """Write the marks of a part of the claim. Return its published tasks that were cancelled. Raises StoreError."""
        self._change_rows(claim, lambda rows, _now: self._results.remaining_changes(claim.locks, rows))
        return self._results.cancelled(claim.ids)

    def _change_rows(self, claim: Claim, decide: Decide) -> datetime:
        """Lock the rows of `claim`, write what `decide` returns, and return the commit timestamp. Raises StoreError.

        If a deferred task becomes a key head by this commit, the commit also releases it.
        """
        changes: Mapping[str, RowChange] = {}

        def decide_and_release(rows: Sequence[LockedRow], now: datetime) -> Mapping[str, RowChange]:
            nonlocal changes
            changes = {**rules.ended_again(claim, rows, now), **decide(rows, now)}
            if claim.keys:
                changes = {**changes, **rules.release_changes(claim, rows, changes, now, self._policy)}
            return changes

        committed = self._timing.timed(self._tools.store, claim, decide_and_release)
        if changes:
            self._tools.marking.committed()
        return committed

    def _release_first_tasks(self) -> None:
        """Make the first task of each ordering key ready if another worker has deferred it.

        This may happen after the batch has lost its locks by an abort or a failed commit. `_change_rows` itself
        releases the deferred heads among the rows that it locks. While Spanner does not answer, try again as long as
        marks are tried: otherwise the keys would wait until the deferrals end, for up to --backoff-max.
        """
        marking, keys = self._tools.marking, self.claim.keys
        backoff, since = Backoff(MARKING, marking.random), marking.clock()
        while keys:
            try:
                heads = self._tools.store.key_heads(keys, 1, skip_dead=self._policy.skip_dead)
                if (deferred := self.claim.of_deferred(heads)).releases:
                    self._change_rows(deferred, lambda _rows, _now: {})
            except StoreError as error:
                if isinstance(error, WriteRefused) or marking.is_over(since):  # a refusal may be about a row
                    return
                self._timing.transactions += 1  # a batch that waits is not stuck
                marking.wait(backoff.next())
            else:
                return

    def _decide(self, rows: Sequence[LockedRow], now: datetime) -> dict[str, RowChange]:
        """Publish the locked rows that may be sent, and return what to write. After an abort, it runs again."""
        eligible = self._eligible_rows(self.claim, rows, now)
        self._publish(self._results.rows_to_publish(self.claim, eligible, now))
        return self._row_changes(eligible, now)

    def _eligible_rows(self, claim: Claim, rows: Sequence[LockedRow], now: datetime) -> list[LockedRow]:
        """Return the rows that this transaction may change, in key order, and record why others are skipped.

        A task that failed before an abort loses its answer if its row has changed.
        """
        self._results.begin_attempt(claim.locks, rows)
        eligible, skipped = rules.eligible(claim, rows, now, self._results.published(), self._policy)
        self._results.note(skipped)
        return eligible

    def _publish(self, rows: Sequence[LockedRow]) -> None:
        if rows:
            # OUT-DELAY-1: tasks that failed before, and suspects of the topic, share no request.
            alone = {row.id for row in rows if row.attempts or row.id in self.claim.suspects}
            answers = self._tools.publisher.publish(self.claim.destination, rows, PUBLISH_SECONDS, alone)
            self._timing.end_publish(rows, answers)
            self._results.answers |= answers

    def _row_changes(self, rows: Sequence[LockedRow], now: datetime) -> dict[str, RowChange]:
        """Return what to write because of the answers, and keep it in the results."""
        changes = rules.row_changes(self.claim, rows, self._results.answers, now, self._policy)
        self._results.note(changes)
        return changes

    def _begin_marking(self, error: StoreError) -> None:
        self._error = TransactionError(self.claim, self._timing.last_phase, str(error))
        # After a refusal nothing was written, so keep the failed attempts and deferrals of the claimed tasks, and write
        # them later. Drop those of the tasks in `releases`, because the next commit decides again about them. After any
        # other error the commit may have succeeded, so drop those of all claimed tasks.
        releases = [task.id for task in self.claim.releases]
        self._results.forget_unwritten(releases if isinstance(error, WriteRefused) else self.claim.locks)
        parts, published = [self.claim.part(self._results.unwritten())], self._results.published()
        self._mark_retry = MarkRetry(self, parts, self._tools.marking, state="published", of=published)

    def _delivered(self) -> Delivered:
        results, unmarked = self._results, self.unmarked
        return Delivered(
            self.claim,
            answers=dict(results.answers),
            skipped=results.decided(Skipped),
            recorded=results.decided(NotSent),
            deferred=results.decided(Deferred, without=unmarked),
            cancelled=results.cancelled(set(self.claim.ids) - unmarked),
            unmarked=unmarked,
            latencies=dict(self._timing.latencies),
            phases=dict(self._timing.phases),
            aborted=self._timing.aborted,
            error=self._error,
        )


class Results:
    """The answers and decisions of a batch, by task ID, over all attempts of its transactions."""

    def __init__(self) -> None:
        #: The answer of Pub/Sub, or the reason why no request was sent.
        self.answers: dict[str, Answer] = {}
        #: The version of the row that the answer is about. Without an answer, the version at the last lock.
        self._versions: dict[str, Version] = {}
        #: The last decision about each task that gets no SentAt.
        self._decided: dict[str, Skipped | NotSent | Deferred] = {}
        #: The published tasks that the last lock has found cancelled, each with its CancelledBy. None: the row was
        #: missing, or registered again.
        self._cancelled_by: dict[str, str | None] = {}

    def begin_attempt(self, ids: Collection[str], rows: Sequence[LockedRow]) -> None:
        """Forget earlier decisions about the claimed `ids`, and the failures of locked rows that have changed.

        Record the versions of rows without an answer.
        """
        self._note_cancelled(ids, rows)
        for id in ids if self._decided else ():
            self._decided.pop(id, None)
        for row in rows if self.answers else ():
            if isinstance(self.answers.get(row.id), Failed) and self._versions.get(row.id) != Version.of(row):
                del self.answers[row.id]
        self._versions |= {row.id: Version.of(row) for row in rows if row.id not in self.answers}

    def rows_to_publish(self, claim: Claim, rows: Sequence[LockedRow], now: datetime) -> list[LockedRow]:
        """Return the eligible rows to publish now: tasks of the claim without an answer.

        Leave out the later tasks of a key after a failure that stops it. Record the failures of those that have
        expired.
        """
        stopped: set[str] = set()
        found: list[LockedRow] = []
        releases = {task.id for task in claim.releases}
        for row in rows:
            answer = self.answers.get(row.id)
            if row.id in releases:
                continue
            if answer is None and row.ordering_key not in stopped:  # OUT-TWICE-2, OUT-ORDER-1
                if row.is_expired(now):
                    self.answers[row.id] = rules.expiry_failure(row)
                else:
                    found.append(row)
            elif row.ordering_key is not None and rules.stops_key(answer):
                stopped.add(row.ordering_key)
        return found

    def note(self, decisions: Mapping[str, Skipped | RowChange]) -> None:
        """Note decisions. A task that is marked as sent needs none, because it has an answer."""
        kinds = (Skipped, NotSent, Deferred)
        self._decided |= {id: each for id, each in decisions.items() if isinstance(each, kinds)}

    def decided(self, kind: type[_T], *, without: Collection[str] = ()) -> dict[str, _T]:
        """Return the decisions of a kind, except those about the tasks in `without`."""
        return {id: each for id, each in self._decided.items() if isinstance(each, kind) and id not in without}

    def published(self) -> dict[str, Version]:
        """Return the published tasks, each with the version that was published."""
        return {id: self._versions[id] for id, answer in self.answers.items() if isinstance(answer, Published)}

    def unwritten(self) -> set[str]:
        """Return the tasks whose rows must be written: published, with a failed attempt to record, or deferred."""
        return {*self.published(), *self._unwritten_changes()}

    def remaining_changes(self, ids: Collection[str], rows: Sequence[LockedRow]) -> dict[str, RowChange]:
        """Return the changes that the unsent rows still need. Forget the decisions about other tasks of `ids`.

        A published task is marked if the row still holds its message. A failed attempt or a deferral is written only
        if the row is unchanged, or if an earlier part of this batch has written it.
        """
        self._note_cancelled(ids, rows)
        published, unwritten = self.published(), self._unwritten_changes()
        still_needed = {
            row.id: change
            for row in rows
            if row.sent_at is None
            if row.cancelled_by is None
            if (change := unwritten.get(row.id)) is not None
            and Version.of(row) in (self._versions[row.id], self._versions[row.id].after(change))
        }
        self.forget_unwritten(ids)
        self._decided |= still_needed
        left = (row for row in rows if row.id in published and not row.is_sent)
        ids_to_mark = (row.id for row in left if published[row.id].has_message_of(row))
        return {**dict.fromkeys(ids_to_mark, MARKED), **still_needed}

    def forget_unwritten(self, ids: Collection[str]) -> None:
        """Forget the failed attempts and deferrals of these tasks."""
        for id in self._unwritten_changes().keys() & set(ids):
            del self._decided[id]

    def cancelled(self, ids: Collection[str]) -> dict[str, CancelledTask]:
        """Return the published tasks among `ids` that the last lock has found cancelled or deleted."""
        found = {id: by for id, by in self._cancelled_by.items() if id in ids}
        answers = ((id, self.answers[id], by) for id, by in found.items())
        return {id: CancelledTask(answer.message_id, by) for id, answer, by in answers if isinstance(answer, Published)}

    def _note_cancelled(self, ids: Collection[str], rows: Sequence[LockedRow]) -> None:
        """Record which published tasks among `ids` are cancelled, or deleted: not locked, or registered again.

        A sent one stays recorded, also if it was reset since, because the mark may be that of an earlier attempt, whose
        commit was not answered.
        """
        if published := self.published():
            by_id = {row.id: row for row in rows}
            for id in published.keys() & set(ids):
                row = by_id.get(id)
                if row is None or not published[id].is_of_task(row):
                    self._cancelled_by[id] = None
                elif row.cancelled_by is not None and published[id].has_message_of(row):
                    self._cancelled_by[id] = row.cancelled_by
                elif not row.is_sent and published[id].has_message_of(row):
                    self._cancelled_by.pop(id, None)

    def _unwritten_changes(self) -> dict[str, NotSent | Deferred]:
        return {id: each for id, each in self._decided.items() if not isinstance(each, Skipped)}


class Timing:
    """The times of a batch, over all its transaction attempts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        #: The seconds of each phase.
        self.phases: dict[str, float] = {}
        #: Seconds between a task's due time and Pub/Sub's answer.
        self.latencies: dict[str, float] = {}
        #: Transactions that have begun, and waits on purpose.
        self.transactions = 0
        #: Attempts that were aborted after they had decided. Aborts of the query that locks are not counted.
        self.aborted = 0
        #: The phase in which the last transaction ended: COMMIT, or CLAIM if its rows were not locked.
        self.last_phase = CLAIM
        self._clock = clock
        self._phase_began = self._locked_at = clock()
        self._now: datetime  # the database's time at the last lock

    def timed(self, store: SpannerStore, claim: Claim, decide: Decide) -> datetime:
        """Run a transaction of the store, and time it. Raises StoreError."""
        self.transactions += 1
        self._phase_began, has_decided = self._clock(), False

        def decide_timed(rows: Sequence[LockedRow], now: datetime) -> Mapping[str, RowChange]:
            nonlocal has_decided
            self.aborted += has_decided  # an earlier attempt had decided, so it was aborted
            self._locked_at, self._now = self._end(CLAIM), now  # after an abort, this includes the commit that failed
            changes = decide(rows, now)
            has_decided, self._phase_began = True, self._clock()
            return changes

        try:
            return store.claim(claim.locks, decide_timed, may_delay=claim.may_delay)
        finally:
            self.last_phase = COMMIT if has_decided else CLAIM
            self._end(self.last_phase)

    def end_publish(self, rows: Sequence[LockedRow], answers: Mapping[str, Answer]) -> None:
        """End the phase, and record the latencies of the published rows."""
        waited = self._end(PUBLISH) - self._locked_at
        for row in rows:
            if isinstance(answers.get(row.id), Published):
                self.latencies[row.id] = max(0.0, (self._now - first_due(row)).total_seconds() + waited)

    def _end(self, phase: str) -> float:
        """Add the time since the last phase ended to this one. Return the time now."""
        now = self._clock()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._phase_began
        self._phase_began = now
        return now
