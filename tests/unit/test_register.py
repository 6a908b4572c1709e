"""The row that `outbox.register` adds for a task, and its metrics."""

import base64
import enum
import logging
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from unittest import mock
from zoneinfo import ZoneInfo

import pytest
from google.protobuf import descriptor_pb2, struct_pb2, timestamp_pb2
from google.pubsub_v1.types import PubsubMessage
from google.pubsub_v1.types import Topic as ProtoPlusTopic

import outbox
from outbox.message import RawPublishRequest, RawPubsubMessage
from outbox.testing import RecordingTransaction, assert_registered

#: Also those of emulators, of a domain, and numbers.
PROJECTS = ("p", "p2", "7", "my-project", "my_project", "example.com:shop", "123456789012", "A" * 100)
LARGE = 10_000_000


def registered(topic: str = "orders", message: object = b"", *attributes: Any, **options: Any) -> dict[str, Any]:
    """Return the row that `register` adds, by column, and below `message` the message as Spanner will hold it."""
    transaction = RecordingTransaction()
    task_id = outbox.register(transaction, topic, message, *attributes, **options)
    [(table, columns, [values])] = transaction.inserts
    row = dict(zip(columns, values, strict=True))
    assert (table, row["Id"]) == ("AsynchronousTasks", task_id)
    return row | {"message": RawPubsubMessage.FromString(base64.b64decode(row["Data"], validate=True))}


def test_a_name_of_the_package_is_searched_for_once() -> None:
    """Each search costs microseconds, and applications call `outbox.register` for each task."""
    register = outbox.register
    assert vars(outbox)["register"] is register


BERLIN = ZoneInfo("Europe/Berlin")
#: Clocks in Berlin show 02:00 to 03:00 twice: the second time with fold=1.
FIRST_0245, SECOND_0215 = (
    datetime(2026, 10, 25, 2, 45, tzinfo=BERLIN),
    datetime(2026, 10, 25, 2, 15, tzinfo=BERLIN, fold=1),
)


def test_times_of_one_zone_are_ordered_in_utc() -> None:
    row = registered(available_at=FIRST_0245, expires_at=SECOND_0215)
    assert (row["AvailableAt"], row["ExpiresAt"]) == (
        datetime(2026, 10, 25, 0, 45, tzinfo=UTC), datetime(2026, 10, 25, 1, 15, tzinfo=UTC),
    )  # fmt: skip
    with pytest.raises(outbox.InvalidMessage, match="is not after available_at"):
        registered(available_at=SECOND_0215, expires_at=FIRST_0245)


class Text(str, enum.Enum):  # noqa: UP042 - not a StrEnum: its format is that of its name
    TOPIC, VALUE, KEY, ID = "orders", "value", "key", "id"


class Loud(str):  # noqa: SLOT000 - as an application would write it
    """Its format differs from its value as well."""

    def __str__(self) -> str:
        return "loud"


class Number(enum.IntEnum):
    SEVEN = 7


@pytest.mark.parametrize("of", [str, Text, Loud])
def test_text_is_its_value_whatever_its_class(of: Callable[[str], str], set_metrics: Callable[[Any], None]) -> None:
    """In the row, in the metrics, and for the IDs that a transaction has already inserted."""
    recorder = mock.Mock()
    set_metrics(recorder)
    attributes = {of("key"): of("value")}
    row = registered(of("orders"), b"", attributes, ordering_key=of("key"), task_id=of("id"), priority=Number.SEVEN)
    expected = {"Topic": "orders", "OrderingKey": "key", "Id": "id", "Priority": 7}
    assert {name: row[name] for name in expected} == expected
    assert [type(row[name]) for name in expected] == [str, str, str, int]
    assert dict(row["message"].attributes) == {"key": "value", outbox.TASK_ID_ATTRIBUTE: "id"}
    recorder.increment.assert_called_once_with("outbox.registered_task_count", 1, ["topic:orders"])
    transaction = RecordingTransaction()
    outbox.register(transaction, "orders", b"", attributes, task_id=of("id"))
    assert outbox.register_once(transaction, of("orders"), b"", task_id="id") is False
    with pytest.raises(outbox.InvalidMessage, match=r"^tasks\[1\]: task_id 'id' is also the task_id of tasks\[0\]$"):
        outbox.register_many(transaction, [outbox.Task("orders", b"", task_id=id) for id in (of("id"), "id")])
    [task] = assert_registered(transaction, topic=of("orders"), attributes=attributes)
    assert task.id == "id"


def test_ids_are_fresh_random_uuids() -> None:
    rows = [registered() for _ in range(100)]
    assert len({row["Id"] for row in rows}) == 100
    assert all(row["Id"] == str(uuid.UUID(row["Id"])) for row in rows)
    assert {(uuid.UUID(row["Id"]).version, uuid.UUID(row["Id"]).variant) for row in rows} == {(4, uuid.RFC_4122)}
    sequences = [row["Sequence"] for row in rows]
    assert sequences == sorted(set(sequences))


