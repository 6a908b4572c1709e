"""Blocked keys: one line for each head that other tasks of its key wait for."""

import dataclasses
from collections import Counter
from datetime import datetime

from starlette.responses import Response

from outbox import admin
from outbox.admin.table import TaskTable
from outbox.admin.tasks import Task
from outbox.console.rendering import render
from outbox.console.visits import Visit, page

#: Max blocked tasks that are read to find their heads.
READ = 1_000


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """The head of a blocked key, or only its ID if it is gone, and how many tasks wait for it."""

    id: str
    task: Task | None
    waiting: int


@dataclasses.dataclass(frozen=True, slots=True)
class Blocked:
    """All heads, those with the most waiting tasks first. Without `whole`, there are more blocked tasks than READ."""

    as_of: datetime
    heads: list[Head]
    whole: bool


def read(table: TaskTable) -> Blocked:
    """Return the blocked heads. Raises NotReached, OutboxError."""
    found = admin.tasks.find(table, ["blocked"], limit=READ)
    waiting = Counter(str(task.columns["BlockedBy"]) for task in found.tasks)
    tasks = admin.tasks.without_data(table, list(waiting))
    heads = [Head(id, tasks.get(id), number) for id, number in waiting.most_common()]
    return Blocked(found.as_of, heads, whole=found.next is None)


def show(visit: Visit) -> Response:
    """Show the blocked heads."""
    return render(visit, "blocked.html", blocked=visit.shared(read), command=visit.command("list", state="blocked"))


ROUTES = (page("/blocked", show),)
