"""Register tasks inside the caller's own Spanner transaction."""

import binascii
import enum
import itertools
import operator
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, TypedDict, Unpack

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP

from outbox import message as messages
from outbox.base.values import class_name, in_utc
from outbox.errors import InvalidMessage
from outbox.observing import count_registered
from outbox.table import transactions
from outbox.table.states import NEVER, TASKS_TABLE
from outbox.table.transactions import SupportsInsert, SupportsReadInsert

#: The columns that a registration writes. The others have defaults (SentAt is NULL) or are generated (Shard from the
#: ordering key or the ID, Bytes from Data).
TASK_COLUMNS = (
    "Id", "Topic", "Data", "Priority", "OrderingKey", "Sequence", "CreatedAt", "AvailableAt", "ExpiresAt", "AtMostOnce",
)  # fmt: skip

#: The positions of the columns that may be left out of an insert. Their default is NULL or FALSE.
_OPTIONAL = [TASK_COLUMNS.index(name) for name in ("OrderingKey", "AvailableAt", "ExpiresAt", "AtMostOnce")]
#: A UUID stores its variant in one hexadecimal digit. Maps a random digit to a valid one.
_VARIANTS = {digit: "89ab"[int(digit, 16) % 4] for digit in "0123456789abcdef"}

#: Of a commit, without its index entries: https://cloud.google.com/spanner/quotas#limits-for
MAX_MUTATIONS = 80_000
#: The value of CancelledBy if an application has cancelled the task.
APPLICATION = "application"

#: The values of Sequence, which orders the tasks of one transaction: they share CreatedAt.
_sequence = itertools.count(1)


class Priority(enum.IntEnum):
    """Three named priorities. Any int64 is accepted, and higher ones go first."""

    LOW = 0
    NORMAL = 50
    HIGH = 100


class Options(TypedDict, total=False):
    """The keyword arguments of `register`, except `task_id`."""

    priority: int
    ordering_key: str
    available_at: datetime | None
    expires_at: datetime | None
    at_most_once: bool


@dataclass(frozen=True, slots=True)
class Task:
    """One task for `register_many`. The fields are the arguments of `register`."""

    topic: str
    message: messages.Message
    attributes: Mapping[str, str] | None = None
    _: KW_ONLY
    priority: int = Priority.NORMAL
    ordering_key: str = ""
    available_at: datetime | None = None
    expires_at: datetime | None = None
    at_most_once: bool = False
    task_id: str | None = None


def register(
    transaction: SupportsInsert,
    topic: str,
    message: messages.Message,
    attributes: Mapping[str, str] | None = None,
    *,
    priority: int = Priority.NORMAL,
    ordering_key: str = "",
    available_at: datetime | None = None,
    expires_at: datetime | None = None,
    at_most_once: bool = False,
    task_id: str | None = None,
) -> str:
    """Add one task to `transaction` and return its ID.

    Adds exactly one insert. Reads nothing, opens nothing, sends nothing. The relay publishes the message after the
    transaction has committed, at least once, with the ID in the attribute `asynchronous_task_id`.

    Args:
        transaction: a Spanner Transaction, Batch (`database.batch()`) or MutationGroup.
        topic: topic ID in the worker's project, or projects/PROJECT/topics/TOPIC.
        message: bytes, a PubsubMessage (proto-plus or plain), or another protobuf message, which becomes the data.
        attributes: added to those of the message. Raises InvalidMessage if the message has the same attribute with
            another value.
        priority: an int64; higher ones go first.
        ordering_key: tasks of one topic and key are published in the order of their commits; "" is no key.
        available_at: do not publish before this timezone-aware time.
        expires_at: do not publish after this timezone-aware time.
        at_most_once: prefer a loss to a duplicate; not together with an ordering key.
        task_id: 1 to 64 printable characters, without a space at the begin or end; a second insert of the same ID fails
            the commit with AlreadyExists. Default: a random UUID. Never use a monotonically increasing number, because
            the ID is the primary key (https://cloud.google.com/spanner/docs/schema-design#primary-key-prevent-hotspots).

    Raises:
        InvalidMessage: Pub/Sub or the table would refuse the task. Nothing was added to the transaction.
        InvalidTransaction: `transaction` was committed or rolled back before, or belongs to a DB-API connection, which
            would drop the insert after an abort.
        TypeError: `transaction` or `message` is not one of the types above.
    """
    transactions.check_transaction(transaction, "register")
    task = Task(
        topic, message, attributes, priority=priority, ordering_key=ordering_key, available_at=available_at,
        expires_at=expires_at, at_most_once=at_most_once, task_id=task_id,
    )  # fmt: skip
    columns, row = insert_of(task)
    # Adds one insert to the transaction of the caller, and so keeps OUT-LOSS-1 of docs/guarantees.md.
    transactions.insert(transaction, TASKS_TABLE, columns, [row], keys=[row[:1]])
    id: str = row[0]
    count_registered(row[1])
    return id


