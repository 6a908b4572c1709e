"""What `outbox.register` adds, and everything that it refuses before it adds anything."""

import base64
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.protobuf import descriptor_pb2, struct_pb2, timestamp_pb2
from google.pubsub_v1.types import PubsubMessage
from google.pubsub_v1.types import Topic as ProtoPlusTopic
from hypothesis import given
from hypothesis import strategies as st

import outbox
from outbox.message import LONGEST_TOPIC_NAME, RawPublishRequest, RawPubsubMessage
from outbox.testing import RecordingTransaction

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Recorded(RecordingTransaction):
    """A transaction that keeps its inserts, as columns."""

    def row(self) -> dict[str, Any]:
        """Return the only row by column."""
        [(table, columns, [values])] = self.inserts
        assert table == "AsynchronousTasks"
        return dict(zip(columns, values, strict=True))

    def message(self) -> Any:
        """Return the message as Spanner will hold it."""
        return RawPubsubMessage.FromString(base64.b64decode(self.row()["Data"], validate=True))


@pytest.fixture
def transaction() -> Recorded:
    """A fresh transaction."""
    return Recorded()


@pytest.fixture(autouse=True)
def no_metrics() -> Iterator[None]:
    """Whatever a test sets is gone after it."""
    yield
    outbox.set_metrics(None)


def test_adds_one_insert_and_returns_the_id(transaction: Recorded) -> None:
    """One row with the defaults; the commit timestamp is Spanner's."""
    task_id = outbox.register(transaction, "orders", b"data")
    row = transaction.row()
    assert row["Id"] == task_id
    assert (row["Topic"], row["Priority"], row["OrderingKey"]) == ("orders", 50, None)
    assert row["CreatedAt"] == COMMIT_TIMESTAMP
    assert (row["AvailableAt"], row["ExpiresAt"], row["AtMostOnce"]) == (None, None, False)


def test_ids_are_fresh_random_uuids(transaction: Recorded) -> None:
    """Version 4, another one at each call."""
    import uuid

    ids = {outbox.register(transaction, "orders", b"") for _ in range(100)}
    assert len(ids) == 100
    assert {uuid.UUID(id).version for id in ids} == {4}


def test_sequence_rises_with_each_call() -> None:
    """Order inside one transaction is the order of the calls, through any number of helpers."""
    sequences = []
    for _ in range(5):
        transaction = Recorded()
        outbox.register(transaction, "orders", b"")
        sequences.append(transaction.row()["Sequence"])
    assert sequences == sorted(set(sequences))


@given(st.binary(max_size=2000))
def test_any_bytes_arrive_unchanged(data: bytes) -> None:
    """Also bytes that look like base64, which the client would decode silently."""
    transaction = Recorded()
    outbox.register(transaction, "orders", data)
    assert transaction.message().data == data


@pytest.mark.parametrize("data", [b"hell", b"x" * 200, b"\x00\xff", b"", b"aGVsbG8="])
def test_bytes_that_look_like_base64_arrive_unchanged(transaction: Recorded, data: bytes) -> None:
    """The named traps."""
    outbox.register(transaction, "orders", data)
    assert transaction.message().data == data


@pytest.mark.parametrize("make", [PubsubMessage, RawPubsubMessage])
def test_a_pubsub_message_is_copied_and_completed(transaction: Recorded, make: Any) -> None:
    """Attributes and ordering key are kept, the id is set, message id and publish time are cleared."""
    message = make(
        data=b"d",
        attributes={"a": "1", "asynchronous_task_id": "old"},
        ordering_key="key",
        message_id="7",
        publish_time=timestamp_pb2.Timestamp(seconds=1),
    )
    task_id = outbox.register(transaction, "orders", message, {"b": "2"})
    sent = transaction.message()
    assert dict(sent.attributes) == {"a": "1", "b": "2", "asynchronous_task_id": task_id}
    assert (sent.ordering_key, sent.message_id, sent.HasField("publish_time")) == ("key", "", False)
    assert transaction.row()["OrderingKey"] == "key"
    assert dict(message.attributes) == {"a": "1", "asynchronous_task_id": "old"}
    assert message.message_id == "7"


def test_any_other_protobuf_message_becomes_the_data(transaction: Recorded) -> None:
    """Plain or proto-plus, serialized."""
    value = struct_pb2.Value(string_value="hello")
    outbox.register(transaction, "orders", value)
    assert struct_pb2.Value.FromString(transaction.message().data) == value
    other = Recorded()
    outbox.register(other, "orders", ProtoPlusTopic(name="t"))
    assert ProtoPlusTopic.deserialize(other.message().data).name == "t"


def test_a_message_that_cannot_be_serialized_is_refused(transaction: Recorded) -> None:
    """A required field is missing: refused before the transaction is touched (A07)."""
    message = descriptor_pb2.UninterpretedOption.NamePart(name_part="x")
    with pytest.raises(outbox.InvalidMessage, match="NamePart"):
        outbox.register(transaction, "orders", message)
    assert transaction.inserts == []


