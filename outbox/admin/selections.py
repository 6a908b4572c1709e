"""The tasks that a command or an operation of the console is about: how many they are, and the chunks to change.

Tasks are read as of the preview (`TaskSelection.as_of`), so that a change takes none that did not match then.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Self

from outbox.admin import backlog, operator_sql
from outbox.admin.table import COUNT_SECONDS, SCAN_SECONDS, LayoutChanged, TaskTable
from outbox.base.values import chunked, json_column, shown
from outbox.errors import OutboxError
from outbox.program.settings import MOMENT
from outbox.table.states import CANCELLED, CONDITIONS, LONG_AGO, NO_SEQUENCE, STATES

#: As the state of a selection by `ids`: all unsent states.
ANY_UNSENT = "unsent"
#: Tasks in one transaction. They need about ten thousand of the 80,000 mutations that a commit may have.
CHUNK = 500
#: Task IDs that one query reads.
PAGE = 20 * CHUNK
#: Max groups of tasks in a preview, the largest first.
GROUPS = 50
#: The place before all tasks, by parameter, and how a place is read from JSON.
_FIRST = {"after": LONG_AGO, "after_created": LONG_AGO, "after_sequence": NO_SEQUENCE, "after_id": ""}
_PARSED: Mapping[str, Any] = {
    **dict.fromkeys(("after", "after_created"), datetime.fromisoformat), "after_sequence": int, "after_id": str,
}  # fmt: skip
_COUNT, _SELECT = "outbox-count", "outbox-select"


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
            frozenset() if self.include_expired or self.state in operator_sql.ENDED else {"unexpired"}
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
            return "CancelledBy IS NOT NULL" + operator_sql.narrowed(None, self.names)
        unheld = f"NOT ({CONDITIONS['pending']}) AND NOT ({operator_sql.HELD})"
        state = (CONDITIONS | {ANY_UNSENT: "SentAt IS NULL"})[self.state] if self.state else unheld
        return state + operator_sql.narrowed(self.state, self.names)


def _field(name: str, value: Any) -> Any:
    """Return a field of a recorded selection. Raises ValueError, TypeError: any program may write the column."""
    times = dict.fromkeys(("since", "until", "as_of"), datetime)
    value = MOMENT.parse(value) if name in times else value
    kind: Any = (times | {"ids": list, "include_expired": bool, "rate": int}).get(name, str)
    if not isinstance(value, kind) or (kind is list and not all(isinstance(id, str) for id in value)):
        raise ValueError(name)
    return tuple(value) if kind is list else value


class Row(NamedTuple):
    """A row of `operator_sql.by_ids`. `now` is the database's time.

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


@dataclasses.dataclass(frozen=True, slots=True)
class Preview:
    """What a change would do: the exact number of tasks, their largest groups, and the tasks that it cannot change.

    A group has a topic, the first line of one LastError, and a number. `refused` has numbers by state: `expired`,
    `missing`, or a state that the change is not for. Of a restore, `overtaken` tasks would follow later tasks
    of their keys, which were sent since.
    """

    tasks: int
    groups: Sequence[Sequence[Any]]
    refused: Mapping[str, int]
    overtaken: int = 0


class Chunk(NamedTuple):
    """Tasks to change together: the position after them, their IDs, and those of them that matched at the preview."""

    position: str
    ids: Sequence[str]
    seen: set[str]


def previewed(table: TaskTable, selection: TaskSelection) -> TaskSelection:
    """Return the selection with a time of its preview: now, if it has none."""
    return dataclasses.replace(selection, as_of=selection.as_of or table.now())


def count(table: TaskTable, selection: TaskSelection, *, exact: bool) -> backlog.Count:
    """Return the number of selected tasks, as of the selection's `as_of` or now.

    Unless `exact`, the count stops early, as that of the backlog does.
    """
    selection = previewed(table, selection)
    if selection.ids is not None:
        return backlog.Count(sum(row.matches for row in _rows_of_ids(table, selection, selection.ids)))
    # The ranges of sent and cancelled tasks have no topic.
    topics = (None,) if selection.state in operator_sql.ENDED else _topics(table, selection)
    ranges, limit = backlog.ranges_of(table.shards, topics), backlog.NO_LIMIT if exact else None
    seconds = COUNT_SECONDS if exact else SCAN_SECONDS

    def query(statement: str, values: Mapping[str, Any]) -> list[list[Any]]:
        return table.query(statement, _COUNT, {**selection.values, **values}, at=selection.as_of, seconds=seconds)

    counting = operator_sql.counts_of_state(_state(selection), selection.names)
    counts = [backlog.count(query, each, ranges, limit) for each in counting]
    return backlog.Count(sum(row.number for rows, _ in counts for row in rows), any(full for _, full in counts))


