"""Read tasks: a list, or one task with its message."""

import dataclasses
from base64 import b64decode
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from outbox.admin import statements
from outbox.admin.changes import CHUNK, TaskSelection
from outbox.admin.table import SCAN_SECONDS, TaskTable
from outbox.message import parsed
from outbox.table import ddl
from outbox.table.states import UNSENT
from outbox.table.values import chunked

_COLUMNS = (
    "Id", "Topic", "Priority", "OrderingKey", "CreatedAt", "AvailableAt", "BlockedBy", "ExpiresAt", "Attempts",
    "LastError", "SentAt", "Bytes",
)  # fmt: skip
_ALL_COLUMNS = tuple(dict.fromkeys((*_COLUMNS, *ddl.columns())))

#: Time windows that are searched for the newest sent tasks, one after the other, before all sent tasks are read.
WINDOWS = tuple(timedelta(minutes=8**power) for power in range(6))


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A row by column name, and the state of the task."""

    state: str
    columns: Mapping[str, Any]

    @property
    def message(self) -> Any | None:
        """Return the PubsubMessage in the column Data, or None if the column holds none."""
        return parsed(self.columns["Data"])


def listed(table: TaskTable, selection: TaskSelection, limit: int, at: datetime | None = None) -> list[Task]:
    """Return the first `limit` tasks of a state, or of all unsent tasks, as they were `at` a time, by default now.

    Pending tasks are sorted by priority and age, and others by AvailableAt, priority and age. Sent tasks are newest
    first, in the reverse of the order in which `outbox.reader` reads them.
    """
    now = at or table.now()
    if selection.state == "sent":
        return _newest(table, selection, limit, now)
    topics = [selection.topic] if selection.topic is not None else table.topics(at=now)
    tasks: list[Task] = []
    for state in (selection.state,) if selection.state else UNSENT:
        if len(tasks) < limit:
            tasks += _of_state(table, state, selection, limit - len(tasks), now, topics=topics)
    return tasks


def tried(table: TaskTable, state: str, topics: Sequence[str], limit: int, at: datetime) -> list[Task]:
    """Return the first `limit` unsent tasks of a state and of `topics` that may have failed, as they were `at` a time.

    A recorded failure sets AvailableAt. So of the pending tasks, only the due ones are read, however many are ready.
    """
    range_ = "due" if state == "pending" else state
    tasks = _of_state(table, range_, TaskSelection(), limit, at, topics=topics)
    return [dataclasses.replace(task, state=state) for task in tasks]


def _newest(table: TaskTable, selection: TaskSelection, limit: int, now: datetime) -> list[Task]:
    """Search growing time windows, because there may be millions of sent tasks and the index has the oldest first."""
    until = selection.until or now + timedelta(seconds=1)
    for window in WINDOWS:
        since = max(filter(None, (selection.since, until - window)))
        tasks = _of_state(table, "sent", dataclasses.replace(selection, since=since), limit, now)
        if len(tasks) >= limit or (selection.since is not None and since <= selection.since):
            return tasks
    return _of_state(table, "sent", selection, limit, now)


def _of_state(
    table: TaskTable, state: str, selection: TaskSelection, limit: int, now: datetime, **places: Any
) -> list[Task]:
    values = selection.values | places | {"shards": list(table.shards), "limit": limit}
    statement = statements.listed(state, ", ".join(_COLUMNS), selection.names)
    if "@now" in statement:
        values["now"] = now
    rows = table.query(statement, "outbox-list", values, at=now, seconds=SCAN_SECONDS)
    return [Task(state, dict(zip(_COLUMNS, row, strict=True))) for row in rows]


def beginning_with(table: TaskTable, prefixes: Sequence[str], limit: int) -> dict[str, list[str]]:
    """Return the IDs of the first `limit` tasks that begin with each of `prefixes`, sorted, if there are any."""
    matches: dict[str, list[str]] = defaultdict(list)
    for ids in chunked(prefixes, CHUNK):
        for prefix, id in table.query(statements.BEGINNING_WITH, "outbox-show", {"ids": list(ids), "limit": limit}):
            matches[prefix].append(id)
    return {prefix: sorted(ids) for prefix, ids in matches.items()}


def task(table: TaskTable, id: str) -> Task | None:
    """Return one task with all columns, `Data` as bytes, or None if it does not exist."""
    rows = table.query(statements.task(", ".join(_ALL_COLUMNS)), "outbox-show", {"id": id})
    if not rows:
        return None
    *values, state = rows[0]
    columns = dict(zip(_ALL_COLUMNS, values, strict=True))
    return Task(state, columns | {"Data": b64decode(columns["Data"])})  # the client returns BYTES in base64
