"""Changes by operators: retry, purge, cancel. They are made in chunks, and each chunk is one transaction.

The IDs are read as of the preview (`TaskSelection.as_of`), and each transaction reads its tasks again under the lock.
So a change takes a task only if it matched at the preview and still matches, also if another process continues it.
Each transaction also records, in the row of the operation, where the next chunk begins. So a change that was stopped,
or lost its process, continues there (`resume`). No chunk is executed twice, even if two processes continue the same
operation.
"""

import dataclasses
import functools
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet

from outbox.admin import backlog, error_groups, operations, operator_sql
from outbox.admin.operations import UNNAMED, Author, Progress
from outbox.admin.table import COUNT_SECONDS, SCAN_SECONDS, LayoutChanged, TaskTable, Transaction
from outbox.base.times import shown
from outbox.base.values import chunked, counted
from outbox.errors import OutboxError, SettingError
from outbox.program.settings import MOMENT
from outbox.program.terminal import escaped
from outbox.table.ddl import OPERATIONS
from outbox.table.shared_sql import NEXT_OF_KEYS, RELEASED
from outbox.table.states import CHANGED, CONDITIONS, STATES, UNSENT

_TABLE = "AsynchronousTasks"
#: Tasks in one transaction. They need about ten thousand of the 80,000 mutations that a commit may have.
CHUNK = 500
#: Task IDs that one query reads.
PAGE = 20 * CHUNK
#: Max groups of tasks in a preview, the largest first.
GROUPS = 50
#: As the state of a selection by `ids`: all unsent states.
ANY_UNSENT = "unsent"
#: The state of a selection by `ids` if it names none, for each change.
OF_IDS = {"retry": None, "resend": "sent", "cancel": ANY_UNSENT, "purge": "sent"}
#: As the state of an unchanged task: it matches now, but did not at the preview.
NEWCOMER = "newcomer"
_log = logging.getLogger("outbox")
_LONG_AGO = datetime(1, 1, 1, tzinfo=UTC)
#: The columns that a retry writes. `retry_values` returns the values.
RETRY_COLUMNS = ("Id", "SentAt", "BlockedBy", "ExpiresAt", "Attempts", "AvailableAt", "DueAt")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TaskSelection:
    """The tasks of a state or with one of the `ids`, narrowed by all other fields.

    `since` is inclusive, `until` exclusive. Both are compared with SentAt of sent tasks and CreatedAt of others.
    `error` is a part of LastError, ignoring case. `id_prefix` is the beginning of the ID. With `ids` and no state,
    pending tasks are excluded, because they need no retry, and blocked ones, because the head of their key releases
    them, unless this head is gone. Without `include_expired`, unsent tasks whose ExpiresAt has passed are excluded.
    `as_of` is the time of the preview. A count is as of then, and a change takes only tasks that matched then, too.
    """

    state: str | None = None
    ids: tuple[str, ...] | None = None
    topic: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    error: str | None = None
    ordering_key: str | None = None
    id_prefix: str | None = None
    include_expired: bool = True
    as_of: datetime | None = None

    @classmethod
    def recorded(cls, text: str) -> Self:
        """Return the selection from the column Selection. Raises OutboxError: it is not whole, or not a selection."""
        try:
            values = json.loads(text)
            json.dumps(values, ensure_ascii=False).encode()  # refuses surrogates, as Spanner does
            return cls(**{name: _recorded(name, value) for name, value in values.items()})
        except (ValueError, TypeError, AttributeError, RecursionError):
            # `more_ids` is no field: the record does not have all IDs.
            raise OutboxError("its record does not contain the whole selection. Start a new operation") from None

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the conditions that narrow the selection."""
        return frozenset(self.values) | (frozenset() if self.include_expired or self.state == "sent" else {"unexpired"})

    @property
    def values(self) -> dict[str, Any]:
        """Return the values that narrow the selection, by parameter name."""
        named = ("topic", "since", "until", "error", "ordering_key", "id_prefix")
        return {name: value for name in named if (value := getattr(self, name)) is not None}

    @property
    def condition(self) -> str:
        """Return the selection as an SQL condition, without the IDs."""
        unheld = f"NOT ({CONDITIONS['pending']}) AND NOT ({operator_sql.HELD})"
        state = (CONDITIONS | {ANY_UNSENT: "SentAt IS NULL"})[self.state] if self.state else unheld
        return state + operator_sql.narrowed(self.state, self.names)


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """A number of tasks. If `at_least`, the count stopped early."""

    number: int
    at_least: bool = False

    def __str__(self) -> str:
        """Return text such as `1 task` or `at least 100,000 tasks`."""
        return f"{'at least ' if self.at_least else ''}{counted(self.number, 'task')}"


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one chunk: IDs that were changed, states of tasks that were not changed, and IDs without a row.

    `heads` are the IDs of the key heads that block unchanged tasks.
    """

    changed: tuple[str, ...]
    unchanged: Mapping[str, str]
    missing: tuple[str, ...]
    warning: str | None = None
    heads: frozenset[str] = frozenset()


