"""The threads and queues of the relay. A simulation passes others, which run in virtual time."""

import queue
import threading
import time
from collections.abc import Callable
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


REAL_THREADS = Threads()
