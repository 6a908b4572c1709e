"""What all tabs share: one read of the outbox, at most every few seconds, and none if no tab asks, in one sentence too.

So a hundred open tabs cost Spanner what one costs. While Spanner cannot be reached, the last figures stay, with their
age and the error.
"""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Generic, TypeVar

from outbox import admin
from outbox.admin.backlog import Backlog
from outbox.admin.operations import Operation
from outbox.admin.table import TaskTable
from outbox.admin.tasks import BlockedHead, ErrorCount
from outbox.admin.topics import Control
from outbox.admin.workers import TopicCircuit
from outbox.errors import OutboxError
from outbox.program.terminal import counted
from outbox.program.times import spoken

T = TypeVar("T")

#: Seconds for which one read serves all tabs. A visible tab asks as often.
FRESH_SECONDS = 5.0
#: An hour of samples of pending tasks, one for each half minute in which a tab asked.
HOUR, SAMPLE_SECONDS = 3_600, 30
#: A topic is late if its oldest pending task waits longer. The monitors of k8s/ have limits of their own.
LATE_SECONDS = 60.0
#: Max heads of blocked keys, and max operations.
HEADS = OPERATIONS = 100
#: Size of a sparkline in the units of its view box.
WIDTH, HEIGHT = 120, 20
#: Max seconds between two samples that a line joins. A longer time had no visible tab.
GAP_SECONDS = 90.0


@dataclasses.dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """The last value that was read, how many seconds ago, and the error of a later attempt, if there was one."""

    value: T | None
    age: float
    error: str | None = None


class Shared(Generic[T]):
    """A value that is read again when it is asked for and old. Used by all threads."""

    def __init__(self, read: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._reading = threading.Lock()
        self._value: T | None = None
        self._error: str | None = None
        self._read_at = self._tried_at = float("-inf")

    def get(self) -> Reading[T]:
        """Return the value. While another thread reads it, return the last one, or wait if there is none."""
        if self._is_old() and self._reading.acquire(blocking=self._tried_at < 0):
            try:
                if self._is_old():
                    self._read_again()
            finally:
                self._reading.release()
        return Reading(self._value, self._clock() - self._read_at, self._error)

    def forget(self) -> None:
        """Let the next `get` read again, because an action has changed what it shows."""
        self._tried_at = min(self._tried_at, self._clock() - FRESH_SECONDS)

    def _is_old(self) -> bool:
        return self._clock() - self._tried_at >= FRESH_SECONDS

    def _read_again(self) -> None:
        try:
            self._value, self._error = self._read(), None
            self._read_at = self._clock()
        except OutboxError as error:
            self._error = str(error)
        self._tried_at = self._clock()


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """What `outbox status`, `workers` and `operations` print, read together."""

    backlog: Backlog
    controls: Mapping[str, Control]
    circuits: Sequence[TopicCircuit]
    differing: Mapping[str, Sequence[str]]
    orphans: Sequence[int] | None
    errors: Sequence[ErrorCount]
    blocked: Sequence[BlockedHead]
    operations: Sequence[Operation]
    reshard: str | None


class History:
    """The pending tasks of each topic in the last hour. There are no samples for times without a visible tab."""

    def __init__(self) -> None:
        self._samples: deque[tuple[datetime, Mapping[str, int]]] = deque(maxlen=HOUR // SAMPLE_SECONDS)

    def add(self, backlog: Backlog) -> None:
        """Add a sample if the last one is old enough."""
        if not self._samples or backlog.as_of - self._samples[-1][0] >= timedelta(seconds=SAMPLE_SECONDS):
            pending = {topic: line.pending for topic, line in backlog.topics().items()}
            self._samples.append((backlog.as_of, pending))

    def of(self, topic: str, now: datetime) -> list[tuple[float, int]]:
        """Return the samples of a topic, each with its age in seconds."""
        samples = [((now - at).total_seconds(), pending.get(topic, 0)) for at, pending in tuple(self._samples)]
        return [(age, number) for age, number in samples if age <= HOUR]


def read_status(table: TaskTable, history: History) -> Status:
    """Read what the pages show without a selection, and add to the history. Raises NotReached, OutboxError."""
    backlog = admin.backlog.read(table)
    history.add(backlog)
    progress = admin.reshard.Resharding(table).progress()
    return Status(
        backlog=backlog,
        controls=admin.topics.controls(table),
        circuits=admin.workers.open_circuits(backlog.workers),
        differing=admin.workers.differing(backlog.workers),
        orphans=admin.workers.shards_without_worker(table, backlog.workers),
        errors=admin.tasks.errors(table, backlog),
        blocked=admin.tasks.blocked_heads(table, backlog, HEADS) if backlog.total.blocked else (),
        operations=admin.operations.latest(table, OPERATIONS, at=backlog.as_of),
        reshard=progress[0].describe(progress[1]) if progress else None,
    )


def sparkline(samples: Sequence[tuple[float, int]]) -> list[str]:
    """Return the points of each line of a chart in SVG. `samples` have an age in seconds and a value, oldest first."""
    top = max((value for _, value in samples), default=0) or 1
    lines, before = list[list[str]](), float("inf")
    for age, value in samples:
        if before - age > GAP_SECONDS:
            lines.append([])
        lines[-1].append(f"{WIDTH * (1 - age / HOUR):.1f},{(HEIGHT - 1) * (1 - value / top) + 0.5:.1f}")
        before = age
    return [" ".join(points if len(points) > 1 else points * 2) for points in lines]  # a dot is a line to itself


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """How urgent it is, as a word that is also a class of the style sheet, and the sentence."""

    level: str
    sentence: str


def health(reading: Reading[Status]) -> Health:
    """Return the most urgent sentence."""
    if reading.error or reading.value is None:
        age = f" The figures are {spoken(reading.age)} old." if reading.value else ""
        return Health("bad", f"Spanner did not answer.{age} {reading.error or ''}".strip())
    return next(_found(reading.value))


def _found(status: Status) -> Iterator[Health]:
    """Yield sentences, the most urgent first."""
    backlog, total, late = status.backlog, status.backlog.total, status.backlog.oldest
    workers, age = counted(len(backlog.workers), "live worker"), spoken(backlog.age(late))
    circuits = {each.topic: f"circuit open since {each.since:%H:%M}: {each.reason}" for each in status.circuits}
    if not backlog.workers:
        yield Health("bad", f"No live worker, so no task is published. Pending: {counted(total.pending, 'task')}")
    if late and backlog.age(late) > LATE_SECONDS:
        yield Health("bad", ", ".join(filter(None, [f"{late.topic} is late: oldest {age}", circuits.get(late.topic)])))
    if status.orphans:
        yield Health("bad", f"{counted(len(status.orphans), 'shard')} without a live worker")
    for topic, sentence in circuits.items():
        yield Health("warn", f"{topic}: {sentence}")
    if total.dead:
        yield Health("warn", f"{counted(total.dead, 'dead task')}. Oldest pending task {age}, {workers}")
    yield Health("ok", f"Healthy: oldest pending task {age}, {workers}, no dead tasks")
