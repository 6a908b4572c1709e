"""What the inbox accepts and refuses, and what its callback does with a message, without a service."""

import enum
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from multiprocessing.pool import ApplyResult
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from google.cloud.pubsub_v1.publisher import futures as pubsub_future
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.batch import Batch
from google.cloud.spanner_v1.streamed import StreamedResultSet
from google.pubsub_v1.types import PubsubMessage

import outbox
from outbox import inbox
from outbox.inbox.once import inbox_row
from outbox.testing import RecordingTransaction


def message(task_id: str | None = "task-1", **more: Any) -> Any:
    """Return a delivery that notes its acknowledgement."""
    attributes = {} if task_id is None else {outbox.TASK_ID_ATTRIBUTE: task_id}
    acknowledged: Future[None] = Future()
    acknowledged.set_result(None)
    seen: list[str] = []
    return SimpleNamespace(
        attributes=attributes, message_id="4711", seen=seen, nack=lambda: seen.append("nack"),
        ack_with_response=lambda: (seen.append("ack"), more.get("acknowledged", acknowledged))[1],
    )  # fmt: skip


class Transaction(RecordingTransaction):
    """Has empty tables beside those of the outbox, and answers statements."""

    def read(self, table: str, *arguments: Any, **options: Any) -> list[list[Any]]:
        return [] if table == "Stock" else super().read(table, *arguments, **options)

    def execute_sql(self, *_arguments: Any, **_options: Any) -> list[list[Any]]:
        return [[1]]


class Database:
    """Runs functions as often as an aborting Spanner would. It may refuse the first commit."""

    def __init__(self, *processed: str, attempts: int = 1, refuses: Exception | None = None) -> None:
        self.processed, self.attempts, self.refuses, self.options = processed, attempts, refuses, dict[str, Any]()
        self.committed: list[RecordingTransaction] = []

    def run_in_transaction(self, work: Any, **options: Any) -> Any:
        self.options = options
        for _ in range(self.attempts):
            transaction = Transaction(self.processed)
            result = work(transaction)
        if self.refuses:
            error, self.refuses = self.refuses, None
            raise error
        self.committed.append(transaction)
        return result

    def rows(self, table: str) -> list[list[str]]:
        """Return the first two values of the rows that are inserted into a table, by transaction."""
        found = [each.insert for of in self.committed for each in of._mutations if each.insert.table == table]
        return [[row[1] if len(row) > 1 else row[0] for row in each.values] for each in found]


def receiver(database: Database, handle: Any = lambda *_: None, **options: Any) -> inbox.Receiver:
    return inbox.Handler(database, consumer="billing", **options)(handle)  # type: ignore[arg-type]  # a fake


@pytest.mark.parametrize("of", [message(), PubsubMessage(attributes={outbox.TASK_ID_ATTRIBUTE: "task-1"})])
def test_the_first_time_is_recorded(of: Any) -> None:
    """Also the second message of one transaction is recognized, whose record a read does not see yet."""
    transaction = RecordingTransaction()
    assert inbox.process_once(transaction, of, consumer="billing") is True
    assert inbox.process_once(transaction, of, consumer="billing") is False
    assert inbox.process_once(transaction, of, consumer="stock") is True
    columns = ("Consumer", "TaskId", "ProcessedAt")
    assert transaction.inserts == [
        ("ProcessedTasks", columns, [(consumer, "task-1", COMMIT_TIMESTAMP)]) for consumer in ("billing", "stock")
    ]
    assert inbox.process_once(RecordingTransaction(["task-1"]), of, consumer="billing") is False


@pytest.mark.parametrize("task_id", [None, "", "x" * 129])
def test_a_message_without_a_usable_task_id(task_id: str | None) -> None:
    """Its message ID follows a hash, because a key must not begin with an increasing number."""
    transaction = RecordingTransaction()
    with pytest.raises(outbox.MissingTaskId, match=r"message '4711' has .* did not come from the outbox"):
        inbox.process_once(transaction, message(task_id), consumer="billing")
    assert transaction.mutations == []
    assert inbox.process_once(transaction, message(task_id), consumer="billing", key="message_id") is True
    [(_, _, [(_, key, _)])] = transaction.inserts
    assert key == "e8aa4477-message-4711"
    with pytest.raises(outbox.MissingTaskId):
        inbox.process_once(transaction, PubsubMessage(), consumer="billing", key="message_id")


