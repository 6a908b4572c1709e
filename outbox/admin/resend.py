"""Publish sent tasks again, to one other Pub/Sub topic. No task is changed.

The tasks of each shard are published in the order of CreatedAt, Sequence and Id, chunk by chunk. All tasks of an
ordering key are in one shard, so they are in order. After each chunk, the row of the operation says where the next one
begins. If a process ends between the two, another one publishes the chunk again, so each task arrives at least once.
"""

import dataclasses
import json
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from importlib import import_module
from typing import NamedTuple

from outbox.admin import changes, operations, operator_sql, topics
from outbox.admin.changes import CHUNK, CHUNK_BYTES, Outcome
from outbox.admin.operations import RECORDED_IDS, Author, Progress
from outbox.admin.selection import TaskSelection
from outbox.admin.table import SCAN_SECONDS, LayoutChanged, TaskTable, Transaction
from outbox.base.times import shown
from outbox.base.values import chunked, topic_name
from outbox.errors import InvalidMessage, OutboxError, SettingError
from outbox.message import check_topic
from outbox.table.controls import NO_CONTROLS
from outbox.table.states import LONG_AGO, NO_SEQUENCE

#: Max tasks of one operation, because those of a shard are sorted in memory. The replay job has no limit.
MAX_TASKS = 1_000_000
#: Why a sent task of the given IDs is not published.
EXCLUDED = "excluded by the flags, or sent again since"
_TAG = "outbox-resend"


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resend(TaskSelection):
    """The sent tasks of a topic or with one of the `ids`, and the full name of the Pub/Sub topic that they go to.

    `rate` is a max number of tasks per second. Tasks that were sent at `until` or later do not match, so the selection
    does not change while workers run.
    """

    to: str = ""
    rate: int | None = None


class _Place(NamedTuple):
    """The place of a task in the order of publishing, and the size of its message."""

    created_at: datetime
    sequence: int
    id: str
    bytes: int


def checked(
    table: TaskTable, selection: TaskSelection, to: str, rate: int | None = None, *, own: bool = False
) -> Resend:
    """Return what to publish where, if `to` is a topic for it. Raises SettingError, OutboxError, NotReached.

    `own` allows the topic that the tasks have been published to.
    """
    changes.check("resend", selection)
    if (number := len(selection.ids or ())) > RECORDED_IDS:
        raise SettingError(f"{number:,} IDs are too many for one operation. Pass at most {RECORDED_IDS:,}, or --topic")
    try:
        name = topic_name(check_topic(to), table.project)
    except InvalidMessage as error:
        raise SettingError(f"--to: {error}") from None
    fields = {field.name: getattr(selection, field.name) for field in dataclasses.fields(selection)}
    found = Resend(**fields, to=name, rate=rate)
    if not own and name in _destinations(table, found):
        raise SettingError(
            f"--to {to} is the topic of the tasks, so all of its subscribers would get them again. Pass another topic, "
            "or --force"
        )
    return found


def _destinations(table: TaskTable, selection: Resend) -> set[str]:
    """Return the full names of the Pub/Sub topics that workers publish the selected tasks to."""
    controls = topics.controls(table)
    of_tasks = {selection.topic} if selection.ids is None else {topic for topic, _ in _of_ids(table, selection)}
    routes = {controls.get(topic or "", NO_CONTROLS).publish_to for topic in of_tasks}
    return {topic_name(topic, table.project) for topic in of_tasks | routes if topic}


def check_exists(table: TaskTable, selection: Resend) -> str | None:
    """Ask Pub/Sub whether the topic exists. Return why that is unknown, or None. Raises OutboxError if it does not."""
    from outbox.program import pubsub  # noqa: PLC0415 - imports the client

    return pubsub.check_topic(topics.pubsub_settings(table), selection.to, otherwise="")


def begin(table: TaskTable, selection: Resend, author: Author, *, id: str, selected: int) -> bool:
    """Record a resend, which `resume` executes. Return False if the operation exists. Raises OutboxError."""
    if selected > MAX_TASKS:
        raise OutboxError(
            f"{selected:,} tasks are more than {MAX_TASKS:,}. Pass a shorter time, or use `outbox-pipeline replay --to`"
        )
    return changes.begin(table, "resend", selection, author, id=id, selected=selected)


