"""The rows that `register`, `register_once` and `register_many` add for tasks, and their metrics."""

import asyncio
import base64
import dataclasses
import enum
import gc
import inspect
import logging
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock
from zoneinfo import ZoneInfo

import pytest
from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1._async.batch import Batch as AsyncBatch
from google.cloud.spanner_v1._async.transaction import Transaction as AsyncTransaction
from google.cloud.spanner_v1.batch import Batch, MutationGroup
from google.cloud.spanner_v1.snapshot import Snapshot
from google.cloud.spanner_v1.transaction import Transaction
from google.protobuf import descriptor_pb2, struct_pb2, timestamp_pb2
from google.pubsub_v1.types import PubsubMessage
from google.pubsub_v1.types import Topic as ProtoPlusTopic

import outbox
from outbox import aio, registration
from outbox.base.values import class_name
from outbox.message import RawPublishRequest, RawPubsubMessage
from outbox.table import transactions
from outbox.testing import RecordingTransaction, assert_registered

#: Also those of emulators, of a domain, and numbers.
PROJECTS = ("p", "p2", "7", "my-project", "my_project", "example.com:shop", "123456789012", "a" * 100)
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
def test_text_is_its_value_whatever_its_class(of: Callable[[str], str], counter: mock.Mock) -> None:
    """In the row, in the metrics, and for the IDs that a transaction has already inserted."""
    attributes = {of("key"): of("value")}
    row = registered(of("orders"), b"", attributes, ordering_key=of("key"), task_id=of("id"), priority=Number.SEVEN)
    expected = {"Topic": "orders", "OrderingKey": "key", "Id": "id", "Priority": 7}
    assert {name: row[name] for name in expected} == expected
    assert [type(row[name]) for name in expected] == [str, str, str, int]
    assert dict(row["message"].attributes) == {"key": "value", outbox.TASK_ID_ATTRIBUTE: "id"}
    counter.increment.assert_called_once_with("outbox.registered_task_count", 1, ["topic:orders"])
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


@pytest.mark.parametrize("topic", ["orders", "projects/p23/topics/orders"])
def test_the_largest_message_makes_a_request_of_ten_million_bytes(topic: str) -> None:
    """The size is that of a publish request to a topic with the longest name: an operator may route it there."""
    name = f"projects/example.com:{'p' * 88}/topics/{'t' * 255}"

    def request(size: int) -> int:
        message = registered(topic, bytes(size), task_id="x")["message"]
        return int(RawPublishRequest(topic=name, messages=[message]).ByteSize())

    largest = LARGE - (request(9_000_000) - 9_000_000)
    assert request(largest) == LARGE
    with pytest.raises(outbox.InvalidMessage, match=f"the publish request of the message has {LARGE + 1:,} bytes"):
        registered(topic, bytes(largest + 1), task_id="x")


def test_a_broken_recorder_never_fails_the_caller(counter: mock.Mock, caplog: pytest.LogCaptureFixture) -> None:
    counter.increment.side_effect = OSError
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


NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Recorded(RecordingTransaction):
    def __init__(self, *task_ids: str) -> None:
        super().__init__(task_ids)
        self.reads: list[Any] = []

    def read(self, table: str, columns: Any, keyset: KeySet, **options: object) -> list[list[str]]:
        self.reads.append((keyset.keys, options))
        return super().read(table, columns, keyset, **options)


def once(transaction: Any, task_id: str = "t", message: bytes = b"", **options: Any) -> bool:
    return outbox.register_once(transaction, "orders", message, task_id=task_id, **options)


def test_a_new_task_is_one_read_by_key_and_one_insert() -> None:
    times = {"available_at": NOW, "expires_at": NOW + timedelta(hours=1)}
    options: dict[str, Any] = {"priority": 7, "at_most_once": True, "task_id": "t", **times}
    transaction, plain = Recorded(), Recorded()

    assert outbox.register_once(transaction, "orders", b"data", {"a": "b"}, **options) is True

    outbox.register(plain, "orders", b"data", {"a": "b"}, **options)
    [(keys, sent)] = transaction.reads
    assert (keys, plain.reads) == ([["t"]], [])
    assert (sent["request_options"], sent["timeout"]) == ({"request_tag": "outbox-register-once"}, 30)
    assert transaction.tasks == plain.tasks


