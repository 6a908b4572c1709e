"""A circuit breaker for each topic.

Closed: the topic's tasks are published. A failure that is about the topic opens the circuit, unless the same batch has
published a task. Open: the poll does not read the topic, so its tasks cost nothing, however many there are. Half-open:
one small batch probes the topic. In an outage (Pub/Sub does not answer or has no quota) the probe is a single task,
drawn at random; if the topic is missing or refuses messages, it is up to ten tasks. A publish that succeeds closes the
circuit. A probe that fails doubles the time until the next one.

A suspect is a task whose publish failed in the topic's last outage. If it fails again while the topic accepts other
tasks, it may be the cause, so a failed attempt is recorded.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from publishworker.delivery.claim import Claim, Delivered, TopicHints
from publishworker.pubsub.errors import FailureKind, failure_kind
from publishworker.types import Candidate, CircuitState, Failed

#: Seconds until the first probe. Each further wait is twice as long.
FIRST_PROBE_SECONDS = 1.0
#: Max seconds between probes. An outage ends by itself, so it is probed often. A missing topic needs an operator.
MAX_TARGET_PROBE_SECONDS = 300.0
MAX_OUTAGE_PROBE_SECONDS = 10.0
#: Max tasks of one probe.
TARGET_PROBE_TASKS = 10
OUTAGE_PROBE_TASKS = 1
#: Max suspects of one topic, and of all topics together. Of one topic the oldest are forgotten. If all topics together
#: have more, the topic whose suspects changed longest ago loses all of them.
MAX_SUSPECTS = 1_000
#: Max IDs of probes that are remembered for one outage. Beyond this number any task can be drawn again.
MAX_PROBED = 100
#: Seconds after a probe became due. If the topic had no task to probe with, its circuit is then forgotten.
FORGET_SECONDS = 600.0
#: How many rows of each range a poll reads to find a task that has not been a probe. The number doubles with each poll.
FIRST_SEARCH_DEPTH, MAX_SEARCH_DEPTH = 250, 2_500
#: In an outage, a failed probe loses an at-most-once task, so the first draws of such tasks are skipped. After this
#: many skips, the next draw is published.
MAX_SKIPPED_DRAWS = 3


@dataclass(slots=True)
class _OpenCircuit:
    """Why a topic's circuit is open or half-open, since when, and when the topic may be probed."""

    failure: Failed
    since: float
    delay: float = FIRST_PROBE_SECONDS
    probe_at: float = 0.0
    probing: bool = False
    #: When a turn found no task to probe with. Other topics that are due then go first.
    no_task_at: float = 0.0
    #: IDs of earlier probes: other tasks go first.
    probed: set[str] = field(default_factory=set)
    #: How many rows of each range to read, because all polled tasks have been probes. 0: no more than for other topics.
    search_depth: int = 0
    #: How many draws of an at-most-once task were skipped.
    skipped_draws: int = 0

    @property
    def is_outage(self) -> bool:
        return failure_kind(self.failure.reason) is FailureKind.OUTAGE


@dataclass(frozen=True, slots=True)
class CircuitChange:
    """A circuit has opened or stays open because of `failure`, or has closed if it is None.

    `seconds`: since it opened.
    """

    topic: str
    failure: Failed | None
    seconds: float = 0.0