@pytest.mark.parametrize("consumer", ["", "x" * 257, " billing", "billing\n", "a\x00b", "\ud800", 5])
def test_a_consumer_that_the_column_cannot_hold(consumer: Any) -> None:
    for call in (
        lambda: inbox.process_once(RecordingTransaction(), message(), consumer=consumer),
        lambda: inbox.Handler(mock.Mock(), consumer=consumer),
    ):
        with pytest.raises(outbox.InvalidConsumer, match=r"^consumer "):
            call()


def test_names_and_ids_are_plain_text(counter: mock.Mock) -> None:
    database = Database()
    consumer = enum.Enum("Consumer", {"BILLING": "billing"}, type=str).BILLING
    receive = inbox.Handler(database, consumer=consumer)(lambda *_: None)  # type: ignore[arg-type]  # a fake
    receive(message(consumer))
    [[row]] = [rows for of in database.committed for _, _, rows in of.inserts]
    without_id = message(None)
    without_id.message_id = consumer
    assert [type(each) for each in row[:2]] == [str, str]
    assert inbox_row(without_id, consumer, "message_id")[1].endswith("-message-billing")
    counter.increment.assert_called_once_with(
        "outbox.inbox_message_count", 1, ["consumer:billing", "outcome:processed"]
    )


def test_wrong_arguments() -> None:
    wrong: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
        (Batch(mock.Mock()), message(), {}, TypeError, "Batch. It must be a Spanner Transaction"),
        (RecordingTransaction(), b"data", {}, TypeError, "message is bytes"),
        (RecordingTransaction(), message(), {"key": "id"}, ValueError, "key is 'id'"),
    ]
    for transaction, of, options, error, text in wrong:
        with pytest.raises(error, match=text):
            inbox.process_once(transaction, of, consumer="billing", **options)
    with pytest.raises(TypeError, match="message is bytes"):
        receiver(Database()).process(b"data")  # type: ignore[arg-type]  # the wrong type
    for choice in ({"key": "id"}, {"missing_task_id": "rasie"}):
        with pytest.raises(ValueError, match=r"is '(id|rasie)'. It must be '"):
            inbox.Handler(mock.Mock(), consumer="billing", **choice)


async def coroutine(_transaction: Any, _message: Any = None) -> None:
    """Would have no effect."""


async def async_generator(_transaction: Any, _message: Any = None) -> AsyncIterator[None]:
    yield


def generator(_transaction: Any, _message: Any = None) -> Iterator[None]:
    yield