def preview(table: TaskTable, selection: TaskSelection, name: str = "") -> Preview:
    """Return what the change `name` of the selection would do, as of its `as_of` or now."""
    selection = previewed(table, selection)
    found = _preview_of_state(table, selection) if selection.ids is None else _preview_of_ids(table, selection)
    if name != "restore":
        return found
    overtaken = 0
    for chunk in chunks(table, selection):
        values = {"ids": sorted(chunk.seen)}
        [[later]] = table.query(operator_sql.OVERTAKEN, _COUNT, values, at=selection.as_of, seconds=SCAN_SECONDS)
        overtaken += later
    return dataclasses.replace(found, overtaken=overtaken)


def _preview_of_state(table: TaskTable, selection: TaskSelection) -> Preview:
    statement = operator_sql.grouped(_state(selection), selection.names)
    topics = [] if selection.state in operator_sql.ENDED else _topics(table, selection)
    values = selection.values | {"topics": topics, "limit": GROUPS}
    groups = table.query(statement, _COUNT, values, at=selection.as_of, seconds=COUNT_SECONDS)
    tasks = count(table, selection, exact=True).number
    everything = dataclasses.replace(selection, include_expired=True)
    expired = count(table, everything, exact=True).number - tasks if "unexpired" in selection.names else 0
    return Preview(tasks, groups, {"expired": expired} if expired else {})


def _preview_of_ids(table: TaskTable, selection: TaskSelection) -> Preview:
    rows = list(_rows_of_ids(table, selection, selection.ids or ()))
    matching = [row for row in rows if row.matches]
    groups = Counter((row.topic, operator_sql.error_group(row.error)) for row in matching)
    errors = {(row.topic, operator_sql.error_group(row.error)): row.error for row in reversed(matching)}
    refused = Counter(row.state for row in rows if not row.matches)
    refused["missing"] = len(selection.ids or ()) - len(rows)
    largest = [[group[0], errors[group], number] for group, number in groups.most_common(GROUPS)]
    return Preview(len(matching), largest, +refused)


def in_order_of_keys(table: TaskTable, selection: TaskSelection) -> TaskSelection:
    """Return the selection with its IDs, if it has any, in the order of their ordering keys."""
    rows: list[list[Any]] = []
    for ids in chunked(selection.ids or (), PAGE):
        rows += table.query(operator_sql.PLACES, _SELECT, {"ids": ids}, at=selection.as_of, seconds=SCAN_SECONDS)
    found = [id for id, *_ in sorted(rows, key=lambda row: (*row[2:], row[0]))]
    return dataclasses.replace(selection, ids=selection.ids and tuple(dict.fromkeys([*found, *selection.ids])))


def chunks(
    table: TaskTable,
    selection: TaskSelection,
    position: str | None = None,
    *,
    most: int | None = None,
    max_bytes: float = math.inf,
) -> Iterator[Chunk]:
    """Yield the selected tasks after `position` in chunks with at most `most` tasks and `max_bytes` of messages.

    A chunk has at most CHUNK tasks. Raises OutboxError if the position is malformed, or if the number of shards was
    changed since it was recorded.
    """
    layout, column = table.layout, _shard_column(table, selection)  # first: another thread may replace the layout
    (done, after), limits = next_chunk(table, selection, position), (min(CHUNK, most or CHUNK), max_bytes)
    if selection.ids is not None:
        yield from _chunks_of_ids(table, selection, done, limits)
        return
    topics = [] if selection.state in operator_sql.ENDED else _topics(table, selection)
    for shard in table.shards[done:]:
        values = selection.values | {"topics": topics, "shard": shard, "limit": PAGE}
        for place, ids in _chunks_of_shard(table, selection, values, after, limits):
            yield Chunk(json.dumps({"column": column, "done": shard, "after": place}, default=shown), ids, {*ids})
        after = {}
        if table.layout != layout:
            # Another thread has noticed a reshard and replaced the layout: the last pages may be of the new one.
            raise LayoutChanged(f"{table.name}: the number of shards was changed. Start a new operation")