def test_a_new_task_has_the_columns_in_use_as_one_of_register() -> None:
    """So an application that is older than the grant of a column registers in both ways, or in none."""
    unused = {"OrderingKey", "AvailableAt", "ExpiresAt", "AtMostOnce"}
    for options, expected in (({}, unused), ({"ordering_key": "k"}, unused - {"OrderingKey"})):
        once, plain = Recorded(), Recorded()
        assert outbox.register_once(once, "orders", b"", task_id="t", **options)
        outbox.register(plain, "orders", b"", task_id="t", **options)
        for [(table, columns, _)] in (once.inserts, plain.inserts):
            assert (table, {*registration.TASK_COLUMNS} - {*columns}) == ("AsynchronousTasks", expected)


@pytest.mark.parametrize("function", [outbox.register_once, aio.register_once])
def test_a_task_and_register_once_have_the_arguments_of_register(function: Callable[..., Any]) -> None:
    """Also those in `Options`, whose defaults are the same."""
    arguments = list(inspect.signature(outbox.register).parameters.values())[1:]
    assert list(inspect.signature(outbox.Task).parameters.values()) == arguments
    ours, of_register = (list(inspect.signature(each).parameters) for each in (function, outbox.register))
    assert [*ours[:-1], *registration.Options.__annotations__] == [
        *of_register[:4], "task_id", *(name for name in of_register[4:] if name != "task_id"),
    ]  # fmt: skip


SESSION = mock.Mock()


def test_an_object_that_cannot_read_and_insert_is_a_type_error() -> None:
    """The sentence names the type and the remedy. The read of an asynchronous Transaction would have to be awaited."""
    of_client = (Batch(SESSION), MutationGroup(SESSION), Snapshot(SESSION), AsyncTransaction(SESSION))
    for transaction in (None, object(), *of_client):
        with pytest.raises(TypeError) as caught:
            once(transaction)
        assert str(caught.value) == (
            f"transaction is {class_name(transaction)}. It must be a Spanner Transaction, because register_once reads "
            "before it writes: call it in a function given to database.run_in_transaction, or use register. For the "
            "transaction of an AsyncClient, await outbox.aio.register_once"
        )


@pytest.mark.parametrize("ending", [{"committed": NOW}, {"rolled_back": True}])
@pytest.mark.parametrize("make", [Batch, Transaction, AsyncBatch, AsyncTransaction])
def test_a_transaction_that_has_ended_is_refused(make: type[Any], ending: dict[str, Any], counter: mock.Mock) -> None:
    """The client would buffer the insert, and never send it."""
    transaction = make(SESSION)
    vars(transaction).update(ending)
    calls: list[Callable[[], object]] = [
        lambda: outbox.register(transaction, "orders", b""),
        lambda: outbox.register_many(transaction, []),
    ]
    if make is Transaction:
        calls += [lambda: once(transaction), lambda: outbox.cancel(transaction, "t")]
    if make is AsyncTransaction:
        calls.append(lambda: asyncio.run(aio.register_once(transaction, "orders", b"", task_id="t")))
        calls.append(lambda: asyncio.run(aio.cancel(transaction, "t")))
    for call in calls:
        with pytest.raises(outbox.InvalidTransaction, match="was committed or rolled back before"):
            call()
    assert len(transaction._mutations) == counter.increment.call_count == 0


def test_only_a_new_task_is_registered_and_counted(counter: mock.Mock) -> None:
    transaction = Recorded("there")
    assert [once(transaction, id) for id in ("new", "new", "there")] == [True, False, False]
    assert [task.id for task in transaction.tasks] == ["new"]
    with pytest.raises(outbox.InvalidMessage):
        once(transaction, "")
    counter.increment.assert_called_once_with("outbox.registered_task_count", 1, ["topic:orders"])


def test_ids_are_forgotten_with_their_transaction() -> None:
    """An application that runs for years keeps nothing."""
    gc.collect()  # of transactions of other tests
    before = len(transactions._changes)
    transaction = Transaction(mock.Mock())
    outbox.register(transaction, "orders", b"", task_id="t")
    assert transactions._changes[transaction].inserted == {("t",)}
    del transaction
    gc.collect()
    assert len(transactions._changes) == before


