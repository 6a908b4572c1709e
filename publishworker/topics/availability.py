"""Whether a topic may be published to now, by its topic controls, circuit breaker and rate limit.

Any program may write topic controls, so they are checked.

The relay reads the topic controls with each discovery, and before it starts a batch if they are older than 2 s.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, replace
from typing import NamedTuple, TypeVar

from outbox.table.controls import problems
from publishworker.delivery.claim import Claim, Delivered, Kind
from publishworker.host import Host
from publishworker.log import ThrottledLog, log
from publishworker.topics.circuit_breaker import CircuitBreakers, CircuitChange
from publishworker.topics.rate_limit import RateLimits
from publishworker.types import NO_POLICY, Candidate, CircuitState, TopicControls

#: Max seconds between two reads of the topic controls while a topic is paused, limited or has an open circuit. Workers
#: must apply within 10 s what an operator changes.
CONTROLS_SECONDS = 8.0


class Admitted(NamedTuple):
    """The candidates that may start, and the max tasks of each topic that has a limit or an open circuit."""

    candidates: Sequence[Candidate]
    allowed: dict[str, int]


class Topics:
    """What this worker has seen of its topics, and what it may send to them. It belongs to the relay's thread."""

    def __init__(self, host: Host, *, places: int = 8) -> None:
        self._circuits = CircuitBreakers(host.random, host.clock, places=places)
        self._limits = RateLimits(host.clock)
        self._throttled_log = ThrottledLog(host.clock)
        self._controls = TopicControls()

    def apply(self, controls: TopicControls, workers: int) -> None:
        """Apply the valid controls. Each worker gets a part of a limit. The end of a pause makes a probe due."""
        controls, wrong = valid(controls)
        for (kind, topic), sentence in wrong.items():
            self._throttled_log.log(kind, topic, sentence)
        before, self._controls = self._controls, controls
        for topic in sorted(topic for topic, _ in before.routes.items() ^ controls.routes.items()):
            self._circuits.forget(topic)
            to = controls.routes.get(topic, topic)
            log.info("Messages of topic %s go to %s", topic, to, extra={"action": "routed"})
        for topic in sorted(before.paused ^ controls.paused):
            what = "paused" if topic in controls.paused else "resumed"
            log.info("Topic %s is %s", topic, what, extra={"action": what})
            if what == "resumed":
                self._circuits.probe_now(topic)
        self._limits.apply(controls.limits, workers)
        self._circuits.forget_old()

    @property
    def paused(self) -> frozenset[str]:
        """Return the paused topics, and those with an invalid route."""
        return self._controls.paused

    def unavailable(self, in_flight: Mapping[str, int]) -> frozenset[str]:
        """Return the topics that a poll does not read: paused, circuit open, or at a limit with `in_flight` tasks."""
        allowed = self._limits.allowances(in_flight)
        return self.paused | self._circuits.suspended() | {topic for topic, tasks in allowed.items() if not tasks}

    def admit(
        self, candidates: Sequence[Candidate], in_flight: Mapping[str, int], cut_off: Collection[str]
    ) -> Admitted:
        """Return the candidates that may start, of a half-open circuit a probe. Topics in `cut_off` have more tasks."""
        candidates, probes = self._circuits.draw_probes(candidates, cut_off)
        allowed = self._limits.allowances(in_flight)
        allowed |= {topic: min(tasks, allowed.get(topic, tasks)) for topic, tasks in probes.items()}
        return Admitted(candidates, allowed)

    def may_start(self, claim: Claim) -> bool:
        """Tell whether the claim may start: its topic is not paused, or the claim only defers tasks."""
        return claim.kind is Kind.DEFER or claim.topic not in self.paused

    def start(self, claim: Claim) -> Claim:
        """Use tokens of the rate limit. Return the claim with its destination, its retry policy and its hints."""
        claim = self._with_controls(claim)
        if claim.kind is Kind.DEFER:
            return claim
        self._limits.take(claim.topic, len(claim.tasks))
        return self._circuits.start(claim)

    def observe(self, delivered: Delivered) -> CircuitChange | None:
        """Update the topic from a finished batch. Return a change of its circuit, or a failed probe."""
        claim = delivered.claim
        if claim.kind is Kind.DEFER:
            return None
        self._limits.take(claim.topic, len(delivered.answers) - len(claim.tasks))  # gives back the untried
        if self._with_controls(claim).destination != claim.destination:
            return None  # the batch tells nothing about the Pub/Sub topic that messages go to now
        return self._circuits.observe(delivered)

    def _with_controls(self, claim: Claim) -> Claim:
        policy = self._controls.policies.get(claim.topic, NO_POLICY)
        return replace(claim, publish_to=self._controls.routes.get(claim.topic), policy=policy)

    def admit_at_most_once(self, delivered: Delivered) -> Claim | None:
        """Return a claim of the at-most-once tasks that a finished batch has found, or None while they must wait."""
        claim = delivered.at_most_once()
        return claim if claim is not None and self._circuits.admit_at_most_once(delivered) else None

    def depths(self) -> Mapping[str, int]:
        """Return, by topic, how many rows a poll must read from each range to find a task that has not been a probe."""
        return self._circuits.depths()

    def circuit_states(self) -> Mapping[str, CircuitState]:
        """Return the circuits that are not closed, by topic."""
        return self._circuits.states()

    def seconds_until_available(self) -> float | None:
        """Return the seconds until a topic that is unavailable now may be tried again, or None."""
        waits = (self._circuits.seconds_to_probe(), self._limits.seconds_to_next())
        return min((seconds for seconds in waits if seconds is not None), default=None)

    @property
    def max_wait(self) -> float:
        """Return after how many seconds the controls are read again, to notice the end of a pause or limit."""
        waits = self.paused or self.seconds_until_available() is not None
        return CONTROLS_SECONDS if waits else math.inf


_V = TypeVar("_V")

_LIMIT_COLUMNS = ("RatePerSecond", "Burst", "MaxInFlight")
_POLICY_COLUMNS = ("MaxAttempts", "BackoffInitialSeconds", "BackoffMaxSeconds", "DeadAfterSeconds")


def valid(controls: TopicControls) -> tuple[TopicControls, dict[tuple[str, str], str]]:
    """Return the valid controls, and by kind and topic why others are not. An invalid route pauses its topic."""
    wrong: dict[tuple[str, str], str] = {}

    def keep(kind: str, values: Mapping[str, _V], columns: tuple[str, ...], sentence: str) -> dict[str, _V]:
        for topic, value in values.items():
            row = dict(zip(columns, (value,) if isinstance(value, str) else astuple(value), strict=True))  # type: ignore[call-overload]  # a dataclass
            if found := "; ".join(f"{column} {text}" for column, text in problems(row).items()):
                wrong[kind, topic] = f"{sentence.format(topic)}: {found}. See AsynchronousTaskTopics"
        return {topic: value for topic, value in values.items() if (kind, topic) not in wrong}

    limits = keep("limits", controls.limits, _LIMIT_COLUMNS, "The limits of topic {} are ignored")
    policies = keep("policy", controls.policies, _POLICY_COLUMNS, "The retry policy of topic {} is ignored")
    routes = keep("route", controls.routes, ("PublishTo",), "Topic {} counts as paused")
    paused = controls.paused | (controls.routes.keys() - routes.keys())
    return TopicControls(paused, limits, routes, policies), wrong