class _Row(NamedTuple):
    """A row of `statements.by_ids`. `now` is the database's time.

    `expires_at` is in the future, or None.
    """

    id: str
    topic: str
    ordering_key: str | None
    shard: int
    state: str
    matches: bool
    now: datetime
    expires_at: datetime | None
    blocked_by: str | None
    error: str | None
    due_at: datetime | None


@dataclasses.dataclass(frozen=True, slots=True)
class Preview:
    """What a change would do: the exact number of tasks, their largest groups, and the tasks that it cannot change.

    A group has a topic, the first line of one LastError, and a number. `refused` has numbers by state: `expired`,
    `missing`, or a state that the change is not for.
    """

    tasks: int
    groups: Sequence[Sequence[Any]]
    refused: Mapping[str, int]


#: Buffers the writes of one transaction for its matching rows. Called only if there are some.
_Write = Callable[[Transaction, Sequence[_Row]], None]


def count(table: TaskTable, selection: TaskSelection, *, exact: bool) -> Count:
    """Return the number of selected tasks, as of the selection's `as_of` or now.

    Unless `exact`, the count stops early, as that of the backlog does.
    """
    selection = _previewed(table, selection)
    if selection.ids is not None:
        return Count(len(_matching_ids(table, selection, selection.ids)))
    seconds = COUNT_SECONDS if exact else SCAN_SECONDS

    def query(statement: str, **values: Any) -> list[list[Any]]:
        values |= selection.values | _now(statement, selection)
        return table.query(statement, "outbox-count", values, at=selection.as_of, seconds=seconds)

    # The range of sent tasks has no topic.
    topics = (None,) if selection.state == "sent" else _topics(table, selection)
    ranges, limit = backlog.ranges_of(table, topics), backlog.NO_LIMIT if exact else None
    counting = operator_sql.counts_of_state(_state(selection), selection.names)
    counts = [backlog.count(query, each, ranges, limit) for each in counting]
    return Count(sum(row.number for rows, _ in counts for row in rows), any(full for _, full in counts))


def preview(table: TaskTable, selection: TaskSelection) -> Preview:
    """Return what a change of the selection would do, as of its `as_of` or now."""
    selection = _previewed(table, selection)
    if selection.ids is not None:
        return _preview_of_ids(table, selection)
    statement = operator_sql.grouped(_state(selection), selection.names)
    ranges = {"shards": list(table.shards)} | ({"topics": _topics(table, selection)} if "@topics" in statement else {})
    values = selection.values | ranges | _now(statement, selection) | {"limit": GROUPS}
    groups = table.query(statement, "outbox-count", values, at=selection.as_of, seconds=COUNT_SECONDS)
    tasks = count(table, selection, exact=True).number
    everything = dataclasses.replace(selection, include_expired=True)
    expired = count(table, everything, exact=True).number - tasks if "unexpired" in selection.names else 0
    return Preview(tasks, groups, {"expired": expired} if expired else {})


def _preview_of_ids(table: TaskTable, selection: TaskSelection) -> Preview:
    rows = list(_rows_of_ids(table, selection, selection.ids or ()))
    matching = error_groups.count((row.topic, "", row.error) for row in rows if row.matches)
    refused = Counter(row.state for row in rows if not row.matches)
    refused["missing"] = len(selection.ids or ()) - len(rows)
    groups = [[each.topic, each.error, each.tasks] for each in matching[:GROUPS]]
    return Preview(sum(each.tasks for each in matching), groups, +refused)


