"""One group on its way: claim, publish, mark. What comes of it is data; nothing is counted or logged here."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime

from publishworker.eligibility import expired, in_order, stops, taken, untried, woken
from publishworker.pubsub.errors import Kind, is_refused, kind_of
from publishworker.pubsub.messages import trace_id
from publishworker.pubsub.publisher import Publisher
from publishworker.retry_policy import Retries, is_charged, last_error
from publishworker.spanner.store import Decide, NotWritten, Store, StoreError
from publishworker.telemetry.metrics import CLAIM, COMMIT, PUBLISH
from publishworker.types import (
    Charged,
    Failed,
    Group,
    GroupResult,
    Mark,
    Outcome,
    Parked,
    Row,
    Sent,
    Taken,
    Version,
)


class Delivery:
    """Delivers groups, several at once on threads of their own: it keeps nothing between them."""

    def __init__(
        self,
        store: Store,
        publisher: Publisher,
        retries: Retries,
        publish_seconds: float,
        *,
        pass_dead: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Publish each group within `publish_seconds` of the return of its lock query.

        With `pass_dead` a dead task does not hold back what follows in its ordering key.
        """
        self._pass_dead = pass_dead
        self._clock = clock
        self._store = store
        self._publisher = publisher
        self._retries = retries
        self._publish_seconds = publish_seconds

    def deliver(self, group: Group) -> GroupResult:
        """Claim a group, publish what is still to be sent, mark it: one transaction, run again if it is aborted."""
        if group.at_most_once:
            return self._deliver_at_most_once(group)
        if group.parks:
            return self._park(group)
        result = GroupResult(group)

        def publish(rows: Sequence[Row], now: datetime) -> Mapping[str, Mark]:
            locked = self._clock()
            ours = self._ours(result, rows, now)
            result.tried |= {row.id: expired(row) for row in ours if row.id not in result.tried and row.is_expired(now)}
            self._publish(result, untried(ours, result.tried), locked)
            marks = self._marks(result, ours, now)
            awake = woken(group, rows, marks, now, pass_dead=self._pass_dead) if group.keys else ()
            return marks | {row.id: Charged(row.attempts, None, row.expires_at, None) for row in awake}

        self._claim(result, publish)
        return result

    def _park(self, group: Group) -> GroupResult:
        """Put off the tasks of a key behind its head, if that is still unsent and not due."""
        result = GroupResult(group)

        def put_off(rows: Sequence[Row], now: datetime) -> Mapping[str, Mark]:
            reasons = taken(group, rows, now, {}, pass_dead=self._pass_dead)
            held = [row.id for row in rows if reasons.get(row.id) == Taken("held") and row.is_due(now)]
            head = next((row for row in rows if row.id == group.ids[0]), None)
            if held and head is not None and head.available_at is not None:
                parked = self._retries.park(head, head.available_at, now)
                result.parked = dict.fromkeys(held, parked)
            else:
                result.parked = {}
            return result.parked

        self._claim(result, put_off)
        return result

    def mark(self, group: Group, published: Decide) -> GroupResult:
        """Mark what `published` says was published before, in a transaction without publishing."""
        result = GroupResult(group)
        self._claim(result, published)
        return result

    def _deliver_at_most_once(self, group: Group) -> GroupResult:
        """Mark a group, and publish it once that is surely committed: if in doubt a loss, never a duplicate.

        What Pub/Sub surely has not taken gets its row back.
        """
        result = GroupResult(group)
        marked: dict[str, Row] = {}
        locked = 0.0

        def mark_first(rows: Sequence[Row], now: datetime) -> Mapping[str, Mark]:
            nonlocal locked
            locked = self._clock()
            ours = self._ours(result, rows, now)
            result.tried = {row.id: expired(row) for row in ours if row.is_expired(now)}
            result.tried |= self._publisher.refusals(group.topic, [row for row in ours if row.id not in result.tried])
            marked.clear()
            marked.update({row.id: row for row in ours if row.id not in result.tried})
            return self._marks(result, ours, now) | {id: Sent("") for id in marked}

        committed = self._claim(result, mark_first)
        if committed is None:
            result.in_doubt = list(marked) if result.unsure else []
            return result
        self._publish(result, list(marked.values()), locked)
        back = {id: row for id, row in marked.items() if _is_surely_not_taken(result.tried.get(id))}
        result.in_doubt = [id for id in marked.keys() - back.keys() if not isinstance(result.tried[id], Sent)]
        if back:
            self._give_back(result, back, committed)
        return result

    def _give_back(self, result: GroupResult, before: Mapping[str, Row], committed: datetime) -> None:
        """Take our marks back, with the failures that are charged; what somebody has touched since is theirs."""
        charged_before = result.charged

        def give_back(rows: Sequence[Row], now: datetime) -> Mapping[str, Mark]:
            ours = [before[row.id] for row in rows if row.sent_at == committed]
            charges = self._marks(result, ours, now)
            result.charged |= charged_before
            return {row.id: charges.get(row.id) or _as_it_was(row, result.tried.get(row.id)) for row in ours}

        back = self.mark(Group(result.group.topic, tuple(before)), give_back)
        if back.error is not None:
            result.charged = charged_before
            result.in_doubt += before

    def _publish(self, result: GroupResult, rows: Sequence[Row], locked: float) -> None:
        """Publish rows that were `locked` then; those that have failed before go singly, to take no others along."""
        if not rows:
            return
        singly = {row.id for row in rows if row.attempts or row.id in result.group.suspects}
        began = self._clock()
        outcomes = self._publisher.publish(result.group.topic, rows, self._publish_seconds, singly)
        ended = self._clock()
        result.tried |= outcomes
        result.phases[PUBLISH] = result.phases.get(PUBLISH, 0.0) + ended - began
        if (now := result.locked_at) is not None:
            for row in rows:
                if isinstance(outcomes.get(row.id), Sent):
                    due = max(row.created_at, row.available_at or row.created_at)
                    result.waited[row.id] = max(0.0, (now - due).total_seconds() + ended - locked)

    def _marks(self, result: GroupResult, ours: Sequence[Row], now: datetime) -> dict[str, Mark]:
        """Return what to write of the outcomes, and note it in the result."""
        result.charged, result.parked = {}, {}
        works = result.group.works or bool(result.published())
        marks: dict[str, Mark] = {}
        failed: dict[str, Parked | None] = {}  # ordering key to what is written of the tasks behind the failed one
        for row in ours:
            outcome = result.tried.get(row.id)
            if outcome is not None:
                result.outcomes[row.id] = outcome
            if isinstance(outcome, Sent):
                marks[row.id] = outcome
            elif row.ordering_key in failed:
                if parked := failed[row.ordering_key]:
                    marks[row.id] = result.parked[row.id] = parked
            elif isinstance(outcome, Failed):
                charged = None
                if is_charged(result.group, row.id, outcome, works=works):
                    charged = marks[row.id] = result.charged[row.id] = self._retries.charge(row, outcome, now)
                passed_over = charged is not None and charged.dead and self._pass_dead
                if passed_over and kind_of(outcome.reason) is Kind.CONTENT:
                    continue  # the next one may have a verdict of its own
                if row.ordering_key is not None and stops(outcome):
                    failed[row.ordering_key] = None if passed_over else self._behind(row, charged, now)
        result.traces |= _traces(ours, result.charged)
        return marks

    def _behind(self, head: Row, charged: Charged | None, now: datetime) -> Parked | None:
        """Return what to write of the tasks behind a failed one: nothing if it was an outage."""
        if charged is None or charged.available_at is None:
            return None
        return self._retries.park(head, charged.available_at, now)

    def _ours(self, result: GroupResult, rows: Sequence[Row], now: datetime) -> list[Row]:
        """Note what is not to be sent here, and return the rest, the tasks of a key in their order.

        What an earlier run tried in vain is tried afresh if somebody has written the row since.
        """
        versions = {row.id: Version.of(row) for row in rows}
        for id in result.failed():
            if id in versions and versions[id] != result.versions[id]:
                del result.tried[id]
        result.outcomes = taken(result.group, rows, now, result.published_versions(), pass_dead=self._pass_dead)
        left = {*result.outcomes, *result.group.wakes}
        ours = [row for row in in_order(result.group, rows) if row.id not in left]
        result.versions |= {row.id: versions[row.id] for row in ours if row.id not in result.tried}
        result.locked_at = now
        return ours

    def _claim(self, result: GroupResult, decide: Decide) -> datetime | None:
        """Let the store claim the group, and note how often and for how long."""
        since, phase = self._clock(), CLAIM

        def lap() -> None:
            result.phases[phase] = result.phases.get(phase, 0.0) + self._clock() - since

        def timed(rows: Sequence[Row], now: datetime) -> Mapping[str, Mark]:
            nonlocal since, phase
            phase = CLAIM  # of a run after an aborted one, whose commit counts as a part of it
            lap()
            result.runs += 1
            marks = decide(rows, now)
            since, phase = self._clock(), COMMIT
            return marks

        try:
            return self._store.claim((*result.group.ids, *result.group.wakes), timed)
        except StoreError as error:
            result.error, result.unsure = str(error), not isinstance(error, NotWritten)
            return None
        finally:
            lap()


def _traces(rows: Sequence[Row], ids: Collection[str]) -> dict[str, str]:
    """Return the trace ids that the messages of some rows carry."""
    found = {row.id: trace_id(row.data) for row in rows if row.id in ids}
    return {id: trace for id, trace in found.items() if trace is not None}


def _is_surely_not_taken(outcome: Outcome | None) -> bool:
    """Tell whether Pub/Sub has surely not got the message: it was not tried, or it was refused."""
    return outcome is None or (isinstance(outcome, Failed) and is_refused(outcome.reason))


def _as_it_was(row: Row, outcome: Outcome | None) -> Charged:
    """Return the row as it was before it was marked; only LastError, which is not read, says what happened since."""
    error = last_error(outcome) if isinstance(outcome, Failed) else None
    return Charged(row.attempts, row.available_at, row.expires_at, error)
