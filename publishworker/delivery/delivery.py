"""Send one batch: claim, publish, mark.

`Reporter` counts and logs the results of `run`. `InDoubt` uses those of `mark`.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime

from publishworker.delivery.retry_policy import RetryPolicy, is_recorded, last_error
from publishworker.delivery.rules import (
    deferred_behind,
    expired,
    in_order,
    skip_reasons,
    stops_key,
    to_publish,
    to_release,
)
from publishworker.pubsub.errors import FailureKind, is_refused, kind_of
from publishworker.pubsub.messages import trace_id
from publishworker.pubsub.publisher import Publisher
from publishworker.spanner.errors import NotWritten, Refused, StoreError
from publishworker.spanner.store import Decide, Store
from publishworker.telemetry.metrics import CLAIM, COMMIT, PUBLISH
from publishworker.types import (
    MARKED,
    Batch,
    BatchResult,
    Deferred,
    Failed,
    LockedRow,
    Mark,
    NotSent,
    Outcome,
    Sent,
    Skipped,
    Version,
)

#: Max seconds to search for the rows for which Spanner refuses a commit, and max refused rows while all are refused.
#: Then the reason is probably in no row.
SEARCH_SECONDS = 20.0
MAX_REFUSED = 10


class Delivery:
    """Delivers batches, and may be called on several threads at once. It keeps no state between batches."""

    def __init__(
        self,
        store: Store,
        publisher: Publisher,
        retries: RetryPolicy,
        publish_seconds: float,
        *,
        skip_dead: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`publish_seconds` is the time limit for publishing one batch.

        With `skip_dead` a dead task does not block its ordering key.
        """
        self._skip_dead = skip_dead
        self._clock = clock
        self._store = store
        self._publisher = publisher
        self._retries = retries
        self._publish_seconds = publish_seconds

    def run(self, batch: Batch) -> BatchResult:
        """Deliver a batch according to its kind."""
        if batch.defers:
            return self.defer(batch)
        if batch.at_most_once:
            return self.deliver_at_most_once(batch)
        return self.deliver(batch)

    def deliver(self, batch: Batch) -> BatchResult:
        """Claim a batch, publish its tasks and mark them, in one transaction.

        After an abort the transaction function runs again, and only `result` is kept. The next attempt publishes only
        tasks that have no answer yet, and failed tasks whose row has changed since. It marks every task that any
        attempt has published.
        """
        result = BatchResult(batch)

        def attempt(rows: Sequence[LockedRow], now: datetime) -> Mapping[str, Mark]:
            locked_at = self._clock()
            eligible = self._check(result, rows, now)
            self._expire(result, to_publish(eligible, result.answers), now)
            self._publish(result, to_publish(eligible, result.answers), locked_at)
            return self._marks(result, [*eligible, *deferred_behind(batch, rows)], now)

        self._transact(result, attempt)
        return result

    def defer(self, batch: Batch) -> BatchResult:
        """Defer tasks of a key, if the first task of the batch, the key head, is still unsent and not due."""
        result = BatchResult(batch)

        def attempt(rows: Sequence[LockedRow], now: datetime) -> Mapping[str, Mark]:
            result.deferred = {}
            reasons = skip_reasons(batch, rows, now, {}, skip_dead=self._skip_dead)
            blocked = [row for row in in_order(batch, rows) if reasons.get(row.id) == Skipped("blocked")]
            head = next((row for row in rows if row.id == batch.ids[0]), None)
            if head is not None and head.available_at is not None:
                deferrals = self._retries.deferrals(head, head.available_at, now)
                waiting = [row for row in blocked if row.is_due(now) or row.deferred]
                pairs = zip(waiting, deferrals, strict=False)
                result.deferred = {row.id: deferral for row, deferral in pairs if _is_too_late(row, deferral, now)}
            return result.deferred

        self._transact(result, attempt)
        return result

    def deliver_at_most_once(self, batch: Batch) -> BatchResult:
        """Mark a batch, commit, and only then publish it. A task can be lost but is never published twice.

        If Pub/Sub certainly did not accept a message, a second transaction clears SentAt again.
        """
        result = BatchResult(batch)
        marked: dict[str, LockedRow] = {}
        locked_at = 0.0

        def attempt(rows: Sequence[LockedRow], now: datetime) -> Mapping[str, Mark]:
            nonlocal marked, locked_at
            locked_at = self._clock()
            result.answers = {}
            eligible = self._check(result, rows, now)
            self._expire(result, eligible, now)
            publishable = [row for row in eligible if row.id not in result.answers]
            result.answers |= self._publisher.refusals(batch.topic, publishable)
            marked = {row.id: row for row in to_publish(eligible, result.answers)}
            return self._marks(result, eligible, now) | dict.fromkeys(marked, MARKED)

        committed = self._transact(result, attempt)
        for part in (result, *result.parts):
            part.unconfirmed = [id for id in part.batch.ids if id in marked] if part.commit_unknown else []
        sendable = _without_gaps(list(marked.values()), committed)
        marked = {id: row for id, row in marked.items() if id in committed}
        self._publish(result, sendable, locked_at)
        refused = {id: row for id, row in marked.items() if _is_surely_not_published(result.answers.get(id))}
        result.unconfirmed += [id for id in marked.keys() - refused.keys() if not isinstance(result.answers[id], Sent)]
        if refused:
            self._undo_marks(result, refused, committed)
        return result

    def mark(self, batch: Batch, decide: Decide) -> BatchResult:
        """Write the marks that `decide` returns, in a transaction that publishes nothing."""
        result = BatchResult(batch)
        self._transact(result, decide)
        return result

    def _undo_marks(
        self, result: BatchResult, before: Mapping[str, LockedRow], committed: Mapping[str, datetime]
    ) -> None:
        """Clear SentAt of rows that have not changed since the mark was committed, and record the failed attempts."""
        recorded_before = result.recorded

        def attempt(rows: Sequence[LockedRow], now: datetime) -> Mapping[str, Mark]:
            ours = [before[row.id] for row in rows if row.sent_at == committed[row.id]]
            self._marks(result, ours, now)
            failed, result.deferred = result.recorded, {}
            result.recorded = recorded_before | failed
            return {row.id: failed.get(row.id) or _restored(row, result.answers.get(row.id)) for row in ours}

        undone = self.mark(Batch(result.batch.topic, tuple(before)), attempt)
        for id in (id for part in (undone, *undone.parts) if part.error is not None for id in part.batch.ids):
            result.recorded.pop(id, None)
            result.unconfirmed.append(id)

    def _check(self, result: BatchResult, rows: Sequence[LockedRow], now: datetime) -> list[LockedRow]:
        """Return the rows to publish or, if they are published, to mark. Note why the others are skipped.

        They are in the order of their ordering keys.

        A task that failed in an earlier attempt loses its answer if its row has changed since.
        """
        versions = {row.id: Version.of(row) for row in rows}
        for id in result.failed():
            if id in versions and versions[id] != result.versions[id]:
                del result.answers[id]
        result.outcomes = skip_reasons(result.batch, rows, now, result.published_versions(), skip_dead=self._skip_dead)
        excluded = {*result.outcomes, *result.batch.releases}
        eligible = [row for row in in_order(result.batch, rows) if row.id not in excluded]
        result.versions |= {row.id: versions[row.id] for row in eligible if row.id not in result.answers}
        result.locked_at = now
        return eligible

    def _expire(self, result: BatchResult, rows: Sequence[LockedRow], now: datetime) -> None:
        """Note the failure of each row whose ExpiresAt has passed."""
        result.answers |= {row.id: expired(row) for row in rows if row.is_expired(now)}

    def _publish(self, result: BatchResult, rows: Sequence[LockedRow], locked_at: float) -> None:
        """Publish rows. A row that failed before, or is a suspect, gets its own request: no other row fails with it."""
        if not rows:
            return
        alone = {row.id for row in rows if row.attempts or row.id in result.batch.suspects}
        began = self._clock()
        outcomes = self._publisher.publish(result.batch.topic, rows, self._publish_seconds, alone)
        ended = self._clock()
        result.answers |= outcomes
        result.phases[PUBLISH] = result.phases.get(PUBLISH, 0.0) + ended - began
        if (now := result.locked_at) is not None:
            for row in rows:
                if isinstance(outcomes.get(row.id), Sent):
                    due = max(row.created_at, row.available_at or row.created_at)
                    result.waited[row.id] = max(0.0, (now - due).total_seconds() + ended - locked_at)

    def _marks(self, result: BatchResult, eligible: Sequence[LockedRow], now: datetime) -> dict[str, Mark]:
        """Return the marks of all outcomes, and note failed attempts and deferrals in the result."""
        result.recorded, result.deferred = {}, {}
        topic_accepts = result.batch.topic_accepts or bool(result.published())
        marks: dict[str, Mark] = {}
        #: The ordering keys in which a task has failed, each with the deferrals of its later tasks, if there are any.
        stopped: dict[str, Iterator[Deferred]] = {}
        for row in eligible:
            outcome = result.answers.get(row.id)
            if outcome is not None:
                result.outcomes[row.id] = outcome
            if isinstance(outcome, Sent):
                marks[row.id] = outcome
            elif row.ordering_key in stopped:
                if deferral := next(stopped[row.ordering_key], None):
                    marks[row.id] = result.deferred[row.id] = deferral
            elif isinstance(outcome, Failed):
                recorded = None
                if is_recorded(result.batch, row.id, outcome, topic_accepts=topic_accepts):
                    recorded = marks[row.id] = result.recorded[row.id] = self._retries.record(row, outcome, now)
                blocks_nothing = recorded is not None and recorded.dead and self._skip_dead
                if blocks_nothing and kind_of(outcome.reason) is FailureKind.CONTENT:
                    continue  # Pub/Sub was not asked about this dead task, so the later tasks of its key were tried
                if row.ordering_key is not None and stops_key(outcome):
                    stopped[row.ordering_key] = self._deferrals_behind(row, None if blocks_nothing else recorded, now)
        result.traces |= _traces(eligible, result.recorded)
        return marks

    def _deferrals_behind(self, head: LockedRow, recorded: NotSent | None, now: datetime) -> Iterator[Deferred]:
        """Return the deferrals of the tasks behind a failed one. There are none if the failure was not recorded."""
        if recorded is None or recorded.available_at is None:
            return iter(())
        return self._retries.deferrals(head, recorded.available_at, now)

    def _releases(
        self, batch: Batch, rows: Sequence[LockedRow], marks: Mapping[str, Mark], now: datetime
    ) -> dict[str, Mark]:
        """Return a mark for each deferred task that this commit makes a key head. The mark releases the task."""
        if not batch.keys:
            return {}
        heads = to_release(batch, rows, marks, now, skip_dead=self._skip_dead)
        return {row.id: NotSent(row.attempts, None, row.expires_at, None) for row in heads}

    def _transact(self, result: BatchResult, decide: Decide) -> Mapping[str, datetime]:
        """Let the store claim the batch and write the marks. Note attempts and seconds.

        Return the commit timestamp of each mark that is written. Tasks whose mark Spanner refuses become parts of the
        result.
        """
        since, phase = self._clock(), CLAIM
        locked: Sequence[LockedRow] = ()
        marks: Mapping[str, Mark] = {}

        def end_phase() -> None:
            result.phases[phase] = result.phases.get(phase, 0.0) + self._clock() - since

        def timed(rows: Sequence[LockedRow], now: datetime) -> Mapping[str, Mark]:
            nonlocal since, phase, locked, marks
            phase = CLAIM  # after an abort, the time since the last `decide` counts as claim
            end_phase()
            result.transaction_attempts += 1
            locked, marks = rows, decide(rows, now)
            marks = {**marks, **self._releases(result.batch, rows, marks, now)}
            since, phase = self._clock(), COMMIT
            return marks

        try:
            committed = self._store.claim((*result.batch.ids, *result.batch.releases), timed)
            return dict.fromkeys(marks, committed)
        except Refused as error:
            return self._write_apart(result, {row.id: row for row in locked}, marks, error)
        except StoreError as error:
            _fail(result, error)
            return {}
        finally:
            end_phase()

    def _write_apart(
        self, result: BatchResult, locked: Mapping[str, LockedRow], marks: Mapping[str, Mark], refusal: Refused
    ) -> Mapping[str, datetime]:
        """Halve a refused commit until only the rows that Spanner refuses are left. Publishes nothing.

        Return the commit timestamp of each written mark. The other tasks with a mark become parts of the result.
        """
        written: dict[str, datetime] = {}
        failed: list[tuple[Sequence[str], StoreError]] = []
        refused: list[tuple[Sequence[str], StoreError]] = [(tuple(marks), refusal)]
        unchanged: dict[str, Mark] = {}
        end = self._clock() + SEARCH_SECONDS

        def holds(row: LockedRow, now: datetime) -> bool:
            # An at-most-once task is published after this search, which may take long.
            is_too_late = result.batch.at_most_once and marks[row.id] is MARKED and row.is_expired(now)
            return _is_unchanged(row, locked[row.id]) and not is_too_late

        def decide(rows: Sequence[LockedRow], now: datetime) -> Mapping[str, Mark]:
            nonlocal unchanged
            unchanged = {row.id: marks[row.id] for row in rows if holds(row, now)}
            return unchanged

        while refused:
            ids, error = refused.pop()
            may_search = self._clock() < end and (written or len(failed) < MAX_REFUSED)
            if len(ids) < 2 or not may_search:
                failed.append((ids, error))
                continue
            for half in (ids[len(ids) // 2 :], ids[: len(ids) // 2]):
                try:
                    committed = self._store.claim(half, decide)
                    written |= dict.fromkeys(unchanged, committed)
                except Refused as again:
                    refused.append((half, again))
                except StoreError as other:
                    failed.append((half, other))
        if not written:
            _fail(result, refusal)
        for ids, error in failed:
            _fail(result if tuple(ids) == result.batch.ids else result.split_off(ids), error)
        return written


def _fail(result: BatchResult, error: StoreError) -> None:
    """Note in the result that the marks of its tasks are not written, or perhaps not."""
    result.error, result.commit_unknown = str(error), not isinstance(error, NotWritten)
    result.refused = isinstance(error, Refused) and len(result.batch.ids) == 1


def _is_unchanged(row: LockedRow, before: LockedRow) -> bool:
    """Tell whether a mark for the row as it was before still holds."""
    return row.sent_at == before.sent_at and Version.of(row) == Version.of(before)


def _without_gaps(rows: Sequence[LockedRow], committed: Collection[str]) -> list[LockedRow]:
    """Return the committed rows, of each ordering key only those before the first one that is not committed."""
    found: list[LockedRow] = []
    ended: set[str | None] = set()
    for row in rows:
        if row.id not in committed and row.ordering_key is not None:
            ended.add(row.ordering_key)
        elif row.id in committed and row.ordering_key not in ended:
            found.append(row)
    return found


def _traces(rows: Sequence[LockedRow], ids: Collection[str]) -> dict[str, str]:
    """Return the trace IDs in the messages of the rows with these IDs."""
    found = {row.id: trace_id(row.data) for row in rows if row.id in ids}
    return {id: trace for id, trace in found.items() if trace is not None}


def _is_surely_not_published(outcome: Outcome | None) -> bool:
    """Tell whether Pub/Sub has certainly not accepted the message: no request was sent, or it was refused."""
    return outcome is None or (isinstance(outcome, Failed) and is_refused(outcome.reason))


def _restored(row: LockedRow, outcome: Outcome | None) -> NotSent:
    """Return the mark that restores the row, with a LastError that says what happened. A deferred row becomes ready."""
    error = last_error(outcome) if isinstance(outcome, Failed) else None
    return NotSent(row.attempts, None if row.deferred else row.available_at, row.expires_at, error)


def _is_too_late(row: LockedRow, deferral: Deferred, now: datetime) -> bool:
    """Tell whether a blocked row needs this deferral: a poll still returns it, or will return it only later."""
    return row.available_at is None or not now < row.available_at <= deferral.available_at
