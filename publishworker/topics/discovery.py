"""Topic discovery: which topics have, or recently had, unsent tasks."""

import time
from collections.abc import Callable, Iterable

#: Seconds after which a topic without unsent tasks is not polled any more. Discovery finds it again.
FORGET_TOPIC_SECONDS = 600.0


class KnownTopics:
    """A memory in the process, because the database has no list of topics."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know none."""
        self._clock = clock
        self._seen: dict[str, float] = {}

    @property
    def known(self) -> frozenset[str]:
        """Return all names."""
        return frozenset(self._seen)

    def see(self, topics: Iterable[str]) -> None:
        """Note topics that have unsent tasks."""
        self._seen |= dict.fromkeys(topics, self._clock())

    def forget(self) -> None:
        """Drop the names that have been without tasks for long."""
        oldest = self._clock() - FORGET_TOPIC_SECONDS
        self._seen = {topic: seen for topic, seen in self._seen.items() if seen > oldest}