def test_many_tasks_are_one_insert_of_the_rows_of_register() -> None:
    """The IDs are those of the tasks in their order, and so is the sequence."""
    single, many = RecordingTransaction(), RecordingTransaction()
    times = {"available_at": NOW, "expires_at": NOW + timedelta(hours=1)}
    whole = outbox.Task("orders", b"1", {"a": "b"}, priority=7, ordering_key="k", task_id="t", **times)
    tasks = [whole, outbox.Task("invoices", b"2", at_most_once=True)]
    for task in tasks:
        outbox.register(single, **{field.name: getattr(task, field.name) for field in dataclasses.fields(task)})
    ids = outbox.register_many(many, tasks)
    [(table, columns, rows)] = many.inserts
    assert (table, tuple(columns)) == ("AsynchronousTasks", registration.TASK_COLUMNS)
    assert ids == [task.id for task in many.tasks]
    first, second = many.tasks
    assert first == single.tasks[0]
    assert (second.topic, second.message.data, second.at_most_once) == ("invoices", b"2", True)
    assert (first.ordering_key, second.ordering_key) == ("k", "")
    assert rows[0][5] < rows[1][5]


def test_columns_with_their_default_are_not_written() -> None:
    transaction = RecordingTransaction()
    outbox.register_many(transaction, [outbox.Task("orders", b"", priority=0)] * 2)
    assert outbox.register_many(transaction, []) == []
    [(_, columns, rows)] = transaction.inserts  # no task is no insert
    assert columns == ("Id", "Topic", "Data", "Priority", "Sequence", "CreatedAt")
    assert len(rows) == 2


@pytest.mark.parametrize(
    ("bad", "kind", "sentence"),
    [
        (outbox.Task("x", b""), outbox.InvalidMessage, r"tasks\[1\]: topic 'x' is not a name"),
        (outbox.Task("orders", 7), TypeError, r"tasks\[1\]: message is int"),  # type: ignore[arg-type]  # wrong on purpose
        (("orders", b""), TypeError, r"tasks\[1\] is tuple\. It must be an outbox\.Task"),
        (outbox.Task("invoices", b"", task_id="t"), outbox.InvalidMessage, r"tasks\[1\]: .* 't' is .* of tasks\[0\]"),
    ],
)
def test_one_refused_task_refuses_all(bad: Any, kind: type[Exception], sentence: str, counter: mock.Mock) -> None:
    """The error names the task; nothing is buffered, counted or remembered."""
    transaction = RecordingTransaction()
    with pytest.raises(kind, match=sentence):
        outbox.register_many(transaction, [outbox.Task("orders", b"", task_id="t"), bad])
    assert transaction.inserts == []
    counter.increment.assert_not_called()
    assert outbox.register_once(transaction, "orders", b"", task_id="t")


def test_more_tasks_than_a_commit_can_hold_are_refused() -> None:
    """The Spanner emulator would take them, for hours."""
    with pytest.raises(outbox.InvalidMessage, match=r"20,000 tasks are .* 120,000 mutations.* at most 5,000 tasks"):
        outbox.register_many(RecordingTransaction(), [outbox.Task("orders", b"")] * 20_000)


@pytest.mark.parametrize("wrong", [iter([]), (task for task in ()), map(str, []), outbox.Task("orders", b""), None])
def test_tasks_that_a_second_attempt_would_not_find_are_refused(wrong: Any) -> None:
    """A transaction function that runs again after ABORTED would register nothing, without an error."""
    with pytest.raises(TypeError, match=r"^tasks is [\w.]+\. It must be a list .* An iterator has no tasks left"):
        outbox.register_many(RecordingTransaction(), wrong)


def test_tasks_are_counted_by_topic_and_known_to_register_once(counter: mock.Mock) -> None:
    transaction = RecordingTransaction()
    outbox.register_many(transaction, [outbox.Task(topic, b"") for topic in ("orders", "invoices", "orders")])
    calls = [mock.call("outbox.registered_task_count", n, [f"topic:{t}"]) for t, n in (("orders", 2), ("invoices", 1))]
    assert counter.increment.call_args_list == calls
    outbox.register_many(transaction, [outbox.Task("orders", b"", task_id="t")])
    assert outbox.register_once(transaction, "orders", b"", task_id="t") is False