class CircuitBreakers:
    """The circuits of all topics, based on this worker's own results. Only the relay's thread uses it."""

    def __init__(self, random: Random, clock: Callable[[], float], *, places: int) -> None:
        """`places` is the max number of batches. Probes in an outage may time out, so they get at most a quarter."""
        self._random = random
        self._clock = clock
        self._max_probes = max(1, places // 4)
        self._open: dict[str, _OpenCircuit] = {}
        self._failing: set[str] = set()  # topics that had an outage and have published nothing since
        self._suspects: dict[str, dict[str, None]] = {}  # by topic, the IDs in order of insertion

    def forget_old(self) -> None:
        """Forget circuits that could not be probed for FORGET_SECONDS, because their topics had no task."""
        now = self._clock()
        for topic in [topic for topic, circuit in self._open.items() if now > circuit.probe_at + FORGET_SECONDS]:
            self.forget(topic)

    def forget(self, topic: str) -> None:
        """Close the circuit of a topic and forget its failures, because the topic was routed or they are old."""
        self._open.pop(topic, None)
        self._suspects.pop(topic, None)
        self._failing.discard(topic)

    def probe_now(self, topic: str) -> None:
        """Let the topic be probed at once, if its circuit is open: an operator may have removed the cause."""
        if circuit := self._open.get(topic):
            circuit.probe_at = self._clock()

    def suspended(self) -> frozenset[str]:
        """Return the topics that a poll does not read now: open, being probed, or without a place for a probe."""
        now = self._clock()
        held = {topic for topic, circuit in self._open.items() if circuit.probing or now < circuit.probe_at}
        probing = sum(circuit.is_outage and circuit.probing for circuit in self._open.values())
        due = [topic for topic, circuit in self._open.items() if circuit.is_outage and topic not in held]
        due.sort(key=lambda topic: max(self._open[topic].probe_at, self._open[topic].no_task_at))
        return frozenset(held).union(due[max(0, self._max_probes - probing) :])

    def states(self) -> dict[str, CircuitState]:
        """Return the circuits that are not closed, by topic."""
        now = self._clock()
        return {
            topic: CircuitState(circuit.failure, now - circuit.since, max(0.0, circuit.probe_at - now))
            for topic, circuit in self._open.items()
        }

    def depths(self) -> dict[str, int]:
        """Return, by topic, how many rows a poll must read from each range to find a task that has not been a probe."""
        now = self._clock()
        return {
            topic: circuit.search_depth
            for topic, circuit in self._open.items()
            if circuit.is_outage and circuit.search_depth and circuit.probe_at <= now
        }

    def seconds_to_probe(self) -> float | None:
        """Return the seconds until a suspended topic may be polled, or None if no topic waits for a probe."""
        now, suspended = self._clock(), self.suspended()
        waiting = [circuit for topic, circuit in self._open.items() if topic in suspended and not circuit.probing]
        seconds = (circuit.probe_at - now for circuit in waiting)
        return min((each if each > 0 else FIRST_PROBE_SECONDS for each in seconds), default=None)

    def draw_probes(
        self, candidates: Sequence[Candidate], cut_off: Collection[str] = frozenset()
    ) -> tuple[list[Candidate], dict[str, int]]:
        """Return the candidates that may be sent, and the max tasks of each topic whose circuit is not closed.

        In an outage, one task of the topic is drawn at random, if possible one that has not been a probe. Ready tasks
        go first, because due ones may have failed before, and messages that always time out must not keep the circuit
        open. If all tasks have been probes and the poll left others in the table (`cut_off`), the next polls read more.
        """
        if not self._open:
            return list(candidates), {}
        kept: list[Candidate] = []
        in_outage: defaultdict[str, list[Candidate]] = defaultdict(list)
        for each in candidates:
            circuit = self._open.get(each.topic)
            (in_outage[each.topic] if circuit and circuit.is_outage else kept).append(each)
        for topic in self._open.keys() - in_outage.keys() - self.suspended():
            self._open[topic].no_task_at = self._clock()
        for topic, tasks in in_outage.items():
            circuit = self._open[topic]
            untried = [each for each in tasks if each.id not in circuit.probed]
            if not untried and topic in cut_off:
                circuit.search_depth = min(max(2 * circuit.search_depth, FIRST_SEARCH_DEPTH), MAX_SEARCH_DEPTH)
            ready = [each for each in untried if each.available_at is None]
            kept.append(self._random.choice(ready or untried or tasks))
        return kept, {
            topic: OUTAGE_PROBE_TASKS if circuit.is_outage else TARGET_PROBE_TASKS
            for topic, circuit in self._open.items()
        }

    def begin_batch(self, claim: Claim) -> Claim:
        """Return the claim with its hints. If the circuit is not closed, the batch is a probe."""
        if (circuit := self._open.get(claim.topic)) is not None:
            circuit.probing = True
            return replace(claim, hints=TopicHints(probe=True))
        suspects = frozenset(self._suspects.get(claim.topic, {}).keys() & set(claim.ids))
        return replace(claim, hints=TopicHints(accepts=claim.topic not in self._failing, suspects=suspects))

    def admit_at_most_once(self, delivered: Delivered) -> bool:
        """Decide whether the at-most-once tasks that this batch has found are sent now.

        In an outage, a failed publish loses at-most-once tasks, so they wait until the circuit closes. After
        MAX_SKIPPED_DRAWS draws, one of them becomes the probe, because there may be no other task.
        """
        circuit = self._open.get(delivered.claim.topic)
        if circuit is None or not delivered.claim.hints.probe:
            return circuit is None
        if circuit.is_outage and circuit.skipped_draws < MAX_SKIPPED_DRAWS:
            circuit.skipped_draws += 1
            return False
        circuit.skipped_draws = 0
        return True

    def observe(self, delivered: Delivered) -> CircuitChange | None:
        """Update the circuit from a finished batch. Return a change if it opened or closed, or if a probe failed."""
        topic, probe = delivered.claim.topic, delivered.claim.hints.probe
        circuit = self._open.get(topic)
        if circuit is not None and probe:
            circuit.probing = False
            circuit.probed.update(delivered.claim.ids)
        published, failed = delivered.published(), delivered.failed()
        kinds = {id: failure_kind(failure.reason) for id, failure in failed.items()}
        if published:
            self._failing.discard(topic)
        elif FailureKind.OUTAGE in kinds.values():
            self._failing.add(topic)
        outage = [id for id, kind in kinds.items() if kind is FailureKind.OUTAGE and id not in delivered.recorded]
        self._update_suspects(topic, published, [] if probe else outage, is_new=circuit is None)
        if published:
            self._open.pop(topic, None)
            return None if circuit is None else CircuitChange(topic, None, self._clock() - circuit.since)
        about_topic = [id for id, kind in kinds.items() if kind is FailureKind.TARGET or id in outage]
        return self._fail(topic, failed[about_topic[0]], probe=probe) if about_topic else None

    def _fail(self, topic: str, failure: Failed, *, probe: bool) -> CircuitChange | None:
        now, circuit = self._clock(), self._open.get(topic)
        if circuit is None:
            circuit = self._open[topic] = _OpenCircuit(failure, now)
        elif probe and now >= circuit.probe_at:  # of several probes, only the first failure counts
            circuit.failure, circuit.delay = failure, 2 * circuit.delay
        else:
            return None
        circuit.delay = min(circuit.delay, MAX_OUTAGE_PROBE_SECONDS if circuit.is_outage else MAX_TARGET_PROBE_SECONDS)
        circuit.probe_at = now + circuit.delay * self._random.uniform(0.85, 1)
        if len(circuit.probed) > MAX_PROBED:
            circuit.probed.clear()
            circuit.search_depth = 0
        return CircuitChange(topic, failure, now - circuit.since)

    def _update_suspects(self, topic: str, published: Iterable[str], failed: Sequence[str], *, is_new: bool) -> None:
        """Remove published tasks, and add those that failed. A new outage replaces all suspects."""
        suspects = self._suspects.pop(topic, {})
        for id in published:
            suspects.pop(id, None)
        if failed:
            suspects = dict.fromkeys([*(() if is_new else suspects), *failed][-MAX_SUSPECTS:])
        if suspects:
            self._suspects[topic] = suspects  # at the end: the topics are in the order of their last change
        while sum(map(len, self._suspects.values())) > MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]