def _rows_of_ids(table: TaskTable, selection: TaskSelection, wanted: Sequence[str]) -> Iterator[_Row]:
    """Yield the existing rows of these IDs, as of the selection's `as_of`."""
    statement = operator_sql.by_ids(selection.condition)
    for ids in chunked(wanted, CHUNK):
        values = selection.values | {"ids": ids, "now": selection.as_of}
        yield from (_Row(*row) for row in table.query(statement, "outbox-count", values, at=selection.as_of))


def _matching_ids(table: TaskTable, selection: TaskSelection, wanted: Sequence[str]) -> set[str]:
    return {row.id for row in _rows_of_ids(table, selection, wanted) if row.matches}


def _previewed(table: TaskTable, selection: TaskSelection) -> TaskSelection:
    """Return the selection with a time of its preview: now, if it has none."""
    return dataclasses.replace(selection, as_of=selection.as_of or table.now())


def count_unsent(table: TaskTable, topic: str, *, exact: bool) -> Count:
    """Return the number of unsent tasks of a topic, of all states."""
    now = table.now()
    counts = [count(table, TaskSelection(state=state, topic=topic, as_of=now), exact=exact) for state in UNSENT]
    return Count(sum(each.number for each in counts), any(each.at_least for each in counts))


def retry_values(
    id: str, now: datetime, expires_at: datetime | None = None, due_at: datetime | None = None
) -> tuple[object, ...]:
    """Return the values of RETRY_COLUMNS: unsent, due `now`, without failed attempts. Without `due_at`, it is new."""
    return (id, None, None, expires_at, 0, now, due_at)


def change(
    table: TaskTable, name: str, selection: TaskSelection, author: Author = UNNAMED, *, id: str = ""
) -> Iterator[Outcome]:
    """Retry, cancel or purge the selected tasks, chunk by chunk. Record it in the same transactions.

    A retry makes them due now, with 0 failed attempts. Cancel and purge delete them. A cancel also releases the next
    tasks of their keys, and logs the IDs. Each of its transactions waits at most 20 s for the batches that hold its
    tasks. `id` is the ID of the operation, by default a new one. Raises OutboxError if the change is not for these
    tasks, or if Spanner no longer keeps the versions of the selection's `as_of`.
    """
    check(name, selection)
    return _Change(table, name, _previewed(table, selection), author).outcomes(Progress(id or operations.new_id()))


def begin(table: TaskTable, name: str, selection: TaskSelection, author: Author, *, id: str, selected: int) -> bool:
    """Record a change or a resend for a `resume`. `selected` is the number of tasks of the preview.

    Return False, and record nothing, if the operation exists, because a form may be sent twice.
    """
    check(name, selection)
    selection = _previewed(table, selection)

    def work(transaction: Transaction) -> bool:
        if transaction.read(OPERATIONS, ("OperationId",), KeySet(keys=[[id]])):
            return False
        columns = {"OperationId": id, "Tasks": 0, "Selected": selected, "SeenAt": COMMIT_TIMESTAMP}
        operations.record(transaction, table, name, dataclasses.asdict(selection), author, **columns)
        return True

    return table.transact(f"outbox-{name}", work)


def resume(table: TaskTable, id: str) -> Iterator[Outcome]:
    """Execute the chunks of a recorded operation that are not executed yet.

    Before each chunk and at the end, raises NotContinued if the operation was stopped or finished, or if another
    process has executed a chunk. Raises OutboxError if there is no such operation.
    """
    operation, progress = operations.begun(table, id, _WRITES)
    selection, author = TaskSelection.recorded(operation.selection), Author(operation.principal, operation.reason)
    check(operation.operation, selection)
    return _Change(table, operation.operation, _previewed(table, selection), author).outcomes(progress)


def check(name: str, selection: TaskSelection) -> None:
    """Raise OutboxError if the operation `name` is not for this selection.

    A retry of sent tasks needs `until`. Otherwise it would also select the tasks that are sent because of it.
    """
    states = CHANGED[name]
    if selection.state not in states and (selection.ids is None or selection.state != OF_IDS[name]):
        raise OutboxError(f"{name} is for tasks that are {', '.join(states)}, not for {selection.state or 'any'}")
    if name == "retry" and selection.state == "sent" and selection.until is None:
        raise OutboxError("a retry of sent tasks needs `until`")
    if name == "resend" and selection.ids is None and selection.topic is None:
        raise SettingError("a resend needs the IDs or the topic of its tasks")


