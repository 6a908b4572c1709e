"""Groups in flight: each on a thread of its own, so that a slow one holds back no other."""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from publishworker.types import Group, GroupResult, Key

#: Seconds after which a group in flight is stuck: all that it does has time limits, which end well before.
STUCK_SECONDS = 120.0
#: Seconds between two looks that count at most: no step of the loop lasts longer, but for one that the process slept
#: through, and then the groups have slept as well.
LONGEST_STEP = 45.0
#: Seconds in which the other groups may end when one has met a defect: the process ends anyway.
JOIN_SECONDS = 30.0
#: Seconds between two signs of life where all groups are waited for; None: none.
WATCH_SECONDS: float | None = 1.0


class StuckGroup(Exception):
    """Groups that do not end. Their threads cannot be stopped, only their process can."""

    def __init__(self, groups: Sequence[Group], seconds: float) -> None:
        """Name the groups; the first has been in flight for so long."""
        group = groups[0]
        some = ", ".join(group.ids[:5]) + (", ..." if len(group.ids) > 5 else "")
        others = f", and {len(groups) - 1} more" if len(groups) > 1 else ""
        super().__init__(
            f"a group of {len(group.ids)} tasks of {group.topic} is stuck for {seconds:.0f} s ({some}){others}"
        )
        self.groups = tuple(groups)
        self.seconds = seconds


@dataclass(eq=False, slots=True)
class _Flight:
    """One group on its way. Two may be of equal groups."""

    group: Group
    seconds: float = 0.0  # as of the last look


class Flights:
    """Starts groups and collects their results. It belongs to one thread; only `fly` runs on others.

    Never a pool: a thread on which the Spanner client once failed to get a session can run no transaction any more
    (google-cloud-python #18375), so no thread outlives its group.
    """

    def __init__(
        self,
        fly: Callable[[Group], GroupResult],
        clock: Callable[[], float] = time.monotonic,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `fly` for each group, and `beat` while they are waited for: that may take long."""
        self._fly = fly
        self._clock = clock
        self._beat = beat
        self._threads: dict[_Flight, threading.Thread] = {}
        self._looked_at = clock()
        self._ended: queue.SimpleQueue[tuple[_Flight, GroupResult | BaseException]] = queue.SimpleQueue()

    def __len__(self) -> int:
        """Return how many groups have been started and not been collected."""
        return len(self._threads)

    def _groups(self) -> list[Group]:
        return [flight.group for flight in self._threads]

    def ids(self) -> frozenset[str]:
        """Return the ids of their tasks."""
        return frozenset(id for group in self._groups() for id in group.ids)

    def by_topic(self) -> Counter[str]:
        """Return how many groups each topic has in flight."""
        return Counter(group.topic for group in self._groups())

    def tasks_by_topic(self) -> Counter[str]:
        """Return how many tasks each topic has in flight, but for those that are only parked."""
        tasks: Counter[str] = Counter()
        for group in self._groups():
            tasks[group.topic] += 0 if group.parks else len(group.ids)
        return tasks

    def bytes(self) -> int:
        """Return how many bytes of messages they have."""
        return sum(group.bytes for group in self._groups())

    def parking(self) -> int:
        """Return how many groups only park tasks."""
        return sum(group.parks for group in self._groups())

    def keys(self) -> frozenset[Key]:
        """Return the ordering keys of their tasks: one request of a key at a time."""
        return frozenset(Key(group.topic, key) for group in self._groups() for key in group.keys if key is not None)

    def start(self, group: Group) -> None:
        """Let a group fly."""
        flight = _Flight(group)
        self._threads[flight] = threading.Thread(target=self._run, args=(flight,), name="group", daemon=True)
        self._threads[flight].start()

    def check(self) -> None:
        """Raise StuckGroup if groups do not end; they are given up then."""
        step, self._looked_at = min(self._clock() - self._looked_at, LONGEST_STEP), self._clock()
        for flight in self._threads:
            flight.seconds += step
        # One whose thread has ended waits to be collected, as long as it may be.
        stuck = [each for each, thread in self._threads.items() if each.seconds > STUCK_SECONDS and thread.is_alive()]
        if stuck:
            for flight in stuck:
                del self._threads[flight]
            raise StuckGroup([flight.group for flight in stuck], stuck[0].seconds)

    def landed(self, leave: int = 0, patience: float | None = None, longest: float | None = None) -> list[GroupResult]:
        """Wait until at most `leave` groups fly; return the results of those that have ended.

        It waits for `longest` seconds at most, and no longer than `patience` seconds once one has ended. What `fly`
        raised is raised here, after the others had the time to end: nothing is swallowed. Without a limit it raises
        StuckGroup if one does not end; whoever has to keep the results of the others takes them one by one.
        """
        results: list[GroupResult] = []
        end = None if longest is None else self._clock() + longest
        while self._threads:
            wait = WATCH_SECONDS if end is None else max(0.0, end - self._clock())
            try:
                flight, result = self._ended.get(timeout=0 if len(self._threads) <= leave else wait)
            except queue.Empty:
                if end is not None or len(self._threads) <= leave:
                    break
                self._beat()
                self.check()
                continue
            if flight not in self._threads:
                continue
            if not results and patience is not None:
                end = min(self._clock() + patience, float("inf") if end is None else end)
            del self._threads[flight]
            if isinstance(result, BaseException):
                self._join()
                raise result
            results.append(result)
        return results

    def _run(self, flight: _Flight) -> None:
        try:
            self._ended.put((flight, self._fly(flight.group)))
        except BaseException as error:
            self._ended.put((flight, error))

    def _join(self) -> None:
        end = time.monotonic() + JOIN_SECONDS
        for thread in self._threads.values():
            thread.join(max(0.0, end - time.monotonic()))
