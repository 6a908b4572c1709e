"""What `outbox.register` refuses, in full sentences: they name the culprit, its value and what is allowed."""

import time
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from google.pubsub_v1.types import PubsubMessage

import outbox
from outbox.testing import RecordingTransaction

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NO_NAME = (
    "is not a name that Pub/Sub allows: 3 to 255 of letters, digits and -._~+%, beginning with a letter and not with "
    "'goog', or projects/PROJECT/topics/TOPIC"
)

BAD_TEXT = "\ud800"
REFUSED = {
    "a topic that is too short": ({"topic": "ab"}, f"topic 'ab' {NO_NAME}"),
    "a topic that begins with goog": ({"topic": "google"}, f"topic 'google' {NO_NAME}"),
    "a topic that begins with a digit": ({"topic": "1abc"}, f"topic '1abc' {NO_NAME}"),
    "a topic that is too long": ({"topic": "a" * 256}, f"topic '{'a' * 256}' {NO_NAME}"),
    "a topic that is far too long": ({"topic": "a" * 999}, f"topic '{'a' * 300}' {NO_NAME}"),
    "a topic with a slash": ({"topic": "a/b/c"}, f"topic 'a/b/c' {NO_NAME}"),
    "a topic without a project": ({"topic": "projects//topics/orders"}, f"topic 'projects//topics/orders' {NO_NAME}"),
    "a topic with a newline at its end": ({"topic": "orders\n"}, f"topic 'orders\\n' {NO_NAME}"),
    "a topic that is no text": ({"topic": 7}, "topic is int, it must be a str"),
    "a message that is too large": (
        {"message": bytes(10_000_000)},
        "the message makes a publish request of 10000377 bytes, 10000000 are allowed",
    ),
    "too many attributes": (
        {"attributes": {str(n): "" for n in range(100)}},
        "the message has 101 attributes with 'asynchronous_task_id', 100 are allowed",
    ),
    "an empty attribute key": ({"attributes": {"": "v"}}, "an attribute has an empty key"),
    "an attribute key of 257 bytes": (
        {"attributes": {"ü" * 128 + "k": "v"}},
        f"attribute key '{'ü' * 99}... has 257 bytes, 256 are allowed",
    ),
    "an attribute value of 1,025 bytes": (
        {"attributes": {"k": "v" * 1025}},
        "the value of attribute 'k' has 1025 bytes, 1024 are allowed",
    ),
    "an attribute that begins with goog": (
        {"attributes": {"goog-x": "v"}},
        "attribute 'goog-x' begins with 'goog', which Pub/Sub keeps for itself",
    ),
    "a long attribute that begins with goog": (
        {"attributes": {"goog" + "x" * 200: "v"}},
        f"attribute 'goog{'x' * 95}... begins with 'goog', which Pub/Sub keeps for itself",
    ),
    "an attribute whose key is just short enough to be shown": (
        {"attributes": {"k" * 98: 1}},
        f"attribute '{'k' * 98}' is str to int, both must be str",
    ),
    "an attribute whose key is too long to be shown": (
        {"attributes": {"k" * 99: BAD_TEXT}},
        f"the value of attribute '{'k' * 99}... is not valid Unicode: surrogates not allowed at position 0",
    ),
    "an attribute that is no text": ({"attributes": {"k": 1}}, "attribute 'k' is str to int, both must be str"),
    "an attribute that is no Unicode": (
        {"attributes": {"k": BAD_TEXT}},
        "the value of attribute 'k' is not valid Unicode: surrogates not allowed at position 0",
    ),
    "an attribute's key that is no Unicode": (
        {"attributes": {BAD_TEXT: "v"}},
        "attribute key is not valid Unicode: surrogates not allowed at position 0",
    ),
    "an attribute's key that is no text": ({"attributes": {1: "v"}}, "attribute 1 is int to str, both must be str"),
    "attributes that are no mapping": ({"attributes": ["a"]}, "attributes is list, it must be a mapping of str to str"),
    "attributes that contradict": (
        {"message": PubsubMessage(attributes={"k": "1"}), "attributes": {"k": "2"}},
        "attribute 'k' is given twice with different values, in the message and beside it",
    ),
    "an ordering key of 1,025 bytes": ({"ordering_key": "k" * 1025}, "ordering_key has 1025 bytes, 1024 are allowed"),
    "an ordering key that is no text": ({"ordering_key": b"k"}, "ordering_key is bytes, it must be a str"),
    "two ordering keys": (
        {"message": PubsubMessage(ordering_key="a"), "ordering_key": "b"},
        "two ordering keys: 'a' in the message, 'b' beside it",
    ),
    "two long ordering keys": (
        {"message": PubsubMessage(ordering_key="a" * 150), "ordering_key": "b" * 150},
        f"two ordering keys: '{'a' * 100}' in the message, '{'b' * 100}' beside it",
    ),
    "an empty id": ({"task_id": ""}, "task_id has 0 characters, 1 to 64 are allowed"),
    "an id of 65 characters": ({"task_id": "x" * 65}, "task_id has 65 characters, 1 to 64 are allowed"),
    "an id that is no text": ({"task_id": 7}, "task_id is int, it must be a str"),
    "an id that is no Unicode": (
        {"task_id": BAD_TEXT},
        "task_id is not valid Unicode: surrogates not allowed at position 0",
    ),
    "a priority that is too high": ({"priority": 2**63}, "priority 9223372036854775808 is outside of int64"),
    "a priority that is too low": ({"priority": -(2**63) - 1}, "priority -9223372036854775809 is outside of int64"),
    "a priority of a bit more": ({"priority": 2**64}, "priority of 65 bits is outside of int64"),
    "a priority of a hundred digits": ({"priority": 10**100}, "priority of 333 bits is outside of int64"),
    "a priority of more digits than Python writes": (
        {"priority": -(10**5000)},
        "priority of 16610 bits is outside of int64",
    ),
    "a priority that is no number": ({"priority": "high"}, "priority is str, it must be an int"),
    "a priority that is a truth": ({"priority": True}, "priority is bool, it must be an int"),
    "a naive available_at": (
        {"available_at": datetime(2026, 1, 1)},  # noqa: DTZ001 - the point
        "available_at 2026-01-01 00:00:00 has no time zone; give one, such as datetime.now(UTC) + ...",
    ),
    "a naive expires_at": (
        {"expires_at": datetime(2026, 1, 1)},  # noqa: DTZ001 - the point
        "expires_at 2026-01-01 00:00:00 has no time zone; give one, such as datetime.now(UTC) + ...",
    ),
    "a date": ({"available_at": NOW.date()}, "available_at is date, it must be an aware datetime"),
    "available_at at NEVER": (
        {"available_at": datetime(9999, 12, 31, tzinfo=UTC)},
        "available_at 9999-12-31 00:00:00+00:00 is not before 9999-12-31 00:00:00+00:00",
    ),
    "a time outside of UTC's years": (
        {"expires_at": datetime.max.replace(tzinfo=timezone(timedelta(hours=-1)))},
        "expires_at 9999-12-31 23:59:59.999999-01:00 is outside of the years 1 to 9999 in UTC",
    ),
    "expires_at at available_at": (
        {"available_at": NOW, "expires_at": NOW},
        "expires_at 2026-01-01 00:00:00+00:00 is not after available_at 2026-01-01 00:00:00+00:00",
    ),
    "at most once as a text": ({"at_most_once": "False"}, "at_most_once is str, it must be a bool"),
    "at most once as a number": ({"at_most_once": 1}, "at_most_once is int, it must be a bool"),
    "at most once in order": (
        {"at_most_once": True, "ordering_key": "k"},
        "at_most_once and an ordering key exclude each other: a lost message would leave a gap",
    ),
    "at most once in the message's order": (
        {"at_most_once": True, "message": PubsubMessage(ordering_key="k")},
        "at_most_once and an ordering key exclude each other: a lost message would leave a gap",
    ),
}


