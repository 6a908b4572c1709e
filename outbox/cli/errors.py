"""Equal errors of tasks, counted."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from outbox.cli.output import table

if TYPE_CHECKING:
    from outbox.admin.backlog import Backlog
    from outbox.admin.changes import TaskSelection
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


def groups(tasks: "Iterable[Task]", *, at_least: bool = False) -> list[dict[str, Any]]:
    """Return the number of dead or retrying tasks with the same topic, state and LastError, the largest first.

    If `at_least`, there may be more of them.
    """
    counts = Counter(
        (task.columns["Topic"], task.state, task.columns["LastError"])
        for task in tasks
        if task.state in STATES and task.columns["LastError"]
    )
    return [
        {"topic": topic, "state": state, "error": error, "tasks": number, "at_least": at_least}
        for (topic, state, error), number in counts.most_common()
    ]


def of_backlog(database: "TaskTable", backlog: "Backlog") -> list[dict[str, Any]]:
    """Read the errors of at most READ tasks of each state, as of the backlog. Raises NotReached, OutboxError."""
    from outbox.admin import tasks  # noqa: PLC0415 - see open_table
    from outbox.admin.changes import TaskSelection  # noqa: PLC0415 - see open_table

    found: list[dict[str, Any]] = []
    for state in STATES:
        if getattr(backlog.total, state):
            some = tasks.listed(database, TaskSelection(state=state), READ, backlog.as_of)
            found += groups(some, at_least=len(some) == READ)
    return sorted(found, key=lambda group: -int(group["tasks"]))


def of_selection(database: "TaskTable", selection: "TaskSelection") -> list[dict[str, Any]]:
    """Count the first READ tasks of a selection by topic and LastError. Raises NotReached, OutboxError."""
    from outbox.admin import tasks  # noqa: PLC0415 - see open_table

    some = tasks.listed(database, selection, READ)
    counts = Counter((task.columns["Topic"], task.state, task.columns["LastError"]) for task in some)
    return [
        {"topic": topic, "state": state, "error": error, "tasks": number, "at_least": len(some) == READ}
        for (topic, state, error), number in counts.most_common()
    ]


def text(found: Sequence[dict[str, Any]]) -> str:
    """Return a table of the first GROUPS groups, after an empty line."""
    rows = [
        [f">= {each['tasks']:,}" if each["at_least"] else each["tasks"], each["state"], each["topic"],
         shortened(each["error"])]
        for each in found[:GROUPS]
    ]  # fmt: skip
    more = f"\n... and {len(found) - GROUPS:,} more" if len(found) > GROUPS else ""
    return "\n" + table(("TASKS", "STATE", "TOPIC", "ERROR"), rows) + more


def shortened(error: str | None) -> str | None:
    """Return the first CHARACTERS of an error."""
    return error if error is None or len(error) <= CHARACTERS else error[: CHARACTERS - 3] + "..."
