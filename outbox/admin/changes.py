"""Changes by operators: retry, purge, cancel, restore, resend. They are executed in chunks of one transaction each.

The IDs are read as of the preview (`TaskSelection.as_of`), and each transaction reads its tasks again under the lock.
So a change takes a task only if it matched at the preview and still matches, also if another process continues it.
A change is recorded first, and each transaction records in the operation's row where the next chunk begins. So a
change that was stopped, or lost its process, continues there (`resume`). No chunk is executed twice, even if two
processes continue the same operation.
"""

import dataclasses
import functools
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet

from outbox.admin import backlog, cancelled, error_groups, operations, operator_sql, resend
from outbox.admin.operations import UNNAMED, Author, Operation, Progress
from outbox.admin.selection import ANY_UNSENT as ANY_UNSENT  # noqa: PLC0414 - callers pass it to a change
from outbox.admin.selection import Outcome as Outcome  # noqa: PLC0414 - they get it
from outbox.admin.selection import TaskSelection as TaskSelection  # noqa: PLC0414 - callers pass it to a change
from outbox.admin.table import COUNT_SECONDS, SCAN_SECONDS, LayoutChanged, TaskTable, Transaction
from outbox.base.values import chunked, shown
from outbox.errors import OutboxError, SettingError
from outbox.program.terminal import escaped
from outbox.registration import TABLE
from outbox.table.ddl import CANCELLED as CANCELLED_TABLE
from outbox.table.ddl import OPERATIONS
from outbox.table.shared_sql import NEXT_OF_KEYS, RELEASED
from outbox.table.states import CANCELLED, CHANGED, LONG_AGO, MARKS_FINAL_AFTER, NO_SEQUENCE, STATES, UNSENT

#: Tasks in one transaction. They need about ten thousand of the 80,000 mutations that a commit may have.
CHUNK = 500
#: Max tasks in one transaction that moves them to another table: each needs some 40 mutations. Max bytes of their
#: messages, or of messages that are published in one chunk: a commit may have 100 MB.
MOVED, CHUNK_BYTES = 200, 8_000_000
#: Task IDs that one query reads.
PAGE = 20 * CHUNK
#: Max tasks of one resend, because each page sorts those of a shard. The replay job has no limit.
MAX_RESENT = 1_000_000
#: The place before all tasks, by parameter.
_FIRST = {"after": LONG_AGO, "after_created": LONG_AGO, "after_sequence": NO_SEQUENCE, "after_id": ""}
#: Max groups of tasks in a preview, the largest first.
GROUPS = 50
#: The state that a selection by `ids` has for each change, if it names none.
OF_IDS = {"retry": None, "resend": "sent", "cancel": ANY_UNSENT, "purge": "sent", "restore": CANCELLED}
#: As the state of an unchanged task: it matches now, but did not at the preview.
NEWCOMER = "newcomer"
_log = logging.getLogger("outbox")
#: The columns that a retry writes. `retry_values` returns the values.
RETRY_COLUMNS = ("Id", "SentAt", "BlockedBy", "ExpiresAt", "Attempts", "AvailableAt", "DueAt")


class _Row(NamedTuple):
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
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Preview:
    """What a change would do: the exact number of tasks, their largest groups, and the tasks that it cannot change.

    A group has a topic, the first line of one LastError, and a number. `refused` has numbers by state: `expired`,
    `missing`, `exists`, or a state that the change is not for. Of a restore, `overtaken` tasks would follow later tasks
    of their keys, which were sent since.
    """

    tasks: int
    groups: Sequence[Sequence[Any]]
    refused: Mapping[str, int]
    overtaken: int = 0


#: Buffers the writes of one transaction, of the operation with this ID, for its matching rows. Called only if there are
#: some.
_Write = Callable[[Transaction, Sequence[_Row], str], None]


def count(table: TaskTable, selection: TaskSelection, *, exact: bool) -> backlog.Count:
    """Return the number of selected tasks, as of the selection's `as_of` or now.

    Unless `exact`, the count stops early, as that of the backlog does.
    """
    selection = _previewed(table, selection)
    if selection.ids is not None:
        return backlog.Count(sum(row.matches for row in _rows_of_ids(table, selection, selection.ids)))
    seconds = COUNT_SECONDS if exact else SCAN_SECONDS

    def query(statement: str, **values: Any) -> list[list[Any]]:
        values |= selection.values | _now(statement, selection)
        return table.query(statement, "outbox-count", values, at=selection.as_of, seconds=seconds)

    # The range of sent tasks has no topic.
    topics = (None,) if selection.state in ("sent", CANCELLED) else _topics(table, selection)
    ranges, limit = backlog.ranges_of(_shards(table, selection), topics), backlog.NO_LIMIT if exact else None
    counting = operator_sql.counts_of_state(_state(selection), selection.names)
    counts = [backlog.count(query, each, ranges, limit) for each in counting]
    return backlog.Count(sum(row.number for rows, _ in counts for row in rows), any(full for _, full in counts))