@pytest.mark.parametrize("arguments", REFUSED.values(), ids=REFUSED.keys())
def test_what_pubsub_would_refuse_is_refused_here(arguments: tuple[dict[str, Any], str]) -> None:
    """As InvalidMessage, a ValueError, that says what and how much; nothing is added."""
    refused(arguments[1], **arguments[0])


def refused(says: str, *, topic: Any = "orders", message: Any = b"", **options: Any) -> None:
    """Expect a refusal that says so."""
    transaction = RecordingTransaction()
    with pytest.raises(outbox.InvalidMessage) as caught:
        outbox.register(transaction, topic, message, **options)
    assert str(caught.value) == says
    assert isinstance(caught.value, ValueError)
    assert transaction.inserts == []


@pytest.mark.parametrize("message", ["text", None, {"a": 1}, 7])
def test_a_message_of_another_type_is_a_type_error(message: object) -> None:
    """A text is not bytes: the caller decides on the encoding."""
    transaction = RecordingTransaction()
    with pytest.raises(TypeError) as caught:
        outbox.register(transaction, "orders", message)
    name = type(message).__name__
    assert str(caught.value) == f"message is {name}, it must be bytes, a PubsubMessage or a protobuf message"
    assert transaction.inserts == []


@pytest.mark.parametrize("transaction", [None, object(), "database"])
def test_something_that_takes_no_insert_is_a_type_error(transaction: object) -> None:
    """The sentence names what is needed."""
    with pytest.raises(TypeError) as caught:
        outbox.register(transaction, "orders", b"")
    name = type(transaction).__name__
    assert str(caught.value) == f"transaction is {name}, it must be a Spanner Transaction, Batch or MutationGroup"


def test_the_range_of_a_time_is_that_of_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever zone the machine is in: here one in which the last moment is in the year 10,000."""
    monkeypatch.setenv("TZ", "UTC-14")
    time.tzset()
    try:
        outbox.register(RecordingTransaction(), "orders", b"", expires_at=datetime.max.replace(tzinfo=UTC))
    finally:
        monkeypatch.undo()
        time.tzset()