def register_once(
    transaction: SupportsReadInsert,
    topic: str,
    message: messages.Message,
    attributes: Mapping[str, str] | None = None,
    *,
    task_id: str,
    **options: Unpack[Options],
) -> bool:
    """Register the task unless a row with `task_id` exists, sent or not; return whether it was registered.

    Reads one row by its key, in one request, and locks that ID for the transaction. Of two concurrent transactions, one
    gets True. The other runs again and gets False. An ID is free again when its row is deleted, for example by the row
    deletion policy. An ID that the same transaction has registered counts as existing.

    Call it before any DML that writes PENDING_COMMIT_TIMESTAMP() to the table, because Spanner then refuses reads of
    the table in the same transaction (https://cloud.google.com/spanner/docs/commit-timestamp). `register` uses no DML.

    `transaction` is the Spanner Transaction that `database.run_in_transaction` passes to its function. `task_id` should
    be a hash of the business key, such as a uuid5, and never a monotonically increasing number. The other arguments are
    those of `register`, and the message is checked even if the task exists.

    Raises:
        InvalidMessage: like `register`, before anything is read.
        InvalidTransaction: like `register`.
        TypeError: `transaction` cannot read (a Batch, a MutationGroup) or cannot write, or `message` has a wrong type.
        RetryError, DeadlineExceeded: from google.api_core. Spanner was unavailable, or another transaction held the
            row, for 30 s.
    """
    transactions.check_transaction(transaction, "register_once", reads=True)
    task = Task(topic, message, attributes, task_id=task_id, **options)
    from outbox.table.existing_keys import insert_once  # noqa: PLC0415 - `register` does not need it

    return register_with(partial(insert_once, transaction), task)


def register_with(insert: Callable[..., bool], task: Task) -> bool:
    """Register the task with a function that inserts a row unless its key exists. Return whether it did."""
    messages.check_task_id(task.task_id)  # type: ignore[arg-type]  # `task_row` would replace None with a random ID
    columns, row = insert_of(task)
    is_new = insert(TASKS_TABLE, columns, row, key=row[:1], tag="outbox-register-once")
    if is_new:
        count_registered(row[1])
    return is_new


def register_many(transaction: SupportsInsert, tasks: Collection[Task]) -> list[str]:
    """Add all tasks to `transaction` in one insert and return their IDs in the same order.

    Does what `register` does for each task, in less CPU time. If a task is refused, none is added.

    Args:
        transaction: see `register`.
        tasks: a list or another collection; it may be empty. An iterator, such as a generator, is refused: after an
            abort, the client calls the function of `run_in_transaction` again, and an iterator has no tasks left.
            Spanner limits a commit to 80,000 mutations. Each column and each index entry of a task counts, so a few
            thousand tasks fit (https://cloud.google.com/spanner/quotas#limits-for).

    Raises:
        InvalidMessage: like `register`, or two tasks have the same `task_id`. The message begins with the index of the
            task. Or there are more tasks than a commit can hold. Nothing was added to the transaction.
        InvalidTransaction: like `register`.
        TypeError: like `register`, or `tasks` is no collection. If a task or its message has a wrong type, the text
            begins with the index of the task.
    """
    transactions.check_transaction(transaction, "register_many")
    rows = _task_rows(tasks)
    if not rows:
        return []  # Spanner refuses an insert without rows
    columns, values = _without_defaults(rows)
    if len(columns) * len(rows) > MAX_MUTATIONS:
        raise InvalidMessage(
            f"{len(rows):,} tasks are more than {len(columns) * len(rows):,} mutations, and Spanner allows "
            f"{MAX_MUTATIONS:,} in a commit. Register at most {MAX_MUTATIONS // 16:,} tasks in one transaction"
        )
    transactions.insert(transaction, TASKS_TABLE, columns, values, keys=[row[:1] for row in rows])
    for topic, count in Counter(row[1] for row in rows).items():
        count_registered(topic, count)
    return [row[0] for row in rows]


