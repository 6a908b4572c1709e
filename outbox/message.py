"""Builds a message that Pub/Sub accepts, or raises an error that says why Pub/Sub would refuse it.

The limits are Pub/Sub's: https://cloud.google.com/pubsub/quotas#resource_limits. Its emulator does not check them.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

from google.protobuf.message import DecodeError, EncodeError
from google.protobuf.message import Message as ProtobufMessage
from google.pubsub_v1.types import PublishRequest, PubsubMessage, ReceivedMessage
from proto import Message as ProtoPlusMessage

from outbox import observing
from outbox.base.values import MAX_ID_CHARACTERS, TOPIC, class_name, plain
from outbox.errors import InvalidMessage

#: The attribute that carries the task ID to the subscriber.
TASK_ID_ATTRIBUTE = "asynchronous_task_id"
#: Max bytes of a whole publish request. It is the service's limit, and the client library has the same constant.
MAX_REQUEST_BYTES = 10_000_000
MAX_ATTRIBUTES = 100
#: A message with more fields than this is not decoded. Each attribute is one field. A decoded field takes about 100
#: bytes.
MAX_FIELDS = 2 * MAX_ATTRIBUTES
MAX_ATTRIBUTE_KEY_BYTES = 256
MAX_ATTRIBUTE_VALUE_BYTES = 1_024
MAX_ORDERING_KEY_BYTES = 1_024
#: The longest name of a topic that `values.TOPIC` accepts. Every message leaves room for it, because an operator may
#: send it to another topic.
LONGEST_TOPIC_NAME = f"projects/{'p' * 100}/topics/{'t' * 255}"

_TOPIC = re.compile(TOPIC)
_DATA = (bytes, bytearray, memoryview)

# The plain protobuf classes behind proto-plus, which are an order of magnitude cheaper to fill. Their members are
# created at run time, so they are Any for the type checker.
RawPubsubMessage: Any = PubsubMessage.pb()
_RECEIVED: Any = ReceivedMessage.pb().DESCRIPTOR.full_name
RawPublishRequest: Any = PublishRequest.pb()


class SupportsSerializeToString(Protocol):
    """A plain protobuf message."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """Return the message as bytes."""


class SupportsProtoPlus(Protocol):
    """A proto-plus message, recognized by two methods that no other common type has together.

    proto-plus ships no types. With its class in the union `Message`, a type checker without `follow_untyped_imports`
    would take the whole union for Any.
    """

    def __contains__(self, field: Any, /) -> bool:
        """Return whether the field is set."""

    def __setstate__(self, state: Any, /) -> None:
        """Restore a pickled message."""


#: What an application can register.
Message: TypeAlias = bytes | bytearray | memoryview | PubsubMessage | SupportsSerializeToString | SupportsProtoPlus


def check_topic(topic: str) -> str:
    """Return the topic as a plain str. Raises InvalidMessage: it is not a valid name."""
    return _checked_topic(_plain(topic, "topic"))


@lru_cache(maxsize=1024)
def _checked_topic(topic: str) -> str:
    if not _TOPIC.fullmatch(topic):
        raise InvalidMessage(
            f"topic {topic[:300]!r} is not a name that Pub/Sub allows. It must be a topic ID or "
            "projects/PROJECT/topics/ID, PROJECT in lower case. An ID has 3 to 255 letters, digits or characters of "
            "-._~+%, and begins with a letter, but not with 'goog'"
        )
    return topic


def check_task_id(task_id: str) -> str:
    """Return the ID as a plain str. Raises InvalidMessage: the table or an attribute cannot hold it."""
    task_id = _plain(task_id, "task_id")
    if not 1 <= len(task_id) <= MAX_ID_CHARACTERS:
        raise InvalidMessage(f"task_id has {len(task_id):,} characters. It must have 1 to {MAX_ID_CHARACTERS}")
    _utf8(task_id, "task_id")
    return task_id


def check_new_task_id(task_id: str) -> str:
    """Return the ID of a task to register, as `check_task_id` does. Raises InvalidMessage.

    Lines of files and of logs, and forms in a browser, change an ID with control characters, and lists do not show
    invisible ones. Other programs can insert such tasks, so everything else accepts them.
    """
    task_id = check_task_id(task_id)
    if not task_id.isprintable() or task_id != task_id.strip():
        raise InvalidMessage(
            f"task_id {task_id!r} has an invisible character, such as a line break, or a space at its begin or end. "
            "Remove it"
        )
    return task_id


def build(
    message: object, *, attributes: Mapping[str, str] | None, ordering_key: str, task_id: str
) -> tuple[bytes, str]:
    """Return the serialized PubsubMessage and its ordering key ("" for none).

    `message` is a PubsubMessage (proto-plus or plain), or the data of one: bytes or any other protobuf message. It is
    copied, never changed. If there is a current span, its context is added to the attributes. Raises InvalidMessage if
    Pub/Sub would refuse the message, TypeError for another type.
    """
    given = None if isinstance(message, _DATA) else _copy(message)
    merged = {} if given is None else dict(given.attributes)
    if attributes is not None:
        _merge_attributes(merged, attributes)
        if (given_id := attributes.get(TASK_ID_ATTRIBUTE, task_id)) != task_id:
            raise InvalidMessage(
                f"attribute {TASK_ID_ATTRIBUTE!r} is {_shown(given_id)}, but the ID of the task is {task_id!r}. Leave "
                "the attribute out, and pass the ID as `task_id`"
            )
    merged[TASK_ID_ATTRIBUTE] = task_id
    _check_attributes(merged)
    key = _one_ordering_key("" if given is None else given.ordering_key, ordering_key)
    if given is None:
        content = message if type(message) is bytes else _content(message)
        built = RawPubsubMessage(data=content, attributes=merged, ordering_key=key)
    else:
        built = given
        built.attributes.update(merged)
        built.ordering_key = key
    data: bytes = built.SerializeToString()
    if (size := _request_size(len(data))) > MAX_REQUEST_BYTES:
        raise InvalidMessage(f"the publish request of the message has {size:,} bytes; at most {MAX_REQUEST_BYTES:,}")
    return _traced(built) or data, key


def parsed(data: bytes) -> Any | None:
    """Return the raw PubsubMessage in a row's `Data`, or None if it is not one, or has too many fields."""
    if has_too_many_fields(data):
        return None
    try:
        return RawPubsubMessage.FromString(data)
    except DecodeError:
        return None


