"""The tasks that a command, a page or a change is about, and how many they are.

Tasks are read as of the preview (`TaskSelection.as_of`), so that a change takes none that did not match then.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Self

from outbox.base.values import chunked, json_column
from outbox.errors import OutboxError
from outbox.program.settings import MOMENT
from outbox.rows import backlog
from outbox.rows.task_table import COUNT_SECONDS, SCAN_SECONDS, TaskTable
from outbox.table.states import CANCELLED, CONDITIONS, STATES
from outbox_admin.tasks import task_sql

#: As the state of a selection by `ids`: all unsent states.
ANY_UNSENT = "unsent"
#: Tasks in one transaction. They need about ten thousand of the 80,000 mutations that a commit may have.
CHUNK = 500
COUNT_TAG = "outbox-count"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TaskSelection:
    """The tasks of a state or with one of the `ids`, narrowed by all other fields.

    `since` is inclusive, `until` exclusive. Both are compared with SentAt of sent tasks and CreatedAt of others.
    `error` is a part of LastError, ignoring case. `id_prefix` is the beginning of the ID. With `ids` and no state,
    pending tasks are excluded, because they need no retry, and blocked ones, because the head of their key releases
    them, unless this head is gone. Without `include_expired`, unsent tasks whose ExpiresAt has passed are excluded.
    `operation` is the ID of the operation that cancelled the tasks, and then times are those of the cancels. `as_of` is
    the time of the preview. A count is as of then, and a change takes only tasks that matched then, too. Of a resend,
    `to` is the full name of the Pub/Sub topic, and `rate` a max number of tasks per second.
    """

    state: str | None = None
    ids: tuple[str, ...] | None = None
    topic: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    error: str | None = None
    ordering_key: str | None = None
    id_prefix: str | None = None
    operation: str | None = None
    include_expired: bool = True
    as_of: datetime | None = None
    to: str | None = None
    rate: int | None = None

    @classmethod
    def recorded(cls, text: str) -> Self:
        """Return the selection from the column Selection. Raises OutboxError: it is not whole, or not a selection."""
        try:
            values = json_column(text)
            return cls(**{name: _field(name, value) for name, value in values.items()})
        except (ValueError, TypeError, AttributeError):
            # `more_ids` is no field: the record does not have all IDs.
            raise OutboxError("its record does not contain the whole selection. Start a new operation") from None

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the conditions that narrow the selection."""
        return frozenset(self.values) | (
            frozenset() if self.include_expired or self.state in task_sql.ENDED else {"unexpired"}
        )

    @property
    def values(self) -> dict[str, Any]:
        """Return the values that narrow the selection, by parameter name."""
        named = ("topic", "since", "until", "error", "ordering_key", "id_prefix", "operation")
        return {name: value for name in named if (value := getattr(self, name)) is not None}

    @property
    def condition(self) -> str:
        """Return the selection as an SQL condition, without the IDs."""
        if self.state == CANCELLED:  # also if another program has made it unsent
            return "CancelledBy IS NOT NULL" + task_sql.narrowed(None, self.names)
        unheld = f"NOT ({CONDITIONS['pending']}) AND NOT ({task_sql.HELD})"
        state = (CONDITIONS | {ANY_UNSENT: "SentAt IS NULL"})[self.state] if self.state else unheld
        return state + task_sql.narrowed(self.state, self.names)


def _field(name: str, value: Any) -> Any:
    """Return a field of a recorded selection. Raises ValueError, TypeError: any program may write the column."""
    times = dict.fromkeys(("since", "until", "as_of"), datetime)
    value = MOMENT.parse(value) if name in times else value
    kind: Any = (times | {"ids": list, "include_expired": bool, "rate": int}).get(name, str)
    if not isinstance(value, kind) or (kind is list and not all(isinstance(id, str) for id in value)):
        raise ValueError(name)
    return tuple(value) if kind is list else value


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


def previewed(table: TaskTable, selection: TaskSelection) -> TaskSelection:
    """Return the selection with a time of its preview: now, if it has none."""
    return dataclasses.replace(selection, as_of=selection.as_of or table.now())


def count(table: TaskTable, selection: TaskSelection, *, exact: bool) -> backlog.Count:
    """Return the number of selected tasks, as of the selection's `as_of` or now.

    Unless `exact`, the count stops early, as that of the backlog does.
    """
    selection = previewed(table, selection)
    if selection.ids is not None:
        return backlog.Count(sum(row.matches for row in rows_of_ids(table, selection, selection.ids)))
    # The ranges of sent and cancelled tasks have no topic.
    topics = (None,) if selection.state in task_sql.ENDED else topics_of(table, selection)
    ranges, limit = backlog.ranges_of(table.shards, topics), backlog.NO_LIMIT if exact else None
    seconds = COUNT_SECONDS if exact else SCAN_SECONDS

    def query(statement: str, values: Mapping[str, Any]) -> list[list[Any]]:
        return table.query(statement, COUNT_TAG, {**selection.values, **values}, at=selection.as_of, seconds=seconds)

    counting = task_sql.counts_of_state(state_of(selection), selection.names)
    counts = [backlog.count(query, each, ranges, limit) for each in counting]
    return backlog.Count(sum(row.number for rows, _ in counts for row in rows), any(full for _, full in counts))


def rows_of_ids(table: TaskTable, selection: TaskSelection, wanted: Sequence[str]) -> Iterator[Row]:
    """Yield the existing rows of these IDs, as of the selection's `as_of`."""
    statement = task_sql.by_ids(selection.condition)
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
