"""Which topics a poll reads: those that have unsent tasks, as far as this process has seen."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

#: Seconds for which a topic without candidates is still polled. Then it costs nothing until discovery finds it again.
#: If discovery finds it and polls do not, because all its tasks are scheduled or dead, the time doubles.
POLLED_SECONDS = 5.0
#: Max seconds for which a topic without candidates is polled, and for which metrics name it.
FORGET_TOPIC_SECONDS = 600.0


@dataclass(slots=True)
class _Topic:
    seen_at: float
    polled_seconds: float = POLLED_SECONDS
    polled: bool = True


class KnownTopics:
    """A memory in the process, because the database has no list of topics."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._topics: dict[str, _Topic] = {}

    @property
    def polled(self) -> frozenset[str]:
        """Return the topics that a poll reads."""
        return frozenset(name for name, topic in self._topics.items() if topic.polled)

    @property
    def recent(self) -> frozenset[str]:
        """Return the topics that have, or recently had, unsent tasks."""
        return frozenset(self._topics)

    def see(self, candidates_of: Iterable[str]) -> None:
        """Note the topics of the candidates that a poll returned."""
        self._topics |= {name: _Topic(self._clock()) for name in candidates_of}

    def discover(self, names: Iterable[str]) -> None:
        """Note topics that discovery found: they have unsent tasks."""
        for name in names:
            topic = self._topics.setdefault(name, _Topic(self._clock(), POLLED_SECONDS / 2))
            topic.polled_seconds = min(2 * topic.polled_seconds, FORGET_TOPIC_SECONDS)
            topic.seen_at, topic.polled = self._clock(), True

    def forget(self, unavailable: Iterable[str]) -> None:
        """Stop polling topics that have been without candidates for long. The `unavailable` ones were not polled."""
        now = self._clock()
        for name in unavailable:
            if name in self._topics:
                self._topics[name].seen_at = now
        for topic in self._topics.values():
            topic.polled = now - topic.seen_at <= topic.polled_seconds
        oldest = now - FORGET_TOPIC_SECONDS
        self._topics = {name: topic for name, topic in self._topics.items() if topic.seen_at > oldest}
