"""Unsent tasks, counted by topic, state and error."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from outbox import admin
from outbox.cli.output import shortened, table
from outbox.program.terminal import Escaped, joined
from outbox.table.states import UNSENT

#: Max rows of the table.
ROWS = 10
#: Max tasks of a state that are read to count their errors.
READ = 1_000
#: The states in which LastError is the reason for the state.
FAILING = ("dead", "retrying")


def counted(tasks: "Sequence[admin.tasks.Task]", *, at_least: bool = False) -> list[dict[str, Any]]:
    """Return the number of tasks with the same topic, state and LastError, highest first.

    If `at_least`, there may be more tasks than `tasks`.
    """
    counts = Counter((task.columns["Topic"], task.state, task.columns["LastError"]) for task in tasks)
    return [
        {"topic": topic, "state": state, "error": error, "tasks": number, "at_least": at_least}
        for (topic, state, error), number in counts.most_common()
    ]


def of_backlog(database: "admin.table.TaskTable", backlog: "admin.backlog.Backlog") -> list[dict[str, Any]]:
    """Count the errors of at most READ tasks of each state, as of the backlog. Raises NotReached, OutboxError."""
    counts: list[dict[str, Any]] = []
    topics = backlog.topics()
    for state in UNSENT:
        if names := [topic for topic, line in topics.items() if getattr(line, state)]:
            tasks = admin.tasks.tried(database, state, names, READ, backlog.as_of)
            counts += counted([task for task in tasks if task.columns["LastError"]], at_least=len(tasks) == READ)
    return sorted(counts, key=lambda count: -int(count["tasks"]))


def of_selection(database: "admin.table.TaskTable", selection: "admin.changes.TaskSelection") -> list[dict[str, Any]]:
    """Count the first READ tasks of a selection by topic, state and LastError. Raises NotReached, OutboxError."""
    states = [selection.state] if selection.state else UNSENT
    tasks = admin.tasks.find(database, states, selection, limit=READ).tasks
    return counted(tasks, at_least=len(tasks) == READ)


def text(counts: Sequence[dict[str, Any]]) -> Escaped:
    """Return a table of the first ROWS counts."""
    rows = [
        [f">= {each['tasks']:,}" if each["at_least"] else each["tasks"], each["state"], each["topic"],
         shortened(each["error"])]
        for each in counts[:ROWS]
    ]  # fmt: skip
    others = [f"... and {len(counts) - ROWS:,} more"] if len(counts) > ROWS else []
    return joined(table(("TASKS", "STATE", "TOPIC", "ERROR"), rows), *others)
