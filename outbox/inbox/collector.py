"""Items of several threads, in lists. Standard library only."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Collector(Generic[T]):
    """Passes items to `process` in lists of at most `max_size`, in the order of `add`, and one list at a time.

    An item waits up to `max_delay` seconds for others, and until the list before has been processed.
    """

    def __init__(self, process: Callable[[list[T]], None], max_size: int, max_delay: float) -> None:
        """Start nothing: a thread that calls `add` does the work."""
        self._process, self._max_size, self._max_delay = process, max_size, max_delay
        self._items: deque[tuple[T, float]] = deque()
        self._arrived = threading.Condition()
        self._is_busy = False

    def add(self, item: T) -> None:
        """Return at once if another thread is processing. Otherwise process lists until no item is left.

        Raises what `process` raises. Items that are left then wait for the next call.
        """
        with self._arrived:
            self._items.append((item, time.monotonic() + self._max_delay))
            if self._is_busy:
                if len(self._items) >= self._max_size:
                    self._arrived.notify()
                return
            self._is_busy = True
        try:
            while items := self._next():
                self._process(items)
        except BaseException:
            self._is_busy = False
            raise

    def _next(self) -> list[T]:
        """Return the next list when it is full or has waited. Return none, and stop being busy, if no item is left."""
        with self._arrived:
            if self._items:
                delay = self._items[0][1] - time.monotonic()
                self._arrived.wait_for(lambda: len(self._items) >= self._max_size, max(delay, 0))
            else:
                self._is_busy = False
            return [self._items.popleft()[0] for _ in range(min(len(self._items), self._max_size))]
