"""In-flight batches: each on a thread of its own, so that a slow one delays no other."""

import queue
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from publishworker.threads import REAL_THREADS, Queue, Thread, Threads
from publishworker.turn.batching import Limits
from publishworker.types import Batch, BatchResult, Key

#: Seconds after which a batch counts as stuck. The time limits of all its steps add up to less.
STUCK_SECONDS = 120.0
#: Max seconds that one check for stuck batches adds to a batch's time in flight. If more time has passed since the last
#: check, the process was suspended and its batches did not run, because no step of the worker takes longer.
MAX_STEP_SECONDS = 45.0
#: An unexpected error in a batch ends the process. The other batches get this many seconds to finish.
JOIN_SECONDS = 30.0
#: Seconds between two calls of `touch_file`, and checks for stuck batches, while waiting without a time limit. None: no
#: calls.
WATCH_SECONDS: float | None = 1.0


class StuckBatch(Exception):
    """Some batches do not end. Their threads cannot be stopped, but their process can."""

    def __init__(self, batches: Sequence[Batch], seconds: float) -> None:
        """Name the batches; the first has been in flight for `seconds`."""
        batch = batches[0]
        some = ", ".join(batch.ids[:5]) + (", ..." if len(batch.ids) > 5 else "")
        others = f" (and {len(batches) - 1} more batches)" if len(batches) > 1 else ""
        super().__init__(
            f"Batch of {len(batch.ids)} tasks of topic {batch.topic} has been in flight for {seconds:.0f} s: "
            f"{some}{others}"
        )
        self.batches = tuple(batches)
        self.seconds = seconds


@dataclass(eq=False, slots=True)
class _Entry:
    """One in-flight batch. Two entries may have equal batches."""

    batch: Batch
    seconds: float = 0.0  # in flight, as of the last check
    straggler: bool = False  # a turn has ended while the batch was in flight


class InFlight:
    """Starts batches and collects their results. It belongs to one thread; only `run` is called on others.

    Each batch has a thread of its own, not one of a pool: a thread on which the Spanner client once failed to get a
    session can never run a transaction again (google-cloud-python #18375).
    """

    def __init__(
        self,
        run: Callable[[Batch], BatchResult],
        clock: Callable[[], float] = time.monotonic,
        touch_file: Callable[[], None] = lambda: None,
        threads: Threads = REAL_THREADS,
    ) -> None:
        """Call `run` for each batch on a thread of its own.

        A wait for batches may take minutes, so `touch_file` is called meanwhile to show that the worker is alive.
        """
        self._run_batch = run
        self._clock = clock
        self._touch_file = touch_file
        self._threads = threads
        self._running: dict[_Entry, Thread] = {}
        self._checked_at = clock()
        self._ended: Queue = threads.queue()  # of entries, each with its BatchResult or BaseException

    def __len__(self) -> int:
        """Return the number of batches that have been started and not been collected."""
        return len(self._running)

    def _batches(self) -> list[Batch]:
        return [entry.batch for entry in self._running]

    def ids(self) -> frozenset[str]:
        """Return the IDs of the tasks in flight."""
        return frozenset(id for batch in self._batches() for id in batch.ids)

    def by_topic(self) -> Counter[str]:
        """Return the number of in-flight batches by topic."""
        return Counter(batch.topic for batch in self._batches())

    def tasks_by_topic(self) -> Counter[str]:
        """Return the number of tasks in flight by topic, except tasks that are being deferred."""
        tasks: Counter[str] = Counter()
        for batch in self._batches():
            tasks[batch.topic] += 0 if batch.defers else len(batch.ids)
        return tasks

    def has_room(self, limits: Limits) -> bool:
        """Tell whether another batch may start within the limits of batches and bytes."""
        return len(self) < limits.batches and self.bytes() < limits.bytes

    def bytes(self) -> int:
        """Return the bytes of all messages in flight."""
        return sum(batch.bytes for batch in self._batches())

    def deferring(self) -> int:
        """Return the number of batches that only defer tasks."""
        return sum(batch.defers for batch in self._batches())

    def keys(self) -> frozenset[Key]:
        """Return the ordering keys in flight. Their other tasks must wait until the batch has ended."""
        return frozenset(Key(batch.topic, key) for batch in self._batches() for key in batch.keys if key is not None)

    def start(self, batch: Batch) -> None:
        """Start a batch."""
        entry = _Entry(batch)
        self._running[entry] = self._threads.thread("batch", self._run, entry)
        self._running[entry].start()

    def raise_if_stuck(self) -> None:
        """Raise StuckBatch if batches are in flight for over STUCK_SECONDS. A later call does not report them again."""
        step, self._checked_at = min(self._clock() - self._checked_at, MAX_STEP_SECONDS), self._clock()
        for entry in self._running:
            entry.seconds += step
        old = [entry for entry in self._running if entry.seconds > STUCK_SECONDS]
        stuck = [entry for entry in old if self._running[entry].is_alive()]  # the others only have to be collected
        for entry in stuck:
            del self._running[entry]
        if stuck:
            raise StuckBatch([entry.batch for entry in stuck], stuck[0].seconds)

    def collect(self) -> list[BatchResult]:
        """Return the results of the batches that have ended, without waiting."""
        return self._wait(lambda _results: True)

    def wait_for_one(self, max_seconds: float | None = None) -> list[BatchResult]:
        """Wait until a batch has ended, at most `max_seconds`, and return the results."""
        return self._wait(lambda results: len(results) > 0, max_seconds)

    def wait_for_most(self, max_left: int = 0, max_seconds: float | None = None) -> list[BatchResult]:
        """Wait until a batch has ended and at most `max_left` batches are left. Return the results.

        The wait lasts at most `max_seconds`. The batches that are left become stragglers, which later calls do not
        count.
        """

        def enough(results: Sequence[BatchResult]) -> bool:
            return len(results) > 0 and sum(not entry.straggler for entry in self._running) <= max_left

        results = self._wait(enough, max_seconds)
        for entry in self._running:
            entry.straggler = True
        return results

    def _wait(
        self, enough: Callable[[Sequence[BatchResult]], bool], max_seconds: float | None = None
    ) -> list[BatchResult]:
        """Wait until the results are `enough`, no batch is in flight, or `max_seconds` seconds have passed.

        If `run` raised an exception, wait up to JOIN_SECONDS for the other batches, and raise it. The results so far
        are lost. Without `max_seconds`, raises StuckBatch if a batch does not end.
        """
        results: list[BatchResult] = []
        end = None if max_seconds is None else self._clock() + max_seconds
        while self._running:
            is_enough = enough(results)
            seconds = WATCH_SECONDS if end is None else max(0.0, end - self._clock())
            try:
                entry, result = self._ended.get(timeout=0 if is_enough else seconds)
            except queue.Empty:
                if is_enough or end is not None:
                    break
                self._touch_file()
                self.raise_if_stuck()
                continue
            if entry not in self._running:  # it was reported as stuck, and has ended after all
                continue
            del self._running[entry]
            if isinstance(result, BaseException):
                self._join()
                raise result
            results += [each for each in (result, *result.parts) if each.batch.ids]
        return results

    def _run(self, entry: _Entry) -> None:
        try:
            self._ended.put((entry, self._run_batch(entry.batch)))
        except BaseException as error:
            self._ended.put((entry, error))

    def _join(self) -> None:
        end = self._clock() + JOIN_SECONDS
        for thread in self._running.values():
            thread.join(max(0.0, end - self._clock()))
