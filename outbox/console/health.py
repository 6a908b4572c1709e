"""One sentence about the outbox, at the top of every page. Pure."""

import dataclasses
from collections.abc import Iterator

from outbox.console.readings import Reading, Status
from outbox.program.terminal import counted
from outbox.program.times import spoken

#: A topic is late if its oldest pending task waits longer. The monitors of k8s/ have limits of their own.
LATE_SECONDS = 60.0


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
    backlog, total = status.backlog, status.backlog.total
    oldest, workers = backlog.oldest, counted(len(backlog.workers), "live worker")
    late = oldest if backlog.age(oldest) > LATE_SECONDS else None
    if not backlog.workers:
        yield Health("bad", f"No live worker, so no task is published. Pending: {counted(total.pending, 'task')}")
    if late:
        yield Health("bad", f"{late.topic} is late: oldest {spoken(backlog.age(late))}{_circuit(status, late.topic)}")
    if status.orphans:
        yield Health("bad", f"{counted(len(status.orphans), 'shard')} without a live worker")
    for circuit in status.circuits:
        yield Health("warn", f"{circuit.topic}: circuit open since {circuit.since:%H:%M}: {circuit.reason}")
    if total.dead:
        yield Health("warn", f"{counted(total.dead, 'dead task')}. Oldest pending task {_age(status)}, {workers}")
    yield Health("ok", f"Healthy: oldest pending task {_age(status)}, {workers}, no dead tasks")


def _age(status: Status) -> str:
    return spoken(status.backlog.age(status.backlog.oldest))


def _circuit(status: Status, topic: str) -> str:
    found = [each for each in status.circuits if each.topic == topic]
    return f", circuit open since {found[0].since:%H:%M}: {found[0].reason}" if found else ""
