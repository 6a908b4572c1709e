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
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet

from outbox.base.values import topic_name
from outbox.errors import InvalidMessage, OutboxError, SettingError
from outbox.message import check_topic
from outbox.program.settings import one_of
from outbox.program.terminal import escaped
from outbox.rows.task_table import SCAN_SECONDS, TaskTable, Transaction
from outbox.table.controls import NO_CONTROLS
from outbox.table.ddl import OPERATIONS
from outbox.table.states import CANCELLED, MARKS_FINAL_AFTER
from outbox_admin import operations
from outbox_admin.change_kinds import KINDS, MADE_UNSENT, MATCHED_LATER
from outbox_admin.changes import change_sql, resending
from outbox_admin.changes.chunks import Chunk, chunks, in_order_of_keys, next_chunk
from outbox_admin.changes.resending import message
from outbox_admin.changes.writes import WRITES
from outbox_admin.operations import UNNAMED, Author, Operation, Progress, found
from outbox_admin.tasks import task_sql
from outbox_admin.tasks.selected import Row, condition_of, with_as_of
from outbox_admin.tasks.selections import TaskSelection

#: Max bytes of the messages that a resend publishes in one chunk.
CHUNK_BYTES = 8_000_000
#: Max tasks of one resend, because each page sorts those of a shard. The replay job has no limit.
MAX_RESENT = 1_000_000
#: Why a sent task of the given IDs is not published.
EXCLUDED = "excluded by the flags, or sent again since"
_log = logging.getLogger("outbox")


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one chunk: IDs that were changed, and states of tasks that were not changed, or `missing`.

    `heads` are the IDs of the key heads that block unchanged tasks. The last outcome has the number of `left` tasks:
    those that the preview counted and that no chunk has read, because they did not match any more.
    """

    changed: tuple[str, ...] = ()
    unchanged: Mapping[str, str] = dataclasses.field(default_factory=dict)
    heads: frozenset[str] = frozenset()
    left: int = 0


def change(
    table: TaskTable, name: str, selection: TaskSelection, author: Author = UNNAMED, *, id: str = "", selected: int = 0
) -> Iterator[Outcome]:
    """Record a change of the selected tasks, and execute it chunk by chunk.

    A retry makes them due now, with 0 failed attempts. A purge deletes them. A cancel takes them out, also releases the
    next tasks of their keys, and logs the IDs. A restore makes them unsent again, as they were. Each transaction waits
    at most 20 s for the batches that hold its tasks. A resend publishes them. `id` is the ID of the operation, by
    default a new one. Raises OutboxError if the change is not for these tasks, or if Spanner no longer keeps the
    versions of the selection's `as_of`.
    """
    id = id or operations.new_id()
    selection, _ = begin(table, name, selection, author, id=id, selected=selected)
    return _Change(table, name, selection, author).outcomes(Progress(id))


def begin(
    table: TaskTable, name: str, selection: TaskSelection, author: Author, *, id: str, selected: int
) -> tuple[TaskSelection, bool]:
    """Record a change for a `resume`, and return what it is of. `selected` is the number of tasks of the preview.

    The IDs of a restore or a resend are in the order of their keys. Return also whether this call has recorded the
    change: not if the operation exists, because a form may be sent twice.
    """
    check(name, selection)
    selection = with_as_of(table, selection)
    if name in ("restore", "resend"):
        selection = in_order_of_keys(table, selection)
    if name == "resend" and selected > MAX_RESENT:
        raise OutboxError(
            f"{selected:,} tasks are more than {MAX_RESENT:,}. Pass a shorter time, or use `outbox-pipeline replay "
            "--to`"
        )

    tried = False

    def work(transaction: Transaction) -> bool:
        nonlocal tried
        if transaction.read(OPERATIONS, ("OperationId",), KeySet(keys=[[id]])):
            return tried  # by an attempt whose commit was not answered
        tried = True
        columns = {"OperationId": id, "Tasks": 0, "Selected": selected or None, "SeenAt": COMMIT_TIMESTAMP}
        operations.record(transaction, table, name, dataclasses.asdict(selection), author, **columns)
        return True

    return selection, table.transact(f"outbox-{name}", work)


def continued(table: TaskTable, id: str) -> Operation:
    """Return a recorded operation. Raises OutboxError if it cannot be continued."""
    operation, selection, progress = begun(table, id)
    next_chunk(table, selection, progress.position)
    return operation


def resume(table: TaskTable, id: str) -> Iterator[Outcome]:
    """Execute the chunks of a recorded operation that are not executed yet.

    Before each chunk and at the end, raises NotContinued if the operation was stopped or finished, or if another
    process has executed a chunk. Raises OutboxError if there is no such operation.
    """
    operation, selection, progress = begun(table, id)
    author = Author(operation.principal, operation.reason)
    check(operation.operation, selection)
    return _Change(table, operation.operation, with_as_of(table, selection), author).outcomes(progress)


def bounded(name: str, selection: TaskSelection, at: datetime) -> TaskSelection:
    """Return the selection for the change `name` without tasks newer than its preview `at`. Raises OutboxError.

    A task that a retry sends again gets a later SentAt, so neither the retry nor its continuation takes it twice.
    """
    state = selection.state or KINDS[name].of_ids
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
    kind = KINDS[name]
    if selection.state not in kind.states and (selection.ids is None or selection.state != kind.of_ids):
        raise OutboxError(f"{name} is for tasks that are {', '.join(kind.states)}, not for {selection.state or 'any'}")
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
        rows = table.query(change_sql.PLACES, "outbox-resend", {"ids": [*selection.ids]}, seconds=SCAN_SECONDS)
        of_tasks = {topic for _, topic, *_ in rows}
    routes = {controls.get(topic or "", NO_CONTROLS).publish_to for topic in of_tasks}
    return {topic_name(topic, table.project) for topic in of_tasks | routes if topic}


@dataclasses.dataclass(frozen=True, slots=True)
class _Change:
    table: TaskTable
    name: str
    selection: TaskSelection
    author: Author

    def outcomes(self, progress: Progress) -> Iterator[Outcome]:
        tag = f"outbox-{self.name}"
        publish = _publisher(self.table, self.selection) if self.name == "resend" else None
        limits = (self.selection.rate, CHUNK_BYTES) if publish else (None, math.inf)
        selected = chunks(self.table, self.selection, progress.position, most=limits[0], max_bytes=limits[1])
        for chunk in _paced(selected, self.selection.rate):
            if publish:
                self.table.transact(tag, progress.check)
                outcome = publish(chunk.ids)
                record = functools.partial(_recorded, progress, outcome, chunk.position)
                _, progress = self.table.transact(tag, _committing(record))
            else:
                execute = _committing(functools.partial(self._execute, chunk, progress))
                outcome, progress = self.table.transact(tag, execute)
            if self.name == "cancel":
                _log_cancelled(outcome.changed, self.author)
            yield outcome
        left = self.table.transact(tag, functools.partial(progress.finish, counts_left=self.selection.ids is None))
        if left:
            yield Outcome(left=left)

    def _execute(self, chunk: Chunk, progress: Progress, transaction: Transaction) -> "_Done":
        # The tasks come first. A transaction that has locked something before is older than the claims of workers, and
        # would abort batches that may have published.
        statement = task_sql.by_ids(condition_of(self.selection), lock=True)
        ids = sorted(chunk.ids)  # so that two commands lock the rows in the same order
        found = transaction.query(statement, self.selection.values | {"ids": ids})
        rows = [_examined(self.name, Row(*row), chunk.seen) for row in found]
        if matching := [row for row in rows if row.matches]:
            WRITES[self.name](transaction, matching, progress.id)
        return _recorded(progress, _outcome(chunk.ids, rows), chunk.position, transaction)


#: What an attempt of a transaction has done: the outcome of its chunk, and the progress after it.
_Done = tuple[Outcome, Progress]


def _committing(work: Callable[[Transaction], _Done]) -> Callable[[Transaction], _Done]:
    """Return the function of a transaction that may run again after a commit without an answer.

    If that commit took effect, the row of the operation is as the earlier attempt has written it. Its result counts.
    """
    tried: list[_Done] = []

    def attempt(transaction: Transaction) -> _Done:
        if committed := [each for each in tried if each[1].is_last(transaction)]:
            return committed[0]
        tried.append(work(transaction))
        return tried[-1]

    return attempt


def _recorded(progress: Progress, outcome: Outcome, position: str, transaction: Transaction) -> _Done:
    progress.check(transaction)
    unchanged = Counter(outcome.unchanged.values())
    return outcome, progress.move(transaction, len(outcome.changed), unchanged, position)


def _examined(name: str, row: Row, seen: Collection[str]) -> Row:
    """Return a row that does not match unless it matched at the preview, too, and the change is for it.

    A cancelled task that another program has made unsent can be restored, or cancelled again. No worker would send it.
    """
    if name in ("retry", "purge") and row.state == MADE_UNSENT:
        return row._replace(matches=False)
    return row._replace(matches=False, state=MATCHED_LATER) if row.matches and row.id not in seen else row


def _outcome(ids: Sequence[str], rows: Sequence[Row]) -> Outcome:
    unchanged = [row for row in rows if not row.matches]
    found = {row.id for row in rows}
    return Outcome(
        changed=tuple(row.id for row in rows if row.matches),
        unchanged={row.id: row.state for row in unchanged} | {id: "missing" for id in ids if id not in found},
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
    send = resending.opened(table.pubsub, selection.to or "")
    statement = change_sql.messages(condition_of(selection))

    def publish(ids: Sequence[str]) -> Outcome:
        rows = table.query(statement, "outbox-resend", selection.values | {"ids": ids}, seconds=SCAN_SECONDS)
        found = {id: message(id, key, b64decode(data), created_at) for id, key, data, created_at, *_ in rows}
        left_out = {id: EXCLUDED if is_sent else "unsent" for id, *_, is_sent, matches in rows if not matches}
        left_out |= {id: "missing" for id in ids if id not in found}
        unchanged = left_out | {**send([found[id] for id in ids if id not in left_out])}
        return Outcome(tuple(id for id in ids if id not in unchanged), unchanged)

    return publish


def begun(table: TaskTable, id: str) -> tuple[Operation, TaskSelection, Progress]:
    """Return an operation that is executed in chunks, its selection, and how far it is. Raises OutboxError."""
    row = found(table, id)
    if row.operation not in KINDS or row.seen_at is None:
        raise OutboxError(f"operation {id} is not a {one_of(*KINDS).allowed}, so it cannot be continued")
    try:
        selection = TaskSelection.recorded(row.selection)
    except OutboxError as error:
        raise OutboxError(f"operation {id} cannot be continued: {error}") from None
    if row.tasks is None:
        raise OutboxError(f"the row of the operation is malformed: operation {id} has no Tasks. Start a new operation")
    return row, selection, Progress(id, row.tasks, row.position)
