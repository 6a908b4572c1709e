"""How fast this worker may publish to a topic: its part of the limits in AsynchronousTaskTopics.

A limit applies to all live workers together. Each worker gets an equal part, but at least a burst of one task and one
task in flight.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from publishworker.log import log
from publishworker.types import TopicLimit

#: Tasks of a topic start only when its bucket has collected the tokens of this many seconds, or is full. Batches are
#: then fewer and larger.
SAVE_SECONDS = 0.2


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
        return min(self.burst, max(1.0, self.rate * SAVE_SECONDS)) - self.filled(now)


class RateLimits:
    """The limits of all topics, as last read. It belongs to the relay's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}
        self._in_flight: dict[str, int] = {}
        self._limits: Mapping[str, TopicLimit] = {}

    def apply(self, limits: Mapping[str, TopicLimit], workers: int) -> None:
        """Apply the limits. Each of the live `workers`, of which this is one, gets an equal part."""
        now = self._clock()
        self._log_changes(limits)
        buckets: dict[str, _Bucket] = {}
        for topic, limit in limits.items():
            if limit.rate is not None and limit.burst is not None:
                burst = max(1.0, limit.burst / workers)
                before = self._buckets.get(topic)
                tokens = burst if before is None else min(burst, before.filled(now))
                buckets[topic] = _Bucket(limit.rate / workers, burst, tokens, now)
        self._buckets = buckets
        self._in_flight = {
            topic: max(1, limit.in_flight // workers) for topic, limit in limits.items() if limit.in_flight is not None
        }

    def allowances(self, in_flight: Mapping[str, int]) -> dict[str, int]:
        """Return how many tasks of each limited topic may start now, in addition to those `in_flight`."""
        now = self._clock()
        allowed: dict[str, int] = {}
        for topic, bucket in self._buckets.items():
            allowed[topic] = int(bucket.filled(now)) if bucket.missing(now) <= 0 else 0
        for topic, limit in self._in_flight.items():
            left = max(0, limit - in_flight.get(topic, 0))
            allowed[topic] = min(left, allowed.get(topic, left))
        return allowed

    def take(self, topic: str, tasks: int) -> None:
        """Use tokens for tasks that start. A negative number returns tokens of tasks that were not published."""
        if (bucket := self._buckets.get(topic)) is not None:
            now = self._clock()
            bucket.tokens, bucket.at = min(bucket.burst, bucket.filled(now) - tasks), now

    def seconds_to_next(self) -> float | None:
        """Return the seconds until a topic has enough tokens to start tasks, or None if no topic waits."""
        now = self._clock()
        missing = ((bucket.missing(now), bucket.rate) for bucket in self._buckets.values())
        return min((tokens / rate for tokens, rate in missing if tokens > 0), default=None)

    def _log_changes(self, limits: Mapping[str, TopicLimit]) -> None:
        for topic in sorted(self._limits.keys() | limits.keys()):
            if (limit := limits.get(topic, TopicLimit())) != self._limits.get(topic):
                parts = ((limit.rate, "tasks a second"), (limit.burst, "at once"), (limit.in_flight, "in flight"))
                text = ", ".join(f"{value:g} {unit}" for value, unit in parts if value is not None) or "no limit"
                log.info("Topic %s, all live workers together: %s", topic, text, extra={"action": "limited"})
        self._limits = limits