def task_row(task: Task) -> transactions.Row:
    """Return the row in the order of TASK_COLUMNS. Raises InvalidMessage; TypeError for the type of `message`."""
    id = _random_id() if task.task_id is None else messages.check_new_task_id(task.task_id)
    priority = _priority(task.priority)
    available_at, expires_at = _times(task.available_at, task.expires_at)
    topic = messages.check_topic(task.topic)
    data, key = messages.build(task.message, attributes=task.attributes, ordering_key=task.ordering_key, task_id=id)
    if not isinstance(task.at_most_once, bool):
        raise InvalidMessage(f"at_most_once is {class_name(task.at_most_once)}. It must be a bool")
    if task.at_most_once and key:
        raise InvalidMessage("at_most_once and an ordering key exclude each other: a lost message would leave a gap")
    return (
        id,
        topic,
        binascii.b2a_base64(data, newline=False),  # the client sends BYTES unchanged, but Spanner expects base64
        priority,
        key or None,
        next(_sequence),
        COMMIT_TIMESTAMP,
        available_at,
        expires_at,
        task.at_most_once,
    )


def insert_of(task: Task) -> tuple[tuple[str, ...], transactions.Row]:
    """Return the columns in use and their values, ID and topic first. Raises as `task_row` does."""
    columns, [row] = _without_defaults([task_row(task)])
    return columns, row


def _random_id() -> str:
    """Return what `str(uuid.uuid4())` returns, in less than half of the time."""
    text = os.urandom(16).hex()
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-{_VARIANTS[text[16]]}{text[17:20]}-{text[20:]}"


def _without_defaults(rows: Sequence[transactions.Row]) -> tuple[tuple[str, ...], list[transactions.Row]]:
    """Return the columns and the values to insert, without the columns that have only their default.

    Each value costs CPU in the client and counts as a mutation.
    """
    columns, values = _columns_and_getter(*[n for n in _OPTIONAL if any(map(operator.itemgetter(n), rows))])
    return columns, list(map(values, rows))


@lru_cache
def _columns_and_getter(*optional: int) -> tuple[tuple[str, ...], Callable[[transactions.Row], transactions.Row]]:
    values: Any = operator.itemgetter(*[n for n in range(len(TASK_COLUMNS)) if n in optional or n not in _OPTIONAL])
    return values(TASK_COLUMNS), values


def _task_rows(tasks: Collection[Task]) -> list[transactions.Row]:
    """Return the rows. Raises like `register_many`."""
    if not isinstance(tasks, Collection):
        raise TypeError(
            f"tasks is {class_name(tasks)}. It must be a list or another collection of outbox.Task, such as "
            "list(tasks). An iterator has no tasks left when the client runs the transaction again after an abort, so "
            "they would be lost"
        )
    rows: list[transactions.Row] = []
    chosen: dict[str, int] = {}
    for index, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise TypeError(f"tasks[{index}] is {class_name(task)}. It must be an outbox.Task")
        try:
            row = task_row(task)
        except (InvalidMessage, TypeError) as error:
            raise type(error)(f"tasks[{index}]: {error}") from error
        if task.task_id is not None and (first := chosen.setdefault(row[0], index)) != index:
            raise InvalidMessage(f"tasks[{index}]: task_id {row[0]!r} is also the task_id of tasks[{first}]")
        rows.append(row)
    return rows


def _priority(priority: int) -> int:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidMessage(f"priority is {class_name(priority)}. It must be an int")
    if not -(2**63) <= priority < 2**63:
        raise InvalidMessage("priority is outside of int64, which is -2**63 to 2**63 - 1")
    return int.__index__(priority)  # without its subclass, such as an IntEnum


def _times(available_at: datetime | None, expires_at: datetime | None) -> tuple[datetime | None, datetime | None]:
    available, expires = aware("available_at", available_at), aware("expires_at", expires_at)
    if available is not None and available >= NEVER:
        raise InvalidMessage(f"available_at {available_at} is not before {NEVER}")
    if available is not None and expires is not None and expires <= available:
        raise InvalidMessage(f"expires_at {expires_at} is not after available_at {available_at}")
    return available, expires


def aware(name: str, time: datetime | None) -> datetime | None:
    """Return a time in UTC. Raises InvalidMessage: it is no time with a time zone."""
    if time is None:
        return None
    if not isinstance(time, datetime) or time != time:  # noqa: PLR0124 - pandas.NaT is a datetime
        raise InvalidMessage(f"{name} is {class_name(time)}. It must be an aware datetime")
    if time.utcoffset() is None:
        raise InvalidMessage(f"{name} {time} has no time zone; give one, such as datetime.now(UTC) + ...")
    try:
        return in_utc(time)
    except OverflowError:
        raise InvalidMessage(f"{name} {time} is outside of the years 1 to 9999 in UTC") from None
