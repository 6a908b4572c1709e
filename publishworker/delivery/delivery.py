"""Deliver one batch: claim its rows, publish its messages and mark its tasks. If the commit fails, mark them again.

`Delivery` publishes and marks in one transaction. For the other kinds of claims see `MarkFirst` and `Deferral`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from publishworker.delivery import rules
from publishworker.delivery.claim import Claim, Delivered, State, Unmarked
from publishworker.delivery.marking import Marking, MarkRetry
from publishworker.delivery.rules import RetryPolicy, should_record
from publishworker.host import Host
from publishworker.pubsub.errors import FailureKind, kind_of
from publishworker.pubsub.messages import trace_id
from publishworker.pubsub.publisher import Publisher
from publishworker.spanner.errors import Refused, StoreError
from publishworker.spanner.store import Decide, Store
from publishworker.telemetry.trace import Trace
from publishworker.types import (
    CLAIM,
    COMMIT,
    MARKED,
    PUBLISH,
    Deferred,
    Failed,
    LockedRow,
    Mark,
    NotSent,
    Outcome,
    Sent,
    Version,
)

#: Max seconds to search for the rows for which Spanner refuses a commit, before the result is reported.
SEARCH_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What every delivery works with."""

    store: Store
    publisher: Publisher
    retries: RetryPolicy
    #: The time limit for publishing one batch.
    publish_seconds: float
    #: A dead task does not block its ordering key.
    skip_dead: bool
    host: Host = field(default_factory=Host)
    trace: Trace | None = None

    @property
    def heads(self) -> Store:
        """Return the store for reads of key heads, which the trace notes, too."""
        return self.store if self.trace is None else self.trace.reading(self.store)


