"""Tasks that Pub/Sub has and whose commit failed, or whose commit's outcome is not known."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from publishworker.batching import Limits
from publishworker.types import Batch, LockedRow, Version

#: Older doubts are forgotten and their tasks published again: a duplicate, never a loss.
MAX_SECONDS = 60.0
MAX_TASKS = 10_000


@dataclass(frozen=True, slots=True)
class Doubt:
    """One published task."""

    topic: str
    version: Version
    since: float


class InDoubt:
    """A bounded memory of tasks that must be marked without publishing them again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Measure age by `clock`, in seconds."""
        self._clock = clock
        self._entries: dict[str, Doubt] = {}

    def remember(self, topic: str, published: Mapping[str, Version]) -> None:
        """Remember published tasks by their ids; beyond the limit the oldest are forgotten."""
        now = self._clock()
        for id, version in published.items():
            self._entries.setdefault(id, Doubt(topic, version, now))
        for id in list(self._entries)[: max(0, len(self._entries) - MAX_TASKS)]:
            del self._entries[id]

    def forget(self, ids: Iterable[str]) -> None:
        """Forget tasks that are marked."""
        for id in ids:
            self._entries.pop(id, None)

    def is_about(self, row: LockedRow) -> bool:
        """Tell whether this very row is remembered, as it was when it was published."""
        doubt = self._entries.get(row.id)
        return doubt is not None and doubt.version == Version.of(row)

    def ids(self) -> frozenset[str]:
        """Return all that is remembered; what is too old is forgotten here."""
        oldest = self._clock() - MAX_SECONDS
        self._entries = {id: doubt for id, doubt in self._entries.items() if doubt.since >= oldest}
        return frozenset(self._entries)

    def batches(self, limits: Limits) -> list[Batch]:
        """Return batches of one topic, as many as a turn may have in flight, the oldest doubts first."""
        by_topic: dict[str, list[str]] = {}
        for id, doubt in self._entries.items():
            by_topic.setdefault(doubt.topic, []).append(id)
        size = limits.batch_size
        return [
            Batch(topic, tuple(ids[start : start + size]))
            for topic, ids in by_topic.items()
            for start in range(0, len(ids), size)
        ][: limits.batches]
