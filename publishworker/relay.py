"""One turn of the relay: poll, sample, claim, publish, mark, record."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from random import Random

from publishworker.batching import Limits, fitting, sample
from publishworker.delivery import Delivery
from publishworker.fair_share import FairShare
from publishworker.in_doubt import Doubts
from publishworker.in_flight import Flights
from publishworker.membership import Fleet
from publishworker.ordering import Fronts, Ordering
from publishworker.poll_size import Window
from publishworker.poller import Found, Poller
from publishworker.spanner.store import Store, StoreError
from publishworker.telemetry.metrics import Metrics
from publishworker.telemetry.reporter import Recorder
from publishworker.topics.circuit_breaker import Breakers
from publishworker.topics.rate_limit import Throttle
from publishworker.types import Candidate, Group, GroupResult, Key, Mark, Row, Sent, Turn

#: Seconds a turn waits for groups in flight before it ends without them, so that the loop can do what else is due.
LONGEST_TURN_WAIT = 0.25


class Relay:
    """Moves tasks from a store to their topics. Not thread-safe: one turn at a time."""

    def __init__(
        self,
        store: Store,
        delivery: Delivery,
        metrics: Metrics,
        fleet: Fleet,
        *,
        limits: Limits,
        look_further_seconds: float,
        random: Random,
        fair_share: float = 0.0,
        pass_dead: bool = False,
        stragglers: int = 0,
        patience: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Take groups within `limits`; read news and due tasks every `look_further_seconds`.

        With `pass_dead` a dead task does not hold back what follows in its ordering key.

        A turn ends when no more than `stragglers` of its groups are still in flight, or `patience` seconds after one
        has ended; a later turn reports them. `beat` is called before everything that may take long: a turn can be slow
        and healthy.
        """
        self._delivery = delivery
        self._limits = limits
        self._random = random
        self._stragglers = stragglers
        self._patience = patience
        self._clock = clock
        self._beat = beat
        window = Window(target=limits.groups * limits.group_size, shards=len(fleet.shards))
        self._throttle = Throttle(clock)
        self._poller = Poller(
            store, fleet, window, self._throttle, look_further_seconds=look_further_seconds, clock=clock
        )
        self._fair = FairShare(fair_share)
        self._behind = False  # whether the last sample left tasks behind
        self._crowded = False  # whether it did so because there are too many bytes in flight
        self._breakers = Breakers(random, clock, places=limits.groups)
        self._doubts = Doubts(clock)
        self._recorder = Recorder(metrics, clock)
        self._ordering = Ordering(store, limits, random, pass_dead=pass_dead)
        self._flights = Flights(delivery.deliver, clock, beat)

    def turn(self, stopping: Callable[[], bool] = lambda: False) -> Turn:
        """Do one turn and return its numbers; once `stopping` says so, take nothing more.

        Raises StoreError if the poll got no answer, or if tasks that were published before cannot be marked: nothing
        is published then but what is in flight. Raises StuckGroup if a group does not end.
        """
        self._beat()
        results = self._flights.landed(self._limits.groups)  # before the poll, which may fail for a long time
        changed = self._learn(results)
        self._flights.check()
        if not stopping():
            self._follow_up(results)  # before the sample: what is in flight is no candidate
        full = len(self._flights) >= self._limits.groups or self._flights.bytes() >= self._limits.bytes
        found = Found() if full else self._poll()
        self._beat()
        doubtful = self._mark_doubtful()
        self._beat()
        waits = full
        if not (full or stopping()):
            fronts = self._ordering.fronts(found, self._flights.keys(), doubtful)
            self._beat()
            groups = self._sample(fronts)
            for group in groups:
                self._start(group)
            waits = bool(groups) or fronts.busy or self._crowded
        later = self._landed(found) if waits else self._flights.landed(self._limits.groups)
        changed |= self._learn(later)
        results += later
        if not stopping():
            self._follow_up(later)
        return self._turn(found, results, waits=waits and not results, changed=changed)

    def finish(self) -> Turn:
        """Wait for everything in flight, try once to mark what is in doubt then, and return the numbers.

        Raises StuckGroup if a group does not end.
        """
        results: list[GroupResult] = []
        try:
            while len(self._flights):  # one by one: what has landed is told, whatever becomes of the others
                landed = self._flights.landed(len(self._flights) - 1)
                self._learn(landed)
                results += landed
            with contextlib.suppress(StoreError):  # it was said when the commit failed
                self._mark_doubtful()
            return self._turn(Found(), results)
        finally:
            self._recorder.end()

    @property
    def in_flight(self) -> int:
        """Return how many groups are in flight."""
        return len(self._flights)

    @property
    def topics(self) -> frozenset[str]:
        """Return the topics that have unsent tasks, or had some lately, but for paused ones."""
        return self._poller.topics

    def resting(self) -> Mapping[str, bool]:
        """Return the topics that do not work, and whether each rests now; else it is being probed, or may be."""
        return self._breakers.states()

    def _poll(self) -> Found:
        """Look for tasks that are not in flight, of topics that neither rest nor are at their limit."""
        in_flight = self._flights.ids()  # also those that end before the poll does: its snapshot may not show it
        allowed = self._throttle.allowances(self._flights.tasks_by_topic())
        held = self._breakers.resting() | {topic for topic, tasks in allowed.items() if not tasks}
        began = self._clock()
        found = self._poller.poll(self._fair.below, in_flight, held, self._breakers.depth())
        self._recorder.poll(self._clock() - began)
        return found

    def _sample(self, fronts: Fronts) -> list[Group]:
        """Cut candidates into as many groups as can start now; some may be a lower priority's share.

        Tasks that are held are parked, as they hide others from the poll: in a quarter of the places, or in half of
        them if there is nothing to send.
        """
        parks = list(fronts.held[: self._places_to_park(nothing_else=not fronts.candidates)])
        candidates, probes = self._breakers.probes(fronts.candidates, self._poller.cut_off)
        allowed = self._throttle.allowances(self._flights.tasks_by_topic())
        allowed |= {topic: min(tasks, allowed.get(topic, tasks)) for topic, tasks in probes.items()}
        fair = self._groups(self._fair.choose(candidates), parks, allowed)[: self._fair.groups]
        for group in fair:
            if group.topic in allowed:
                allowed[group.topic] -= len(group.ids)
        given = {id for group in fair for id in group.ids}
        rest = [each for each in candidates if each.id not in given]
        wanted = fair + self._groups(rest, parks + fair, allowed)
        groups = fitting(wanted, self._limits.bytes - self._flights.bytes(), alone=not len(self._flights))
        self._crowded = len(groups) < len(wanted)
        taken = sum(len(group.ids) for group in groups if group.topic not in allowed)
        # The others wait for more than for a place.
        free = sum(each.tasks for each in candidates if each.topic not in allowed)
        self._behind = bool(self._poller.cut_off - allowed.keys()) or taken < free
        highest = max((each.priority for each in candidates if each.available_at is None), default=None)
        self._fair.count(len(groups), min(len(fair), len(groups)), highest if self._behind else None)
        return parks + groups

    def _places_to_park(self, *, nothing_else: bool) -> int:
        most = self._limits.groups // (2 if nothing_else else 4)
        if most == 0:  # of one, two or three places one is given now and then
            most = int(nothing_else or self._random.random() < 1 / 4)
        free = self._limits.groups - len(self._flights)
        return max(0, min(free, most - self._flights.parking()))

    def _groups(
        self, candidates: Sequence[Candidate], beside: Sequence[Group], allowed: Mapping[str, int]
    ) -> list[Group]:
        flying = self._flights.by_topic() + Counter(group.topic for group in beside)
        return sample(candidates, self._limits, self._random, flying, allowed)

    def _start(self, group: Group) -> None:
        if group.parks:
            self._flights.start(group)
            return
        self._throttle.take(group.topic, len(group.ids))
        self._flights.start(self._breakers.start(group))

    def _landed(self, found: Found) -> list[GroupResult]:
        """Wait for groups in flight, and return the results of those that ended.

        Stragglers are left behind for the sake of tasks that wait: where none do, another poll would find nothing. If
        all that was found is of keys in flight, it would find the same: then at least one group has to land.
        """
        if not self._behind:
            return self._flights.landed(longest=LONGEST_TURN_WAIT)
        leave, flying = self._stragglers, self._flights.keys()
        if all(each.ordering_key and Key(each.topic, each.ordering_key) in flying for each in found.candidates):
            leave = min(leave, max(0, len(self._flights) - 1))
        return self._flights.landed(leave, self._patience, LONGEST_TURN_WAIT)

    def _learn(self, results: Sequence[GroupResult]) -> bool:
        """Tell of groups that have landed, after their commits, and take in what they say of their topics.

        Returns whether a topic rests from now on, or works again.
        """
        changes = []
        for result in results:
            topic = result.group.topic
            self._recorder.group(result)
            if result.error is not None:
                self._doubts.remember(topic, result.published_versions())
            if result.group.parks:
                continue
            self._throttle.take(topic, len(result.tried) - len(result.group.ids))
            if change := self._breakers.learn(result):
                self._recorder.change(change)
                changes.append(change)
        return bool(changes)

    def _follow_up(self, results: Sequence[GroupResult]) -> None:
        """Start groups of the tasks that must be marked before they are published."""
        for result in results:
            if (group := result.at_most_once()) and self._breakers.may_be_risked(result):
                self._start(group)

    def _mark_doubtful(self) -> frozenset[str]:
        """Mark what was published while its commit failed; return those ids, which are no candidates in this turn.

        Raises StoreError if that fails again: where commits are refused, publishing more would only make duplicates.
        """
        doubtful = self._doubts.ids()

        def published(rows: Sequence[Row], _now: datetime) -> Mapping[str, Mark]:
            return {row.id: Sent("") for row in rows if row.sent_at is None and self._doubts.is_about(row)}

        flights = Flights(lambda group: self._delivery.mark(group, published), self._clock, self._beat)
        for group in self._doubts.groups(self._limits):
            flights.start(group)
        errors = []
        while len(flights):
            for result in flights.landed(len(flights) - 1):
                if result.error is None:
                    self._doubts.forget(result.group.ids)
                else:
                    errors.append(result.error)
        if errors:
            raise StoreError(f"published tasks could not be marked: {errors[0]}")
        return doubtful

    def _turn(
        self,
        found: Found,
        results: Sequence[GroupResult],
        *,
        waits: bool = False,
        changed: bool = False,
    ) -> Turn:
        """Return the numbers of a turn, and tell of them."""
        held = [self._breakers.seconds_to_probe(), self._throttle.seconds_to_next()]
        committed = [result for result in results if result.error is None]
        turn = Turn(
            polled=len(found.candidates),
            published=sum(len(result.published()) for result in results),
            taken=sum(len(result.taken_by_others()) for result in results),
            failed=sum(len(result.failed()) for result in results),
            charged=sum(len(result.charged) for result in committed),
            parked=sum(len(result.parked) for result in committed),
            uncommitted=sum(len(result.published()) for result in results if result.error is not None),
            in_flight=len(self._flights),
            waits=waits,
            discovered=found.discovered or changed,
            again_in=min((seconds for seconds in held if seconds is not None), default=None),
        )
        self._recorder.turn(turn, worked=bool(results))
        return turn
