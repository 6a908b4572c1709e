"""Virtual time: fibers that run one at a time, and a clock that jumps to the next event.

A fiber is a greenlet. It runs until it waits, so a history depends only on its seed. No real thread and no real time is
involved.
"""

import heapq
import queue
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import greenlet


class Clockwork:
    """The events of one history, in order of their virtual time."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.failure: BaseException | None = None
        self._closed = False
        self._processes: dict[Process, None] = {}
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0
        self._hub: Any = greenlet.getcurrent()

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, call))

    def spawn(self, process: "Process", run: Callable[[], Any]) -> "Fiber":
        self._processes[process] = None
        fiber = Fiber(self, process, run)
        self.after(0.0, lambda: fiber.resume(0, None))
        return fiber

    def run(self, until: float, ends: Callable[[], bool] = lambda: False) -> bool:
        """Play all events before `until`; return early, and True, once `ends()` is true after an event."""
        while self._events and self._events[0][0] <= until:
            self.now, _, call = heapq.heappop(self._events)
            call()
            if self.failure is not None:
                raise self.failure
            if ends():
                return True
        self.now = until
        return False

    def park(self, seconds: float | None = None) -> Any:
        """Let the running fiber wait until it is woken. Return the value of `wake`, or None after `seconds`."""
        if self._closed:
            raise greenlet.GreenletExit
        fiber: Fiber = greenlet.getcurrent()  # type: ignore[assignment]  # only fibers wait
        fiber.waits += 1
        if seconds is not None:
            number = fiber.waits
            self.after(max(0.0, seconds), lambda: fiber.resume(number, None))
        return self._hub.switch()

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            self.park(seconds)

    def close(self) -> None:
        """End all fibers, without letting any clean up after itself: otherwise they would never be freed."""
        self._closed = True
        for process in self._processes:
            process.alive = False
            for fiber in list(process.fibers):
                if fiber.waits:
                    fiber.throw(greenlet.GreenletExit)
            process.fibers.clear()
        self._events.clear()

    def waiter(self) -> Callable[[Any], None]:
        """Return a function that wakes the running fiber from its next `park`, and does nothing later."""
        fiber: Fiber = greenlet.getcurrent()  # type: ignore[assignment]  # the same
        number = fiber.waits + 1
        return lambda value: self.after(0.0, lambda: fiber.resume(number, value))


class Process:
    """What lives and dies together. While it is paused, as by SIGSTOP, none of its fibers continues."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused_until = 0.0
        #: Until when its CPU is busy, and how many seconds it has worked.
        self.busy_until = self.worked = 0.0
        #: Seconds that its clock is ahead.
        self.skew = 0.0
        #: Kept, because a greenlet without references ends by an exception, and would clean up like a living one.
        self.fibers: dict[Fiber, None] = {}


class Fiber(greenlet.greenlet):
    """One thread of a process."""

    def __init__(self, clockwork: Clockwork, process: Process, run: Callable[[], Any]) -> None:
        super().__init__(self._main, clockwork._hub)
        self._clockwork, self.process, self._call = clockwork, process, run
        self.waits = 0
        self.ended = False
        process.fibers[self] = None

    def _main(self, _value: Any) -> None:
        try:
            self._call()
        except greenlet.GreenletExit:
            pass
        except BaseException as error:
            self._clockwork.failure = error
        self.ended = True
        self.process.fibers.pop(self, None)

    def resume(self, number: int, value: Any) -> None:
        """Continue, unless the process is dead or the fiber has been woken from this wait before."""
        if number != self.waits or self.ended or not self.process.alive:
            return
        if (left := self.process.paused_until - self._clockwork.now) > 0:
            self._clockwork.after(left, lambda: self.resume(number, value))
            return
        self.switch(value)


class Event:
    """As `threading.Event`."""

    def __init__(self, clockwork: Clockwork) -> None:
        self._clockwork, self._set = clockwork, False
        self._waiters: list[Callable[[Any], None]] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        for wake in self._waiters:
            wake(True)
        self._waiters.clear()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._waiters.append(self._clockwork.waiter())
            # A shorter time may vanish when it is added to the clock, and the caller would wait for it forever.
            self._clockwork.park(None if timeout is None else max(timeout, 1e-6))
        return self._set


class VirtualQueue:
    """As `queue.SimpleQueue`."""

    def __init__(self, clockwork: Clockwork) -> None:
        self._clockwork = clockwork
        self._items: deque[Any] = deque()
        self._waiters: deque[Callable[[Any], None]] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        while self._waiters:
            self._waiters.popleft()(True)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        while not self._items and block and timeout != 0:
            self._waiters.append(self._clockwork.waiter())
            if self._clockwork.park(timeout) is None:  # otherwise another fiber may have taken the item
                break
        if not self._items:
            raise queue.Empty
        return self._items.popleft()


class VirtualThread:
    """As `threading.Thread`."""

    def __init__(self, clockwork: Clockwork, process: Process, run: Callable[[], None]) -> None:
        self._clockwork, self._process, self._run = clockwork, process, run
        self._fiber: Fiber | None = None

    def start(self) -> None:
        self._fiber = self._clockwork.spawn(self._process, self._run)

    def is_alive(self) -> bool:
        return self._fiber is not None and not self._fiber.ended

    def join(self, timeout: float | None = None) -> None:
        raise AssertionError("a batch ended with an unexpected error")


class VirtualThreads:
    """The threads and queues of one process."""

    def __init__(self, clockwork: Clockwork, process: Process) -> None:
        self._clockwork, self._process = clockwork, process

    def thread(self, name: str, target: Callable[..., None], *arguments: Any) -> VirtualThread:
        return VirtualThread(self._clockwork, self._process, lambda: target(*arguments))

    def event(self) -> Event:
        return Event(self._clockwork)

    def queue(self) -> VirtualQueue:
        return VirtualQueue(self._clockwork)

    def sleep(self, seconds: float) -> None:
        self._clockwork.sleep(seconds)
