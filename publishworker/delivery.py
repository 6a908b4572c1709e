"""One batch on its way: claim, publish, mark. What comes of it is data; nothing is counted or logged here."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime

from publishworker.eligibility import expired, in_order, released, stops, taken, untried
from publishworker.pubsub.errors import FailureKind, is_refused, kind_of
from publishworker.pubsub.messages import trace_id
from publishworker.pubsub.publisher import Publisher
from publishworker.retry_policy import RetryPolicy, is_recorded, last_error
from publishworker.spanner.store import Decide, NotWritten, Store, StoreError
from publishworker.telemetry.metrics import CLAIM, COMMIT, PUBLISH
from publishworker.types import (
    Batch,
    BatchResult,
    Deferred,
    Failed,
    FailedAttempt,
    LockedRow,
    Mark,
    Outcome,
    Sent,
    Skipped,
    Version,
)


class Delivery:
    """Delivers batches, several at once on threads of their own: it keeps nothing between them."""

    def __init__(
        self,
        store: Store,
        publisher: Publisher,
        retries: RetryPolicy,
        publish_seconds: float,
        *,
        skip_dead: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Publish each batch within `publish_seconds` of the return of its lock query.

        With `skip_dead` a dead task does not hold back what follows in its ordering key.
        """
        self._skip_dead = skip_dead
        self._clock = clock
        self._store = store
        self._publisher = publisher
        self._retries = retries
        self._publish_seconds = publish_seconds

    def deliver(self, batch: Batch) -> BatchResult:
        """Claim a batch, publish what is still to be sent, mark it: one transaction, run again if it is aborted."""
        if batch.at_most_once:
            return self._deliver_at_most_once(batch)
        if batch.defers:
            return self._defer(batch)
        result = BatchResult(batch)

        def publish(rows: Sequence[LockedRow], now: datetime) -> Mapping[str, Mark]:
            locked = self._clock()
            ours = self._ours(result, rows, now)
            result.tried |= {row.id: expired(row) for row in ours if row.id not in result.tried and row.is_expired(now)}
            self._publish(result, untried(ours, result.tried), locked)
            marks = self._marks(result, ours, now)
            awake = released(batch, rows, marks, now, skip_dead=self._skip_dead) if batch.keys else ()
            return marks | {row.id: FailedAttempt(row.attempts, None, row.expires_at, None) for row in awake}

        self._claim(result, publish)
        return result

    def _defer(self, batch: Batch) -> BatchResult:
        """Put off the tasks of a key behind its head, if that is still unsent and not due."""
        result = BatchResult(batch)

        def put_off(rows: Sequence[LockedRow], now: datetime) -> Mapping[str, Mark]:
            reasons = taken(batch, rows, now, {}, skip_dead=self._skip_dead)
            held = [row.id for row in rows if reasons.get(row.id) == Skipped("held") and row.is_due(now)]
            head = next((row for row in rows if row.id == batch.ids[0]), None)
            if held and head is not None and head.available_at is not None:
                deferred = self._retries.defer(head, head.available_at, now)
                result.deferred = dict.fromkeys(held, deferred)
            else:
                result.deferred = {}
            return result.deferred

        self._claim(result, put_off)
        return result

    def mark(self, batch: Batch, published: Decide) -> BatchResult:
        """Mark what `published` says was published before, in a transaction without publishing."""
        result = BatchResult(batch)
        self._claim(result, published)
        return result

    def _deliver_at_most_once(self, batch: Batch) -> BatchResult:
        """Mark a batch, and publish it once that is surely committed: if in doubt a loss, never a duplicate.

        What Pub/Sub surely has not taken gets its row back.
        """
        result = BatchResult(batch)
        marked: dict[str, LockedRow] = {}
        locked = 0.0

        def mark_first(rows: Sequence[LockedRow], now: datetime) -> Mapping[str, Mark]:
            nonlocal locked
            locked = self._clock()
            ours = self._ours(result, rows, now)
            result.tried = {row.id: expired(row) for row in ours if row.is_expired(now)}
            result.tried |= self._publisher.refusals(batch.topic, [row for row in ours if row.id not in result.tried])
            marked.clear()
            marked.update({row.id: row for row in ours if row.id not in result.tried})
            return self._marks(result, ours, now) | {id: Sent("") for id in marked}

        committed = self._claim(result, mark_first)
        if committed is None:
            result.unconfirmed = list(marked) if result.unsure else []
            return result
        self._publish(result, list(marked.values()), locked)
        back = {id: row for id, row in marked.items() if _is_surely_not_taken(result.tried.get(id))}
        result.unconfirmed = [id for id in marked.keys() - back.keys() if not isinstance(result.tried[id], Sent)]
        if back:
            self._give_back(result, back, committed)
        return result

    def _give_back(self, result: BatchResult, before: Mapping[str, LockedRow], committed: datetime) -> None:
        """Take our marks back, with the failures that are recorded; what somebody has touched since is theirs."""
        charged_before = result.recorded

        def give_back(rows: Sequence[LockedRow], now: datetime) -> Mapping[str, Mark]:
            ours = [before[row.id] for row in rows if row.sent_at == committed]
            records = self._marks(result, ours, now)
            result.recorded |= charged_before
            return {row.id: records.get(row.id) or _as_it_was(row, result.tried.get(row.id)) for row in ours}

        back = self.mark(Batch(result.batch.topic, tuple(before)), give_back)
        if back.error is not None:
            result.recorded = charged_before
            result.unconfirmed += before

    def _publish(self, result: BatchResult, rows: Sequence[LockedRow], locked: float) -> None:
        """Publish rows that were `locked` then; those that have failed before go singly, to take no others along."""
        if not rows:
            return
        singly = {row.id for row in rows if row.attempts or row.id in result.batch.suspects}
        began = self._clock()
        outcomes = self._publisher.publish(result.batch.topic, rows, self._publish_seconds, singly)
        ended = self._clock()
        result.tried |= outcomes
        result.phases[PUBLISH] = result.phases.get(PUBLISH, 0.0) + ended - began
        if (now := result.locked_at) is not None:
            for row in rows:
                if isinstance(outcomes.get(row.id), Sent):
                    due = max(row.created_at, row.available_at or row.created_at)
                    result.waited[row.id] = max(0.0, (now - due).total_seconds() + ended - locked)

    def _marks(self, result: BatchResult, ours: Sequence[LockedRow], now: datetime) -> dict[str, Mark]:
        """Return what to write of the outcomes, and note it in the result."""
        result.recorded, result.deferred = {}, {}
        works = result.batch.works or bool(result.published())
        marks: dict[str, Mark] = {}
        failed: dict[str, Deferred | None] = {}  # ordering key to what is written of the tasks behind the failed one
        for row in ours:
            outcome = result.tried.get(row.id)
            if outcome is not None:
                result.outcomes[row.id] = outcome
            if isinstance(outcome, Sent):
                marks[row.id] = outcome
            elif row.ordering_key in failed:
                if deferred := failed[row.ordering_key]:
                    marks[row.id] = result.deferred[row.id] = deferred
            elif isinstance(outcome, Failed):
                recorded = None
                if is_recorded(result.batch, row.id, outcome, works=works):
                    recorded = marks[row.id] = result.recorded[row.id] = self._retries.record(row, outcome, now)
                expired_early = recorded is not None and recorded.dead and self._skip_dead
                if expired_early and kind_of(outcome.reason) is FailureKind.CONTENT:
                    continue  # the next one may have a verdict of its own
                if row.ordering_key is not None and stops(outcome):
                    failed[row.ordering_key] = None if expired_early else self._behind(row, recorded, now)
        result.traces |= _traces(ours, result.recorded)
        return marks

    def _behind(self, head: LockedRow, recorded: FailedAttempt | None, now: datetime) -> Deferred | None:
        """Return what to write of the tasks behind a failed one: nothing if it was an outage."""
        if recorded is None or recorded.available_at is None:
            return None
        return self._retries.defer(head, recorded.available_at, now)

    def _ours(self, result: BatchResult, rows: Sequence[LockedRow], now: datetime) -> list[LockedRow]:
        """Note what is not to be sent here, and return the rest, the tasks of a key in their order.

        What an earlier run tried in vain is tried afresh if somebody has written the row since.
        """
        versions = {row.id: Version.of(row) for row in rows}
        for id in result.failed():
            if id in versions and versions[id] != result.versions[id]:
                del result.tried[id]
        result.outcomes = taken(result.batch, rows, now, result.published_versions(), skip_dead=self._skip_dead)
        left = {*result.outcomes, *result.batch.releases}
        ours = [row for row in in_order(result.batch, rows) if row.id not in left]
        result.versions |= {row.id: versions[row.id] for row in ours if row.id not in result.tried}
        result.locked_at = now
        return ours

    def _claim(self, result: BatchResult, decide: Decide) -> datetime | None:
        """Let the store claim the batch, and note how often and for how long."""
        since, phase = self._clock(), CLAIM

        def lap() -> None:
            result.phases[phase] = result.phases.get(phase, 0.0) + self._clock() - since

        def timed(rows: Sequence[LockedRow], now: datetime) -> Mapping[str, Mark]:
            nonlocal since, phase
            phase = CLAIM  # of a run after an aborted one, whose commit counts as a part of it
            lap()
            result.runs += 1
            marks = decide(rows, now)
            since, phase = self._clock(), COMMIT
            return marks

        try:
            return self._store.claim((*result.batch.ids, *result.batch.releases), timed)
        except StoreError as error:
            result.error, result.unsure = str(error), not isinstance(error, NotWritten)
            return None
        finally:
            lap()


def _traces(rows: Sequence[LockedRow], ids: Collection[str]) -> dict[str, str]:
    """Return the trace ids that the messages of some rows carry."""
    found = {row.id: trace_id(row.data) for row in rows if row.id in ids}
    return {id: trace for id, trace in found.items() if trace is not None}


def _is_surely_not_taken(outcome: Outcome | None) -> bool:
    """Tell whether Pub/Sub has surely not got the message: it was not tried, or it was refused."""
    return outcome is None or (isinstance(outcome, Failed) and is_refused(outcome.reason))


def _as_it_was(row: LockedRow, outcome: Outcome | None) -> FailedAttempt:
    """Return the row as it was before it was marked; only LastError, which is not read, says what happened since."""
    error = last_error(outcome) if isinstance(outcome, Failed) else None
    return FailedAttempt(row.attempts, row.available_at, row.expires_at, error)
