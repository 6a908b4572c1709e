"""One turn of the relay: poll, sample, claim, publish, mark, record."""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from random import Random

from publishworker import metrics as m
from publishworker.complaints import Complaints
from publishworker.doubts import Doubts
from publishworker.fairness import FairShare
from publishworker.fleet import Fleet
from publishworker.flights import Flights
from publishworker.metrics import Metrics
from publishworker.polling import Found, Poller
from publishworker.publisher import Publisher
from publishworker.sampling import Limits, sample
from publishworker.store import Decide, Store, StoreError
from publishworker.task import Candidate, Group, GroupResult, Outcome, Row, Sent, Taken, Turn
from publishworker.window import Window

_log = logging.getLogger("publishworker")

#: Seconds a turn waits for groups in flight before it ends without them, so that the loop can do what else is due.
LONGEST_TURN_WAIT = 0.25


class Relay:
    """Moves tasks from a store to a publisher. Not thread-safe: one turn at a time."""

    def __init__(
        self,
        store: Store,
        publisher: Publisher,
        metrics: Metrics,
        fleet: Fleet,
        *,
        limits: Limits,
        publish_seconds: float,
        look_further_seconds: float,
        random: Random,
        fair_share: float = 0.0,
        stragglers: int = 0,
        patience: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Take groups within `limits`; read news and due tasks every `look_further_seconds`.

        A turn ends when no more than `stragglers` of its groups are still in flight, or `patience` seconds after one
        has ended; a later turn reports them. `beat` is called before everything that may take long: a turn can be slow
        and healthy.
        """
        self._store = store
        self._publisher = publisher
        self._metrics = metrics
        self._limits = limits
        self._publish_seconds = publish_seconds
        self._random = random
        self._stragglers = stragglers
        self._patience = patience
        self._clock = clock
        self._beat = beat
        window = Window(target=limits.groups * limits.group_size, shards=len(fleet.shards))
        self._poller = Poller(store, fleet, window, look_further_seconds=look_further_seconds, clock=clock)
        self._fair = FairShare(fair_share)
        self._behind = False  # whether the last sample left tasks behind
        self._doubts = Doubts(clock)
        self._complaints = Complaints(clock)
        self._flights = Flights(self._relay, clock)

    def turn(self, stopping: Callable[[], bool] = lambda: False) -> Turn:
        """Do one turn and return its numbers; once `stopping` says so, take nothing more.

        Raises StoreError if the poll got no answer, or if tasks that were published before cannot be marked: nothing
        is published then but what is in flight.
        """
        self._beat()
        full = len(self._flights) >= self._limits.groups
        found = Found() if full else self._poll()
        self._beat()
        doubtful = self._mark_doubtful()
        self._beat()
        groups = [] if full or stopping() else self._sample(found.candidates, doubtful)
        for group in groups:
            self._flights.start(group)
        results = self._landed() if full or groups else self._flights.landed(self._limits.groups)
        waits = bool(full or groups) and not results
        return self._record(found, results, waits=waits)

    def finish(self) -> Turn:
        """Wait for everything in flight, try once to mark what is in doubt then, and return the numbers."""
        turn = self._record(Found(), self._flights.landed())
        with contextlib.suppress(StoreError):  # it was said when the commit failed
            self._mark_doubtful()
        return turn

    def _poll(self) -> Found:
        """Look for tasks that are not in flight."""
        in_flight = self._flights.ids()  # also those that end before the poll does: its snapshot may not show it
        return self._poller.poll(self._fair.below, in_flight)

    def _sample(self, candidates: Sequence[Candidate], doubtful: frozenset[str]) -> list[Group]:
        """Cut candidates into as many groups as can start now; some may be a lower priority's share."""
        candidates = [each for each in candidates if each.id not in doubtful]
        fair = self._groups(self._fair.choose(candidates), [])[: self._fair.groups]
        given = {id for group in fair for id in group.ids}
        groups = fair + self._groups([each for each in candidates if each.id not in given], fair)
        self._behind = self._poller.cut_off or sum(len(group.ids) for group in groups) < len(candidates)
        priorities = [each.priority for each in candidates if each.available_at is None]
        self._fair.count(len(groups), len(fair), max(priorities, default=None) if self._behind else None)
        return groups

    def _groups(self, candidates: Sequence[Candidate], beside: Sequence[Group]) -> list[Group]:
        flying = self._flights.by_topic() + Counter(group.topic for group in beside)
        return sample(candidates, self._limits, self._random, flying)

    def _landed(self) -> list[GroupResult]:
        """Wait for groups in flight, and return the results of those that ended.

        Stragglers are left behind for the sake of tasks that wait: where none do, another poll would find nothing.
        """
        if self._behind:
            return self._flights.landed(self._stragglers, self._patience, LONGEST_TURN_WAIT)
        return self._flights.landed(longest=LONGEST_TURN_WAIT)

    def _relay(self, group: Group) -> GroupResult:
        """Claim a group, publish what is still to be sent, mark it: one transaction, run again if it is aborted."""
        result = GroupResult(group)

        def publish(rows: Sequence[Row], now: datetime) -> Mapping[str, Outcome]:
            result.runs += 1
            result.outcomes = taken(group, rows, now)
            ours = [row for row in rows if row.id not in result.outcomes]
            result.created |= {row.id: row.created_at for row in ours}
            untried = [row for row in ours if row.id not in result.tried]
            if untried:
                result.tried |= self._publisher.publish(group.topic, untried, self._publish_seconds)
            result.outcomes |= {row.id: result.tried[row.id] for row in ours if row.id in result.tried}
            return result.outcomes

        self._claim(result, publish)
        return result

    def _mark_doubtful(self) -> frozenset[str]:
        """Mark what was published while its commit failed; return those ids, which are no candidates in this turn.

        Raises StoreError if that fails again: where commits are refused, publishing more would only make duplicates.
        """
        doubtful = self._doubts.ids()

        def mark(group: Group) -> GroupResult:
            def published(rows: Sequence[Row], _now: datetime) -> Mapping[str, Outcome]:
                return {row.id: Sent("") for row in rows if row.sent_at is None and self._doubts.is_about(row)}

            result = GroupResult(group)
            self._claim(result, published)
            return result

        flights = Flights(mark, self._clock)
        for group in self._doubts.groups(self._limits):
            flights.start(group)
        for result in flights.landed():
            if result.error is not None:
                raise StoreError(f"published tasks could not be marked: {result.error}")
            self._doubts.forget(result.group.ids)
        return doubtful

    def _claim(self, result: GroupResult, decide: Decide) -> None:
        try:
            self._store.claim(result.group.ids, decide)
        except StoreError as error:
            result.error = str(error)

    def _record(self, found: Found, results: Sequence[GroupResult], *, waits: bool = False) -> Turn:
        """Count and log what happened: the only place, and after every commit has returned."""
        for result in results:
            topic = result.group.topic
            published = result.published()
            self._metrics.count(m.PUBLISHED, len(published), topic=topic)
            self._metrics.count(m.ALREADY_PUBLISHED, len(result.taken_by_others()), topic=topic)
            self._metrics.count(m.ABORTED, max(0, result.runs - 1), topic=topic)
            for reason, count in Counter(failure.reason for failure in result.failed().values()).items():
                self._metrics.count(m.FAILED, count, topic=topic, reason=reason)
            if result.error is not None:
                self._metrics.count(m.UNCOMMITTED, len(published), topic=topic)
                self._doubts.remember(topic, {id: result.created[id] for id in published})
            self._complain(result)
        turn = Turn(
            polled=len(found.candidates),
            published=sum(len(result.published()) for result in results),
            taken=sum(len(result.taken_by_others()) for result in results),
            failed=sum(len(result.failed()) for result in results),
            uncommitted=sum(len(result.published()) for result in results if result.error is not None),
            in_flight=len(self._flights),
            waits=waits,
            discovered=found.discovered,
        )
        if results:
            _log.debug("one turn: %s", turn, extra={"action": "turn"})
        return turn

    def _complain(self, result: GroupResult) -> None:
        topic = result.group.topic
        if result.error is not None:
            self._complaints.say(
                "commit_failed",
                topic,
                f"a group of {len(result.group.ids)} tasks of {topic} was not committed "
                f"({len(result.published())} were published): {result.error}",
            )
        by_reason: dict[str, list[str]] = {}
        for id, failure in result.failed().items():
            by_reason.setdefault(failure.reason, []).append(id)
        for reason, ids in by_reason.items():
            which = ", ".join(ids[:5]) + (", ..." if len(ids) > 5 else "")
            error = result.failed()[ids[0]].error
            self._complaints.say(
                "publish_failed",
                f"{topic} {reason}",
                f"{len(ids)} tasks of {topic} were not sent and stay pending: {reason}: {error} ({which})",
            )


def taken(group: Group, rows: Sequence[Row], now: datetime) -> dict[str, Outcome]:
    """Return those of the group's tasks that are not ours to send: gone, sent by another worker, not due, moved."""
    outcomes: dict[str, Outcome] = dict.fromkeys(group.ids, Taken("gone"))
    for row in rows:
        if row.sent_at is not None:
            outcomes[row.id] = Taken("sent")
        elif not row.is_due(now):
            outcomes[row.id] = Taken("not_due")
        elif row.topic != group.topic:
            outcomes[row.id] = Taken("moved")
        else:
            del outcomes[row.id]
    return outcomes