def _recorded(name: str, value: Any) -> Any:
    """Return a field of a recorded selection. Raises ValueError, TypeError: any program may write the column."""
    times = dict.fromkeys(("since", "until", "as_of"), datetime)
    value = MOMENT.parse(value) if name in times else value
    kind: Any = (times | {"ids": list, "include_expired": bool, "rate": int}).get(name, str)
    if not isinstance(value, kind) or (kind is list and not all(isinstance(id, str) for id in value)):
        raise ValueError(name)
    return tuple(value) if kind is list else value


def _make_due(transaction: Transaction, rows: Sequence[_Row]) -> None:
    transaction.update(
        _TABLE, RETRY_COLUMNS, [retry_values(row.id, row.now, row.expires_at, row.due_at) for row in rows]
    )


def _delete(transaction: Transaction, rows: Sequence[_Row]) -> None:
    transaction.delete(_TABLE, KeySet(keys=[[row.id] for row in rows]))


def _delete_and_release(transaction: Transaction, rows: Sequence[_Row]) -> None:
    """Delete rows, and release the next task of each ordering key of which a row was not blocked.

    Behind deleted rows that were all blocked, the task that blocks the key is still there. A release would be for
    nothing, and would take the next task out of a selection of blocked tasks before its chunk.
    """
    keys = {(row.topic, row.ordering_key) for row in rows if row.ordering_key and row.state != "blocked"}
    if ids := [row.id for row in rows if (row.topic, row.ordering_key) in keys]:
        heads = transaction.query(NEXT_OF_KEYS, {"ids": ids})
        transaction.update(_TABLE, ("Id", *RELEASED), [(id, None, None) for (id,) in heads])
    _delete(transaction, rows)


_WRITES: Mapping[str, _Write] = {"retry": _make_due, "purge": _delete, "cancel": _delete_and_release}


@dataclasses.dataclass(frozen=True, slots=True)
class _Change:
    """A change of all selected tasks."""

    table: TaskTable
    name: str
    selection: TaskSelection
    author: Author

    def outcomes(self, progress: Progress) -> Iterator[Outcome]:
        """Execute the chunks that follow `progress`."""
        tag = f"outbox-{self.name}"
        for position, ids in _selected_ids(self.table, self.selection, tag, progress.position):
            seen = set(ids) if self.selection.ids is None else _matching_ids(self.table, self.selection, ids)
            work = functools.partial(self._chunk, ids, seen, position, progress)
            rows, progress = self.table.transact(tag, work)
            outcome = _outcome(ids, rows)
            if self.name == "cancel":
                _log_cancelled(outcome.changed, self.author)
            yield outcome
        if progress.is_recorded and (warning := operations.finish(self.table, progress)):
            yield Outcome((), {}, (), warning)

    def _chunk(
        self, ids: Sequence[str], seen: Collection[str], position: str, progress: Progress, transaction: Transaction
    ) -> tuple[Sequence[_Row], Progress]:
        if progress.is_recorded:
            progress.check(transaction)
        # Sorted, so that two commands lock the rows in the same order.
        values = self.selection.values | {"ids": sorted(ids)}
        statement = operator_sql.by_ids(self.selection.condition, lock=True)
        rows = [_as_seen(_Row(*row), seen) for row in transaction.query(statement, values)]
        matching = [row for row in rows if row.matches]
        if matching:
            _WRITES[self.name](transaction, matching)
        after = Progress(progress.id, progress.tasks + len(matching), position, progress.is_recorded or bool(matching))
        columns = {"Tasks": after.tasks, "Position": position, "SeenAt": COMMIT_TIMESTAMP}
        if progress.is_recorded:
            operations.update(transaction, progress.id, **columns)
        elif matching:  # a change that has not changed any task has no row yet
            recorded, columns = dataclasses.asdict(self.selection), columns | {"OperationId": progress.id}
            operations.record(transaction, self.table, self.name, recorded, self.author, **columns)
        return rows, after