def test_options_reach_their_columns(transaction: Recorded) -> None:
    """Priority, times, at-most-once and the caller's id."""
    outbox.register(
        transaction,
        "projects/other/topics/orders",
        b"",
        priority=-(2**63),
        available_at=NOW,
        expires_at=NOW + timedelta(hours=1),
        at_most_once=True,
        task_id="ü" * 64,
    )
    row = transaction.row()
    assert (row["Id"], row["Priority"], row["AtMostOnce"]) == ("ü" * 64, -(2**63), True)
    assert (row["AvailableAt"], row["ExpiresAt"]) == (NOW, NOW + timedelta(hours=1))


def test_the_limits_themselves_are_allowed(transaction: Recorded) -> None:
    """Refusals begin one past the limit."""
    attributes = {f"{n:0256}": "v" * 1024 for n in range(99)}
    outbox.register(transaction, "orders", b"", attributes, ordering_key="k" * 1024)
    outbox.register(transaction, "t" + "~" * 254, b"")
    outbox.register(transaction, "orders", b"", {"googclient_x": "y"})
    outbox.register(transaction, "orders", b"", priority=-(2**63))
    outbox.register(transaction, "orders", b"", priority=2**63 - 1)
    assert [len(task.message.attributes) for task in transaction.tasks] == [100, 1, 2, 1, 1]


LARGE = 10_000_000


@pytest.mark.parametrize("topic", ["orders", "projects/p23/topics/orders"])
def test_the_largest_message_is_just_below_ten_million_bytes(topic: str) -> None:
    """The publish request counts: a short topic as the longest full name, a full one as it is."""
    longest = 302 if not topic.startswith("projects/") else len(topic)
    low, high = 0, LARGE
    while low < high:  # the largest data that is taken
        middle = (low + high + 1) // 2
        try:
            outbox.register(Recorded(), topic, bytes(middle), task_id="x")
            low = middle
        except outbox.InvalidMessage:
            high = middle - 1
    overhead = LARGE - low
    assert longest + 20 < overhead < longest + 60
    transaction = Recorded()
    outbox.register(transaction, topic, bytes(low), task_id="x")
    full_name = topic if topic.startswith("projects/") else LONGEST_TOPIC_NAME
    assert RawPublishRequest(topic=full_name, messages=[transaction.message()]).ByteSize() == LARGE


class Counter:
    """A metrics client."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.seen: list[tuple[str, float, list[str]]] = []

    def increment(self, metric: str, value: float, tags: list[str]) -> None:
        """Record one call."""
        self.seen.append((metric, value, tags))


def test_calls_are_counted_through_the_applications_recorder(transaction: Recorded) -> None:
    """One for each task that was handed over, none for a refusal (A11)."""
    counter = Counter()
    outbox.set_metrics(counter)
    outbox.register(transaction, "orders", b"")
    with pytest.raises(outbox.InvalidMessage):
        outbox.register(transaction, "x", b"")
    assert counter.seen == [("outbox.registered_task_count", 1, ["topic:orders"])]


def test_a_broken_recorder_never_fails_the_caller(transaction: Recorded, caplog: pytest.LogCaptureFixture) -> None:
    """It is reported once."""

    class Broken:
        def increment(self, metric: str, value: float, tags: list[str]) -> None:
            raise OSError

    outbox.set_metrics(Broken())
    with caplog.at_level(logging.WARNING, "outbox"):
        outbox.register(transaction, "orders", b"")
        outbox.register(transaction, "orders", b"")
    assert len(transaction.inserts) == 2
    assert len(caplog.records) == 1


def test_the_public_names_are_these() -> None:
    """What applications may rely on; a change here is a change of the version."""
    assert set(outbox.__all__) == {
        "TASK_ID_ATTRIBUTE",
        "InvalidMessage",
        "OutboxError",
        "Priority",
        "Recorder",
        "__version__",
        "register",
        "register_once",
        "set_metrics",
    }
    assert all(hasattr(outbox, name) for name in outbox.__all__)
    assert [(each.name, int(each)) for each in outbox.Priority] == [("LOW", 0), ("NORMAL", 50), ("HIGH", 100)]


def test_importing_the_library_imports_no_worker_and_no_datadog() -> None:
    """An application carries only what it needs."""
    code = "import sys, json, outbox; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert "outbox" in loaded
    assert not {"publishworker", "datadog", "pyspark", "pandas"} & set(loaded)


def test_an_application_sees_in_its_own_tests_what_it_registered() -> None:
    """`outbox.testing` needs no Spanner: topic, message and options, in the order of the calls."""
    transaction = RecordingTransaction()
    transaction.insert("Orders", ("Id",), [("1",)])
    first = outbox.register(transaction, "orders", b"one", {"a": "b"}, priority=outbox.Priority.HIGH)
    outbox.register(transaction, "invoices", b"two", ordering_key="k", available_at=NOW)
    [one, two] = transaction.tasks
    assert (one.id, one.topic, one.message.data, one.priority) == (first, "orders", b"one", 100)
    assert one.message.attributes["a"] == "b"
    assert (two.topic, two.ordering_key, two.available_at, two.expires_at) == ("invoices", "k", NOW, None)
    assert transaction.inserts[0] == ("Orders", ("Id",), [("1",)])