def next_chunk(table: TaskTable, selection: TaskSelection, position: str | None) -> tuple[int, dict[str, Any]]:
    """Return where the next chunk begins: after so many shards, or IDs, and after a place in the next shard.

    Raises OutboxError if the shards were others at the last chunk, or if the position is malformed, because any program
    may write it.
    """
    column = _shard_column(table, selection)
    try:
        found: dict[str, Any] = json_column(position) if position else {"column": column, "done": 0}
        if found["column"] != column:
            raise OutboxError("the number of shards was changed since the last chunk. Start a new operation")
        after = {name: _PARSED[name](value) for name, value in found.get("after", {}).items()}
        return int(found["done"]), after
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise OutboxError(f"the row of the operation is malformed: {error!r}. Start a new operation") from None


def _shard_column(table: TaskTable, selection: TaskSelection) -> str | None:
    """Return the column by whose shards the tasks are selected. None: by their IDs."""
    return None if selection.ids is not None else table.layout.column


def _chunks_of_ids(table: TaskTable, selection: TaskSelection, done: int, limits: tuple[int, float]) -> Iterator[Chunk]:
    for page in chunked((selection.ids or ())[done:], CHUNK):
        rows = {row.id: row for row in _rows_of_ids(table, selection, page)}
        seen, sizes = {id for id in rows if rows[id].matches}, Counter({id: rows[id].bytes for id in rows})
        for ids in chunked(page, *limits, sizes.__getitem__):
            done += len(ids)
            yield Chunk(json.dumps({"column": None, "done": done}), ids, seen.intersection(ids))


def _chunks_of_shard(
    table: TaskTable,
    selection: TaskSelection,
    values: Mapping[str, Any],
    after: Mapping[str, Any],
    limits: tuple[int, float],
) -> Iterator[tuple[Mapping[str, Any], Sequence[str]]]:
    """Yield the selected IDs of a shard in chunks, each with the place after it."""
    state, by_key = _state(selection), selection.to is not None
    statement = operator_sql.next_ids(state, selection.names, by_key=by_key)
    order = operator_sql.order(state, by_key=by_key)
    place: dict[str, Any] = {**{name: _FIRST[name] for name in order}, **after}
    rows: Sequence[Any] = range(PAGE)
    while len(rows) == PAGE:
        given = {**values, **place, "now": selection.as_of}
        rows = table.query(statement, _SELECT, given, at=_read_at(selection), seconds=SCAN_SECONDS)
        for chunk in chunked(rows, *limits, lambda row: row[0]):
            place = dict(zip(order, chunk[-1][1:], strict=True))
            yield place, [row[-1] for row in chunk]


def _rows_of_ids(table: TaskTable, selection: TaskSelection, wanted: Sequence[str]) -> Iterator[Row]:
    """Yield the existing rows of these IDs, as of the selection's `as_of`."""
    statement = operator_sql.by_ids(selection.condition)
    for ids in chunked(wanted, CHUNK):
        values = selection.values | {"ids": ids, "now": selection.as_of}
        yield from (Row(*row) for row in table.query(statement, _COUNT, values, at=_read_at(selection)))


def _read_at(selection: TaskSelection) -> datetime | None:
    """Return as of when the IDs are read. A resend may take longer than Spanner keeps versions, so it reads them now.

    Tasks that are sent meanwhile do not match, because its selection has an `until`.
    """
    return None if selection.to else selection.as_of


def _topics(table: TaskTable, selection: TaskSelection) -> list[str]:
    """Return the topics of the index ranges to read."""
    return [selection.topic] if selection.topic is not None else table.topics(at=selection.as_of)


def _state(selection: TaskSelection) -> str:
    if selection.state not in STATES:
        raise ValueError(f"a selection without ids needs a state, not {selection.state}")
    return selection.state
