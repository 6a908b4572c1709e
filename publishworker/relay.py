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
from publishworker.in_doubt import InDoubt
from publishworker.in_flight import InFlight
from publishworker.membership import Membership
from publishworker.ordering import Ordering, ResolvedKeys
from publishworker.poll_size import PollSize
from publishworker.poller import Found, Poller
from publishworker.spanner.store import Store, StoreError
from publishworker.telemetry.metrics import Metrics
from publishworker.telemetry.reporter import Reporter
from publishworker.topics.circuit_breaker import CircuitBreakers
from publishworker.topics.rate_limit import RateLimits
from publishworker.types import Batch, BatchResult, Candidate, Key, LockedRow, Mark, Sent, Turn

#: Seconds a turn waits for batches in flight before it ends without them, so that the loop can do what else is due.
MAX_TURN_WAIT_SECONDS = 0.25


class Relay:
    """Moves tasks from a store to their topics. Not thread-safe: one turn at a time."""

    def __init__(
        self,
        store: Store,
        delivery: Delivery,
        metrics: Metrics,
        membership: Membership,
        *,
        limits: Limits,
        discovery_seconds: float,
        random: Random,
        fair_share: float = 0.0,
        skip_dead: bool = False,
        stragglers: int = 0,
        patience: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Take batches within `limits`; read news and due tasks every `discovery_seconds`.

        With `skip_dead` a dead task does not hold back what follows in its ordering key.

        A turn ends when no more than `stragglers` of its batches are still in flight, or `patience` seconds after one
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
        window = PollSize(target=limits.batches * limits.batch_size, shards=len(membership.shards))
        self._rate_limits = RateLimits(clock)
        self._poller = Poller(
            store, membership, window, self._rate_limits, discovery_seconds=discovery_seconds, clock=clock
        )
        self._fair_share = FairShare(fair_share)
        self._behind = False  # whether the last sample left tasks behind
        self._crowded = False  # whether it did so because there are too many bytes in flight
        self._circuits = CircuitBreakers(random, clock, places=limits.batches)
        self._in_doubt = InDoubt(clock)
        self._reporter = Reporter(metrics, clock)
        self._ordering = Ordering(store, limits, random, skip_dead=skip_dead)
        self._in_flight = InFlight(delivery.deliver, clock, beat)

    def turn(self, stopping: Callable[[], bool] = lambda: False) -> Turn:
        """Do one turn and return its numbers; once `stopping` says so, take nothing more.

        Raises StoreError if the poll got no answer, or if tasks that were published before cannot be marked: nothing
        is published then but what is in flight. Raises StuckBatch if a batch does not end.
        """
        self._beat()
        results = self._in_flight.collect(self._limits.batches)  # before the poll, which may fail for a long time
        changed = self._learn(results)
        self._in_flight.check()
        if not stopping():
            self._start_at_most_once(results)  # before the sample: what is in flight is no candidate
        full = len(self._in_flight) >= self._limits.batches or self._in_flight.bytes() >= self._limits.bytes
        found = Found() if full else self._poll()
        self._beat()
        in_doubt = self._mark_doubtful()
        self._beat()
        waits = full
        if not (full or stopping()):
            key_heads = self._ordering.key_heads(found, self._in_flight.keys(), in_doubt)
            self._beat()
            batches = self._sample(key_heads)
            for batch in batches:
                self._start(batch)
            waits = bool(batches) or key_heads.busy or self._crowded
        later = self._wait(found) if waits else self._in_flight.collect(self._limits.batches)
        changed |= self._learn(later)
        results += later
        if not stopping():
            self._start_at_most_once(later)
        return self._turn(found, results, waits=waits and not results, changed=changed)

    def finish(self) -> Turn:
        """Wait for everything in flight, try once to mark what is in doubt then, and return the numbers.

        Raises StuckBatch if a batch does not end.
        """
        results: list[BatchResult] = []
        try:
            while len(self._in_flight):  # one by one: what has landed is told, whatever becomes of the others
                landed = self._in_flight.collect(len(self._in_flight) - 1)
                self._learn(landed)
                results += landed
            with contextlib.suppress(StoreError):  # it was said when the commit failed
                self._mark_doubtful()
            return self._turn(Found(), results)
        finally:
            self._reporter.end()

    @property
    def in_flight(self) -> int:
        """Return how many batches are in flight."""
        return len(self._in_flight)

    @property
    def topics(self) -> frozenset[str]:
        """Return the topics that have unsent tasks, or had some lately, but for paused ones."""
        return self._poller.topics

    def resting(self) -> Mapping[str, bool]:
        """Return the topics that do not work, and whether each rests now; else it is being probed, or may be."""
        return self._circuits.states()

    def _poll(self) -> Found:
        """Look for tasks that are not in flight, of topics that neither rest nor are at their limit."""
        in_flight = self._in_flight.ids()  # also those that end before the poll does: its snapshot may not show it
        allowed = self._rate_limits.allowances(self._in_flight.tasks_by_topic())
        held = self._circuits.resting() | {topic for topic, tasks in allowed.items() if not tasks}
        began = self._clock()
        found = self._poller.poll(self._fair_share.below, in_flight, held, self._circuits.depth())
        self._reporter.poll(self._clock() - began)
        return found

    def _sample(self, key_heads: ResolvedKeys) -> list[Batch]:
        """Cut candidates into as many batches as can start now; some may be a lower priority's share.

        Tasks that are held are deferred, as they hide others from the poll: in a quarter of the places, or in half of
        them if there is nothing to send.
        """
        defers = list(key_heads.held[: self._places_to_defer(nothing_else=not key_heads.candidates)])
        candidates, probes = self._circuits.probes(key_heads.candidates, self._poller.cut_off)
        allowed = self._rate_limits.allowances(self._in_flight.tasks_by_topic())
        allowed |= {topic: min(tasks, allowed.get(topic, tasks)) for topic, tasks in probes.items()}
        fair = self._batches(self._fair_share.choose(candidates), defers, allowed)[: self._fair_share.batches]
        for batch in fair:
            if batch.topic in allowed:
                allowed[batch.topic] -= len(batch.ids)
        given = {id for batch in fair for id in batch.ids}
        rest = [each for each in candidates if each.id not in given]
        wanted = fair + self._batches(rest, defers + fair, allowed)
        batches = fitting(wanted, self._limits.bytes - self._in_flight.bytes(), alone=not len(self._in_flight))
        self._crowded = len(batches) < len(wanted)
        taken = sum(len(batch.ids) for batch in batches if batch.topic not in allowed)
        # The others wait for more than for a place.
        free = sum(each.tasks for each in candidates if each.topic not in allowed)
        self._behind = bool(self._poller.cut_off - allowed.keys()) or taken < free
        highest = max((each.priority for each in candidates if each.available_at is None), default=None)
        self._fair_share.count(len(batches), min(len(fair), len(batches)), highest if self._behind else None)
        return defers + batches

    def _places_to_defer(self, *, nothing_else: bool) -> int:
        most = self._limits.batches // (2 if nothing_else else 4)
        if most == 0:  # of one, two or three places one is given now and then
            most = int(nothing_else or self._random.random() < 1 / 4)
        free = self._limits.batches - len(self._in_flight)
        return max(0, min(free, most - self._in_flight.deferring()))

    def _batches(
        self, candidates: Sequence[Candidate], beside: Sequence[Batch], allowed: Mapping[str, int]
    ) -> list[Batch]:
        in_flight = self._in_flight.by_topic() + Counter(batch.topic for batch in beside)
        return sample(candidates, self._limits, self._random, in_flight, allowed)

    def _start(self, batch: Batch) -> None:
        if batch.defers:
            self._in_flight.start(batch)
            return
        self._rate_limits.take(batch.topic, len(batch.ids))
        self._in_flight.start(self._circuits.start(batch))

    def _wait(self, found: Found) -> list[BatchResult]:
        """Wait for batches in flight, and return the results of those that ended.

        Stragglers are left behind for the sake of tasks that wait: where none do, another poll would find nothing. If
        all that was found is of keys in flight, it would find the same: then at least one batch has to land.
        """
        if not self._behind:
            return self._in_flight.collect(longest=MAX_TURN_WAIT_SECONDS)
        leave, in_flight = self._stragglers, self._in_flight.keys()
        if all(each.ordering_key and Key(each.topic, each.ordering_key) in in_flight for each in found.candidates):
            leave = min(leave, max(0, len(self._in_flight) - 1))
        return self._in_flight.collect(leave, self._patience, MAX_TURN_WAIT_SECONDS)

    def _learn(self, results: Sequence[BatchResult]) -> bool:
        """Tell of batches that have landed, after their commits, and take in what they say of their topics.

        Returns whether a topic rests from now on, or works again.
        """
        changes = []
        for result in results:
            topic = result.batch.topic
            self._reporter.batch(result)
            if result.error is not None:
                self._in_doubt.remember(topic, result.published_versions())
            if result.batch.defers:
                continue
            self._rate_limits.take(topic, len(result.tried) - len(result.batch.ids))
            if change := self._circuits.learn(result):
                self._reporter.change(change)
                changes.append(change)
        return bool(changes)

    def _start_at_most_once(self, results: Sequence[BatchResult]) -> None:
        """Start batches of the tasks that must be marked before they are published."""
        for result in results:
            if (batch := result.at_most_once()) and self._circuits.may_be_risked(result):
                self._start(batch)

    def _mark_doubtful(self) -> frozenset[str]:
        """Mark what was published while its commit failed; return those ids, which are no candidates in this turn.

        Raises StoreError if that fails again: where commits are refused, publishing more would only make duplicates.
        """
        in_doubt = self._in_doubt.ids()

        def published(rows: Sequence[LockedRow], _now: datetime) -> Mapping[str, Mark]:
            return {row.id: Sent("") for row in rows if row.sent_at is None and self._in_doubt.is_about(row)}

        in_flight_batches = InFlight(lambda batch: self._delivery.mark(batch, published), self._clock, self._beat)
        for batch in self._in_doubt.batches(self._limits):
            in_flight_batches.start(batch)
        errors = []
        while len(in_flight_batches):
            for result in in_flight_batches.collect(len(in_flight_batches) - 1):
                if result.error is None:
                    self._in_doubt.forget(result.batch.ids)
                else:
                    errors.append(result.error)
        if errors:
            raise StoreError(f"published tasks could not be marked: {errors[0]}")
        return in_doubt

    def _turn(
        self,
        found: Found,
        results: Sequence[BatchResult],
        *,
        waits: bool = False,
        changed: bool = False,
    ) -> Turn:
        """Return the numbers of a turn, and tell of them."""
        held = [self._circuits.seconds_to_probe(), self._rate_limits.seconds_to_next()]
        committed = [result for result in results if result.error is None]
        turn = Turn(
            polled=len(found.candidates),
            published=sum(len(result.published()) for result in results),
            taken=sum(len(result.taken_by_others()) for result in results),
            failed=sum(len(result.failed()) for result in results),
            recorded=sum(len(result.recorded) for result in committed),
            deferred=sum(len(result.deferred) for result in committed),
            uncommitted=sum(len(result.published()) for result in results if result.error is not None),
            in_flight=len(self._in_flight),
            waits=waits,
            discovered=found.discovered or changed,
            again_in=min((seconds for seconds in held if seconds is not None), default=None),
        )
        self._reporter.turn(turn, worked=bool(results))
        return turn
