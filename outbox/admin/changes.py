"""Changes by operators: retry, purge, cancel, restore, resend. They are executed in chunks of one transaction each.

A change is recorded first. Each transaction reads its tasks again under the lock, changes those that matched at the
preview and still match, and records in the operation's row where the next chunk begins. So a change that was stopped,
or lost its process, continues there (`resume`). No chunk is executed twice, even if two processes continue the same
operation.

A resend changes no task. If its process ends after it has published a chunk and before it has recorded it, another one
publishes the chunk again, so each task arrives at least once. All tasks of an ordering key are in one shard, and those
of a shard are published in the order of CreatedAt, Sequence and Id.
"""

import dataclasses
import functools
import logging
import math
import time
from base64 import b64decode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from typing import Any, NamedTuple

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet

from outbox.admin import operations, operator_sql
from outbox.admin.operations import UNNAMED, Author, Operation, Progress
from outbox.admin.selections import (
    ANY_UNSENT,
    Chunk,
    Row,
    TaskSelection,
    chunks,
    in_order_of_keys,
    next_chunk,
    previewed,
)
from outbox.admin.table import SCAN_SECONDS, TaskTable, Transaction
from outbox.base.values import json_texts, topic_name
from outbox.errors import InvalidMessage, OutboxError, SettingError
from outbox.message import check_topic
from outbox.program.terminal import escaped
from outbox.registration import TABLE
from outbox.table import ddl
from outbox.table.controls import NO_CONTROLS
from outbox.table.ddl import CANCELLED as CANCELLED_TABLE
from outbox.table.ddl import OPERATIONS
from outbox.table.shared_sql import NEXT_OF_KEYS, RELEASED
from outbox.table.states import CANCELLED, CHANGED, MARKS_FINAL_AFTER

