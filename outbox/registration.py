"""Register a task inside the caller's own Spanner transaction."""

import base64
import enum
import inspect
import itertools
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from weakref import WeakKeyDictionary

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet
from google.cloud.spanner_v1.transaction import Transaction

from outbox import message as messages
from outbox.errors import InvalidMessage
from outbox.shared.metric_recorder import count_registered
from outbox.storage.task_states import NEVER

TABLE = "AsynchronousTasks"
#: The columns that a registration writes. The others have defaults or are generated.
COLUMNS = (
    "Id",
    "Topic",
    "Data",
    "Priority",
    "OrderingKey",
    "Sequence",
    "CreatedAt",
    "AvailableAt",
    "ExpiresAt",
    "AtMostOnce",
)

_sequence = itertools.count(1)
#: The task IDs that callers gave, by transaction, because a read does not see what its own transaction has buffered.
#: After ABORTED the client calls the function again with a new Transaction, so each attempt begins with none.
_given: WeakKeyDictionary[Transaction, set[str]] = WeakKeyDictionary()


class Priority(enum.IntEnum):
    """Three named priorities. Any int64 is accepted, and higher ones go first."""

    LOW = 0
    NORMAL = 50
    HIGH = 100


def register(
    transaction: object,
    topic: str,
    message: object,
    attributes: Mapping[str, str] | None = None,
    *,
    priority: int = Priority.NORMAL,
    ordering_key: str = "",
    available_at: datetime | None = None,
    expires_at: datetime | None = None,
    at_most_once: bool = False,
    task_id: str | None = None,
) -> str:
    """Add one task to `transaction` and return its id.

    Adds exactly one insert. Reads nothing, opens nothing, sends nothing. The relay publishes the message after the
    transaction has committed, at least once, with the ID in the attribute `asynchronous_task_id`.

    Args:
        transaction: a Spanner Transaction, Batch (`database.batch()`) or MutationGroup.
        topic: topic ID in the worker's project, or projects/PROJECT/topics/TOPIC.
        message: bytes, a PubsubMessage (proto-plus or plain), or another protobuf message, which becomes the data.
        attributes: added to those of the message; contradictions are refused.
        priority: an int64; higher ones go first.
        ordering_key: tasks of one topic and key are published in the order of their commits; "" is no key.
        available_at: publish not before this aware time.
        expires_at: publish not after this aware time.
        at_most_once: prefer a loss to a duplicate; not together with an ordering key.
        task_id: 1 to 64 characters; a second insert of the same ID fails the commit with AlreadyExists. Default: a
            random UUID. Never use a rising number, because the ID leads the primary key
            (https://cloud.google.com/spanner/docs/schema-design#primary-key-prevent-hotspots).

    Raises:
        InvalidMessage: Pub/Sub or the table would refuse the task. Nothing was added to the transaction.
        TypeError: `transaction` or `message` has another type than those above.
    """
    insert = getattr(transaction, "insert", None)
    if not callable(insert):
        raise TypeError(
            f"transaction is {type(transaction).__name__}, it must be a Spanner Transaction, Batch or MutationGroup"
        )
    given = task_id is not None
    if task_id is None:
        task_id = str(uuid.uuid4())
    row = _row(
        topic, message, attributes, task_id=task_id, priority=priority, ordering_key=ordering_key,
        available_at=available_at, expires_at=expires_at, at_most_once=at_most_once,
    )  # fmt: skip
    insert(TABLE, COLUMNS, [row])
    if given:
        _remember(transaction, task_id)
    count_registered(topic)
    return task_id


