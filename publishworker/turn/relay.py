"""One turn of the relay, in the order in which data moves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from publishworker.delivery.claim import Claim, Delivered, counted_in_turn
from publishworker.delivery.delivery import Tools
from publishworker.delivery.marking import Marking
from publishworker.telemetry.metrics import Metrics
from publishworker.telemetry.reporter import Reporter
from publishworker.topics.availability import Topics
from publishworker.turn.in_flight import InFlight, Limits, Report, delivery_of
from publishworker.turn.membership import Membership
from publishworker.turn.ordering import Ordering, ResolvedKeys
from publishworker.turn.poller import Polled, Poller
from publishworker.turn.selection import Selection, Selector
from publishworker.types import CircuitState, Discovery, Next, Turn

#: Max seconds that a turn waits for in-flight batches. Then the turn ends, so that the worker can send its heartbeat.
MAX_TURN_WAIT_SECONDS = 0.25
#: If what the small tables had (live workers, layouts and topic controls) is older than this, the relay reads them
#: again before it polls or starts a batch. It is old after a long pause, a slow read, or a suspension of the process.
MAX_READ_AGE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The settings of a relay."""

    limits: Limits
    #: Seconds between two discoveries. A discovery reads the small tables (live workers, layouts and topic controls),
    #: and finds topics that polls do not read yet. The next poll also reads due tasks.
    discovery_seconds: float
    #: Part of the batches (0 to 0.5) for lower priorities while tasks of higher ones wait.
    fair_share: float = 0.0
    #: If more tasks are left to start, a turn waits until a batch has reported and at most this many of its batches
    #: have not. Otherwise it waits for all its batches. It never waits longer than MAX_TURN_WAIT_SECONDS.
    stragglers: int = 0
    #: How long batches may still mark published tasks after `finish` begins. Each batch tries at least once.
    shutdown_seconds: float = 0.0


