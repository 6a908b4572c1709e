"""What the relay takes from its process: time, chance and threads. A simulation passes others."""

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
        return Queue()

    def event(self) -> Event:
        return Event()

    def sleep(self, seconds: float) -> None:
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