class Delivery:
    """One batch, on a thread of its own. The relay's thread reads `claim`, `unmarked`, `aside` and `transactions`.

    After an abort the transaction function, `decide`, runs again. The next attempt publishes only tasks that have no
    answer yet, and failed tasks whose row has changed since. It marks every task that any attempt has published.
    """

    def __init__(self, claim: Claim, tools: Tools, marking: Marking) -> None:
        self.claim = claim
        #: The tasks whose marks are not written yet. Before `run` has returned, all tasks.
        self.unmarked = frozenset(claim.ids)
        #: The rows that are left cannot be written although other rows can, so the batch needs no place.
        self.aside = False
        #: Transactions that have begun. While the number grows, the batch is not stuck.
        self.transactions = 0
        self._tools = tools
        self._retries = tools.retries.for_topic(claim.policy)
        self._marking = marking
        self._clock = tools.host.clock
        self._answers: dict[str, Outcome] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._recorded: dict[str, NotSent] = {}
        self._deferred: dict[str, Deferred] = {}
        self._unconfirmed: list[str] = []
        #: The rows as they were when their tasks were last tried.
        self._tried: dict[str, Version] = {}
        #: The marks that Spanner has refused to write. They hold while their rows are as they were.
        self._refused: dict[str, tuple[Mark, Version]] = {}
        self._latencies: dict[str, float] = {}
        self._traces: dict[str, str] = {}
        self._phases: dict[str, float] = {}
        self._aborted = 0
        self._locked_at = 0.0
        self._error: str | None = None
        self._mark_retry: MarkRetry | None = None

    def run(self) -> Delivered:
        """Claim, publish and mark, in one transaction."""
        try:
            self._transact(self.claim, self._decide)
            self.unmarked = frozenset()
        except StoreError as error:
            self._note_failed_commit(error)
        return self._delivered()

    def mark_again(self) -> Iterator[Unmarked]:
        """Mark again, in transactions that publish nothing. Yield tasks that cannot be marked while others can."""
        return iter(()) if self._mark_retry is None else self._mark_retry.run()

    def write_marks(self, claim: Claim) -> None:
        """Write the marks of a part of the claim. Raises StoreError."""
        self._transact(claim, lambda rows, now: self._marks_again(claim, rows, now))

    def state_of(self, claim: Claim) -> State:
        """Return what has happened to the tasks of a part whose marks are not written."""
        return "published" if all(isinstance(self._answers.get(id), Sent) for id in claim.ids) else "unpublished"

    def _decide(self, rows: Sequence[LockedRow], now: datetime) -> dict[str, Mark]:
        eligible = self._check(self.claim, rows, now)
        self._expire(rules.to_publish(eligible, self._answers), now)
        self._publish(rules.to_publish(eligible, self._answers), now)
        marks = self._marks([*eligible, *rules.deferred_behind(self.claim, rows)], now)
        return marks | self._releases(self.claim, rows, marks, now)

    def _check(self, claim: Claim, rows: Sequence[LockedRow], now: datetime) -> list[LockedRow]:
        """Return the rows to publish, and those already published, to mark. Keep the order of each ordering key.

        Note why the other rows are skipped. A task that failed in an earlier attempt loses its answer if its row has
        changed since.
        """
        self._forget(claim)
        for row in rows:
            if isinstance(self._answers.get(row.id), Failed) and self._tried.get(row.id) != Version.of(row):
                del self._answers[row.id]
        self._outcomes |= rules.skip_reasons(claim, rows, now, self._published(), skip_dead=self._tools.skip_dead)
        excluded = {*self._outcomes, *(task.id for task in claim.releases)}
        eligible = [row for row in rules.in_order(claim, rows) if row.id not in excluded]
        self._tried |= {row.id: Version.of(row) for row in eligible if row.id not in self._answers}
        return eligible

    def _expire(self, rows: Sequence[LockedRow], now: datetime) -> None:
        self._answers |= {row.id: rules.expired(row) for row in rows if row.is_expired(now)}

    def _publish(self, rows: Sequence[LockedRow], now: datetime) -> None:
        """Publish rows locked at `now`. One that failed before, or is a suspect, gets its own request."""
        if not rows:
            return
        alone = {row.id for row in rows if row.attempts or row.id in self.claim.hints.suspects}  # OUT-DELAY-1
        began = self._clock()
        answers = self._tools.publisher.publish(self.claim.destination, rows, self._tools.publish_seconds, alone)
        ended = self._clock()
        self._answers |= answers
        self._phases[PUBLISH] = self._phases.get(PUBLISH, 0.0) + ended - began
        for row in rows:
            if isinstance(answers.get(row.id), Sent):
                due = max(row.created_at, row.available_at or row.created_at)
                self._latencies[row.id] = max(0.0, (now - due).total_seconds() + ended - self._locked_at)

    def _marks(self, eligible: Sequence[LockedRow], now: datetime) -> dict[str, Mark]:
        """Return the marks of all answers, and note failed attempts and deferrals."""
        topic_accepts = self.claim.hints.accepts or any(isinstance(each, Sent) for each in self._answers.values())
        marks: dict[str, Mark] = {}
        #: The ordering keys that a failed task stops, each with the deferrals for the tasks behind it, if any.
        stopped: dict[str, Iterator[Deferred]] = {}
        for row in eligible:
            answer = self._answers.get(row.id)
            if answer is not None:
                self._outcomes[row.id] = answer
            if isinstance(answer, Sent):  # OUT-LOSS-3
                marks[row.id] = answer
            elif row.ordering_key in stopped:
                if deferral := next(stopped[row.ordering_key], None):
                    marks[row.id] = self._deferred[row.id] = deferral
            elif isinstance(answer, Failed):
                recorded = None
                if should_record(self.claim.hints, row.id, answer, topic_accepts=topic_accepts):
                    recorded = marks[row.id] = self._record(row, answer, now)
                blocks_nothing = recorded is not None and recorded.dead and self._tools.skip_dead
                if blocks_nothing and kind_of(answer.reason) is FailureKind.CONTENT:
                    continue  # this dead task blocks nothing, and the later tasks of its key have answers of their own
                if row.ordering_key is not None and rules.stops_key(answer):
                    stopped[row.ordering_key] = self._deferrals_behind(row, None if blocks_nothing else recorded, now)
        return marks

    def _record(self, row: LockedRow, failure: Failed, now: datetime) -> NotSent:
        recorded = self._recorded[row.id] = self._retries.record(row, failure, now)
        if (trace := trace_id(row.data)) is not None:
            self._traces[row.id] = trace
        return recorded

    def _deferrals_behind(self, head: LockedRow, recorded: NotSent | None, now: datetime) -> Iterator[Deferred]:
        """Return the deferrals of the tasks behind a failed one. There are none if the failure was not recorded."""
        if recorded is None or recorded.available_at is None:
            return iter(())
        return self._retries.deferrals(head, recorded.available_at, now)

    def _releases(
        self, claim: Claim, rows: Sequence[LockedRow], marks: Mapping[str, Mark], now: datetime
    ) -> dict[str, Mark]:
        """Return a mark for each deferred task that this commit makes a key head. The mark releases the task."""
        heads = rules.to_release(claim, rows, marks, now, skip_dead=self._tools.skip_dead)
        return {row.id: NotSent(row.attempts, None, row.expires_at, None) for row in heads}

    def _marks_again(self, claim: Claim, rows: Sequence[LockedRow], now: datetime) -> dict[str, Mark]:
        """Return the marks of published tasks, and the refused marks of rows that are as they were."""
        marks: dict[str, Mark] = {}
        published = self._published()
        for row in rows:
            mark, version = self._refused.get(row.id, (None, None))
            if row.id in published:
                if row.sent_at is None and published[row.id].has_message_of(row):
                    marks[row.id] = MARKED
            elif mark is not None and row.sent_at is None and version == Version.of(row):
                marks[row.id] = mark
        return marks | self._releases(claim, rows, marks, now)

    def _transact(self, claim: Claim, decide: Decide) -> datetime:
        """Lock the rows of `claim`, write the marks of `decide` and commit. Return when. Raises StoreError."""
        since, phase = self._clock(), CLAIM
        marks: Mapping[str, Mark] = {}
        locked: Sequence[LockedRow] = ()
        self.transactions += 1

        def end_phase() -> None:
            self._phases[phase] = self._phases.get(phase, 0.0) + self._clock() - since

        def timed(rows: Sequence[LockedRow], now: datetime) -> Mapping[str, Mark]:
            nonlocal since, phase, locked, marks
            self._aborted += phase == COMMIT
            phase = CLAIM  # after an abort, the time since the last `decide` counts as claim
            end_phase()
            self._locked_at, locked = self._clock(), rows
            marks = decide(rows, now)
            since, phase = self._clock(), COMMIT
            return marks

        try:
            committed = self._tools.store.claim(claim.locks, timed)
        except Refused:
            self._refused |= {row.id: (marks[row.id], Version.of(row)) for row in locked if row.id in marks}
            raise
        finally:
            end_phase()
        if marks:  # a commit without marks does not show that Spanner accepts writes
            self._marking.committed()
        if self._refused:
            self._refused = {id: kept for id, kept in self._refused.items() if id not in marks}
        return committed

    def _note_failed_commit(self, error: StoreError) -> None:
        """Note that the commit failed. If Spanner has refused it, find the rows that are the reason."""
        self._error = str(error)
        spanner_refused = isinstance(error, Refused)
        left = self.claim.part({*self._published(), *self._refused})
        self._mark_retry = MarkRetry(self, (left,), self._marking)
        if not spanner_refused:
            self._recorded.clear()
            self._deferred.clear()
            return
        self._mark_retry.search(SEARCH_SECONDS)
        if self.aside or not self.unmarked:
            self._error = None  # the reasons are single rows, and each is reported as an Unmarked

    def _forget(self, claim: Claim) -> None:
        """Forget what an earlier attempt has decided."""
        decided: tuple[dict[str, Any], ...] = (self._outcomes, self._recorded, self._deferred)
        for each in filter(None, decided):
            for id in claim.locks:
                each.pop(id, None)

    def _published(self) -> dict[str, Version]:
        return {id: self._tried[id] for id, answer in self._answers.items() if isinstance(answer, Sent)}

    def _delivered(self) -> Delivered:
        unwritten = self._refused.keys() | self.unmarked
        return Delivered(
            self.claim,
            answers=dict(self._answers),
            outcomes=dict(self._outcomes),
            recorded={id: mark for id, mark in self._recorded.items() if id not in unwritten},
            deferred={id: mark for id, mark in self._deferred.items() if id not in unwritten},
            unmarked=self.unmarked,
            unconfirmed=tuple(self._unconfirmed),
            traces=dict(self._traces),
            latencies=dict(self._latencies),
            phases=dict(self._phases),
            aborted=self._aborted,
            error=self._error,
        )
