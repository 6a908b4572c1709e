"""What the relay takes from its process: time, chance, threads and growing waits. A simulation passes others."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

Thread = threading.Thread
Queue = queue.SimpleQueue[Any]
Event = threading.Event


class Threads:
    """Creates threads, queues and events."""

    def thread(self, name: str, target: Callable[..., None], *arguments: Any) -> Thread:
        """Return a thread that calls `target`, and does not keep the process alive."""
        return Thread(target=target, args=arguments, name=name, daemon=True)

    def queue(self) -> Queue:
        """Return an empty queue."""
        return Queue()

    def event(self) -> Event:
        """Return an event that is not set."""
        return Event()

    def sleep(self, seconds: float) -> None:
        """Let the calling thread wait."""
        time.sleep(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The process of a relay."""

    #: Monotonic seconds.
    clock: Callable[[], float] = time.monotonic
    #: It spreads load, and protects nothing.
    random: Random = field(default_factory=Random)
    threads: Threads = field(default_factory=Threads)
    #: Called during a long wait, so that the liveness probe does not take it for a hung worker.
    progress: Callable[[], None] = lambda: None


class Backoff:
    """Waits that double from `first` to `longest` seconds, with jitter, so that workers do not act in step."""

    def __init__(self, first: float, longest: float | Callable[[], float], random: Random) -> None:
        self._first = first
        self._longest = longest if callable(longest) else lambda: longest
        self._random = random
        self._next = first

    def reset(self) -> None:
        """Begin again with the shortest wait."""
        self._next = self._first

    def next(self) -> float:
        """Return the current wait less a random part: at most 15 % of it, and at most 0.5 s. Then double it."""
        nominal = min(self._next, self._longest())
        self._next = nominal * 2
        return nominal - self._random.uniform(0, min(0.15 * nominal, 0.5))