class Relay:
    """Moves tasks from a store to their topics. Not thread-safe: one turn at a time."""

    def __init__(self, tools: Tools, metrics: Metrics, membership: Membership, options: Options) -> None:
        host, store, limits = tools.host, tools.reads, options.limits
        self._options = options
        self._clock, self._progress = host.clock, host.progress
        self._store = store
        self._membership = membership
        self._topics = Topics(host, places=limits.batches)
        self._poller = Poller(
            store, membership, host.clock, limits.batches * limits.batch_size, options.discovery_seconds
        )
        self._ordering = Ordering(store, limits, host.random, skip_dead=tools.skip_dead, clock=host.clock)
        self._selector = Selector(limits, self._topics, host.random, options.fair_share)
        #: When the last read of the small tables began. A new relay has read nothing, but before its first discovery it
        #: polls no topic.
        self._read_at = host.clock()
        #: True while the reads of a turn run, and afterwards if one of them failed.
        self._reads_incomplete = False
        #: Set by `wake`. The worker then ends its pause.
        self.woken = host.threads.event()
        #: What all batches share when they mark again.
        self.marking = Marking(host)
        self._in_flight = InFlight(lambda claim: delivery_of(claim, tools, self.marking), host)
        self._reporter = Reporter(metrics, host.clock, tools.trace)

    def turn(self, stopping: Callable[[], bool] = lambda: False) -> Turn:
        """Run one turn and return its counts. Start no batch once `stopping()` is true.

        Raises StoreError if Spanner does not answer a read, and StuckBatch if a batch does not end. After a
        StoreError, in-flight batches keep running, and a later turn reports them.
        """
        if self.woken.is_set():
            self.woken.clear()  # before the poll, so that an insert during this turn starts another turn
            self._poller.wake()
        reports = self._in_flight.collect()
        changed = self._observe(reports)  # circuits, limits, metrics and logs
        self._in_flight.raise_if_stuck()
        needs_no_discovery = self._discover_if_outdated()
        self._start_at_most_once(reports, stopping)
        polled = self._poll()  # reads nothing while no batch may start
        self._progress()
        ready = self._ordering.resolve(polled.candidates, self._in_flight.keys())  # sendable prefixes, blocked keys
        selection = self._select(polled, ready, stopping)
        started = self._start(selection.claims)
        if not needs_no_discovery:  # live workers, controls, unknown topics
            changed |= self._discover(found_nothing=not (started or polled.no_room))
        self._reads_incomplete = False
        waits = polled.no_room or started or ready.left_out or selection.is_byte_limited
        later = self._wait(selection) if waits and self._in_flight.delivering else self._in_flight.collect()
        changed |= self._observe(later)
        self._start_at_most_once(later, stopping)
        return self._turn_of(polled, reports + later, waits=waits, changed=changed)

    def wake(self) -> None:
        """Let the worker poll now, for example after this process has committed a task. Callable on any thread."""
        self.woken.set()

    def find_next_due(self) -> float | None:
        """Return the seconds until a task of an available topic is due, 0 if one is, or None. Raises StoreError."""
        return self._poller.find_next_due(self._topics.unavailable(self._in_flight.tasks_by_topic()))

    def finish(self) -> Turn:
        """Wait until all batches have ended. They may mark tasks for `shutdown_seconds` more. Raises StuckBatch."""
        reports: list[Report] = []
        self.marking.shut_down(self._options.shutdown_seconds)
        try:
            # OUT-LOSS-5. One by one, so that each is reported even if another one is stuck.
            while len(self._in_flight):
                ended = self._in_flight.wait_for_one()
                self._observe(ended)
                reports += ended
            return self._turn_of(Polled(), reports)
        finally:
            self._reporter.end()

    @property
    def in_flight(self) -> int:
        """Return the number of batches in flight, including those that only mark published tasks again."""
        return len(self._in_flight)

    @property
    def topics(self) -> frozenset[str]:
        """Return the topics that have, or recently had, unsent tasks, except paused ones."""
        return self._poller.topics - self._topics.paused

    @property
    def utilization(self) -> float:
        """Return the part of the worker's capacity that is used, from 0 to 1. Each batch takes one of its places."""
        return self._in_flight.places / self._options.limits.batches

    def circuit_states(self) -> Mapping[str, CircuitState]:
        """Return the circuits that are not closed, by topic."""
        return self._topics.circuit_states()

    def _observe(self, reports: Sequence[Report]) -> bool:
        """Report what batches did, update circuits and limits, and tell whether a circuit changed or a probe failed."""
        changed = False
        for report in reports:
            if not isinstance(report, Delivered):
                self._reporter.unmarked(report)
                continue
            self._reporter.delivered(report)
            if (change := self._topics.observe(report)) is not None:
                self._reporter.circuit(change)
                changed = True
        return changed

    def _start_at_most_once(self, reports: Sequence[Report], stopping: Callable[[], bool]) -> None:
        """Start at-most-once tasks in batches of their own.

        Only the claim reads the column AtMostOnce, no poll does.
        """
        if stopping():
            return
        delivered = (each for each in reports if isinstance(each, Delivered))
        admitted = [claim for each in delivered if (claim := self._topics.admit_at_most_once(each)) is not None]
        # A later poll finds those that get no place.
        if claims := admitted[: max(0, self._options.limits.batches - self._in_flight.places)]:
            self._refresh()
            self._start(claims)

    def _discover_if_outdated(self) -> bool:
        """After a turn that failed, read the small tables again. Otherwise discover, if they are outdated.

        Return True if a discovery has found no new topic or shard, so that this turn needs no other one.
        """
        failed, self._reads_incomplete = self._reads_incomplete, True  # `turn` resets it if no read raises StoreError
        if failed:
            self._read_at = float("-inf")
            self._refresh()
        return self._is_outdated() and not self._discover(at_once=True)

    def _is_outdated(self) -> bool:
        return self._clock() - self._read_at > MAX_READ_AGE_SECONDS

    def _refresh(self) -> None:
        """Read the small tables if the last read is outdated. Raises StoreError."""
        if self._is_outdated():
            self._progress()
            began = self._clock()
            self._apply(self._store.discover((), ()), began)

    def _discover(self, *, found_nothing: bool = False, at_once: bool = False) -> bool:
        """Discover if it is time, or `at_once`. Tell whether there are new topics or shards to poll."""
        self._progress()
        began, shards = self._clock(), self._membership.shards
        unavailable = self._topics.unavailable(self._in_flight.tasks_by_topic()) if at_once else ()
        found = self._poller.discover(found_nothing=found_nothing, at_once=at_once, unavailable=unavailable)
        if found is None:
            return False
        self._apply(found, began)
        return self._poller.discovers_again or shards != self._membership.shards

    def _apply(self, found: Discovery, began: float) -> None:
        self._membership.assign(found.workers)
        self._topics.apply(found.controls, self._membership.size)
        self._read_at = began

    def _poll(self) -> Polled:
        self._progress()
        limits = self._options.limits
        if not self._in_flight.has_room(limits):
            return Polled(no_room=True)
        # Batches that end during the poll are collected only after the selection. Otherwise the turn could start their
        # tasks again, because the poll may have returned them as unsent.
        in_flight = self._in_flight.ids()
        unavailable = self._topics.unavailable(self._in_flight.tasks_by_topic())
        began = self._clock()
        room = (limits.batches - self._in_flight.places) * limits.batch_size
        polled = self._poller.poll(room, self._selector.below_priority, in_flight, unavailable, self._topics.depths())
        self._reporter.poll(self._clock() - began)
        return polled

    def _select(self, polled: Polled, ready: ResolvedKeys, stopping: Callable[[], bool]) -> Selection:
        self._progress()
        if polled.no_room or stopping():
            return Selection(left_tasks=polled.no_room)
        if ready.candidates:
            self._refresh()  # the reads may have taken long
        return self._selector.select(ready, polled, self._in_flight)

    def _start(self, claims: Sequence[Claim]) -> bool:
        """Start the batches, except those that would publish to a paused topic. Tell whether any has started."""
        started = [claim for claim in claims if self._topics.may_start(claim)]
        for claim in started:
            self._in_flight.start(self._topics.start(claim))
        return bool(started)

    def _wait(self, selection: Selection) -> list[Report]:
        """Wait for the batches of this turn, except `stragglers` of them if more tasks are left to start."""
        max_left = self._options.stragglers if selection.left_tasks else 0
        return self._in_flight.wait_for_most(max_left, MAX_TURN_WAIT_SECONDS)

    def _turn_of(
        self, polled: Polled, reports: Sequence[Report], *, waits: bool = False, changed: bool = False
    ) -> Turn:
        delivered = [each for each in reports if isinstance(each, Delivered)]
        next_turn = Next.LATER
        if changed or polled.unread or any(each.has_written() for each in delivered):
            next_turn = Next.AT_ONCE
        elif waits and not delivered and self._in_flight.delivering:
            next_turn = Next.STILL_WAITING
        elif polled.candidates or polled.no_room or delivered or self.in_flight:
            next_turn = Next.SOON
        turn = replace(
            counted_in_turn(delivered),
            polled=len(polled.candidates),
            in_flight=self.in_flight,
            next=next_turn,
            seconds_to_retry=self._topics.seconds_until_available(),
            max_wait=self._topics.max_wait,
        )
        self._reporter.turn(turn, worked=bool(delivered))
        return turn
