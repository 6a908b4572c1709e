"""Tasks that Pub/Sub has and whose commit failed, or whose commit's outcome is not known."""

import time
from collections.abc import Callable, Iterable

from publishworker.sampling import Limits
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

    def ids(self) -> frozenset[str]:
        """Return all that is remembered; what is too old is forgotten here."""
        oldest = self._clock() - MAX_SECONDS
        self._entries = {id: entry for id, entry in self._entries.items() if entry[1] >= oldest}
        return frozenset(self._entries)

    def take(self, limits: Limits) -> list[Group]:
        """Take out groups of one topic, as many as a turn may have in flight."""
        by_topic: dict[str, list[str]] = {}
        for id, (topic, _) in self._entries.items():
            by_topic.setdefault(topic, []).append(id)
        size = limits.group_size
        groups = [
            Group(topic, tuple(ids[start : start + size]))
            for topic, ids in by_topic.items()
            for start in range(0, len(ids), size)
        ][: limits.groups]
        for group in groups:
            for id in group.ids:
                del self._entries[id]
        return groups