def preview(table: TaskTable, selection: TaskSelection, name: str = "") -> Preview:
    """Return what the change `name` of the selection would do, as of its `as_of` or now."""
    selection = _previewed(table, selection)
    found = _preview_of_state(table, selection) if selection.ids is None else _preview_of_ids(table, selection)
    return _examined(table, selection, found) if name == "restore" else found


def _examined(table: TaskTable, selection: TaskSelection, found: Preview) -> Preview:
    """Return the preview of a restore with the tasks whose IDs exist again, and those that are overtaken."""
    exists = overtaken = 0
    for _, _, seen in _chunks(table, selection):
        values = {"ids": sorted(seen), "shard_count": table.layout.shards}
        statement = operator_sql.REFUSED_AND_OVERTAKEN
        [[there, later]] = table.query(statement, "outbox-count", values, at=selection.as_of, seconds=SCAN_SECONDS)
        exists, overtaken = exists + there, overtaken + later
    refused = {**found.refused, **({"exists": exists} if exists else {})}
    return dataclasses.replace(found, tasks=found.tasks - exists, refused=refused, overtaken=overtaken)


def _preview_of_state(table: TaskTable, selection: TaskSelection) -> Preview:
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
    matching = error_groups.count((row.topic, "", row.error, None) for row in rows if row.matches)
    refused = Counter(row.state for row in rows if not row.matches)
    refused["missing"] = len(selection.ids or ()) - len(rows)
    groups = [[each.topic, each.error, each.tasks] for each in matching[:GROUPS]]
    return Preview(sum(each.tasks for each in matching), groups, +refused)


def _rows_of_ids(table: TaskTable, selection: TaskSelection, wanted: Sequence[str]) -> Iterator[_Row]:
    """Yield the existing rows of these IDs, as of the selection's `as_of`."""
    statement = operator_sql.by_ids(selection.condition, cancelled=selection.state == CANCELLED)
    for ids in chunked(wanted, CHUNK):
        values = selection.values | {"ids": ids, "now": selection.as_of}
        yield from (_Row(*row) for row in table.query(statement, "outbox-count", values, at=_read_at(selection)))


def _read_at(selection: TaskSelection) -> datetime | None:
    """Return as of when the IDs are read. A resend may take longer than Spanner keeps versions, so it reads them now.

    Tasks that are sent meanwhile do not match, because its selection has an `until`.
    """
    return None if selection.to else selection.as_of


def _shards(table: TaskTable, selection: TaskSelection) -> Sequence[int]:
    return range(operator_sql.CANCELLED_SHARDS) if selection.state == CANCELLED else table.shards


def _previewed(table: TaskTable, selection: TaskSelection) -> TaskSelection:
    """Return the selection with a time of its preview: now, if it has none."""
    return dataclasses.replace(selection, as_of=selection.as_of or table.now())


def count_unsent(table: TaskTable, topic: str, *, exact: bool) -> backlog.Count:
    """Return the number of unsent tasks of a topic, of all states."""
    now = table.now()
    counts = [count(table, TaskSelection(state=state, topic=topic, as_of=now), exact=exact) for state in UNSENT]
    return backlog.Count(sum(each.number for each in counts), any(each.at_least for each in counts))


def retry_values(
    id: str, now: datetime, expires_at: datetime | None = None, due_at: datetime | None = None
) -> tuple[object, ...]:
    """Return the values of RETRY_COLUMNS: unsent, due `now`, without failed attempts.

    Its age begins at `due_at`, or now.
    """
    return (id, None, None, expires_at, 0, now, due_at)