@pytest.mark.parametrize("make", [PubsubMessage, RawPubsubMessage])
def test_a_pubsub_message_is_copied_and_completed(make: Any) -> None:
    message = make(
        data=b"d", attributes={"a": "1", "asynchronous_task_id": "old"}, ordering_key="key", message_id="7",
        publish_time=timestamp_pb2.Timestamp(seconds=1),
    )  # fmt: skip
    row = registered("orders", message, {"b": "2"})
    sent = row["message"]
    assert dict(sent.attributes) == {"a": "1", "b": "2", "asynchronous_task_id": row["Id"]}
    assert (sent.ordering_key, sent.message_id, sent.HasField("publish_time")) == ("key", "", False)
    assert row["OrderingKey"] == "key"
    assert dict(message.attributes) == {"a": "1", "asynchronous_task_id": "old"}
    assert message.message_id == "7"


def test_any_other_protobuf_message_becomes_the_data() -> None:
    value = struct_pb2.Value(string_value="hello")
    assert struct_pb2.Value.FromString(registered(message=value)["message"].data) == value
    assert ProtoPlusTopic.deserialize(registered(message=ProtoPlusTopic(name="t"))["message"].data).name == "t"


def test_a_message_that_cannot_be_serialized_is_refused() -> None:
    """A required field is missing: `register` refuses it before it touches the transaction (A07)."""
    transaction = RecordingTransaction()
    with pytest.raises(outbox.InvalidMessage, match="NamePart"):
        outbox.register(transaction, "orders", descriptor_pb2.UninterpretedOption.NamePart(name_part="x"))
    assert transaction.inserts == []


@pytest.mark.parametrize(
    ("topic", "attributes", "options", "count"),
    [
        ("orders", {f"{n:0256}": "v" * 1024 for n in range(99)}, {"ordering_key": "k" * 1024}, 100),
        ("t" + "~" * 254, {}, {"priority": -(2**63)}, 1),
        ("orders", {"googclient_x": "y"}, {"priority": 2**63 - 1}, 2),
        *((f"projects/{project}/topics/orders", {}, {}, 1) for project in PROJECTS),
    ],
)
def test_the_limits_themselves_are_allowed(topic: str, attributes: Any, options: Any, count: int) -> None:
    assert len(registered(topic, b"", attributes, **options)["message"].attributes) == count


@pytest.mark.parametrize(
    ("topic", "name"),
    [
        ("orders", f"projects/{'p' * 30}/topics/{'t' * 255}"),
        ("projects/p23/topics/orders", "projects/p23/topics/orders"),
    ],
)
def test_the_largest_message_makes_a_request_of_ten_million_bytes(topic: str, name: str) -> None:
    """The size is that of the publish request: a topic ID counts as the longest full name, a full name as itself."""

    def request(size: int) -> int:
        message = registered(topic, bytes(size), task_id="x")["message"]
        return int(RawPublishRequest(topic=name, messages=[message]).ByteSize())

    largest = LARGE - (request(9_000_000) - 9_000_000)
    assert request(largest) == LARGE
    with pytest.raises(outbox.InvalidMessage, match=f"the publish request of the message has {LARGE + 1:,} bytes"):
        registered(topic, bytes(largest + 1), task_id="x")


def test_calls_are_counted_through_the_applications_recorder(set_metrics: Callable[[Any], None]) -> None:
    recorder = mock.Mock()
    set_metrics(recorder)
    registered()
    with pytest.raises(outbox.InvalidMessage):
        registered("x")
    recorder.increment.assert_called_once_with("outbox.registered_task_count", 1, ["topic:orders"])


def test_a_broken_recorder_never_fails_the_caller(
    set_metrics: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    set_metrics(mock.Mock(**{"increment.side_effect": OSError}))
    with caplog.at_level(logging.WARNING, "outbox"):
        registered()
        registered()
    assert len(caplog.records) == 1


def test_the_public_api_has_these_names() -> None:
    """Applications may rely on these names; a change here is a change of the version."""
    assert set(outbox.__all__) == {
        "TASK_ID_ATTRIBUTE", "InvalidConsumer", "InvalidMessage", "InvalidTransaction", "Message", "MissingTaskId",
        "OutboxError", "PositionExpired", "Priority", "Reader", "Recorder", "SentTask", "SupportsCancel",
        "SupportsInsert", "SupportsReadInsert", "Task", "__version__", "cancel", "reader", "register", "register_many",
        "register_once", "set_metrics",
    }  # fmt: skip
    assert all(hasattr(outbox, name) for name in outbox.__all__)
    assert [(each.name, int(each)) for each in outbox.Priority] == [("LOW", 0), ("NORMAL", 50), ("HIGH", 100)]
