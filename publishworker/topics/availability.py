"""Decide whether this worker may publish to a topic now, by its topic controls, circuit breaker and rate limit.

Any program may write topic controls, so they are checked. The relay reads them with each discovery, and before it
starts a batch if they are older than 2 s.

A limit in AsynchronousTaskTopics applies to all live workers together. Each worker gets an equal part, but at least a
burst of one task and one task in flight.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random
from typing import NamedTuple

from outbox.base.schedules import OUTAGE_PROBE, TOPIC_PROBE
from outbox.table.controls import LIMITS, NO_CONTROLS, POLICY, TopicControls, problems, stated
from publishworker.host import Host
from publishworker.log import ThrottledLog, log
from publishworker.pubsub.failures import FailureKind, failure_kind
from publishworker.types import Candidate, Claim, Delivered, Failed, Kind

#: Max seconds between two reads of the topic controls while a topic is paused, waits for its rate limit, or has an open
#: circuit. Workers must apply an operator's change within 10 s.
CONTROLS_SECONDS = 8.0
#: Seconds after which a topic without tasks is forgotten: its open circuit is closed, and a gauge of it that has become
#: 0 is not sent any more. Until then it is sent, because a graph keeps the last value.
FORGET_TOPIC_SECONDS = 600.0


class CircuitState(NamedTuple):
    """A circuit that is not closed: why, the seconds since it opened, and the seconds until the next probe."""

    failure: Failed
    seconds_open: float
    seconds_to_probe: float

    @property
    def is_open(self) -> bool:
        """Tell whether the circuit is open. Otherwise it is half-open: its topic is or may be probed."""
        return self.seconds_to_probe > 0


class Topics:
    """The controls, circuits and limits of all topics. Only the thread of the turns uses it, except `paused`."""

    def __init__(self, host: Host) -> None:
        self.circuits = CircuitBreakers(host.random, host.clock)
        self._rate_limits = RateLimits(host.clock)
        self._throttled_log = ThrottledLog(host.clock)
        self._controls: Mapping[str, TopicControls] = {}
        #: The paused topics, and those with an invalid route.
        self.paused: frozenset[str] = frozenset()
        self._in_flight = Counter[str]()  # tasks by topic, from `permit` to `observe`

    def apply(self, controls: Mapping[str, TopicControls], workers: int) -> None:
        """Apply the valid controls. Each worker gets a part of a limit. The end of a pause makes a probe due."""
        valid, wrong = split_valid(controls)
        for (action, topic), sentence in wrong.items():
            self._throttled_log.log(action, topic, sentence)
        before, self._controls = self._controls, valid
        for topic in sorted(before.keys() | valid.keys()):
            self._change(topic, before.get(topic, NO_CONTROLS), valid.get(topic, NO_CONTROLS))
        self.paused = frozenset(topic for topic, each in valid.items() if each.paused)
        self._rate_limits.apply(valid, workers)
        self.circuits.forget_old()
        self._in_flight = +self._in_flight  # without topics that have none

    def _change(self, topic: str, before: TopicControls, now: TopicControls) -> None:
        if now.publish_to != before.publish_to:
            self.circuits.forget(topic)
            log.info("Messages of topic %s go to %s", topic, now.publish_to or topic, extra={"action": "routed"})
        if now.paused != before.paused:
            what = "paused" if now.paused else "resumed"
            log.info("Topic %s is %s", topic, what, extra={"action": what})
        is_asked = now.probe_requested_at not in (None, before.probe_requested_at)
        if is_asked or (before.paused and not now.paused):
            self.circuits.probe_now(topic)
        if (limits := stated(now, LIMITS)) != stated(before, LIMITS):
            text = ", ".join(limits) or "no limit"
            log.info("Topic %s, all live workers together: %s", topic, text, extra={"action": "limited"})

    @property
    def unavailable(self) -> frozenset[str]:
        """Return the topics that a poll does not read: paused, circuit open, or at a limit."""
        allowed = self._rate_limits.allowances(self._in_flight)
        return self.paused | self.circuits.suspended() | {topic for topic, tasks in allowed.items() if not tasks}

    def admit(self, candidates: Sequence[Candidate]) -> tuple[Sequence[Candidate], dict[str, int]]:
        """Return the candidates that may start, and the max tasks of each topic with a limit or an open circuit.

        A half-open circuit lets a probe pass.
        """
        candidates, probes = self.circuits.admit(candidates)
        allowed = self._rate_limits.allowances(self._in_flight)
        allowed |= {topic: min(tasks, allowed.get(topic, tasks)) for topic, tasks in probes.items()}
        return candidates, allowed

    def permit(self, claim: Claim) -> Claim | None:
        """Return the claim with the controls of its topic, or None if the topic is paused. Use tokens of the limit.

        If the circuit is not closed, the claim is a probe, and it names its suspects. A claim that only defers tasks
        starts in spite of a pause.
        """
        if claim.kind is Kind.DEFER:
            return self._with_controls(claim)
        if claim.topic in self.paused:
            return None
        self._rate_limits.use(claim.topic, len(claim.tasks))
        self._in_flight[claim.topic] += len(claim.tasks)
        return self.circuits.begin_batch(self._with_controls(claim))

    def observe(self, delivered: Delivered) -> "CircuitChange | None":
        """Update the topic from a reported batch. Return a change of its circuit, or a failed probe."""
        claim = delivered.claim
        if claim.kind is Kind.DEFER:
            return None
        self._in_flight[claim.topic] -= len(claim.tasks)
        self._rate_limits.use(claim.topic, len(delivered.answers) - len(claim.tasks))  # returns tokens of untried tasks
        if self._with_controls(claim).destination != claim.destination:
            return None  # the batch tells nothing about the Pub/Sub topic that messages go to now
        return self.circuits.observe(delivered)

    def admit_at_most_once(self, delivered: Delivered) -> Claim | None:
        """Return a claim of the at-most-once tasks that a reported batch has skipped, or None while they must wait."""
        is_probe = delivered.claim.probe
        return delivered.at_most_once() if is_probe or self.circuits.is_closed(delivered.claim.topic) else None

    def _with_controls(self, claim: Claim) -> Claim:
        return replace(claim, controls=self._controls.get(claim.topic, NO_CONTROLS))

    @property
    def seconds_to_change(self) -> float:
        """Return the seconds until a topic may be tried again, or until the controls must be read again."""
        waits = [self.circuits.seconds_to_probe(), self._rate_limits.seconds_to_next()]
        found = min((seconds for seconds in waits if seconds is not None), default=inf)
        return min(found, CONTROLS_SECONDS) if self.paused or found < inf else inf


#: The parts of a row that are checked together, each with the action of the log line, its fields and the sentence. An
#: invalid part is ignored and logged.
_PARTS = (
    ("limits", LIMITS, "The limits of topic {} are ignored"),
    ("policy", POLICY, "The retry policy of topic {} is ignored"),
    ("route", ("publish_to",), "Topic {} counts as paused"),
)


def split_valid(
    controls: Mapping[str, TopicControls],
) -> tuple[dict[str, TopicControls], dict[tuple[str, str], str]]:
    """Return the rows without their invalid parts, and a sentence for each of these, by action and topic.

    An invalid route pauses its topic.
    """
    valid: dict[str, TopicControls] = {}
    wrong: dict[tuple[str, str], str] = {}
    for topic, row in controls.items():
        valid[topic], found = row, problems(row)
        for action, names, sentence in _PARTS:
            if texts := [found[name] for name in names if name in found]:
                wrong[action, topic] = f"{sentence.format(topic)}: {'; '.join(texts)}. See AsynchronousTaskTopics"
                paused = valid[topic].paused or action == "route"
                valid[topic] = replace(valid[topic], paused=paused, **dict.fromkeys(names))
    return valid, wrong


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


@dataclass(frozen=True, slots=True)
class CircuitChange:
    """A circuit has opened or stays open because of `failure`, or has closed if it is None.

    `seconds`: since it opened.
    """

    topic: str
    failure: Failed | None
    seconds: float = 0.0


class CircuitBreakers:
    """The circuits of all topics, based on this worker's own results.

    Closed: the topic's tasks are published. A failure that is about the topic opens the circuit, unless the same batch
    has published a task. Open: the poll does not read the topic, so its tasks cost nothing, however many there are.
    Half-open: one task probes the topic. If it is published, the circuit closes. Each probe that fails doubles the time
    until the next one.

    A suspect is a task whose publish failed in an outage of its topic (Pub/Sub does not answer or has no quota). If it
    fails again while the circuit is closed, it may be the cause, so a failed attempt is recorded.
    """

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

        A probe is one task: in an outage, Pub/Sub may have accepted a task that seems to fail, and would get it twice.
        It is drawn at random. OUT-DELAY-1: otherwise a message that always times out, and is the first of its shard,
        would keep the circuit open.
        """
        admitted = [each for each in candidates if each.topic not in self._circuits]
        for topic in self._circuits:
            tasks = [each for each in candidates if each.topic == topic]
            admitted += [self._random.choice(tasks)] if tasks else []
        return admitted, dict.fromkeys(self._circuits, 1)

    def begin_batch(self, claim: Claim) -> Claim:
        """Return the claim with its suspects. If the circuit is not closed, the batch is a probe."""
        circuit = self._circuits.get(claim.topic)
        if circuit is not None:
            circuit.probe_at = inf
        suspects = frozenset(id for id in claim.ids if id in self._suspects)
        return replace(claim, probe=circuit is not None, suspects=suspects)

    def is_closed(self, topic: str) -> bool:
        return topic not in self._circuits

    def observe(self, delivered: Delivered) -> CircuitChange | None:
        """Update the circuit from a reported batch. Return a change if it opened or closed, or if a probe failed."""
        topic, probe, now = delivered.claim.topic, delivered.claim.probe, self._clock()
        circuit, published, failed = self._circuits.get(topic), delivered.published(), delivered.failed()
        kinds = {id: failure_kind(failure.reason) for id, failure in failed.items()}
        outage = [id for id, kind in kinds.items() if kind is FailureKind.OUTAGE]
        self._update_suspects(published, outage)
        if published:
            self._circuits.pop(topic, None)
            return None if circuit is None else CircuitChange(topic, None, now - circuit.since)
        of_topic = outage or [id for id, kind in kinds.items() if kind is FailureKind.TARGET]
        if not of_topic:
            if circuit is not None and probe and circuit.probe_at == inf:
                circuit.probe_at = now  # the probe says nothing about the topic, so another may follow
            return None
        if circuit is None:
            circuit = self._circuits[topic] = _Circuit(failed[of_topic[0]], now, OUTAGE_PROBE.first)
        elif probe:
            circuit.failure = failed[of_topic[0]]
            circuit.delay = (OUTAGE_PROBE if outage else TOPIC_PROBE).after(circuit.delay)
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


