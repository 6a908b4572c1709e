"""Publish sent tasks again, to one other Pub/Sub topic. No task is changed. `changes` executes it chunk by chunk.

All tasks of an ordering key are in one shard, and those of a shard are published in the order of CreatedAt, Sequence
and Id. If a process ends after it has published a chunk and before it has recorded it, another one publishes the chunk
again, so each task arrives at least once.
"""

import dataclasses
import time
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from typing import NamedTuple

from outbox.admin import operator_sql
from outbox.admin.selection import Outcome, TaskSelection
from outbox.admin.table import SCAN_SECONDS, TaskTable
from outbox.base.values import topic_name
from outbox.errors import InvalidMessage, SettingError
from outbox.message import check_topic
from outbox.table.controls import NO_CONTROLS

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
#: The IDs of a chunk with its position, and those that matched at the preview.
Chunk = tuple[str, Sequence[str], set[str]]


def checked(
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
        rows = table.query(operator_sql.places(cancelled=False), _TAG, {"ids": [*selection.ids]}, seconds=SCAN_SECONDS)
        of_tasks = {topic for _, topic, *_ in rows}
    routes = {controls.get(topic or "", NO_CONTROLS).publish_to for topic in of_tasks}
    return {topic_name(topic, table.project) for topic in of_tasks | routes if topic}


def paced(chunks: Iterable[Chunk], rate: int | None) -> Iterator[Chunk]:
    """Yield the chunks, so that at most `rate` tasks per second are in them."""
    next_at = time.monotonic()
    for chunk in chunks:
        time.sleep(max(0.0, next_at - time.monotonic()))
        next_at = time.monotonic() + (len(chunk[1]) / rate if rate else 0)
        yield chunk


def publisher(table: TaskTable, selection: TaskSelection) -> Callable[[Sequence[str]], Outcome]:
    """Return a function that publishes those of some tasks that are still sent and selected. It raises as Send does."""
    send: Send = import_module(PUBLISHER).opened(table.pubsub, selection.to)
    statement = operator_sql.messages(selection.condition)

    def publish(ids: Sequence[str]) -> Outcome:
        rows = table.query(statement, _TAG, selection.values | {"ids": ids}, seconds=SCAN_SECONDS)
        found = {id: Message(id, key, b64decode(data), created_at) for id, key, data, created_at, *_ in rows}
        left_out = {id: EXCLUDED if is_sent else "unsent" for id, *_, is_sent, matches in rows if not matches}
        unchanged = left_out | {**send([found[id] for id in ids if id in found and id not in left_out])}
        return Outcome(
            changed=tuple(id for id in ids if id in found and id not in unchanged),
            unchanged=unchanged,
            missing=tuple(id for id in ids if id not in found),
        )

    return publish
