"""Groups in flight: each on a thread of its own, so that a slow one holds back no other."""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable

from publishworker.task import Group, GroupResult, Key


class Flights:
    """Starts groups and collects their results. It belongs to one thread; only `fly` runs on others.

    Never a pool: a thread on which the Spanner client once failed to get a session can run no transaction any more
    (google-cloud-python #18375), so no thread outlives its group.
    """

    def __init__(self, fly: Callable[[Group], GroupResult], clock: Callable[[], float] = time.monotonic) -> None:
        """Call `fly` for each group."""
        self._fly = fly
        self._clock = clock
        self._threads: dict[Group, threading.Thread] = {}
        self._ended: queue.SimpleQueue[tuple[Group, GroupResult | BaseException]] = queue.SimpleQueue()

    def __len__(self) -> int:
        """Return how many groups have been started and not been collected."""
        return len(self._threads)

    def ids(self) -> frozenset[str]:
        """Return the ids of their tasks."""
        return frozenset(id for group in self._threads for id in group.ids)

    def by_topic(self) -> Counter[str]:
        """Return how many groups each topic has in flight."""
        return Counter(group.topic for group in self._threads)

    def tasks_by_topic(self) -> Counter[str]:
        """Return how many tasks each topic has in flight, but for those that are only parked."""
        tasks: Counter[str] = Counter()
        for group in self._threads:
            tasks[group.topic] += 0 if group.parks else len(group.ids)
        return tasks

    def parking(self) -> int:
        """Return how many groups only park tasks."""
        return sum(group.parks for group in self._threads)

    def keys(self) -> frozenset[Key]:
        """Return the ordering keys of their tasks: one request of a key at a time."""
        return frozenset(Key(group.topic, key) for group in self._threads for key in group.keys if key is not None)

    def start(self, group: Group) -> None:
        """Let a group fly."""
        thread = threading.Thread(target=self._run, args=(group,), name="group", daemon=True)
        self._threads[group] = thread
        thread.start()

    def landed(self, leave: int = 0, patience: float | None = None, longest: float | None = None) -> list[GroupResult]:
        """Wait until at most `leave` groups fly; return the results of those that have ended.

        It waits for `longest` seconds at most, and no longer than `patience` seconds once one has ended. What `fly`
        raised is raised here, after all have ended: nothing is left running, nothing is swallowed.
        """
        results: list[GroupResult] = []
        end = None if longest is None else self._clock() + longest
        while self._threads:
            wait = None if end is None else max(0.0, end - self._clock())
            try:
                group, result = self._ended.get(timeout=0 if len(self._threads) <= leave else wait)
            except queue.Empty:
                break
            if not results and patience is not None:
                end = min(self._clock() + patience, float("inf") if end is None else end)
            del self._threads[group]
            if isinstance(result, BaseException):
                self._join()
                raise result
            results.append(result)
        return results

    def _run(self, group: Group) -> None:
        try:
            self._ended.put((group, self._fly(group)))
        except BaseException as error:
            self._ended.put((group, error))

    def _join(self) -> None:
        for thread in self._threads.values():
            thread.join()
