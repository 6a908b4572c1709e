"""Tasks in doubt: Pub/Sub has them, but their commit failed or its outcome is unknown."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby

from outbox.table.sql import chunked
from publishworker.spanner.store import Decide
from publishworker.threads import REAL_THREADS, Threads
from publishworker.turn.batching import Limits
from publishworker.turn.in_flight import InFlight
from publishworker.types import MARKED, Batch, BatchResult, Key, LockedRow, Mark, Version

#: Max seconds that a task stays in doubt. Then the relay forgets it and publishes it again, because a duplicate is
#: better than a loss.
MAX_AGE_SECONDS = 900.0
MAX_TASKS = 10_000
#: Seconds between two probes while no transaction commits. A probe is one task that is published to test the commit.
PROBE_SECONDS = 30.0
#: The first `retry_delay` of a task. Each further failure doubles it, up to PROBE_SECONDS.
FIRST_RETRY_SECONDS = 1.0
#: Max seconds that a turn waits for a mark while publishing is paused. Also the pause between two rounds of marks at
#: exit.
MARK_WAIT_SECONDS = 0.25
#: Max tasks that Spanner refuses to mark one after the other while nothing else commits. The reason may then be in no
#: row, so publishing is paused. As it may also be in each of them, the first probe is published at once.
MAX_REFUSED = 10

_log = logging.getLogger("publishworker")


@dataclass(slots=True)
class _TaskInDoubt:
    """A task in doubt: its batch, its row when it was published, and the time at which its commit failed.

    `retry_delay` is 0 until a batch that marks the task fails while others commit. The task is then marked alone, and
    after each failure the next attempt waits this many seconds.
    """

    batch: Batch
    version: Version
    since: float
    retry_delay: float = 0.0
    retry_at: float = 0.0


class InDoubt:
    """A bounded memory of tasks that must be marked without being published again. It belongs to the relay's thread.

    Marks are written by batches of their own, so that they delay neither heartbeats nor other tasks.
    """

    def __init__(
        self,
        mark: Callable[[Batch, Decide], BatchResult],
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        touch_file: Callable[[], None] = lambda: None,
        threads: Threads = REAL_THREADS,
    ) -> None:
        """Mark tasks with `mark`, in batches within `limits`. Call `touch_file` while waiting for them."""
        self._limits = limits
        self._clock = clock
        self._threads = threads
        self._tasks: dict[str, _TaskInDoubt] = {}
        self._marking = InFlight(lambda batch: mark(batch, self._marks), clock, touch_file, threads)
        self._paused = False
        self._refused = 0  # tasks since the last commit
        self._probed_at = float("-inf")
        self._probe_seconds = PROBE_SECONDS

    @property
    def batches_in_flight(self) -> int:
        """Return the number of in-flight batches that mark tasks."""
        return len(self._marking)

    @property
    def is_paused(self) -> bool:
        """Tell whether only probes are published: tasks are in doubt, and no transaction has committed since."""
        return self._paused and bool(self._tasks)

    @property
    def may_publish(self) -> bool:
        """Tell whether anything may be published now, even if it is only a probe."""
        return not self.is_paused or self._clock() - self._probed_at >= self._probe_seconds

    def learn(self, result: BatchResult) -> None:
        """Learn from a finished batch. If its commit failed, its published tasks are in doubt.

        Beyond MAX_TASKS the oldest are forgotten.
        """
        if result.error is None:
            self._resume()
            return
        now, published = self._clock(), result.published_versions()
        self._refused += result.refused
        if published and (not result.refused or self._refused > MAX_REFUSED):
            self._pause(result, now)
        for id, version in published.items():
            task = self._tasks.setdefault(id, _TaskInDoubt(result.batch, version, now))
            if result.refused:
                self._delay(task)
        for id in list(self._tasks)[: max(0, len(self._tasks) - MAX_TASKS)]:
            del self._tasks[id]

    def ids(self) -> frozenset[str]:
        """Return the IDs of the tasks in doubt. Only a batch that marks them may claim them."""
        return frozenset(self._tasks)

    def keys(self) -> frozenset[Key]:
        """Return the ordering keys of the tasks in doubt. Later tasks of these keys wait."""
        pairs = ((task.batch.topic, task.version.ordering_key) for task in self._tasks.values())
        return frozenset(Key(topic, key) for topic, key in pairs if key is not None)

    def limit_to_probe(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return `batches`, or only the first task while publishing is paused: a probe, whose commit ends the pause."""
        if not self.is_paused:
            return list(batches)
        first = next((batch for batch in batches if not batch.defers), None)
        if first is None:
            return []
        self._probed_at, self._probe_seconds = self._clock(), max(self._probe_seconds, FIRST_RETRY_SECONDS)
        return [first.part(first.ids[:1])]

    def mark(self) -> None:
        """Start batches that set `SentAt` of the tasks in doubt, and collect those that have ended.

        While publishing is paused, wait up to MARK_WAIT_SECONDS for one. Raises StuckBatch if one does not end.
        """
        self._settle(self._marking.collect())
        self._marking.raise_if_stuck()
        oldest, now = self._clock() - MAX_AGE_SECONDS, self._clock()
        self._tasks = {id: task for id, task in self._tasks.items() if task.since >= oldest}
        in_flight = self._marking.ids()
        ready = {id: task for id, task in self._tasks.items() if id not in in_flight and task.retry_at <= now}
        for batch in self._batches(ready)[: self._limits.batches - len(self._marking)]:
            self._marking.start(batch)
        if self.is_paused:
            self._settle(self._marking.wait_for_one(MARK_WAIT_SECONDS))

    def finish(self, seconds: float) -> None:
        """Try to mark all tasks in doubt, at least once and for at most `seconds`.

        Raises StuckBatch if a batch does not end.
        """
        end = self._clock() + seconds
        while True:
            self.mark()
            while len(self._marking):
                self._settle(self._marking.wait_for_one())
            if not self._tasks or self._clock() >= end:
                return
            self._threads.sleep(MARK_WAIT_SECONDS)

    def contains(self, row: LockedRow) -> bool:
        """Tell whether this row is in doubt, and still holds the message that was published."""
        task = self._tasks.get(row.id)
        return task is not None and task.version.has_message_of(row)

    def _batches(self, tasks: Mapping[str, _TaskInDoubt]) -> list[Batch]:
        """Return the rest of each failed batch, and then a batch for each task that is marked alone, oldest first."""
        together = groupby((id for id in tasks if not tasks[id].retry_delay), lambda each: tasks[each].batch)
        return [
            *(batch.part(some) for batch, ids in together for some in chunked(ids, self._limits.batch_size)),
            *(task.batch.part((id,)) for id, task in tasks.items() if task.retry_delay),
        ]

    def _settle(self, finished: Sequence[BatchResult]) -> None:
        """Forget tasks that were marked. If a batch fails while others commit, retry its tasks one by one."""
        for result in finished:
            if result.error is None:
                for id in result.batch.ids:
                    self._tasks.pop(id, None)
                self._resume()
        for result in finished:
            if result.error is None or (self._paused and not result.refused):
                continue
            for task in (self._tasks[id] for id in result.batch.ids if id in self._tasks):
                self._delay(task)
                # The failure of several tasks together says nothing about one of them, so do not delay them yet.
                task.retry_at = task.retry_at if len(result.batch.ids) == 1 else self._clock()

    def _pause(self, result: BatchResult, now: float) -> None:
        first = 0.0 if result.refused else PROBE_SECONDS
        if self._paused:
            self._probe_seconds = min(PROBE_SECONDS, max(first, 2 * self._probe_seconds))
            return
        self._paused, self._probed_at, self._probe_seconds = True, now, first
        _log.warning(
            "A commit failed: %s. Until a commit succeeds, the worker publishes only one task every %g s.",
            result.error, PROBE_SECONDS, extra={"action": "publishing_paused"},
        )  # fmt: skip

    def _delay(self, task: _TaskInDoubt) -> None:
        """Mark the task alone, and later than after its last failure."""
        task.retry_delay = min(PROBE_SECONDS, 2 * task.retry_delay or FIRST_RETRY_SECONDS)
        task.retry_at = self._clock() + task.retry_delay

    def _resume(self) -> None:
        self._refused = 0
        if self._paused:
            self._paused = False
            _log.info("Publishing resumes: a transaction has committed", extra={"action": "publishing_resumed"})

    def _marks(self, rows: Sequence[LockedRow], _now: datetime) -> Mapping[str, Mark]:
        return {row.id: MARKED for row in rows if row.sent_at is None and self.contains(row)}