def register_once(
    transaction: object,
    topic: str,
    message: object,
    attributes: Mapping[str, str] | None = None,
    *,
    task_id: str,
    priority: int = Priority.NORMAL,
    ordering_key: str = "",
    available_at: datetime | None = None,
    expires_at: datetime | None = None,
    at_most_once: bool = False,
) -> bool:
    """Register the task unless a row with `task_id` exists, sent or not; return whether it was registered.

    Reads one row by its key, which is one request and locks that ID for the transaction: of two concurrent
    transactions, one gets True, and the other runs again and gets False. An ID is free again when its row is deleted,
    for example by the retention. An ID that the same transaction has registered counts as existing.

    Call it before any DML that writes PENDING_COMMIT_TIMESTAMP() to the table, because Spanner then refuses reads of
    the table in the same transaction (https://cloud.google.com/spanner/docs/commit-timestamp). `register` uses no DML.

    Args:
        transaction: the Spanner Transaction that `database.run_in_transaction` passes to its function.
        topic: see `register`.
        message: checked even if the task exists.
        attributes: see `register`.
        task_id: a hash of the business key, such as a uuid5; never a rising number.
        priority: see `register`.
        ordering_key: see `register`.
        available_at: see `register`.
        expires_at: see `register`.
        at_most_once: see `register`.

    Raises:
        InvalidMessage: like `register`, before anything is read.
        TypeError: `transaction` cannot read (a Batch, a MutationGroup) or cannot write, or `message` has a wrong type.
    """
    read, insert = _read_and_insert(transaction)
    row = _row(
        topic, message, attributes, task_id=task_id, priority=priority, ordering_key=ordering_key,
        available_at=available_at, expires_at=expires_at, at_most_once=at_most_once,
    )  # fmt: skip
    if isinstance(transaction, Transaction) and task_id in _given.get(transaction, ()):
        return False
    # Read to the end, because until then the client blocks the next statement of the transaction.
    if list(read(TABLE, ("Id",), KeySet(keys=[[task_id]]), request_options={"request_tag": "outbox-register-once"})):
        return False
    insert(TABLE, COLUMNS, [row])
    _remember(transaction, task_id)
    count_registered(topic)
    return True


def _read_and_insert(transaction: object) -> tuple[Callable[..., Any], Callable[..., Any]]:
    read, insert = getattr(transaction, "read", None), getattr(transaction, "insert", None)
    # The client's AsyncTransaction inserts like the others, but its read must be awaited.
    if callable(read) and callable(insert) and not inspect.iscoroutinefunction(read):
        return read, insert
    raise TypeError(
        f"transaction is {type(transaction).__name__}, it must be a Spanner Transaction, because register_once reads "
        "before it inserts: call it in a function given to database.run_in_transaction, or use register"
    )


def _remember(transaction: object, task_id: str) -> None:
    if isinstance(transaction, Transaction):
        _given.setdefault(transaction, set()).add(task_id)


def _row(
    topic: str,
    message: object,
    attributes: Mapping[str, str] | None,
    *,
    task_id: str,
    priority: int,
    ordering_key: str,
    available_at: datetime | None,
    expires_at: datetime | None,
    at_most_once: bool,
) -> tuple[Any, ...]:
    """Return the row in the order of COLUMNS. Raises InvalidMessage; TypeError for the type of `message`."""
    messages.check_task_id(task_id)
    messages.check_topic(topic)
    _check_priority(priority)
    _check_times(available_at, expires_at)
    data, key = messages.build(message, topic=topic, attributes=attributes, ordering_key=ordering_key, task_id=task_id)
    if not isinstance(at_most_once, bool):
        raise InvalidMessage(f"at_most_once is {type(at_most_once).__name__}, it must be a bool")
    if at_most_once and key:
        raise InvalidMessage("at_most_once and an ordering key exclude each other: a lost message would leave a gap")
    return (
        task_id,
        topic,
        base64.b64encode(data),  # the client sends BYTES unchanged, but Spanner expects base64
        int(priority),
        key or None,
        next(_sequence),
        COMMIT_TIMESTAMP,
        available_at,
        expires_at,
        at_most_once,
    )


def _check_priority(priority: int) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidMessage(f"priority is {type(priority).__name__}, it must be an int")
    if not -(2**63) <= priority < 2**63:
        shown = str(priority) if priority.bit_length() <= 64 else f"of {priority.bit_length()} bits"
        raise InvalidMessage(f"priority {shown} is outside of int64")


def _check_times(available_at: datetime | None, expires_at: datetime | None) -> None:
    for name, time in (("available_at", available_at), ("expires_at", expires_at)):
        if time is None:
            continue
        if not isinstance(time, datetime):
            raise InvalidMessage(f"{name} is {type(time).__name__}, it must be an aware datetime")
        if time.utcoffset() is None:
            raise InvalidMessage(f"{name} {time} has no time zone; give one, such as datetime.now(UTC) + ...")
        try:
            time.astimezone(UTC)
        except OverflowError:
            raise InvalidMessage(f"{name} {time} is outside of the years 1 to 9999 in UTC") from None
    if available_at is not None and available_at >= NEVER:
        raise InvalidMessage(f"available_at {available_at} is not before {NEVER}")
    if available_at is not None and expires_at is not None and expires_at <= available_at:
        raise InvalidMessage(f"expires_at {expires_at} is not after available_at {available_at}")
