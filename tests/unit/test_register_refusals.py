"""What `outbox.register` and `outbox.reader` refuse, in sentences that name the argument, its value and the limits."""

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from itertools import product
from typing import Any
from unittest import mock

import pytest
from google.cloud.pubsub_v1.subscriber.message import Message
from google.cloud.spanner_v1._async import database as async_database
from google.cloud.spanner_v1.batch import MutationGroups
from google.cloud.spanner_v1.session import Session
from google.pubsub_v1.types import PubsubMessage, ReceivedMessage

import outbox
from outbox import inbox, reading
from outbox.ext import dbapi, sqlalchemy
from outbox.reading import Position, Reader, SentTasks
from outbox.testing import RecordingTransaction, assert_registered
from outbox_admin import console
from tests.support import spanner
from tests.support.drivers import STACKS
from tests.support.operations import CREATED

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NAIVE = datetime(2026, 1, 1)  # noqa: DTZ001 - without a zone, on purpose
BAD_TEXT = "\ud800"
NO_NAME = (
    "is not a name that Pub/Sub allows. It must be a topic ID or projects/PROJECT/topics/ID, PROJECT in lower case. An "
    "ID has 3 to 255 letters, digits or characters of -._~+%, and begins with a letter, but not with 'goog'"
)
GOOG = "begins with 'goog', which Pub/Sub reserves"
NO_UNICODE = "is not valid Unicode: surrogates not allowed at position 0"
NO_INT64 = "is outside of int64, which is -2**63 to 2**63 - 1"
NEVER = datetime(9999, 12, 31, tzinfo=UTC)
NO_ZONE = "2026-01-01 00:00:00 has no time zone; give one, such as datetime.now(UTC) + ..."
RELEASED = memoryview(b"")
RELEASED.release()
IN_ORDER = "at_most_once and an ordering key exclude each other: a lost message would leave a gap"


class NaT(datetime):
    """Like pandas.NaT: unequal to itself, and without an offset."""

    def __ne__(self, _other: object) -> bool:
        return True

    def utcoffset(self) -> timedelta:
        raise ValueError


#: A real database, which sends nothing until it is used.
DATABASE = spanner.client("host:1").instance("instance").database("database")
#: Call `register` or `register_once`, and fail if anything was written or sent.
Call = Callable[..., object]


@pytest.fixture(scope="module", params=["client", *STACKS])
def call(request: pytest.FixtureRequest) -> Iterator[Call]:
    """Call `outbox.register` or that of a driver. No server is needed, because refusals send nothing."""

    def of_client(function: str, *arguments: Any, **options: Any) -> None:
        transaction = RecordingTransaction()
        try:
            getattr(outbox, function)(transaction, *arguments, **options)
        finally:
            assert transaction.inserts == []

    def of_driver(function: str, *arguments: Any, **options: Any) -> None:
        with stack.transaction() as handle:
            try:
                stack.call(function, handle, *arguments, **options)
            finally:
                assert not stack.connection(handle)._spanner_transaction_started

    if request.param == "client":
        yield of_client
        return
    with closing(STACKS[request.param](DATABASE)) as stack:
        yield of_driver