#: Max tasks in one transaction that moves them to another table: each needs some 40 mutations. Max bytes of their
#: messages, or of messages that are published in one chunk: a commit may have 100 MB.
MOVED, CHUNK_BYTES = 200, 8_000_000
#: Max tasks of one resend, because each page sorts those of a shard. The replay job has no limit.
MAX_RESENT = 1_000_000
#: The state that a selection by `ids` has for each change, if it names none.
OF_IDS = {"retry": None, "resend": "sent", "cancel": ANY_UNSENT, "purge": "sent", "restore": CANCELLED}
#: As the state of an unchanged task: it matches now, but did not at the preview.
NEWCOMER = "newcomer"
#: Why a sent task of the given IDs is not published.
EXCLUDED = "excluded by the flags, or sent again since"
_log = logging.getLogger("outbox")
#: The columns that a retry writes. `retry_values` returns the values.
RETRY_COLUMNS = ("Id", "SentAt", "BlockedBy", "ExpiresAt", "Attempts", "AvailableAt", "DueAt")
#: The columns that the table of tasks and that of cancelled ones have, without computed ones.
COLUMNS = tuple(name for name, text in ddl.columns().items() if " AS (" not in text and name != "SentAt")
#: What moves a task to the other table, and what puts it back.
TO_MOVE = operator_sql.rows_by_ids(", ".join(COLUMNS), lock=True)
KEPT = operator_sql.rows_by_ids(f"{', '.join(COLUMNS)}, OperationId, CURRENT_TIMESTAMP()", cancelled=True, lock=True)
#: What tells whether the head of a deferred task still waits.
HEAD = ("Id", "Topic", "OrderingKey", "SentAt", "AvailableAt", "ExpiresAt")
#: The columns of a task that is restored as sent, because subscribers have its message: those of a mark.
_AS_SENT: Mapping[str, Any] = {
    "SentAt": COMMIT_TIMESTAMP, "AvailableAt": None, "DueAt": None, "BlockedBy": None, "ExpiresAt": None, "Attempts": 0,
    "LastError": None,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one chunk: IDs that were changed, and states of tasks that were not changed, or `missing`.

    `heads` are the IDs of the key heads that block unchanged tasks.
    """

    changed: tuple[str, ...]
    unchanged: Mapping[str, str]
    heads: frozenset[str] = frozenset()


class Message(NamedTuple):
    """The message of a sent task."""

    id: str
    ordering_key: str | None
    data: bytes
    created_at: datetime


#: Publishes messages, those of a key in the given order, and returns why Pub/Sub refuses some of them, by ID. Raises
#: OutboxError if the topic does not accept messages, NotReached if Pub/Sub does not answer.
Send = Callable[[Sequence[Message]], Mapping[str, str]]
#: The module with `opened(settings, topic) -> Send`. Its package is above this one, so it is found by its name.
PUBLISHER = "publishworker.pubsub.resending"


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
    id = id or operations.new_id()
    selection, _ = begin(table, name, selection, author, id=id, selected=selected)
    return _Change(table, name, selection, author).outcomes(Progress(id))


def begin(
    table: TaskTable, name: str, selection: TaskSelection, author: Author, *, id: str, selected: int
) -> tuple[TaskSelection, bool]:
    """Record a change for a `resume`, and return what it is of. `selected` is the number of tasks of the preview.

    The IDs of a restore or a resend are in the order of their keys. Return also whether the change was recorded: not if
    the operation exists, because a form may be sent twice.
    """
    check(name, selection)
    selection = previewed(table, selection)
    if name in ("restore", "resend"):
        selection = in_order_of_keys(table, selection, cancelled=name == "restore")
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

    return selection, table.transact(f"outbox-{name}", work)


def continued(table: TaskTable, id: str) -> Operation:
    """Return a recorded operation. Raises OutboxError if it cannot be continued."""
    operation, selection, progress = operations.begun(table, id)
    next_chunk(table, selection, progress.position)
    return operation


def resume(table: TaskTable, id: str) -> Iterator[Outcome]:
    """Execute the chunks of a recorded operation that are not executed yet.

    Before each chunk and at the end, raises NotContinued if the operation was stopped or finished, or if another
    process has executed a chunk. Raises OutboxError if there is no such operation.
    """
    operation, selection, progress = operations.begun(table, id)
    author = Author(operation.principal, operation.reason)
    check(operation.operation, selection)
    return _Change(table, operation.operation, previewed(table, selection), author).outcomes(progress)


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


def resend_to(
    table: TaskTable, selection: TaskSelection, to: str, rate: int | None = None, *, own: bool = False
) -> TaskSelection:
    """Return what to publish where, if `to` is a topic for it. Raises SettingError, OutboxError, NotReached.

    `own` allows the topic that the tasks have been published to.
    """
    try:
        name = topic_name(check_topic(to), table.project)
    except InvalidMessage as error:
        raise SettingError(f"--to: {error}") from None
    if not own and name in _destinations(table, selection):
        raise SettingError(
            f"--to {to} is the topic of the tasks, so all of its subscribers would get them again. Pass another topic, "
            "or --force"
        )
    return dataclasses.replace(selection, to=name, rate=rate)


def _destinations(table: TaskTable, selection: TaskSelection) -> set[str]:
    """Return the full names of the Pub/Sub topics that workers publish the selected tasks to."""
    controls, of_tasks = table.controls(), {selection.topic}
    if selection.ids is not None:
        places = operator_sql.places(cancelled=False)
        rows = table.query(places, "outbox-resend", {"ids": [*selection.ids]}, seconds=SCAN_SECONDS)
        of_tasks = {topic for _, topic, *_ in rows}
    routes = {controls.get(topic or "", NO_CONTROLS).publish_to for topic in of_tasks}
    return {topic_name(topic, table.project) for topic in of_tasks | routes if topic}


def _make_due(transaction: Transaction, rows: Sequence[Row], _operation: str) -> None:
    transaction.update(
        TABLE, RETRY_COLUMNS, [retry_values(row.id, row.now, row.expires_at, row.due_at) for row in rows]
    )


def _delete(transaction: Transaction, rows: Sequence[Row], _operation: str) -> None:
    of_table = CANCELLED_TABLE if rows[0].state == CANCELLED else TABLE
    transaction.delete(of_table, KeySet(keys=[[row.id] for row in rows]))


def _cancel(transaction: Transaction, rows: Sequence[Row], operation: str) -> None:
    """Move rows to the table of cancelled tasks. Release the next task of each key of which a row was not blocked.

    Behind deleted rows that were all blocked, the task that blocks the key is still there. A release would be for
    nothing, and would take the next task out of a selection of blocked tasks before its chunk.
    """
    keys = {(row.topic, row.ordering_key) for row in rows if row.ordering_key and row.state != "blocked"}
    if ids := [row.id for row in rows if (row.topic, row.ordering_key) in keys]:
        heads = transaction.query(NEXT_OF_KEYS, {"ids": ids})
        transaction.update(TABLE, ("Id", *RELEASED), [(id, None, None) for (id,) in heads])
    found = transaction.query(TO_MOVE, {"ids": [row.id for row in rows]})
    moved = [(*values, operation, COMMIT_TIMESTAMP) for values in found]
    transaction.insert_or_update(CANCELLED_TABLE, (*COLUMNS, "OperationId", "CancelledAt"), moved)
    transaction.delete(TABLE, KeySet(keys=[[row.id] for row in rows]))


def _restore(transaction: Transaction, cancelled: Sequence[Row], _operation: str) -> None:
    """Move cancelled tasks back. A task that a worker had published before the cancel is marked as sent.

    Not one that was sent before and then made unsent: the worker may have published it for the first time only.
    """
    rows = transaction.query(KEPT, {"ids": [row.id for row in cancelled]})
    found = [dict(zip((*COLUMNS, "OperationId", "Now"), row, strict=True)) for row in rows]
    published = _published(transaction, {values["OperationId"] for values in found})
    heads = {values["Id"]: values for values in [*_heads(transaction, found), *found]}
    restored = [
        {**values, **_AS_SENT, "TimesSent": values["TimesSent"] + 1}
        if values["Id"] in published[values["OperationId"]] and not values["TimesSent"]
        else _restored(values, heads.get(values["BlockedBy"] or ""))
        for values in found
    ]
    columns = (*COLUMNS, "SentAt")
    transaction.insert(TABLE, columns, [[values.get(name) for name in columns] for values in restored])
    transaction.delete(CANCELLED_TABLE, KeySet(keys=[[row.id] for row in cancelled]))


def _heads(transaction: Transaction, found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tasks behind which cancelled ones were deferred, and lock them."""
    keys = [[id] for id in sorted({values["BlockedBy"] for values in found} - {None})]
    rows = transaction.read(TABLE, HEAD, KeySet(keys=keys)) if keys else []
    return [dict(zip(HEAD, row, strict=True)) for row in rows]


def _restored(values: Mapping[str, Any], head: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the columns of a restored task, as they were.

    A deferred task is released unless its head waits, in the table or among the tasks that are restored with it: the
    next commit of the head, which releases tasks, may not know the task.
    """
    now, available_at = values["Now"], values["AvailableAt"]
    if values["BlockedBy"] is None or available_at is None or available_at <= now or _waits(head, values, now):
        return values
    return {**values, "AvailableAt": None, "BlockedBy": None}


def _waits(head: Mapping[str, Any] | None, values: Mapping[str, Any], now: datetime) -> bool:
    if head is None or any(head[name] != values[name] for name in ("Topic", "OrderingKey")):
        return False
    is_later = head.get("SentAt") is None and head["AvailableAt"] is not None and head["AvailableAt"] > now
    return is_later and (head["ExpiresAt"] is None or head["ExpiresAt"] > now)


def _published(transaction: Transaction, operations: Collection[str]) -> dict[str, Mapping[str, str]]:
    """Return the tasks that workers had published before each operation cancelled them, with their message IDs."""
    keys = KeySet(keys=[[id] for id in sorted(operations)])
    found = dict(map(tuple, transaction.read(OPERATIONS, ("OperationId", "Published"), keys)))
    return {id: json_texts(found.get(id)) for id in operations}


_WRITES: Mapping[str, Callable[[Transaction, Sequence[Row], str], None]] = {
    "retry": _make_due, "purge": _delete, "cancel": _cancel, "restore": _restore,
}  # fmt: skip


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
        publish = _publisher(self.table, self.selection) if self.name == "resend" else None
        most, max_bytes = {
            "resend": (self.selection.rate, CHUNK_BYTES), **dict.fromkeys(("cancel", "restore"), (MOVED, CHUNK_BYTES)),
        }.get(self.name, (None, math.inf))  # fmt: skip
        selected = chunks(self.table, self.selection, progress.position, most=most, max_bytes=max_bytes)
        for chunk in _paced(selected, self.selection.rate):
            if publish:
                self.table.transact(tag, progress.check)
                outcome = publish(chunk.ids)
                record = functools.partial(_recorded, progress, len(outcome.changed), chunk.position)
                progress = self.table.transact(tag, record)
            else:
                outcome, progress = self.table.transact(tag, functools.partial(self._execute, chunk, progress))
            if self.name == "cancel":
                _log_cancelled(outcome.changed, self.author)
            yield outcome
        self.table.transact(tag, progress.finish)

    def _execute(self, chunk: Chunk, progress: Progress, transaction: Transaction) -> tuple[Outcome, Progress]:
        progress.check(transaction)
        ids = sorted(chunk.ids)  # so that two commands lock the rows in the same order
        is_cancelled = self.selection.state == CANCELLED
        statement = operator_sql.by_ids(self.selection.condition, cancelled=is_cancelled, lock=True)
        found = transaction.query(statement, self.selection.values | {"ids": ids})
        keys = KeySet(keys=[[id] for id in ids])
        exists = {id for (id,) in transaction.read(TABLE, ("Id",), keys)} if self.name == "restore" else set[str]()
        rows = [_examined(Row(*row), chunk.seen, exists) for row in found]
        matching = [row for row in rows if row.matches]
        if matching:
            _WRITES[self.name](transaction, matching, progress.id)
        return _outcome(chunk.ids, rows, exists), progress.move(transaction, len(matching), chunk.position)


def _recorded(progress: Progress, tasks: int, position: str, transaction: Transaction) -> Progress:
    progress.check(transaction)
    return progress.move(transaction, tasks, position)


def _examined(row: Row, seen: Collection[str], exists: Collection[str]) -> Row:
    """Return a row that does not match if its ID exists again, or unless it matched at the preview, too."""
    if row.id in exists:
        return row._replace(matches=False, state="exists")
    return row._replace(matches=False, state=NEWCOMER) if row.matches and row.id not in seen else row


def _outcome(ids: Sequence[str], rows: Sequence[Row], exists: Collection[str]) -> Outcome:
    unchanged = [row for row in rows if not row.matches]
    found = {row.id for row in rows}
    absent = [id for id in ids if id not in found]
    return Outcome(
        changed=tuple(row.id for row in rows if row.matches),
        unchanged={row.id: row.state for row in unchanged}
        | {id: "not_cancelled" if id in exists else "missing" for id in absent},
        heads=frozenset(row.blocked_by for row in unchanged if row.state == "blocked" and row.blocked_by),
    )


def _log_cancelled(ids: Sequence[str], author: Author) -> None:
    reason = author.reason or "no reason given"
    for id in ids:
        extra = {"action": "cancelled", "fields": {"task_id": id, "reason": reason}}
        _log.warning("cancelled the task %s: %s", escaped(id), escaped(reason), extra=extra)


def _paced(chunks: Iterable[Chunk], rate: int | None) -> Iterator[Chunk]:
    """Yield the chunks, so that at most `rate` tasks per second are in them."""
    next_at = time.monotonic()
    for chunk in chunks:
        time.sleep(max(0.0, next_at - time.monotonic()))
        next_at = time.monotonic() + (len(chunk.ids) / rate if rate else 0)
        yield chunk


def _publisher(table: TaskTable, selection: TaskSelection) -> Callable[[Sequence[str]], Outcome]:
    """Return a function that publishes those of some tasks that are still sent and selected. It raises as Send does."""
    send: Send = import_module(PUBLISHER).opened(table.pubsub, selection.to)
    statement = operator_sql.messages(selection.condition)

    def publish(ids: Sequence[str]) -> Outcome:
        rows = table.query(statement, "outbox-resend", selection.values | {"ids": ids}, seconds=SCAN_SECONDS)
        found = {id: Message(id, key, b64decode(data), created_at) for id, key, data, created_at, *_ in rows}
        left_out = {id: EXCLUDED if is_sent else "unsent" for id, *_, is_sent, matches in rows if not matches}
        left_out |= {id: "missing" for id in ids if id not in found}
        unchanged = left_out | {**send([found[id] for id in ids if id not in left_out])}
        return Outcome(tuple(id for id in ids if id not in unchanged), unchanged)

    return publish
