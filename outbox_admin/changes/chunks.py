"""What a change would do, and the chunks in which it is executed."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from outbox.base.values import chunked, json_column, shown
from outbox.errors import OutboxError
from outbox.rows.task_table import COUNT_SECONDS, SCAN_SECONDS, LayoutChanged, TaskTable
from outbox.table.states import LONG_AGO, NO_SEQUENCE
from outbox_admin.changes import change_sql
from outbox_admin.tasks import task_sql
from outbox_admin.tasks.selected import CHUNK, COUNT_TAG, read_at, rows_of_ids, state_of, topics_of, with_as_of
from outbox_admin.tasks.selections import ENDED, TaskSelection

#: Task IDs that one query reads.
PAGE_IDS = 20 * CHUNK
#: Max groups of tasks in a preview, the largest first.
GROUPS = 50
#: The place before all tasks, by parameter, and how a place is read from JSON.
_FIRST = {"after": LONG_AGO, "after_created": LONG_AGO, "after_sequence": NO_SEQUENCE, "after_id": ""}
_PARSED: Mapping[str, Any] = {
    **dict.fromkeys(("after", "after_created"), datetime.fromisoformat), "after_sequence": int, "after_id": str,
}  # fmt: skip
_SELECT = "outbox-select"


@dataclasses.dataclass(frozen=True, slots=True)
class Preview:
    """What a change would do: the exact number of tasks, their largest groups, and the tasks that it cannot change.

    A group has a topic, the first line of one LastError, and a number. `refused` has numbers by state: `expired`,
    `missing`, or a state that the change is not for. Of a restore, `overtaken` tasks would follow later tasks
    of their keys, which were sent since. It is None if they are not counted.
    """

    tasks: int
    groups: Sequence[Sequence[Any]]
    refused: Mapping[str, int]
    overtaken: int | None = 0


class Chunk(NamedTuple):
    """Tasks to change together: the position after them, their IDs, and those of them that matched at the preview."""

    position: str
    ids: Sequence[str]
    seen: set[str]


def preview(table: TaskTable, selection: TaskSelection, name: str = "", most: float = math.inf) -> Preview:
    """Return what the change `name` of the selection would do, as of its `as_of` or now.

    Of a restore of more than `most` tasks, the overtaken ones are not counted, because that reads all of them.
    """
    selection = with_as_of(table, selection)
    found = _preview_of_state(table, selection) if selection.ids is None else _preview_of_ids(table, selection)
    if name != "restore":
        return found
    if found.tasks > most:
        return dataclasses.replace(found, overtaken=None)
    overtaken = 0
    for chunk in chunks(table, selection):
        values = {"ids": sorted(chunk.seen)}
        [[later]] = table.query(change_sql.OVERTAKEN, COUNT_TAG, values, at=selection.as_of, seconds=SCAN_SECONDS)
        overtaken += later
    return dataclasses.replace(found, overtaken=overtaken)


def _preview_of_state(table: TaskTable, selection: TaskSelection) -> Preview:
    statement = change_sql.grouped(state_of(selection), selection.names)
    topics = [] if selection.state in ENDED else topics_of(table, selection)
    values = selection.values | {"topics": topics, "limit": 1 + GROUPS}
    rows = table.query(statement, COUNT_TAG, values, at=selection.as_of, seconds=COUNT_SECONDS)
    [(*_, tasks, expired), *groups] = rows or [[0, 0]]
    return Preview(tasks, [group[:3] for group in groups], {"expired": expired} if expired else {})


def _preview_of_ids(table: TaskTable, selection: TaskSelection) -> Preview:
    rows = list(rows_of_ids(table, selection, selection.ids or ()))
    matching = [row for row in rows if row.matches]
    groups = Counter((row.topic, task_sql.error_group(row.error)) for row in matching)
    errors = {(row.topic, task_sql.error_group(row.error)): row.error for row in reversed(matching)}
    refused = Counter(row.state for row in rows if not row.matches)
    refused["missing"] = len(selection.ids or ()) - len(rows)
    largest = [[group[0], errors[group], number] for group, number in groups.most_common(GROUPS)]
    return Preview(len(matching), largest, +refused)


def in_order_of_keys(table: TaskTable, selection: TaskSelection) -> TaskSelection:
    """Return the selection with its IDs, if it has any, in the order of their ordering keys."""
    rows: list[list[Any]] = []
    for ids in chunked(selection.ids or (), PAGE_IDS):
        rows += table.query(change_sql.PLACES, _SELECT, {"ids": ids}, at=selection.as_of, seconds=SCAN_SECONDS)
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
    topics = [] if selection.state in ENDED else topics_of(table, selection)
    for shard in table.shards[done:]:
        values = selection.values | {"topics": topics, "shard": shard, "limit": PAGE_IDS}
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
        found: dict[str, Any] = json_column(position or "{}")
        if found.keys() <= {"by"}:  # no chunk is executed yet
            found = {"column": column, "done": 0}
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
        rows = {row.id: row for row in rows_of_ids(table, selection, page)}
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
    state, by_key = state_of(selection), selection.to is not None
    statement = change_sql.next_ids(state, selection.names, by_key=by_key)
    order = change_sql.order(state, by_key=by_key)
    place: dict[str, Any] = {**{name: _FIRST[name] for name in order}, **after}
    rows: Sequence[Any] = range(PAGE_IDS)
    while len(rows) == PAGE_IDS:
        given = {**values, **place, "now": selection.as_of}
        rows = table.query(statement, _SELECT, given, at=read_at(selection), seconds=SCAN_SECONDS)
        for chunk in chunked(rows, *limits, lambda row: row[0]):
            place = dict(zip(order, chunk[-1][1:], strict=True))
            yield place, [row[-1] for row in chunk]
