"""Deliver one batch: claim its rows, publish its messages and mark its tasks. If the commit fails, mark them again.

`Delivery` publishes and marks in one transaction. For the other kinds of claims see `MarkFirst` and `Deferral`.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from publishworker.delivery import rules
from publishworker.delivery.claim import Claim, ClaimedTask, Delivered, State, Unmarked
from publishworker.delivery.marking import Marking, MarkRetry
from publishworker.delivery.rules import RetryPolicy
from publishworker.delivery.trace import Trace
from publishworker.host import Host
from publishworker.pubsub.messages import trace_id
from publishworker.pubsub.publisher import Publisher
from publishworker.spanner.errors import Refused, StoreError
from publishworker.spanner.store import Decide, Store
from publishworker.types import (
    CLAIM,
    COMMIT,
    MARKED,
    PUBLISH,
    Answer,
    Deferred,
    Failed,
    Key,
    LockedRow,
    Mark,
    NotSent,
    Sent,
    Skipped,
    Version,
)

#: Max seconds to search for the rows that make Spanner refuse a commit. Then the batch reports its result, and goes on.
SEARCH_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What every delivery works with."""

    store: Store
    publisher: Publisher
    retries: RetryPolicy
    #: The time limit for publishing one batch.
    publish_seconds: float
    #: Whether a dead task does not block its ordering key.
    skip_dead: bool
    #: What all batches share when they mark again.
    marking: Marking
    host: Host = field(default_factory=Host)
    trace: Trace | None = None


