"""Threads that run one step at a time: each stops at a point until the test lets it continue, and only one runs.

`patched` puts them in place of the threads and the queue of `publishworker.in_flight`.
"""

import contextlib
import enum
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from publishworker import in_flight

#: Seconds in which a thread comes to its next point; it never waits for anything real.
STEP_SECONDS = 10.0
#: Seconds after which a thread that was forgotten ends by itself.
FORGOTTEN_SECONDS = 600.0


class Point(enum.Enum):
    START = enum.auto()
    POLLED = enum.auto()  # the poll's snapshot is read
    KEY_HEADS = enum.auto()  # the snapshot of the keys is read
    LOCK = enum.auto()  # it wants its rows
    ANSWER = enum.auto()  # its request is on its way to Pub/Sub
    COMMIT = enum.auto()
    COMMITTED = enum.auto()
    LANDING = enum.auto()  # the turn waits for its batches


class Fate(enum.Enum):
    GO = enum.auto()
    ABORT = enum.auto()  # the transaction loses its locks: at LOCK another one does, at ANSWER without notice
    FAIL = enum.auto()  # no answer, and nothing happened
    LANDED = enum.auto()  # no answer, but it happened
    LATE = enum.auto()  # DEADLINE_EXCEEDED, and the request may be executed later
    ODD = enum.auto()  # the same with DATA_LOSS, which is recorded to the task
    MISSING = enum.auto()  # NOT_FOUND
    EXECUTED = enum.auto()  # the request is executed, its answer is still on its way
    IMPATIENT = enum.auto()  # the turn waits no longer


#: The faults that may happen at a point.
FAULTS = {
    Point.POLLED: (Fate.FAIL,),
    Point.KEY_HEADS: (Fate.FAIL,),
    Point.LOCK: (Fate.ABORT, Fate.FAIL),
    Point.ANSWER: (Fate.ODD, Fate.LATE, Fate.LANDED, Fate.ABORT, Fate.EXECUTED, Fate.FAIL, Fate.MISSING),
    Point.COMMIT: (Fate.ABORT, Fate.LANDED, Fate.FAIL),
    Point.LANDING: (Fate.IMPATIENT,),
}


class Killed(BaseException):
    """Raised in a thread whose process is gone."""


class Crew:
    def __init__(self, name: str) -> None:
        self.name = name
        self.threads: list[Stepper] = []

    def spawn(self, run: Callable[[], Any]) -> "Stepper":
        stepper = Stepper(self, run)
        self.threads.append(stepper)
        return stepper


class Stepper:
    def __init__(self, crew: Crew, run: Callable[[], Any]) -> None:
        self.crew = crew
        self.point = Point.START
        self.wanted: Sequence[str] = ()  # the rows, at LOCK
        self.mailbox: Mailbox | None = None  # at LANDING
        self.patient = True  # at LANDING: without a time limit
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = False
        self._run = run
        self._fate = Fate.GO
        self._killed = False
        self._started = False
        self._go = threading.Lock()
        self._back = threading.Lock()
        self._go.acquire()
        self._back.acquire()

    def pause(self, point: Point) -> Fate:
        """Stop here until the test lets the thread continue; called by the thread itself."""
        if self._killed:
            raise Killed
        self.point = point
        self._back.release()
        if not self._go.acquire(timeout=FORGOTTEN_SECONDS) or self._killed:
            self._killed = True
            raise Killed
        return self._fate

    def resume(self, fate: Fate = Fate.GO) -> None:
        self._fate = fate
        if self._started:
            self._go.release()
        else:
            self._started = True
            threading.Thread(target=self._main, daemon=True).start()
        if not self._back.acquire(timeout=STEP_SECONDS):
            raise AssertionError(f"a thread of {self.crew.name} hangs after {self.point}")

    def kill(self) -> None:
        self._killed = True
        if self._started and not self.ended:
            self.resume()
        if self in self.crew.threads:
            self.crew.threads.remove(self)

    def _main(self) -> None:
        _here.stepper = self
        try:
            self.result = self._run()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.ended = True
        self.crew.threads.remove(self)
        self._back.release()


_here = threading.local()


def here() -> Stepper:
    stepper: Stepper = _here.stepper
    return stepper


class Mailbox:
    def __init__(self) -> None:
        self._items: deque[Any] = deque()

    def __bool__(self) -> bool:
        return bool(self._items)

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self, timeout: float | None = None) -> Any:
        """Return the next item; the wait for it takes no time."""
        if not self._items and timeout != 0:
            stepper = here()
            stepper.mailbox, stepper.patient = self, timeout is None
            stepper.pause(Point.LANDING)
        if not self._items:
            raise queue.Empty
        return self._items.popleft()


class _Thread:
    def __init__(self, target: Callable[..., None], args: Sequence[Any], **_more: Any) -> None:
        self._run = lambda: target(*args)

    def start(self) -> None:
        here().crew.spawn(self._run)

    def join(self, timeout: float) -> None:
        raise AssertionError("a batch ended with an error")


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Run batches on such threads, with the worker's log disabled."""
    threads = mock.Mock(Thread=_Thread)
    landings = mock.Mock(SimpleQueue=Mailbox, Empty=queue.Empty)
    with (
        mock.patch.object(in_flight, "threading", threads),
        mock.patch.object(in_flight, "queue", landings),
        mock.patch.object(in_flight, "WATCH_SECONDS", None),
        mock.patch.object(
            in_flight, "STUCK_SECONDS", float("inf")
        ),  # here batches stand for as long as a history likes
        mock.patch.object(logging.getLogger("publishworker"), "disabled", True),
    ):
        yield
