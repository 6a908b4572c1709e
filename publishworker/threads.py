"""The threads and queues of the relay. A simulation passes others, which run in virtual time."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol


class Thread(Protocol):
    """What the relay needs of a thread."""

    def start(self) -> None:
        """Begin."""

    def is_alive(self) -> bool:
        """Tell whether it has begun and not ended."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end."""


class Queue(Protocol):
    """What the relay needs of a queue."""

    def put(self, item: Any) -> None:
        """Add an item."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Remove and return the oldest item. Raises queue.Empty after `timeout` seconds."""


class Event(Protocol):
    """What the relay needs of an event."""

    def set(self) -> None:
        """Let all `wait` calls return."""

    def clear(self) -> None:
        """Let them wait again."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most `timeout` seconds; return whether it is."""


class Threads:
    """Makes threads, queues and events."""

    def thread(self, name: str, target: Callable[..., None], *arguments: Any) -> Thread:
        """Return a thread that calls `target`, and does not keep the process alive."""
        return threading.Thread(target=target, args=arguments, name=name, daemon=True)

    def queue(self) -> Queue:
        """Return an empty queue."""
        return queue.SimpleQueue()

    def event(self) -> Event:
        """Return an event that is not set."""
        return threading.Event()

    def sleep(self, seconds: float) -> None:
        """Let the calling thread wait."""
        time.sleep(seconds)


REAL_THREADS = Threads()
