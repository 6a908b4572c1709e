"""Tasks in doubt: Pub/Sub has them, but their commit failed or its outcome is unknown."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from outbox.storage.sql import chunked
from publishworker.batching import Limits
from publishworker.in_flight import InFlight
from publishworker.spanner.store import Decide, StoreError
from publishworker.types import Batch, BatchResult, LockedRow, Mark, Sent, Version

#: Seconds after which a task in doubt is forgotten and published again: a duplicate rather than a loss.
MAX_SECONDS = 60.0
MAX_TASKS = 10_000


@dataclass(frozen=True, slots=True)
class _Published:
    """A task in doubt: its topic, its row when it was published, and since when it is in doubt."""

    topic: str
    version: Version
    since: float


class InDoubt:
    """A bounded memory of tasks that must be marked without publishing them again."""

    def __init__(
        self,
        mark: Callable[[Batch, Decide], BatchResult],
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Mark tasks by `mark`, in batches within `limits`; `beat` is called while they are waited for."""
        self._mark = mark
        self._limits = limits
        self._clock = clock
        self._beat = beat
        self._tasks: dict[str, _Published] = {}

    def remember(self, topic: str, published: Mapping[str, Version]) -> None:
        """Remember published tasks by their IDs. Beyond MAX_TASKS the oldest are forgotten."""
        now = self._clock()
        for id, version in published.items():
            self._tasks.setdefault(id, _Published(topic, version, now))
        for id in list(self._tasks)[: max(0, len(self._tasks) - MAX_TASKS)]:
            del self._tasks[id]

    def forget(self, ids: Iterable[str]) -> None:
        """Forget tasks that are marked."""
        for id in ids:
            self._tasks.pop(id, None)

    def ids(self) -> frozenset[str]:
        """Return the IDs of the tasks in doubt, without those that are too old."""
        oldest = self._clock() - MAX_SECONDS
        self._tasks = {id: task for id, task in self._tasks.items() if task.since >= oldest}
        return frozenset(self._tasks)

    def is_about(self, row: LockedRow) -> bool:
        """Tell whether this row is in doubt, and unchanged since its task was published."""
        task = self._tasks.get(row.id)
        return task is not None and task.version == Version.of(row)

    def batches(self) -> list[Batch]:
        """Return batches of one topic each, as many as may be in flight, the oldest tasks first."""
        by_topic: dict[str, list[str]] = {}
        for id in self.ids() and self._tasks:
            by_topic.setdefault(self._tasks[id].topic, []).append(id)
        size = self._limits.batch_size
        return [Batch(topic, tuple(some)) for topic, ids in by_topic.items() for some in chunked(ids, size)][
            : self._limits.batches
        ]

    def mark(self) -> None:
        """Set `SentAt` of the tasks in doubt, in transactions that publish nothing.

        Raises StoreError if a commit fails again: while Spanner refuses commits, publishing more would only make
        duplicates.
        """
        marking = InFlight(lambda batch: self._mark(batch, self._marks), self._clock, self._beat)
        for batch in self.batches():
            marking.start(batch)
        errors = []
        while len(marking):
            for result in marking.wait(marking.all_but_one()):
                if result.error is None:
                    self.forget(result.batch.ids)
                else:
                    errors.append(result.error)
        if errors:
            raise StoreError(f"Published tasks could not be marked: {errors[0]}")

    def _marks(self, rows: Sequence[LockedRow], _now: datetime) -> Mapping[str, Mark]:
        return {row.id: Sent("") for row in rows if row.sent_at is None and self.is_about(row)}