class Laps:
    """The seconds of each phase, over all runs of the transaction."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._began = clock()

    def begin(self) -> None:
        """Begin a phase."""
        self._began = self._clock()

    def end(self, phase: str) -> float:
        """Add the time since `begin` to this phase. Return the time now."""
        now = self._clock()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._began
        self._began = now
        return now


class Delivery:
    """One batch, on a thread of its own. The relay's thread reads `claim`, `unmarked`, `aside` and `transactions`.

    After an abort the transaction runs again, with newly locked rows. This run publishes only tasks that have no answer
    yet, and failed tasks whose row has changed since. It marks every task that any run has published.
    """

    def __init__(self, claim: Claim, tools: Tools) -> None:
        self.claim = claim
        #: The tasks whose marks are not written: at first all, later those that are marked again.
        self.unmarked = frozenset(claim.ids)
        #: Spanner refuses all rows that this batch has left to write, but accepts those of others. It gives up its
        #: place.
        self.aside = False
        #: Transactions that have begun. While the number grows, the batch is not stuck.
        self.transactions = 0
        self._tools = tools
        self._retries = tools.retries.for_topic(claim.policy)
        self._marking = tools.marking
        self._clock = tools.host.clock
        #: Over all runs of the transaction: the answer of Pub/Sub, or the failure that made a request needless.
        self._answers: dict[str, Answer] = {}
        #: Of the last run: why tasks were skipped, and the failed attempts and deferrals that it writes.
        self._skipped: dict[str, Skipped] = {}
        self._recorded: dict[str, NotSent] = {}
        self._deferred: dict[str, Deferred] = {}
        #: The rows as they were when their tasks were last tried.
        self._tried: dict[str, Version] = {}
        #: The marks that Spanner has refused to write, each with the version of its row. A change of the row voids it.
        self._refused: dict[str, tuple[Mark, Version]] = {}
        self._latencies: dict[str, float] = {}
        self._traces: dict[str, str] = {}
        self._laps = Laps(tools.host.clock)
        self._aborted = 0
        self._locked_at = 0.0
        self._error: str | None = None
        self._mark_retry: MarkRetry | None = None

    def run(self) -> Delivered:
        """Claim, publish and mark, in one transaction."""
        try:
            self._transact(self.claim, self._decide)
            self.unmarked = frozenset()
            if self._aborted:
                self._release_heads()
        except StoreError as error:
            self._begin_marking(error)
        return self._delivered()

    def mark_again(self) -> Iterator[Unmarked]:
        """Mark again, in transactions that publish nothing. Yield what cannot be marked while others can."""
        if self._mark_retry is not None:
            yield from self._mark_retry.run()
            if self.transactions > 1:
                self._release_heads()

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
        """Return the rows that this transaction may publish or mark. Keep the order of each ordering key.

        Note why the other rows are skipped. A task that failed before an abort loses its answer if its row has changed.
        """
        self._forget(claim)
        for row in rows:
            if isinstance(self._answers.get(row.id), Failed) and self._tried.get(row.id) != Version.of(row):
                del self._answers[row.id]
        self._skipped |= rules.skip_reasons(claim, rows, now, self._published(), skip_dead=self._tools.skip_dead)
        excluded = {*self._skipped, *(task.id for task in claim.releases)}
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
        self._laps.begin()
        answers = self._tools.publisher.publish(self.claim.destination, rows, self._tools.publish_seconds, alone)
        ended = self._laps.end(PUBLISH)
        self._answers |= answers
        for row in rows:
            if isinstance(answers.get(row.id), Sent):
                due = max(row.created_at, row.available_at or row.created_at)
                self._latencies[row.id] = max(0.0, (now - due).total_seconds() + ended - self._locked_at)

    def _marks(self, rows: Sequence[LockedRow], now: datetime) -> dict[str, Mark]:
        """Return the marks of all answers, and note failed attempts and deferrals."""
        found = rules.marks_of(self.claim, rows, self._answers, now, self._retries, skip_dead=self._tools.skip_dead)
        self._recorded |= found.recorded
        self._deferred |= found.deferred
        self._traces |= {row.id: id for row in rows if row.id in found.recorded and (id := trace_id(row.data))}
        return {**found.sent, **found.recorded, **found.deferred}

    def _releases(
        self, claim: Claim, rows: Sequence[LockedRow], marks: Mapping[str, Mark], now: datetime
    ) -> dict[str, Mark]:
        """Return a mark for each deferred task that this commit makes a key head. The mark releases the task."""
        heads = rules.to_release(claim, rows, marks, now, skip_dead=self._tools.skip_dead)
        return {row.id: NotSent(row.attempts, None, row.expires_at, None) for row in heads}

    def _release_heads(self) -> None:
        """Release the tasks that are key heads now, and that another worker has deferred since the poll.

        It may have done so while this batch had lost its locks. If the release fails, their deferrals end by
        themselves, within a minute.
        """
        topic, tasks = self.claim.topic, self.claim.tasks
        keys = {Key(topic, task.ordering_key): task.shard for task in tasks if task.ordering_key is not None}
        if not keys:
            return
        with contextlib.suppress(StoreError):
            heads = self._tools.store.key_heads(keys, 1, skip_dead=self._tools.skip_dead)
            deferred = [ClaimedTask(head.id, key.ordering_key) for key, [head] in heads.items() if head.deferred]
            if deferred:
                claim = replace(self.claim, tasks=tuple(deferred), releases=())
                self._transact(claim, lambda rows, now: self._releases(claim, rows, {}, now))

    def _marks_again(self, claim: Claim, rows: Sequence[LockedRow], now: datetime) -> dict[str, Mark]:
        """Return the marks of published tasks, and those that Spanner has refused if their rows have not changed."""
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
        """Lock the rows of `claim`, write the marks of `decide` and return the commit timestamp. Raises StoreError."""
        marks: Mapping[str, Mark] = {}
        locked: Sequence[LockedRow] = ()
        has_decided = False
        self.transactions += 1
        self._laps.begin()

        def decide_timed(rows: Sequence[LockedRow], now: datetime) -> Mapping[str, Mark]:
            nonlocal has_decided, locked, marks
            self._aborted += has_decided
            self._locked_at, locked = (
                self._laps.end(CLAIM),
                rows,
            )  # after an abort, this includes the commit that failed
            marks, has_decided = decide(rows, now), True
            self._laps.begin()
            return marks

        try:
            committed = self._tools.store.claim(claim.locks, decide_timed)
        except Refused:
            self._refused |= {row.id: (marks[row.id], Version.of(row)) for row in locked if row.id in marks}
            raise
        finally:
            self._laps.end(COMMIT if has_decided else CLAIM)
        if marks:  # a commit without marks does not show that Spanner accepts writes
            self._marking.committed()
        if self._refused:
            self._refused = {id: kept for id, kept in self._refused.items() if id not in marks}
        return committed

    def _begin_marking(self, error: StoreError) -> None:
        """Prepare to mark again. If Spanner has refused the commit, find the rows that are the reason."""
        self._error = str(error)
        spanner_refused = isinstance(error, Refused)
        left = self.claim.part({*self._published(), *self._refused})
        self._mark_retry = MarkRetry(self, (left,), self._marking)
        if not spanner_refused:  # whether it was written is unknown, so no failure and no deferral is reported
            self._recorded.clear()
            self._deferred.clear()
            return
        self._mark_retry.search(SEARCH_SECONDS)
        if self.aside or not self.unmarked:
            self._error = None  # the reasons are single rows, and each is reported as an Unmarked

    def _forget(self, claim: Claim) -> None:
        """Forget what an earlier run has decided."""
        decided: tuple[dict[str, Any], ...] = (self._skipped, self._recorded, self._deferred)
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
            skipped=dict(self._skipped),
            recorded={id: mark for id, mark in self._recorded.items() if id not in unwritten},
            deferred={id: mark for id, mark in self._deferred.items() if id not in unwritten},
            unmarked=self.unmarked,
            traces=dict(self._traces),
            latencies=dict(self._latencies),
            phases=dict(self._laps.seconds),
            aborted=self._aborted,
            error=self._error,
        )
