"""Read the selected tasks: how many they are, and their rows by ID.

Tasks are read as of the preview (`TaskSelection.as_of`), so that a change takes none that did not match then.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from outbox.base.values import chunked
from outbox.rows import backlog
from outbox.rows.task_table import COUNT_SECONDS, SCAN_SECONDS, TaskTable
from outbox.table.states import CANCELLED, CONDITIONS, STATES
from outbox_admin.change_kinds import ANY_UNSENT
from outbox_admin.tasks import task_sql
from outbox_admin.tasks.selections import ENDED, TaskSelection

#: Tasks in one transaction. They need about ten thousand of the 80,000 mutations that a commit may have.
CHUNK = 500
COUNT_TAG = "outbox-count"


class Row(NamedTuple):
    """A row of `task_sql.by_ids`. `now` is the database's time.

    `expires_at` is in the future, or None.
    """

    id: str
    topic: str
    ordering_key: str | None
    state: str
    matches: bool
    now: datetime
    expires_at: datetime | None
    blocked_by: str | None
    error: str | None
    due_at: datetime | None
    available_at: datetime | None
    bytes: int


def with_as_of(table: TaskTable, selection: TaskSelection) -> TaskSelection:
    """Return the selection with a time of its preview: now, if it has none."""
    return dataclasses.replace(selection, as_of=selection.as_of or table.now())


def condition_of(selection: TaskSelection) -> str:
    """Return the selection as an SQL condition, without the IDs."""
    if selection.state == CANCELLED:  # also if another program has made it unsent
        return "CancelledBy IS NOT NULL" + task_sql.narrowed(None, selection.names)
    not_blocked = f"NOT ({CONDITIONS['pending']}) AND NOT ({task_sql.STILL_BLOCKED})"
    state = (CONDITIONS | {ANY_UNSENT: "SentAt IS NULL"})[selection.state] if selection.state else not_blocked
    return state + task_sql.narrowed(selection.state, selection.names)


def count(table: TaskTable, selection: TaskSelection, *, exact: bool) -> backlog.Count:
    """Return the number of selected tasks, as of the selection's `as_of` or now.

    Unless `exact`, the count stops early, as that of the backlog does.
    """
    selection = with_as_of(table, selection)
    if selection.ids is not None:
        return backlog.Count(sum(row.matches for row in rows_of_ids(table, selection, selection.ids)))
    # The ranges of sent and cancelled tasks have no topic.
    topics = (None,) if selection.state in ENDED else topics_of(table, selection)
    ranges, limit = backlog.ranges_of(table.shards, topics), backlog.NO_LIMIT if exact else None
    seconds = COUNT_SECONDS if exact else SCAN_SECONDS

    def query(statement: str, values: Mapping[str, Any]) -> list[list[Any]]:
        return table.query(statement, COUNT_TAG, {**selection.values, **values}, at=selection.as_of, seconds=seconds)

    counting = task_sql.counts_of_state(state_of(selection), selection.names)
    counts = [backlog.count(query, each, ranges, limit) for each in counting]
    return backlog.Count(sum(row.number for rows, _ in counts for row in rows), any(full for _, full in counts))


def rows_of_ids(table: TaskTable, selection: TaskSelection, wanted: Sequence[str]) -> Iterator[Row]:
    """Yield the existing rows of these IDs, as of the selection's `as_of`."""
    statement = task_sql.by_ids(condition_of(selection))
    for ids in chunked(wanted, CHUNK):
        values = selection.values | {"ids": ids, "now": selection.as_of}
        yield from (Row(*row) for row in table.query(statement, COUNT_TAG, values, at=read_at(selection)))


def read_at(selection: TaskSelection) -> datetime | None:
    """Return as of when the IDs are read. A resend may take longer than Spanner keeps versions, so it reads them now.

    Tasks that are sent meanwhile do not match, because its selection has an `until`.
    """
    return None if selection.to else selection.as_of


def topics_of(table: TaskTable, selection: TaskSelection) -> list[str]:
    """Return the topics of the index ranges to read."""
    return [selection.topic] if selection.topic is not None else table.topics(at=selection.as_of)


def state_of(selection: TaskSelection) -> str:
    """Return the state. Raises ValueError if the selection has none."""
    if selection.state not in STATES:
        raise ValueError(f"a selection without ids needs a state, not {selection.state}")
    return selection.state