def change(
    table: TaskTable, name: str, selection: TaskSelection, author: Author = UNNAMED, *, id: str = "", selected: int = 0
) -> Iterator[Outcome]:
    """Record a change of the selected tasks, and execute it chunk by chunk.

    A retry makes them due now, with 0 failed attempts. A purge deletes them. A cancel moves them to another table, also
    releases the next tasks of their keys, and logs the IDs. A restore moves them back. Each transaction waits at most
    20 s for the batches that hold its tasks. A resend publishes them. `id` is the ID of the operation, by default a new
    one. Raises OutboxError if the change is not for these tasks, or if Spanner no longer keeps the versions of the
    selection's `as_of`.
    """
    id, selection = id or operations.new_id(), _checked(table, name, selection)
    _record(table, name, selection, author, id=id, selected=selected)
    return _Change(table, name, selection, author).outcomes(Progress(id))


def begin(table: TaskTable, name: str, selection: TaskSelection, author: Author, *, id: str, selected: int) -> bool:
    """Record a change for a `resume`. `selected` is the number of tasks of the preview.

    Return False, and record nothing, if the operation exists, because a form may be sent twice.
    """
    return _record(table, name, _checked(table, name, selection), author, id=id, selected=selected)


def _record(table: TaskTable, name: str, selection: TaskSelection, author: Author, *, id: str, selected: int) -> bool:
    if name == "resend" and selected > MAX_RESENT:
        raise OutboxError(
            f"{selected:,} tasks are more than {MAX_RESENT:,}. Pass a shorter time, or use `outbox-pipeline replay "
            "--to`"
        )

    def work(transaction: Transaction) -> bool:
        if transaction.read(OPERATIONS, ("OperationId",), KeySet(keys=[[id]])):
            return False
        columns = {"OperationId": id, "Tasks": 0, "Selected": selected or None, "SeenAt": COMMIT_TIMESTAMP}
        operations.record(transaction, table, name, dataclasses.asdict(selection), author, **columns)
        return True

    return table.transact(f"outbox-{name}", work)


def continued(table: TaskTable, id: str) -> Operation:
    """Return a recorded operation. Raises OutboxError if it cannot be continued."""
    operation, selection, progress = operations.begun(table, id)
    operations.next_chunk(progress.position, _shard_column(table, selection))
    return operation


def resume(table: TaskTable, id: str) -> Iterator[Outcome]:
    """Execute the chunks of a recorded operation that are not executed yet.

    Before each chunk and at the end, raises NotContinued if the operation was stopped or finished, or if another
    process has executed a chunk. Raises OutboxError if there is no such operation.
    """
    operation, selection, progress = operations.begun(table, id)
    author = Author(operation.principal, operation.reason)
    check(operation.operation, selection)
    return _Change(table, operation.operation, _previewed(table, selection), author).outcomes(progress)


def bounded(name: str, selection: TaskSelection, at: datetime) -> TaskSelection:
    """Return the selection for the change `name` without tasks newer than its preview `at`. Raises OutboxError.

    A task that a retry sends again gets a later SentAt, so neither the retry nor its continuation takes it twice.
    """
    state = selection.state or OF_IDS[name]
    # An at-most-once task is marked as sent shortly before it is published.
    newest = at - MARKS_FINAL_AFTER if name == "purge" and state != CANCELLED else at
    until = min(selection.until or newest, newest)
    include_expired = selection.include_expired or name != "retry"
    found = dataclasses.replace(selection, state=state, until=until, include_expired=include_expired, as_of=at)
    check(name, found)
    return found


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


def _checked(table: TaskTable, name: str, selection: TaskSelection) -> TaskSelection:
    """Return the selection with the IDs of a restore or a resend in the order of their keys."""
    check(name, selection)
    selection = _previewed(table, selection)
    if selection.ids is None or name not in ("restore", "resend"):
        return selection
    rows: list[list[Any]] = []
    for ids in chunked(selection.ids, PAGE):
        statement = operator_sql.places(cancelled=name == "restore")
        rows += table.query(statement, "outbox-select", {"ids": ids}, at=selection.as_of, seconds=SCAN_SECONDS)
    found = [id for id, *_ in sorted(rows, key=lambda row: (*row[2:], row[0]))]
    return dataclasses.replace(selection, ids=tuple(dict.fromkeys([*found, *selection.ids])))


def _make_due(transaction: Transaction, rows: Sequence[_Row], _operation: str) -> None:
    transaction.update(
        TABLE, RETRY_COLUMNS, [retry_values(row.id, row.now, row.expires_at, row.due_at) for row in rows]
    )


def _delete(transaction: Transaction, rows: Sequence[_Row], _operation: str) -> None:
    of_table = CANCELLED_TABLE if rows[0].state == CANCELLED else TABLE
    transaction.delete(of_table, KeySet(keys=[[row.id] for row in rows]))


