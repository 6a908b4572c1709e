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
