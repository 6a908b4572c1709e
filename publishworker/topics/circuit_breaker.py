"""A circuit breaker for each topic.

Closed: the topic's tasks are published. A failure that is about the topic opens the circuit, unless the same batch has
published a task. Open: the poll does not read the topic, so its tasks cost nothing, however many there are. Half-open:
one small batch probes the topic. A publish that succeeds closes the circuit. A probe that fails doubles the time until
the next one.

A suspect is a task whose publish failed in an outage of its topic (Pub/Sub does not answer or has no quota). If it
fails again while the circuit is closed, it may be the cause, so a failed attempt is recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random

from outbox.base.schedules import OUTAGE_PROBE, TOPIC_PROBE
from publishworker.delivery.claim import Claim, Delivered, TopicHints
from publishworker.pubsub.failures import FailureKind, failure_kind
from publishworker.types import FORGET_TOPIC_SECONDS, Candidate, CircuitState, Failed

#: Max tasks of one probe. In an outage, Pub/Sub may have accepted a task that seems to fail, and would get it twice.
TARGET_PROBE_TASKS = 10
OUTAGE_PROBE_TASKS = 1
#: Max suspects of all topics together. The oldest are forgotten.
MAX_SUSPECTS = 1_000


@dataclass(slots=True)
class _Circuit:
    """Why a circuit is open or half-open, since when, and when its topic may be probed: inf during a probe."""

    failure: Failed
    since: float
    #: Seconds from the last failure to the next probe.
    delay: float
    probe_at: float = inf
    #: The tasks of the last probe. If the topic has others, the next probe in an outage is one of those.
    last_probe: Sequence[str] = ()

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

    def __init__(self, random: Random, clock: Callable[[], float]) -> None:
        self._random = random
        self._clock = clock
        self._circuits: dict[str, _Circuit] = {}  # by topic, unless closed
        self._suspects: dict[str, None] = {}  # task IDs, in order of insertion

    def forget_old(self) -> None:
        """Forget circuits that could not be probed for FORGET_TOPIC_SECONDS, because their topics had no task."""
        oldest = self._clock() - FORGET_TOPIC_SECONDS
        self._circuits = {topic: each for topic, each in self._circuits.items() if each.probe_at >= oldest}

    def forget(self, topic: str) -> None:
        """Close the circuit of a topic, because the topic was routed."""
        self._circuits.pop(topic, None)

    def probe_now(self, topic: str) -> None:
        """Let the topic be probed at once, if its circuit is open: an operator may have removed the cause."""
        if circuit := self._circuits.get(topic):
            circuit.probe_at = self._clock()

    def suspended(self) -> frozenset[str]:
        """Return the topics that a poll does not read now: those that are open, or being probed."""
        now = self._clock()
        return frozenset(topic for topic, circuit in self._circuits.items() if now < circuit.probe_at)

    def states(self) -> dict[str, CircuitState]:
        """Return the circuits that are not closed, by topic."""
        now = self._clock()
        waits = {topic: circuit.probe_at - now for topic, circuit in self._circuits.items()}
        return {
            topic: CircuitState(circuit.failure, now - circuit.since, waits[topic] if 0 < waits[topic] < inf else 0.0)
            for topic, circuit in self._circuits.items()
        }

    def seconds_to_probe(self) -> float | None:
        """Return the seconds until an open topic may be polled, or None if no topic waits for a probe."""
        return min((state.seconds_to_probe for state in self.states().values() if state.is_open), default=None)

    def admit(self, candidates: Sequence[Candidate]) -> tuple[Sequence[Candidate], dict[str, int]]:
        """Return the candidates that may be sent, and the max tasks of each topic whose circuit is not closed.

        In an outage, one task of the topic is drawn at random, but not that of the last probe. OUT-DELAY-1: otherwise a
        message that always times out, and is the first of its shard, would keep the circuit open.
        """
        outages = {topic for topic, circuit in self._circuits.items() if circuit.is_outage}
        admitted = [each for each in candidates if each.topic not in outages]
        for topic in outages:
            tasks = [each for each in candidates if each.topic == topic]
            others = [each for each in tasks if each.id not in self._circuits[topic].last_probe]
            admitted += [self._random.choice(others or tasks)] if tasks else []
        probes = {topic: OUTAGE_PROBE_TASKS if topic in outages else TARGET_PROBE_TASKS for topic in self._circuits}
        return admitted, probes

    def begin_batch(self, claim: Claim) -> Claim:
        """Return the claim with its hints. If the circuit is not closed, the batch is a probe."""
        circuit = self._circuits.get(claim.topic)
        if circuit is not None:
            circuit.probe_at, circuit.last_probe = inf, claim.ids
        suspects = frozenset(id for id in claim.ids if id in self._suspects)
        return replace(claim, hints=TopicHints(circuit is not None, suspects))

    def is_closed(self, topic: str) -> bool:
        """Tell whether the topic's tasks are published."""
        return topic not in self._circuits

    def observe(self, delivered: Delivered) -> CircuitChange | None:
        """Update the circuit from a finished batch. Return a change if it opened or closed, or if a probe failed."""
        topic, probe, now = delivered.claim.topic, delivered.claim.hints.probe, self._clock()
        circuit, published, failed = self._circuits.get(topic), delivered.published(), delivered.failed()
        kinds = {id: failure_kind(failure.reason) for id, failure in failed.items()}
        outage = [id for id, kind in kinds.items() if kind is FailureKind.OUTAGE]
        self._update_suspects(published, outage)
        if published:
            self._circuits.pop(topic, None)
            return None if circuit is None else CircuitChange(topic, None, now - circuit.since)
        about_topic = outage or [id for id, kind in kinds.items() if kind is FailureKind.TARGET]
        if not about_topic:
            if circuit is not None and probe and circuit.probe_at == inf:
                circuit.probe_at = now  # the probe says nothing about the topic, so another may follow
            return None
        if circuit is None:
            circuit = self._circuits[topic] = _Circuit(failed[about_topic[0]], now, OUTAGE_PROBE.first)
        elif probe and not now < circuit.probe_at < inf:  # of several probes, only the first failure counts
            circuit.failure = failed[about_topic[0]]
            circuit.delay = (OUTAGE_PROBE if circuit.is_outage else TOPIC_PROBE).after(circuit.delay)
        else:
            return None
        circuit.probe_at = now + circuit.delay * self._random.uniform(0.85, 1)
        return CircuitChange(topic, circuit.failure, now - circuit.since)

    def _update_suspects(self, published: Sequence[str], failed: Sequence[str]) -> None:
        """Remove published tasks, and add those that failed in an outage.

        OUT-DELAY-1: a suspect shares no request, so a message that always times out delays no other task.
        """
        for id in published:
            self._suspects.pop(id, None)
        self._suspects |= dict.fromkeys(failed)
        for id in [*self._suspects][: max(0, len(self._suspects) - MAX_SUSPECTS)]:
            del self._suspects[id]