class Starts:
    """Calls a function. Only the result shows what the function is."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *of: Any, **options: Any) -> Any:
        return self.function(*of, **options)


#: Functions of the caller that return before their work is done.
UNFINISHED = [
    *map(Starts, (coroutine, async_generator, generator)),
    lambda *of: map(print, of),
    lambda *_of: Future(),
    lambda *_of: pubsub_future.Future(),
    lambda *_of: [{"answer": (Future(),)}],  # whatever holds it
    lambda *_of: {"rows": {1: generator(None)}},
    lambda *_of: contextmanager(generator)(None),  # its body runs when it is entered
    lambda *_of: asynccontextmanager(async_generator)(None),
    lambda *_of: threading.Thread(),
    lambda *_of: ApplyResult(mock.MagicMock(_cache={}), None, None),
    lambda *_of: fails,  # a function that nothing calls
    lambda *_of: partial(fails),
]


def fails(_transaction: Any, _message: Any) -> None:
    raise LookupError


@pytest.mark.parametrize(
    ("handle", "error"),
    [
        *((function, TypeError) for function in UNFINISHED),
        (lambda *_: StreamedResultSet(iter(())), TypeError),
        (lambda transaction, _message: transaction.commit(), outbox.InvalidTransaction),
        (lambda transaction, _message: transaction.rollback(), outbox.InvalidTransaction),
        (lambda _transaction, of: of.ack_with_response(), outbox.InvalidTransaction),
        (fails, LookupError),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine '.*' was never awaited")
def test_a_function_without_an_effect_is_no_success(handle: Any, error: type[Exception]) -> None:
    """The record must not be committed without the effect: the message is redelivered."""
    database, of = Database(), message()
    receive = receiver(database, handle)
    with pytest.raises(error):
        receive.process(of)
    receive(of)
    assert (of.seen, database.committed) == (["nack"], [])


ROUND: list[object] = []
ROUND.append(ROUND)


def test_the_result_of_a_function_is_ignored() -> None:
    mocks = [{"a": [mock.MagicMock()]}, mock.Mock(), mock.MagicMock()]
    for result in (None, 7, "text", [1], *mocks, object(), Path(), ROUND):
        assert receiver(Database(), lambda *_, result=result: result).process(message()) is True


def test_a_function_that_cannot_have_an_effect_is_refused() -> None:
    for handle, kind in {
        coroutine: "coroutine is a coroutine function",
        partial(coroutine): "is a coroutine function",
        generator: "generator is a generator function",
        async_generator: "async_generator is an async generator function",
        lambda _self, _transaction, _message: None: "cannot be called with a transaction and a message: missing",
        7: r"handle is int. It must be a function, because Handler\(\.\.\.\)\(function\) is the callback",
    }.items():
        with pytest.raises(TypeError, match=kind):
            receiver(Database(), handle)


@pytest.mark.parametrize("run", UNFINISHED)
@pytest.mark.filterwarnings("ignore:coroutine '.*' was never awaited")
def test_a_database_whose_transactions_must_be_awaited_is_refused(run: Any, counter: mock.Mock) -> None:
    """That of an AsyncClient, for example. The message is not acknowledged."""
    of = message()
    receiver(mock.Mock(run_in_transaction=run))(of)
    assert of.seen == ["nack"]
    counter.increment.assert_called_once_with("outbox.inbox_message_count", 1, ["consumer:billing", "outcome:failed"])


def test_each_message_is_acknowledged_and_counted_once(counter: mock.Mock) -> None:
    """However often its transaction was aborted."""
    late: Future[None] = Future()
    late.set_exception(RuntimeError("the lease has expired"))
    for database, handle, of, expected in (
        (Database(attempts=3), lambda *_: None, message(), ["ack", "processed"]),
        (Database("task-1"), fails, message(), ["ack", "duplicate"]),
        (Database(), fails, message(), ["nack", "failed"]),
        (Database(), fails, message(None), ["nack", "missing_task_id"]),
        (Database(), lambda *_: None, message(acknowledged=late), ["ack", "processed", "not_acknowledged"]),
    ):
        counter.reset_mock()
        receiver(database, handle, transaction_tag="charge")(of)
        ended, *outcomes = expected
        tags = [["consumer:billing", f"outcome:{outcome}"] for outcome in outcomes]
        assert of.seen == [ended]
        assert counter.increment.mock_calls == [mock.call("outbox.inbox_message_count", 1, each) for each in tags]
        begun = "missing_task_id" not in expected
        assert database.options == ({"transaction_tag": "charge"} if begun else {})


def test_messages_without_a_task_id_can_end_the_pull() -> None:
    of = message(None)
    with pytest.raises(outbox.MissingTaskId):
        receiver(Database(), missing_task_id="raise")(of)
    assert receiver(Database(), key="message_id").process(of) is True


def test_the_message_of_a_push_request() -> None:
    """Some fields come twice, and unknown ones are ignored."""
    of = {
        "data": "aGVsbA==", "messageId": "1", "message_id": "1", "attributes": {"a_b": "c"}, "orderingKey": "k",
        "publishTime": "2026-01-02T03:04:05.678Z", "publish_time": "2026-01-02T03:04:05.678Z", "new": 1,
    }  # fmt: skip
    got = inbox.pushed_message({"message": of, "subscription": "projects/p/subscriptions/s", "deliveryAttempt": 5})
    assert (got.data, got.message_id, dict(got.attributes), got.ordering_key) == (b"hell", "1", {"a_b": "c"}, "k")
    assert got.publish_time.second == 5
    contents = [None, {"attributes": [1]}, *({"data": data} for data in ("!!", "a", "aGV=s", 7))]
    for wrong in ({}, [], None, *({"message": each} for each in contents)):
        with pytest.raises(outbox.InvalidMessage, match="not a push request"):
            inbox.pushed_message(wrong)