def _cancel(transaction: Transaction, rows: Sequence[_Row], operation: str) -> None:
    """Move rows to the table of cancelled tasks. Release the next task of each key of which a row was not blocked.

    Behind deleted rows that were all blocked, the task that blocks the key is still there. A release would be for
    nothing, and would take the next task out of a selection of blocked tasks before its chunk.
    """
    keys = {(row.topic, row.ordering_key) for row in rows if row.ordering_key and row.state != "blocked"}
    if ids := [row.id for row in rows if (row.topic, row.ordering_key) in keys]:
        heads = transaction.query(NEXT_OF_KEYS, {"ids": ids})
        transaction.update(TABLE, ("Id", *RELEASED), [(id, None, None) for (id,) in heads])
    cancelled.move(transaction, [row.id for row in rows], operation)


def _restore(transaction: Transaction, rows: Sequence[_Row], _operation: str) -> None:
    cancelled.restore(transaction, [row.id for row in rows])


_WRITES: Mapping[str, _Write] = {"retry": _make_due, "purge": _delete, "cancel": _cancel, "restore": _restore}


@dataclasses.dataclass(frozen=True, slots=True)
class _Change:
    """A change of all selected tasks."""

    table: TaskTable
    name: str
    selection: TaskSelection
    author: Author

    def outcomes(self, progress: Progress) -> Iterator[Outcome]:
        """Execute the chunks that follow `progress`."""
        tag, publish = f"outbox-{self.name}", None
        if self.name == "resend":
            publish = resend.publisher(self.table, self.selection)
        chunks = _chunks(self.table, self.selection, progress.position, self._limits)
        for position, ids, seen in resend.paced(chunks, self.selection.rate):
            if publish:
                self.table.transact(tag, progress.check)
                outcome = publish(ids)
                record = functools.partial(_recorded, progress, len(outcome.changed), position)
                progress = self.table.transact(tag, record)
            else:
                work = functools.partial(self._chunk, ids, seen, position, progress)
                outcome, progress = self.table.transact(tag, work)
            if self.name == "cancel":
                _log_cancelled(outcome.changed, self.author)
            yield outcome
        self.table.transact(tag, progress.finish)

    @property
    def _limits(self) -> tuple[int, float]:
        """Return how many tasks, and bytes of their messages, a chunk has at most."""
        if self.name == "resend":
            return min(CHUNK, self.selection.rate or CHUNK), CHUNK_BYTES
        return (min(CHUNK, MOVED), CHUNK_BYTES) if self.name in ("cancel", "restore") else (CHUNK, math.inf)

    def _chunk(
        self, ids: Sequence[str], seen: Collection[str], position: str, progress: Progress, transaction: Transaction
    ) -> tuple[Outcome, Progress]:
        progress.check(transaction)
        # Sorted, so that two commands lock the rows in the same order.
        values = self.selection.values | {"ids": sorted(ids)}
        is_cancelled = self.selection.state == CANCELLED
        statement = operator_sql.by_ids(self.selection.condition, cancelled=is_cancelled, lock=True)
        rows = [_as_seen(_Row(*row), seen) for row in transaction.query(statement, values)]
        exists = cancelled.existing(transaction, ids) if self.name == "restore" else set[str]()
        rows = [row._replace(matches=False, state="exists") if row.id in exists else row for row in rows]
        matching = [row for row in rows if row.matches]
        if matching:
            _WRITES[self.name](transaction, matching, progress.id)
        return _outcome(ids, rows, exists), progress.move(transaction, len(matching), position)


def _recorded(progress: Progress, tasks: int, position: str, transaction: Transaction) -> Progress:
    progress.check(transaction)
    return progress.move(transaction, tasks, position)


def _as_seen(row: _Row, seen: Collection[str]) -> _Row:
    """Return a row that does not match unless it matched at the preview, too."""
    return row._replace(matches=False, state=NEWCOMER) if row.matches and row.id not in seen else row


def _outcome(ids: Sequence[str], rows: Sequence[_Row], exists: Collection[str]) -> Outcome:
    unchanged = [row for row in rows if not row.matches]
    existing = {row.id for row in rows}
    there = [id for id in exists if id not in existing]
    return Outcome(
        changed=tuple(row.id for row in rows if row.matches),
        unchanged={row.id: row.state for row in unchanged} | dict.fromkeys(there, "not_cancelled"),
        missing=tuple(id for id in ids if id not in existing and id not in exists),
        heads=frozenset(row.blocked_by for row in unchanged if row.state == "blocked" and row.blocked_by),
    )


