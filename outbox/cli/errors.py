"""Equal errors of tasks, counted."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from outbox.cli.output import table

if TYPE_CHECKING:
    from outbox.admin.backlog import Backlog
    from outbox.admin.table import TaskTable
    from outbox.admin.tasks import Task

#: Max characters of LastError in a table. `outbox show` prints all.
CHARACTERS = 80
#: Max groups in a table.
GROUPS = 10
#: Max tasks of a state whose errors `outbox status` reads.
READ = 1_000
#: The states in which LastError is the reason for the state.
STATES = ("dead", "retrying")


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Tasks of a topic and a state with the same LastError. If `at_least`, there may be more of them."""

    topic: str
    state: str
    error: str
    tasks: int
    at_least: bool = False


def groups(tasks: "Iterable[Task]", *, at_least: bool = False) -> list[ErrorGroup]:
    """Return the groups of the tasks that are dead or retrying, the largest first."""
    counts = Counter(
        (task.columns["Topic"], task.state, task.columns["LastError"])
        for task in tasks
        if task.state in STATES and task.columns["LastError"]
    )
    return [ErrorGroup(*key, number, at_least) for key, number in counts.most_common()]


def of_backlog(database: "TaskTable", backlog: "Backlog") -> list[ErrorGroup]:
    """Read the errors of at most READ tasks of each state, as of the backlog. Raises NotReached, OutboxError."""
    from outbox.admin import tasks  # noqa: PLC0415 - the Spanner client: half a second
    from outbox.admin.changes import TaskSelection  # noqa: PLC0415 - the same

    found: list[ErrorGroup] = []
    for state in STATES:
        if getattr(backlog.total, state):
            some = tasks.listed(database, TaskSelection(state=state), READ, backlog.as_of)
            found += groups(some, at_least=len(some) == READ)
    return sorted(found, key=lambda group: -group.tasks)


def text(found: Sequence[ErrorGroup]) -> str:
    """Return a table of the first GROUPS groups."""
    rows = [
        [f">= {group.tasks:,}" if group.at_least else group.tasks, group.state, group.topic, shortened(group.error)]
        for group in found[:GROUPS]
    ]
    more = f"\n... {len(found) - GROUPS:,} more errors" if len(found) > GROUPS else ""
    return "\n" + table(("TASKS", "STATE", "TOPIC", "ERROR"), rows) + more


def shortened(error: str | None) -> str | None:
    """Return the first CHARACTERS of an error."""
    return error if error is None or len(error) <= CHARACTERS else error[: CHARACTERS - 3] + "..."
