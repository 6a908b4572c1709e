"""Register a task inside the caller's own Spanner transaction."""

import base64
import enum
import itertools
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP

from outbox import message as messages
from outbox._metrics import count_registered
from outbox.errors import InvalidMessage

#: From this time on `AvailableAt` means dead (design: a task is never scheduled for it).
NEVER = datetime(9999, 12, 31, tzinfo=UTC)
#: The columns that one registration writes; the others have defaults or are generated.
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


class Priority(enum.IntEnum):
    """Three named priorities; any int64 is accepted, higher goes first."""

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

    Adds exactly one insert; reads nothing, opens nothing, sends nothing. The relay publishes the message after the
    transaction has committed, at least once, with the id in the attribute `asynchronous_task_id`.

    Args:
        transaction: a Spanner Transaction, Batch (`database.batch()`) or MutationGroup.
        topic: topic id in the worker's project, or projects/PROJECT/topics/TOPIC.
        message: bytes, a PubsubMessage (proto-plus or plain), or another protobuf message, which becomes the data.
        attributes: added to the message's own; contradictions are refused.
        priority: an int64, higher first.
        ordering_key: one key's messages keep their order; "" is none.
        available_at: not before this aware time.
        expires_at: not after this aware time.
        at_most_once: prefer loss to a duplicate; not together with an ordering key.
        task_id: 1 to 64 characters; a second insert of the same id fails the commit with AlreadyExists. Default: a
            random UUID, drawn at each call. Never a rising number: it leads the primary key
            (https://cloud.google.com/spanner/docs/schema-design#primary-key-prevent-hotspots).

    Raises:
        InvalidMessage: Pub/Sub or the table would refuse it; nothing was added to the transaction.
        TypeError: `transaction` or `message` is of a type that is not listed above.
    """
    insert = getattr(transaction, "insert", None)
    if not callable(insert):
        raise TypeError(
            f"transaction is {type(transaction).__name__}, it must be a Spanner Transaction, Batch or MutationGroup"
        )
    if task_id is None:
        task_id = str(uuid.uuid4())
    messages.check_task_id(task_id)
    messages.check_topic(topic)
    _check_priority(priority)
    _check_times(available_at, expires_at)
    data, key = messages.build(message, topic=topic, attributes=attributes, ordering_key=ordering_key, task_id=task_id)
    if at_most_once and key:
        raise InvalidMessage("at_most_once and an ordering key exclude each other: a lost message would leave a gap")
    row = (
        task_id,
        topic,
        base64.b64encode(data),  # the client sends BYTES as they are; Spanner expects base64
        int(priority),
        key or None,
        next(_sequence),
        COMMIT_TIMESTAMP,
        available_at,
        expires_at,
        bool(at_most_once),
    )
    insert("AsynchronousTasks", COLUMNS, [row])
    count_registered(topic)
    return task_id


def _check_priority(priority: int) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidMessage(f"priority is {type(priority).__name__}, it must be an int")
    if not -(2**63) <= priority < 2**63:
        raise InvalidMessage(f"priority {priority} is outside of int64")


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
