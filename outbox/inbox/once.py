"""Record the task of a message in the transaction that processes it."""

import re
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, get_args

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.protobuf.json_format import ParseDict, ParseError
from google.pubsub_v1.types import PubsubMessage

from outbox.base.values import class_name, plain
from outbox.errors import InvalidConsumer, InvalidMessage, MissingTaskId
from outbox.message import TASK_ID_ATTRIBUTE, RawPubsubMessage
from outbox.table.existing_keys import insert_once
from outbox.table.transactions import SupportsReadInsert, check_transaction

PROCESSED_TABLE = "ProcessedTasks"
PROCESSED_COLUMNS = ("Consumer", "TaskId", "ProcessedAt")
#: The lengths of the columns.
MAX_CONSUMER_CHARACTERS, MAX_RECORDED_CHARACTERS = 256, 128

#: With "message_id", its message ID identifies a message that has no task ID. With "task_id", it is refused.
Key: TypeAlias = Literal["task_id", "message_id"]


class ReceivedMessage(Protocol):
    """A received message, from a streaming pull or as a PubsubMessage."""

    @property
    def data(self) -> bytes:
        """Return the data."""

    @property
    def attributes(self) -> Mapping[str, str]:
        """Return the attributes."""

    @property
    def message_id(self) -> str:
        """Return the ID that Pub/Sub gave the message."""


def process_once(
    transaction: SupportsReadInsert, message: ReceivedMessage, *, consumer: str, key: Key = "task_id"
) -> bool:
    """Record the task of `message` as processed, and return whether this is the first time.

    Reads one row by its key and adds one insert. Change your own rows in the same transaction if the answer is True,
    and do nothing if it is False. Of two concurrent transactions, one gets True, and the other runs again and gets
    False. Acknowledge the message after the commit.

    Args:
        transaction: the Spanner Transaction that `database.run_in_transaction` passes to its function.
        message: a message of Pub/Sub's clients, or the result of `pushed_message` for a push request.
        consumer: names the subscriber, 1 to 256 printable characters without leading or trailing spaces. Each
            consumer processes each task once, so under a new name all messages are processed again.
        key: with "message_id", a message without a task ID is recorded by its message ID. Message IDs are unique
            only within a topic, so use a separate consumer name for each topic.

    Raises:
        MissingTaskId: the message has no task ID, or one longer than 128 characters, and `key` is "task_id".
        InvalidConsumer: `consumer` is not a valid name.
        InvalidTransaction: `transaction` belongs to a DB-API connection, which would drop the record after an abort, or
            has ended.
        NotReached: the database has no table ProcessedTasks.
        RetryError, DeadlineExceeded: from google.api_core. Spanner was unavailable, or another transaction held the
            record, for 30 s.
        ValueError: `key` is neither "task_id" nor "message_id".
        TypeError: `transaction` cannot read or write, or `message` is not a message.
    """
    check_transaction(transaction, "process_once", reads=True)
    return record_with(partial(insert_once, transaction), message, consumer, key)


def record_with(insert_once: Callable[..., bool], message: ReceivedMessage, consumer: str, key: Key) -> bool:
    """Record the task with a function that inserts a row unless its key exists. Return whether it did."""
    row = inbox_row(message, consumer, key)
    return insert_once(PROCESSED_TABLE, PROCESSED_COLUMNS, (*row, COMMIT_TIMESTAMP), key=row, tag="outbox-process-once")


def inbox_row(message: ReceivedMessage, consumer: str, key: Key) -> tuple[str, str]:
    """Return the values of Consumer and TaskId. Raises MissingTaskId, InvalidConsumer, TypeError."""
    consumer = plain_consumer(consumer)
    check_choice("key", key, Key)
    attributes: Any = getattr(message, "attributes", None)
    if not hasattr(attributes, "get"):
        raise TypeError(f"message is {class_name(message)}. It must be a Pub/Sub message with attributes")
    task_id = plain(attributes.get(TASK_ID_ATTRIBUTE, ""))
    if 1 <= len(task_id) <= MAX_RECORDED_CHARACTERS:
        return consumer, task_id
    message_id = plain(message.message_id)
    if key == "message_id" and message_id:
        # Message IDs increase, so a TaskId that began with one would be a hot spot: https://cloud.google.com/spanner/docs/schema-design
        return consumer, f"{zlib.crc32(message_id.encode()):08x}-message-{message_id}"
    problem = f"no attribute {TASK_ID_ATTRIBUTE}"
    if task_id:
        problem = f"an {TASK_ID_ATTRIBUTE} of {len(task_id)} characters (max {MAX_RECORDED_CHARACTERS})"
    raise MissingTaskId(
        f"message {message_id!r} has {problem}, so it did not come from the outbox. Pass key='message_id' to process "
        "it by its message ID, or let Pub/Sub forward it to a dead-letter topic"
    )


def check_choice(name: str, value: object, choices: object) -> None:
    """Raise ValueError if `value` is not one of the choices of a Literal."""
    if value not in (allowed := get_args(choices)):
        raise ValueError(f"{name} is {value!r}. It must be {' or '.join(map(repr, allowed))}")


def plain_consumer(consumer: str) -> str:
    """Return the name as an exact str. Raises InvalidConsumer."""
    if not isinstance(consumer, str):
        raise InvalidConsumer(f"consumer is {type(consumer).__name__}. It must be a str")
    consumer = plain(consumer)
    if not 1 <= len(consumer) <= MAX_CONSUMER_CHARACTERS:
        raise InvalidConsumer(f"consumer has {len(consumer)} characters. It must have 1 to {MAX_CONSUMER_CHARACTERS}")
    if not consumer.isprintable() or consumer != consumer.strip():
        raise InvalidConsumer(
            f"consumer {consumer!r} begins or ends with a space, or has a character that cannot be printed"
        )
    return consumer


def _check_base64(data: str) -> None:
    """Raise ParseError for a character that ParseDict would drop."""
    if not re.fullmatch(r"[A-Za-z0-9+/_-]*={0,2}", data):
        raise ParseError("`data` is not base64")


def pushed_message(body: Any) -> PubsubMessage:
    """Return the message in the body of a push request.

    Args:
        body: the parsed JSON, a dictionary with `message`.

    Raises:
        InvalidMessage: the body has another form.
    """
    try:
        # Push requests have some fields twice: messageId and message_id.
        fields = {name: value for name, value in body["message"].items() if "_" not in name}
        _check_base64(fields.get("data") or "")
        raw = ParseDict(fields, RawPubsubMessage(), ignore_unknown_fields=True)
    except (TypeError, KeyError, AttributeError, ParseError) as error:
        raise InvalidMessage(
            "the body is not a push request of Pub/Sub, which is JSON with a `message`. If the subscription "
            f"has payload unwrapping, turn it off ({type(error).__name__}: {error})"
        ) from error
    message: PubsubMessage = PubsubMessage.wrap(raw)
    return message