def _log_cancelled(ids: Sequence[str], author: Author) -> None:
    reason = author.reason or "no reason given"
    for id in ids:
        extra = {"action": "cancelled", "fields": {"task_id": id, "reason": reason}}
        _log.warning("cancelled the task %s: %s", escaped(id), escaped(reason), extra=extra)


def _chunks(
    table: TaskTable,
    selection: TaskSelection,
    position: str | None = None,
    limits: tuple[int, float] = (CHUNK, math.inf),
) -> Iterator[resend.Chunk]:
    """Yield the IDs of the selection after `position` in chunks with at most so many tasks and bytes of messages.

    Each with the position after it, and with the IDs that matched at the preview.
    """
    layout, column = table.layout, _shard_column(table, selection)
    done, after = operations.next_chunk(position, column)
    if selection.ids is not None:
        yield from _chunks_of_ids(table, selection, done, limits)
        return
    ranges = {} if selection.state in ("sent", CANCELLED) else {"topics": _topics(table, selection)}
    for shard in _shards(table, selection)[done:]:
        values = selection.values | ranges | {"shard": shard, "limit": PAGE} | _FIRST | after
        for place, ids in _chunks_of_shard(table, selection, values, limits):
            text = json.dumps({"column": column, "done": shard, "after": place}, default=shown)
            yield text, ids, {*ids}
        after = {}
        if column == layout.column and table.layout != layout:
            # Another thread has noticed a reshard and replaced the layout: the last pages may be of the new one.
            raise LayoutChanged(f"{table.name}: the number of shards was changed. Start a new operation")


def _shard_column(table: TaskTable, selection: TaskSelection) -> str | None:
    """Return the column by whose shards the tasks are selected. None: by their IDs."""
    if selection.ids is not None:
        return None
    return "CancelledShard" if selection.state == CANCELLED else table.layout.column


def _chunks_of_ids(
    table: TaskTable, selection: TaskSelection, done: int, limits: tuple[int, float]
) -> Iterator[resend.Chunk]:
    for page in chunked((selection.ids or ())[done:], CHUNK):
        rows = {row.id: row for row in _rows_of_ids(table, selection, page)}
        seen = {row.id for row in rows.values() if row.matches}
        for ids in chunked(page, *limits, functools.partial(_bytes, rows)):
            done += len(ids)
            yield json.dumps({"column": None, "done": done}), ids, seen.intersection(ids)


def _bytes(rows: Mapping[str, _Row], id: str) -> int:
    return rows[id].bytes if id in rows else 0


def _chunks_of_shard(
    table: TaskTable, selection: TaskSelection, values: Mapping[str, Any], limits: tuple[int, float]
) -> Iterator[tuple[Mapping[str, Any], Sequence[str]]]:
    """Yield the selected IDs of a shard in chunks, each with the place after it. `values` has the first place."""
    state, by_key = _state(selection), selection.to is not None
    statement = operator_sql.next_ids(state, selection.names, by_key=by_key)
    order = operator_sql.order(state, by_key=by_key)
    values = {name: value for name, value in values.items() if name not in _FIRST or name in order}
    values |= _now(statement, selection)
    rows: Sequence[Any] = range(PAGE)
    while len(rows) == PAGE:
        rows = table.query(statement, "outbox-select", values, at=_read_at(selection), seconds=SCAN_SECONDS)
        for chunk in chunked(rows, *limits, lambda row: row[0]):
            place = dict(zip(order, chunk[-1][1:], strict=True))
            values |= place
            yield place, [row[-1] for row in chunk]


def _topics(table: TaskTable, selection: TaskSelection) -> list[str]:
    """Return the topics of the index ranges to read."""
    return [selection.topic] if selection.topic is not None else table.topics(at=selection.as_of)


def _now(statement: str, selection: TaskSelection) -> dict[str, datetime | None]:
    """Return the time of the preview as a parameter, if the statement has it. Those for sent tasks do not."""
    return {"now": selection.as_of} if "@now" in statement else {}


def _state(selection: TaskSelection) -> str:
    if selection.state not in (*STATES, CANCELLED):
        raise ValueError(f"a selection without ids needs a state, not {selection.state}")
    return selection.state