def has_too_many_fields(data: bytes) -> bool:
    """Tell whether a message may have too many attributes to decode it, because there may be millions.

    That is more than MAX_FIELDS fields, and more than MAX_FIELDS bytes that can begin an attribute.
    """
    # Each attribute begins with the byte 0x12 or, in a longer encoding, 0x92. Few such bytes mean few attributes.
    if data.count(0x12) + data.count(0x92) <= MAX_FIELDS:
        return False
    offset = fields = 0
    while offset < len(data) and fields <= MAX_FIELDS:
        # The last bits of a tag are the wire type: https://protobuf.dev/programming-guides/encoding
        tag, offset = _varint(data, offset)
        kind = tag & 7
        length, offset = _varint(data, offset) if kind in (0, 2) else (0, offset)
        if kind not in (0, 1, 2, 5):
            return True  # a protobuf group: no Pub/Sub message has one, and only decoding finds its end
        offset += {0: 0, 1: 8, 2: length, 5: 4}[kind]
        fields += 1
    return fields > MAX_FIELDS


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    """Return the varint at `offset`, and the offset after it."""
    number = shift = 0
    while offset < len(data):
        byte = data[offset]
        number, shift, offset = number | (byte & 0x7F) << shift, shift + 7, offset + 1
        if byte < 0x80 or shift == 70:  # the max length of a varint
            break
    return number, offset


def _content(message: Any) -> bytes:
    try:
        return memoryview(message).tobytes()  # `bytes(message)` would call `__bytes__` of a subclass
    except ValueError as error:
        raise InvalidMessage(f"message is a {class_name(message)} that cannot be read: {error}") from error


def _copy(message: object) -> Any:
    copy = RawPubsubMessage()
    if isinstance(message, ProtoPlusMessage):
        message = type(message).pb(message)
    if not isinstance(message, ProtobufMessage):
        received = isinstance(getattr(message, "data", None), bytes)
        remedy = ". Pass the `data` and the `attributes` of the received message" if received else ""
        raise TypeError(
            f"message is {class_name(message)}. It must be bytes, a PubsubMessage or a protobuf message{remedy}"
        )
    if message.DESCRIPTOR.full_name == _RECEIVED:  # as data, it would have an ack ID
        raise TypeError(f"message is a {_RECEIVED}. Pass its `message`")
    try:
        serialized = message.SerializeToString()
    except EncodeError as error:
        raise InvalidMessage(f"the {message.DESCRIPTOR.full_name} cannot be serialized: {error}") from error
    if message.DESCRIPTOR.full_name == copy.DESCRIPTOR.full_name:
        copy.ParseFromString(serialized)  # not CopyFrom, because the caller may have compiled a class of its own
        copy.ClearField("message_id")
        copy.ClearField("publish_time")
    else:
        copy.data = serialized
    return copy


