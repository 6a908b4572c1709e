"""Tasks that Pub/Sub has and whose commit failed, or whose commit's outcome is not known."""

import time
from collections.abc import Callable, Iterable

from publishworker.task import Group

#: Older doubts are forgotten and their tasks published again: a duplicate, never a loss.
MAX_SECONDS = 60.0
MAX_TASKS = 10_000


class Doubts:
    """A bounded memory; each entry is taken out once, to be marked without publishing again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Measure age by `clock`, in seconds."""
        self._clock = clock
        self._entries: dict[str, tuple[str, float]] = {}

    def remember(self, topic: str, ids: Iterable[str]) -> None:
        """Remember published tasks; beyond the limit the oldest are forgotten."""
        now = self._clock()
        for id in ids:
            self._entries[id] = (topic, now)
        for id in list(self._entries)[: max(0, len(self._entries) - MAX_TASKS)]:
            del self._entries[id]

    def take(self, group_size: int) -> list[Group]:
        """Take out all that is young enough, as groups of one topic."""
        oldest = self._clock() - MAX_SECONDS
        by_topic: dict[str, list[str]] = {}
        for id, (topic, since) in self._entries.items():
            if since >= oldest:
                by_topic.setdefault(topic, []).append(id)
        self._entries.clear()
        return [
            Group(topic, tuple(ids[start : start + group_size]))
            for topic, ids in by_topic.items()
            for start in range(0, len(ids), group_size)
        ]
