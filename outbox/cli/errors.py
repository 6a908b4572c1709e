"""Unsent tasks, counted by topic, state and error."""

from collections.abc import Sequence

from outbox import admin
from outbox.cli.output import shortened, table
from outbox.program.terminal import Escaped, joined
from outbox.table.states import UNSENT

#: Max rows of the table.
ROWS = 10
#: The states in which LastError is the reason for the state.
FAILING = ("dead", "retrying")


def of_selection(
    database: "admin.table.TaskTable", selection: "admin.changes.TaskSelection"
) -> "list[admin.tasks.ErrorCount]":
    """Count the first tasks of a selection by topic, state and LastError. Raises NotReached, OutboxError."""
    states = [selection.state] if selection.state else UNSENT
    limit = admin.tasks.ERRORS_READ
    tasks = admin.tasks.find(database, states, selection, limit=limit).tasks
    return admin.tasks.count_errors(tasks, at_least=len(tasks) == limit)


def text(counts: "Sequence[admin.tasks.ErrorCount]") -> Escaped:
    """Return a table of the first ROWS counts."""
    rows = [
        [f">= {each.tasks:,}" if each.at_least else each.tasks, each.state, each.topic, shortened(each.error)]
        for each in counts[:ROWS]
    ]
    others = [f"... and {len(counts) - ROWS:,} more"] if len(counts) > ROWS else []
    return joined(table(("TASKS", "STATE", "TOPIC", "ERROR"), rows), *others)