def _merge_attributes(merged: dict[str, str], attributes: Mapping[str, str]) -> None:
    if not isinstance(attributes, Mapping):
        raise InvalidMessage(f"attributes is {class_name(attributes)}. It must be a mapping of str to str")
    for given_key, given in attributes.items():
        if not isinstance(given_key, str) or not isinstance(given, str):
            raise InvalidMessage(
                f"attribute {_shown(given_key)} maps {class_name(given_key)} to {class_name(given)}. Both must be str"
            )
        key, value = plain(given_key), plain(given)
        if key != TASK_ID_ATTRIBUTE and merged.get(key, value) != value:
            raise InvalidMessage(f"attribute {_shown(key)} has different values in `message` and in `attributes`")
        merged[key] = value


def _check_attributes(attributes: Mapping[str, str]) -> None:
    if len(attributes) > MAX_ATTRIBUTES:
        raise InvalidMessage(
            f"the message has {len(attributes):,} attributes, including {TASK_ID_ATTRIBUTE!r}; at most {MAX_ATTRIBUTES}"
        )
    for key, value in attributes.items():
        if not key:
            raise InvalidMessage("an attribute has an empty key")
        if key.startswith("goog") and not key.startswith("googclient_"):
            raise InvalidMessage(f"attribute {_shown(key)} begins with 'goog', which Pub/Sub reserves")
        if (size := _bytes(key, "attribute key")) > MAX_ATTRIBUTE_KEY_BYTES:
            raise InvalidMessage(f"attribute key {_shown(key)} has {size:,} bytes; at most {MAX_ATTRIBUTE_KEY_BYTES:,}")
        if (size := _bytes(value, "the value of attribute ", key)) > MAX_ATTRIBUTE_VALUE_BYTES:
            raise InvalidMessage(
                f"the value of attribute {_shown(key)} has {size:,} bytes; at most {MAX_ATTRIBUTE_VALUE_BYTES:,}"
            )


def _one_ordering_key(in_message: str, argument: str) -> str:
    argument = _plain(argument, "ordering_key")
    if in_message and argument and in_message != argument:
        raise InvalidMessage(
            f"two ordering keys: {in_message[:100]!r} in `message`, {argument[:100]!r} as `ordering_key`"
        )
    key = argument or in_message
    if (size := _bytes(key, "ordering_key")) > MAX_ORDERING_KEY_BYTES:
        raise InvalidMessage(f"ordering_key has {size:,} bytes; at most {MAX_ORDERING_KEY_BYTES:,}")
    return key


def _request_size(message_bytes: int) -> int:
    """Return the size of a PublishRequest with a message of this size alone, without encoding one."""
    return _field_size(len(LONGEST_TOPIC_NAME)) + _field_size(message_bytes)


def _field_size(size: int) -> int:
    return 1 + max(1, (size.bit_length() + 6) // 7) + size


def _traced(built: Any) -> bytes | None:
    """Return the message with the current trace context.

    Return None if there is no context, the message has one already, or the result would be too large.
    """
    context = observing.trace_context()
    if not context or context.keys() & built.attributes.keys():
        return None
    context = {key: value for key, value in context.items() if len(value) <= MAX_ATTRIBUTE_VALUE_BYTES}
    if len(built.attributes) + len(context) > MAX_ATTRIBUTES:
        return None
    built.attributes.update(context)
    data: bytes = built.SerializeToString()
    return data if _request_size(len(data)) <= MAX_REQUEST_BYTES else None


def _shown(key: object) -> str:
    """Return the key as an error message shows it, cut to a max length."""
    text = repr(key)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _plain(text: object, what: str) -> str:
    if not isinstance(text, str):
        raise InvalidMessage(f"{what} is {class_name(text)}. It must be a str")
    return plain(text)


def _bytes(text: str, what: str, key: str | None = None) -> int:
    """Return the size of a text in UTF-8."""
    return len(text) if text.isascii() else len(_utf8(text, what if key is None else what + _shown(key)))


def _utf8(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"{what} is not valid Unicode: {error.reason} at position {error.start}") from error
