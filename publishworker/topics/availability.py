"""May a topic be published to now? Topic controls, circuit breakers and rate limits, asked together."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from random import Random

from publishworker.delivery.claim import Claim, Kind
from publishworker.delivery.delivered import Delivered
from publishworker.topics.circuit_breaker import CircuitBreakers, CircuitChange
from publishworker.topics.rate_limit import RateLimits
from publishworker.types import TopicControls

_log = logging.getLogger("publishworker")

#: Max seconds between two reads of the topic controls while a topic is paused or waits for its rate limit: an operator
#: may end that, and workers apply each change within 10 s.
CONTROLS_SECONDS = 8.0


class Topics:
    """What this worker has seen of its topics, and what it may send to them. It belongs to the relay's thread."""

    def __init__(self, random: Random, clock: Callable[[], float] = time.monotonic, *, places: int = 8) -> None:
        """Begin with closed circuits and without limits; `places` is how many batches may be in flight."""
        self.circuits = CircuitBreakers(random, clock, places=places)
        self.rate_limits = RateLimits(clock)
        self.paused: frozenset[str] = frozenset()

    def control(self, controls: TopicControls, workers: int) -> None:
        """Apply pauses and limits. Each of the live `workers` gets an equal part of a limit."""
        for topics, what in ((controls.paused - self.paused, "paused"), (self.paused - controls.paused, "resumed")):
            for topic in sorted(topics):
                _log.info("Topic %s is %s", topic, what, extra={"action": what})
        self.paused = controls.paused
        self.rate_limits.learn(controls.limits, workers)

    def unavailable(self, in_flight: Mapping[str, int]) -> frozenset[str]:
        """Return the topics that a poll does not read: paused, circuit open, or at a limit with `in_flight` tasks."""
        allowed = self.rate_limits.allowances(in_flight)
        return self.paused | self.circuits.suspended() | {topic for topic, tasks in allowed.items() if not tasks}

    def prepare(self, claim: Claim) -> Claim:
        """Return the claim as a probe or with its suspects, and use tokens of its rate limit."""
        if claim.kind is Kind.DEFER:
            return claim
        self.rate_limits.take(claim.topic, len(claim.tasks))
        return self.circuits.prepare(claim)

    def observe(self, delivered: Delivered) -> CircuitChange | None:
        """Update the topic from a finished batch. Return a change of its circuit, or a failed probe."""
        claim = delivered.claim
        if claim.kind is Kind.DEFER:
            return None
        self.rate_limits.take(claim.topic, len(delivered.answers) - len(claim.tasks))  # gives back the untried
        return self.circuits.observe(delivered)

    def at_most_once(self, delivered: Delivered) -> Claim | None:
        """Return a claim of the at-most-once tasks that a finished batch has found, or None while they must wait."""
        claim = delivered.at_most_once()
        return claim if claim is not None and self.circuits.may_send_at_most_once(delivered) else None

    def seconds_until_available(self) -> float | None:
        """Return the seconds until a topic that is unavailable now may be tried again, or None."""
        waits = (self.circuits.seconds_to_probe(), self.rate_limits.seconds_to_next())
        return min((seconds for seconds in waits if seconds is not None), default=None)

    @property
    def max_pause(self) -> float:
        """Return the seconds after which the topic controls must be read again. No read is needed to pause a topic."""
        waits = self.paused or self.rate_limits.seconds_to_next() is not None
        return CONTROLS_SECONDS if waits else math.inf