def _as_seen(row: _Row, seen: Collection[str]) -> _Row:
    """Return a row that does not match unless it matched at the preview, too."""
    return row._replace(matches=False, state=NEWCOMER) if row.matches and row.id not in seen else row


def _outcome(ids: Sequence[str], rows: Sequence[_Row]) -> Outcome:
    unchanged, existing = [row for row in rows if not row.matches], {row.id for row in rows}
    return Outcome(
        changed=tuple(row.id for row in rows if row.matches),
        unchanged={row.id: row.state for row in unchanged},
        missing=tuple(id for id in ids if id not in existing),
        heads=frozenset(row.blocked_by for row in unchanged if row.state == "blocked" and row.blocked_by),
    )


def _log_cancelled(ids: Sequence[str], author: Author) -> None:
    reason = author.reason or "no reason given"
    for id in ids:
        extra = {"action": "cancelled", "fields": {"task_id": id, "reason": reason}}
        _log.warning("cancelled the task %s: %s", escaped(id), escaped(reason), extra=extra)


def _selected_ids(
    table: TaskTable, selection: TaskSelection, tag: str, position: str | None
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the IDs of the selection after `position` in chunks, each with the position after it."""
    if selection.ids is not None:
        done = json.loads(position)["ids"] if position else 0
        for ids in chunked(selection.ids[done:], CHUNK):
            done += len(ids)
            yield json.dumps({"ids": done}), ids
        return
    layout = table.layout
    begin: dict[str, Any] = json.loads(position) if position else {"column": layout.column, "shard": 0}
    if begin["column"] != layout.column:
        raise OutboxError("the number of shards was changed since the last chunk. Start a new operation")
    ranges = {} if selection.state == "sent" else {"topics": _topics(table, selection)}
    for shard in table.shards[begin["shard"] :]:
        values = selection.values | ranges | {"shard": shard, "limit": PAGE}
        after: list[str] | None = begin.get("after") if shard == begin["shard"] else None
        for next_after, of_shard in _ids_of_shard(table, selection, tag, values, after):
            yield json.dumps({"column": layout.column, "shard": shard, "after": next_after}), of_shard
        if table.layout != layout:
            # Another thread has noticed a reshard and replaced the layout: the last pages may be of the new one.
            raise LayoutChanged(f"{table.name}: the number of shards was changed. Start a new operation")


def _ids_of_shard(
    table: TaskTable, selection: TaskSelection, tag: str, values: dict[str, Any], after: Sequence[str] | None
) -> Iterator[tuple[list[str], Sequence[str]]]:
    """Yield the selected IDs of a shard in chunks, each with where the next begins: after an ID, and a SentAt."""
    statement = operator_sql.next_ids(_state(selection), selection.names)
    values |= {"after_id": after[0] if after else ""} | _now(statement, selection)
    if selection.state == "sent":
        values |= {"after": datetime.fromisoformat(after[1]) if after else selection.since or _LONG_AGO}
    rows: Sequence[Any] = range(PAGE)
    while len(rows) == PAGE:
        rows = table.query(statement, tag, values, at=selection.as_of, seconds=SCAN_SECONDS)
        for chunk in chunked(rows, CHUNK):
            last_id, last_sent_at = chunk[-1]
            yield [last_id, *([shown(last_sent_at)] if last_sent_at else [])], [id for id, _ in chunk]
        if rows:
            last_id, last_sent_at = rows[-1]
            values |= {"after_id": last_id} | ({"after": last_sent_at} if last_sent_at else {})


def _topics(table: TaskTable, selection: TaskSelection) -> list[str]:
    """Return the topics of the index ranges to read."""
    return [selection.topic] if selection.topic is not None else table.topics(at=selection.as_of)


def _now(statement: str, selection: TaskSelection) -> dict[str, datetime | None]:
    """Return the time of the preview as a parameter, if the statement has it. Those for sent tasks do not."""
    return {"now": selection.as_of} if "@now" in statement else {}


def _state(selection: TaskSelection) -> str:
    if selection.state not in STATES:
        raise ValueError(f"a selection without ids needs a state, not {selection.state}")
    return selection.state