#: Tasks of a topic start only when its bucket has collected the tokens of this many seconds, or is full. Batches are
#: then fewer and larger.
MIN_REFILL_SECONDS = 0.2


@dataclass(slots=True)
class _Bucket:
    """A token bucket: one token a task, at most `burst`, refilled by `rate` a second."""

    rate: float
    burst: float
    tokens: float
    at: float

    def filled(self, now: float) -> float:
        return min(self.burst, self.tokens + (now - self.at) * self.rate)

    def missing(self, now: float) -> float:
        """Return how many tokens the topic needs at `now` before it may start tasks. Zero or less if it may."""
        return min(self.burst, max(1.0, self.rate * MIN_REFILL_SECONDS)) - self.filled(now)


class RateLimits:
    """The limits of all topics, as last read. It belongs to the relay's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}
        self._max_in_flight: dict[str, int] = {}

    def apply(self, controls: Mapping[str, TopicControls], workers: int) -> None:
        """Apply the limits. `workers` is the number of live workers. Each gets an equal part."""
        now = self._clock()
        buckets: dict[str, _Bucket] = {}
        for topic, limit in controls.items():
            if limit.rate_per_second is not None and limit.burst is not None:
                burst = max(1.0, limit.burst / workers)
                before = self._buckets.get(topic)
                tokens = burst if before is None else min(burst, before.filled(now))
                buckets[topic] = _Bucket(limit.rate_per_second / workers, burst, tokens, now)
        self._buckets = buckets
        self._max_in_flight = {
            topic: max(1, limit.max_in_flight // workers)
            for topic, limit in controls.items()
            if limit.max_in_flight is not None
        }

    def allowances(self, in_flight: Mapping[str, int]) -> dict[str, int]:
        """Return how many tasks of each limited topic may start now, in addition to those `in_flight`."""
        now = self._clock()
        allowed: dict[str, int] = {}
        for topic, bucket in self._buckets.items():
            allowed[topic] = int(bucket.filled(now)) if bucket.missing(now) <= 0 else 0
        for topic, limit in self._max_in_flight.items():
            left = max(0, limit - in_flight.get(topic, 0))
            allowed[topic] = min(left, allowed.get(topic, left))
        return allowed

    def use(self, topic: str, tasks: int) -> None:
        """Use tokens for tasks that start. A negative number returns tokens of tasks that were not published."""
        if (bucket := self._buckets.get(topic)) is not None:
            now = self._clock()
            bucket.tokens, bucket.at = min(bucket.burst, bucket.filled(now) - tasks), now

    def seconds_to_next(self) -> float | None:
        """Return the seconds until a topic has enough tokens to start tasks, or None if no topic waits."""
        now = self._clock()
        missing = ((bucket.missing(now), bucket.rate) for bucket in self._buckets.values())
        # A shorter wait may vanish when it is added to the clock: then turns follow each other without a pause.
        return min((max(tokens / rate, 1e-6) for tokens, rate in missing if tokens > 0), default=None)