def resume(table: TaskTable, id: str) -> Iterator[Outcome]:
    """Publish the chunks of a recorded resend that are not published yet.

    Before each chunk and at the end, raises NotContinued if the operation was stopped or finished, or if another
    process has published a chunk. Also raises what Send raises, and OutboxError if there is no such operation.
    """
    _, selection, progress = operations.begun(table, id, ["resend"], Resend.recorded)
    send: Send = import_module(PUBLISHER).opened(topics.pubsub_settings(table), selection.to)
    return _outcomes(table, selection, send, progress)


def _outcomes(table: TaskTable, selection: Resend, send: Send, progress: Progress) -> Iterator[Outcome]:
    next_at = time.monotonic()
    for ids, position in _chunks(table, selection, progress.position):
        time.sleep(max(0.0, next_at - time.monotonic()))
        next_at = time.monotonic() + (len(ids) / selection.rate if selection.rate else 0)
        table.transact(_TAG, progress.check)
        outcome = _publish(table, selection, send, ids)
        progress = table.transact(_TAG, partial(_record, progress, len(outcome.changed), position))
        yield outcome
    if warning := operations.finish(table, progress):
        yield Outcome((), {}, (), warning)


def _record(progress: Progress, tasks: int, position: str, transaction: Transaction) -> Progress:
    progress.check(transaction)
    return progress.move(transaction, tasks, position)


def _publish(table: TaskTable, selection: Resend, send: Send, ids: Sequence[str]) -> Outcome:
    """Publish the tasks `ids` that are still sent and selected."""
    statement, values = operator_sql.messages(selection.condition), selection.values | {"ids": ids}
    rows = table.query(statement, _TAG, values, seconds=SCAN_SECONDS)
    found = {id: Message(id, key, b64decode(data), created_at) for id, key, data, created_at, *_ in rows}
    left_out = {id: EXCLUDED if is_sent else "unsent" for id, *_, is_sent, matches in rows if not matches}
    refused = send([found[id] for id in ids if id in found and id not in left_out])
    unchanged = {**left_out, **refused}
    return Outcome(
        changed=tuple(id for id in ids if id in found and id not in unchanged),
        unchanged=unchanged,
        missing=tuple(id for id in ids if id not in found),
    )


def _chunks(table: TaskTable, selection: Resend, position: str | None) -> Iterator[tuple[list[str], str]]:
    """Yield the IDs of the selection after `position` in chunks, each with the position after it."""
    layout = table.layout
    begin = operations.next_chunk(position, changes.shard_column(table, selection))
    for shard in table.shards[begin["shard"] :] if selection.ids is None else [0]:
        places = sorted(_places(table, selection, shard))
        if shard == begin["shard"] and "after" in begin:
            created_at, sequence, id = begin["after"]
            done = (datetime.fromisoformat(created_at), sequence, id)
            places = [place for place in places if place[:3] > done]
        for chunk in chunked(places, min(CHUNK, selection.rate or CHUNK), CHUNK_BYTES, lambda place: place.bytes):
            last = chunk[-1]
            after = [shown(last.created_at), last.sequence, last.id]
            yield [place.id for place in chunk], json.dumps({"column": layout.column, "shard": shard, "after": after})
        if table.layout != layout:
            # Another thread has noticed a reshard, and replaced the layout: the places may be of another shard.
            raise LayoutChanged(f"{table.name}: the number of shards was changed. Start a new operation")


def _places(table: TaskTable, selection: Resend, shard: int) -> list[_Place]:
    if selection.ids is not None:
        return [place for _, place in _of_ids(table, selection)]
    values = selection.values | {"shard": shard}
    rows = table.query(operator_sql.sent_places(selection.names), _TAG, values, seconds=SCAN_SECONDS)
    return [_place(*row) for row in rows]


def _of_ids(table: TaskTable, selection: Resend) -> list[tuple[str | None, _Place]]:
    """Return topic and place for each of the selected IDs: of a sent or an unsent task, or of none, without a topic."""
    ids = list(selection.ids or ())
    rows = table.query(operator_sql.PLACES, _TAG, {"ids": ids}, seconds=SCAN_SECONDS)
    found = {place[2]: (topic, _place(*place)) for *place, topic in rows}
    return [found.get(id) or (None, _Place(LONG_AGO, NO_SEQUENCE, id, 0)) for id in ids]


def _place(created_at: datetime, sequence: int | None, id: str, size: int) -> _Place:
    return _Place(created_at, NO_SEQUENCE if sequence is None else sequence, id, size)
