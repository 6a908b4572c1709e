"""Reading tasks: a list, one with its message, those that were just sent."""

import dataclasses
from base64 import b64decode
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from outbox.admin import statements
from outbox.admin.changes import TaskSelection
from outbox.admin.table import LOOK_SECONDS, TaskTable
from outbox.storage.task_states import UNSENT

_COLUMNS = (
    "Id", "Topic", "Priority", "OrderingKey", "CreatedAt", "AvailableAt", "ExpiresAt", "Attempts", "LastError",
    "SentAt", "Bytes",
)  # fmt: skip
_ALL_COLUMNS = (*_COLUMNS, "Shard", "Sequence", "AtMostOnce", "Data")

#: How far back the newest sent tasks are looked for, one after the other, before all of them are read.
LOOKS_BACK = tuple(timedelta(minutes=8**power) for power in range(6))


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One row, its columns by their names, with its state."""

    state: str
    columns: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """How far a reader of sent tasks has come: to this SentAt, and in it to this id."""

    sent_at: datetime
    id: str = ""


def listed(table: TaskTable, selection: TaskSelection, limit: int) -> list[Task]:
    """Return the first `limit` tasks of a state, or of all states of unsent tasks, as they are now.

    Pending ones by priority, then age; sent ones the newest first; others by AvailableAt, then priority and age.
    """
    now = table.now()
    if selection.state == "sent":
        return _newest(table, selection, limit, now)
    topics = [selection.topic] if selection.topic is not None else table.topics(at=now)
    found: list[Task] = []
    for state in (selection.state,) if selection.state else UNSENT:
        if len(found) < limit:
            found += _of_state(table, state, selection, limit - len(found), now, topics=topics)
    return found


def _newest(table: TaskTable, selection: TaskSelection, limit: int, now: datetime) -> list[Task]:
    """Look back ever further: of a long time there may be millions, and the index has the oldest first."""
    until = selection.until or now + timedelta(seconds=1)
    for window in LOOKS_BACK:
        since = max(filter(None, (selection.since, until - window)))
        found = _of_state(table, "sent", dataclasses.replace(selection, since=since), limit, now)
        if len(found) >= limit or since == selection.since:
            return found
    return _of_state(table, "sent", selection, limit, now)


def _of_state(
    table: TaskTable, state: str, selection: TaskSelection, limit: int, now: datetime, **places: Any
) -> list[Task]:
    values = selection.values | places | {"shards": list(table.shards), "limit": limit}
    statement = statements.listed(state, ", ".join(_COLUMNS), values)
    if "@now" in statement:
        values["now"] = now
    rows = table.query(statement, "outbox-list", values, at=now, seconds=LOOK_SECONDS)
    return [Task(state, dict(zip(_COLUMNS, row, strict=True))) for row in rows]


def task(table: TaskTable, id: str) -> Task | None:
    """Return one task with all its columns, `Data` as bytes, or None if there is none of that id."""
    rows = table.query(statements.task(", ".join(_ALL_COLUMNS)), "outbox-show", {"id": id})
    if not rows:
        return None
    *values, state = rows[0]
    columns = dict(zip(_ALL_COLUMNS, values, strict=True))
    return Task(state, columns | {"Data": b64decode(columns["Data"])})  # the client leaves BYTES as they travel


def sent_after(table: TaskTable, position: Position, topic: str | None, limit: int) -> list[dict[str, Any]]:
    """Return the next tasks that were sent behind `position`, in the order of SentAt, then Id: by column.

    A commit that a later read sees has a later timestamp than all that this one sees, so a reader that goes on behind
    the last row misses none. https://cloud.google.com/spanner/docs/true-time-external-consistency
    """
    names = {"topic": topic} if topic is not None else {}
    values = names | {
        "shards": list(table.shards), "after": position.sent_at, "after_id": position.id, "limit": limit,
    }  # fmt: skip
    rows = table.query(statements.sent_after(names), "outbox-tail", values)
    columns = ("SentAt", "Id", "Topic", "Priority", "OrderingKey", "Bytes", "CreatedAt")
    return [dict(zip(columns, row, strict=True)) for row in rows]