LEAVE_OUT = "Leave the attribute out, and pass the ID as `task_id`"
INVISIBLE = "has an invisible character, such as a line break, or a space at its begin or end. Remove it"
#: By the argument: a value, and the sentence of the refusal.
REFUSED: dict[str, list[tuple[Any, str]]] = {
    "topic": [
        *(
            (name, f"topic '{name}' {NO_NAME}")
            for name in ("ab", "google", "1abc", "a" * 256, "a/b/c", "projects/My/topics/abc")
        ),
        ("a" * 999, f"topic '{'a' * 300}' {NO_NAME}"),
        ("orders\n", f"topic 'orders\\n' {NO_NAME}"),
        (7, "topic is int. It must be a str"),
    ],
    "message": [
        (
            bytes(10_000_000),
            "the publish request of the message has 10,000,447 bytes; at most 10,000,000",
        ),
        (RELEASED, "message is a memoryview that cannot be read: operation forbidden on released memoryview object"),
    ],
    "attributes": [
        (
            {str(n): "" for n in range(100)},
            "the message has 101 attributes, including 'asynchronous_task_id'; at most 100",
        ),
        ({"": "v"}, "an attribute has an empty key"),
        ({"ü" * 128 + "k": "v"}, f"attribute key '{'ü' * 99}... has 257 bytes; at most 256"),
        ({"k": "v" * 1025}, "the value of attribute 'k' has 1,025 bytes; at most 1,024"),
        ({"goog-x": "v"}, f"attribute 'goog-x' {GOOG}"),
        ({"k" * 99: BAD_TEXT}, f"the value of attribute '{'k' * 99}... {NO_UNICODE}"),
        ({"k": BAD_TEXT}, f"the value of attribute 'k' {NO_UNICODE}"),
        ({BAD_TEXT: "v"}, f"attribute key {NO_UNICODE}"),
        ({"k": 1}, "attribute 'k' maps str to int. Both must be str"),
        ({1: "v"}, "attribute 1 maps int to str. Both must be str"),
        (["a"], "attributes is list. It must be a mapping of str to str"),
    ],
    "ordering_key": [
        ("k" * 1025, "ordering_key has 1,025 bytes; at most 1,024"),
        (b"k", "ordering_key is bytes. It must be a str"),
    ],
    "task_id": [
        ("", "task_id has 0 characters. It must have 1 to 64"),
        ("x" * 65, "task_id has 65 characters. It must have 1 to 64"),
        *((id, f"task_id {id!r} {INVISIBLE}") for id in ("a\n", "\x00", "a\tb", "a\x85", "a\u200b", "a ", "\xa0a")),
        (7, "task_id is int. It must be a str"),
        (BAD_TEXT, f"task_id {NO_UNICODE}"),
    ],
    "priority": [
        (2**63, f"priority {NO_INT64}"),
        (-(10**5000), f"priority {NO_INT64}"),  # of more digits than Python writes
        ("high", "priority is str. It must be an int"),
        (True, "priority is bool. It must be an int"),
    ],
    "available_at": [
        (NAIVE, f"available_at {NO_ZONE}"),
        (NOW.date(), "available_at is datetime.date. It must be an aware datetime"),
        (NEVER, f"available_at {NEVER} is not before {NEVER}"),
    ],
    "expires_at": [
        (NAIVE, f"expires_at {NO_ZONE}"),
        (NaT(2026, 1, 1), f"expires_at is {__name__}.NaT. It must be an aware datetime"),
        (
            datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))),
            "expires_at 9999-12-31 23:59:59.999999-01:00 is outside of the years 1 to 9999 in UTC",
        ),
    ],
    "at_most_once": [
        ("False", "at_most_once is str. It must be a bool"),
        (1, "at_most_once is int. It must be a bool"),
    ],
}
#: Arguments that contradict each other.
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"message": PubsubMessage(attributes={"k": "1"}), "attributes": {"k": "2"}},
        "attribute 'k' has different values in `message` and in `attributes`",
    ),
    (
        {"message": PubsubMessage(ordering_key="a"), "ordering_key": "b"},
        "two ordering keys: 'a' in `message`, 'b' as `ordering_key`",
    ),
    (
        {"available_at": NOW, "expires_at": NOW},
        "expires_at 2026-01-01 00:00:00+00:00 is not after available_at 2026-01-01 00:00:00+00:00",
    ),
    ({"at_most_once": True, "ordering_key": "k"}, IN_ORDER),
    (
        {"attributes": {outbox.TASK_ID_ATTRIBUTE: "order-1"}, "task_id": "t"},
        f"attribute {outbox.TASK_ID_ATTRIBUTE!r} is 'order-1', but the ID of the task is 't'. {LEAVE_OUT}",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        *(
            pytest.param({name: value}, sentence, id=f"{name} {place}")
            for name, cases in REFUSED.items()
            for place, (value, sentence) in enumerate(cases)
        ),
        *(pytest.param(*each, id=f"contradiction {place}") for place, each in enumerate(CONTRADICTIONS)),
    ],
)
def test_register_refuses_messages_that_pubsub_would_refuse(
    call: Call, arguments: dict[str, Any], sentence: str
) -> None:
    for function, task_id in (("register", {}), ("register_once", {"task_id": "t" * 36})):
        with pytest.raises(outbox.InvalidMessage) as caught:
            call(function, **{"topic": "orders", "message": b"", **task_id, **arguments})
        assert str(caught.value) == sentence
        assert isinstance(caught.value, ValueError)


OTHERS = (None, "text", {"a": 1}, 7, object())


def test_a_message_of_another_type_is_a_type_error(call: Call) -> None:
    """The sentence names the allowed types. Text is not bytes: the caller decides on the encoding."""
    for wrong in OTHERS:
        sentence = f"^message is {type(wrong).__name__}. It must be bytes, a PubsubMessage or a protobuf message$"
        with pytest.raises(TypeError, match=sentence):
            call("register", "orders", wrong)


def test_a_received_message_is_a_type_error_with_the_remedy() -> None:
    received = Message(PubsubMessage.pb(PubsubMessage(data=b"d", attributes={"a": "b"})), "ack", 0, mock.Mock())
    with pytest.raises(TypeError, match=r"^message is google\..* Pass the `data` and the `attributes` of the received"):
        outbox.register(RecordingTransaction(), "orders", received)  # type: ignore[arg-type]  # wrong on purpose
    outbox.register(RecordingTransaction(), "orders", received.data, received.attributes)
    of_pull = ReceivedMessage(message=PubsubMessage(data=b"d"), ack_id="a")
    for pulled in (of_pull, ReceivedMessage.pb(of_pull)):
        with pytest.raises(TypeError, match=r"^message is a google\.pubsub\.v1\.ReceivedMessage\. Pass its `message`$"):
            outbox.register(RecordingTransaction(), "orders", pulled)


def test_a_transaction_of_another_type_is_a_type_error() -> None:
    sentences = {
        outbox: "transaction is {}. It must be a Spanner Transaction, Batch or MutationGroup",
        dbapi: "connection is {}. It must be a Connection of google.cloud.spanner_dbapi",
        sqlalchemy: "session is {}. It must be a Session or a Connection of SQLAlchemy",
    }
    for wrong, (module, sentence) in product(OTHERS, sentences.items()):
        with pytest.raises(TypeError, match=f"^{sentence.format(type(wrong).__name__)}"):
            module.register(wrong, "orders", b"")


ASYNC = async_database.Database("database", mock.MagicMock(), mock.MagicMock())


def test_another_object_of_the_client_is_refused_with_what_to_do() -> None:
    for wrong, remedy in (
        (DATABASE, "Call register in a function given to its run_in_transaction, and pass the transaction"),
        (DATABASE.batch(), "Use `with database.batch() as batch:`, and pass batch"),
        (DATABASE.mutation_groups(), "Use `with database.mutation_groups() as groups:`, and pass groups.group()"),
        (MutationGroups(mock.Mock()), "Pass its group()"),
        (ASYNC.batch(), "Use `with database.batch"),
    ):
        sentence = rf"^transaction is google\.cloud\.spanner_v1\..* MutationGroup\. {re.escape(remedy)}"
        with pytest.raises(TypeError, match=sentence):
            outbox.register(wrong, "orders", b"")


@pytest.mark.parametrize("wrong", [ASYNC, DATABASE._instance, Session(DATABASE), None, "shop"])
@pytest.mark.parametrize(
    "call", [lambda of: inbox.Handler(of, consumer="billing"), outbox.reader, console.app, assert_registered]
)
def test_what_is_no_synchronous_database_is_refused_at_once(call: Callable[[Any], Any], wrong: Any) -> None:
    """Wherever one is passed, and not at the first message."""
    remedy = " That of an AsyncClient needs `await`" if wrong is ASYNC else ""
    with pytest.raises(TypeError, match=rf"^database is .*\. It must be the Database of a Spanner Client.*{remedy}"):
        call(wrong)


class Asynchronous:
    async def increment(self, metric: str, value: float, tags: list[str]) -> None: ...


class OfOneArgument:
    def increment(self, metric: str) -> None: ...


@pytest.mark.parametrize("wrong", [object(), Asynchronous(), Asynchronous, OfOneArgument(), "statsd"])
def test_a_recorder_that_cannot_count_is_refused_at_once(set_metrics: Callable[[Any], None], wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^recorder is .* increment\(metric, value, tags\)"):
        set_metrics(wrong)


def test_a_position_in_the_future_stays() -> None:
    """It may come from a database that was restored."""
    future, table = Position(NOW + timedelta(hours=1)), mock.Mock(shards=range(10))
    table.strong_query.return_value = [], NOW
    assert SentTasks(table, future, None).page().end == future


def test_what_no_task_can_match_is_refused() -> None:
    for options in ({"topic": "bad topic"}, {"topic": 7}, {"since": "2026-01-01"}):
        with pytest.raises(ValueError, match=r"^(topic|since) .* It must be"):
            reading.reader(mock.Mock(), **options)


def test_a_read_refuses_a_timeout_that_is_no_number_and_the_end_of_the_block_closes_the_reader() -> None:
    """With nan, it would never end."""
    with Reader(mock.Mock()) as reader:
        for timeout in (float("nan"), "1", timedelta(seconds=1)):
            with pytest.raises(ValueError, match=r"^timeout is .* It must be a number of seconds, or None$"):
                reader.read(timeout=timeout)
    assert reader.read() is None
    assert list(reader) == []


def test_a_position_is_a_text() -> None:
    """Also for an ID with spaces. A reader that has reached the end has only a time, so nothing can strip the text."""
    for position in (
        Position(NOW), Position(), Position(NOW, CREATED, 7, " a b "),
        Position.of({"SentAt": NOW, "CreatedAt": CREATED, "Sequence": None, "Id": "a"}),
    ):  # fmt: skip
        assert Position.read(str(position)) == position
    assert str(Position(NOW)) == "2026-01-01T00:00:00.000000Z"
