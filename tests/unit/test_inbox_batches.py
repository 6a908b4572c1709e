"""The callback of the inbox with `max_batch`: what each message of a batch gets, without a service."""

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from google.api_core.exceptions import Aborted, AlreadyExists, DeadlineExceeded, NotFound, ServiceUnavailable
from google.cloud.pubsub_v1.subscriber.exceptions import AcknowledgeError, AcknowledgeStatus
from google.cloud.spanner_v1 import KeySet

import outbox
from outbox import inbox
from outbox.errors import NotReached
from outbox.inbox.collector import Collector
from outbox.table.transactions import inserted
from tests.support.waiting import eventually
from tests.unit.test_inbox import Database
from tests.unit.test_inbox import message as single

SECONDS = 30.0


def message(task_id: str, key: str = "", **more: Any) -> Any:
    of = single(task_id, **more)
    of.ordering_key = key
    return of


def effect(transaction: Any, of: Any) -> None:
    transaction.insert("Effects", ("TaskId",), [(of.attributes[outbox.TASK_ID_ATTRIBUTE],)])


def deliver(database: Any, handle: Any, *messages: Any, **options: Any) -> inbox.Receiver:
    """Deliver messages in this order, so that they are one batch."""
    options |= {"consumer": "billing", "max_batch": len(messages), "max_delay": SECONDS}
    receive: Any = inbox.Handler(database, **options)(handle)
    errors: list[BaseException] = []

    def first() -> None:
        try:
            receive(messages[0])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    eventually(lambda: receive._batches._is_busy or not thread.is_alive())
    for of in messages[1:]:
        receive(of)
    thread.join(SECONDS)
    if errors:
        raise errors[0]
    return receive  # type: ignore[no-any-return]  # for its name


def seen(*messages: Any) -> list[list[str]]:
    return [of.seen for of in messages]


@pytest.fixture
def outcomes(set_metrics: Any) -> list[str]:
    counted: list[str] = []
    set_metrics(SimpleNamespace(increment=lambda _name, _value, tags: counted.append(tags[1].partition(":")[2])))
    return counted


@pytest.mark.parametrize("attempts", [1, 3])
def test_messages_of_a_batch_have_one_transaction(attempts: int, outcomes: list[str]) -> None:
    """New ones, one that was processed before, and one that is there twice. An abort changes nothing."""
    database, of = Database("old", attempts=attempts), [message(id) for id in ("a", "old", "b", "a")]
    deliver(database, effect, *of)
    assert database.rows("Effects") == [["a"], ["b"]]
    assert database.rows("ProcessedTasks") == [["a", "b"]]
    assert len(database.committed) == 1
    assert seen(*of) == [["ack"]] * 4
    assert outcomes == ["processed", "duplicate", "processed", "duplicate"]


def test_a_failed_message_leaves_nothing_behind_and_the_others_are_committed(
    outcomes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Not even the memory of a task that it has registered. Later messages of its ordering key wait for it."""

    # With "a" first, "one" would be remembered as registered if its mutation stayed.
    def once(transaction: Any, of: Any) -> None:
        id = of.attributes[outbox.TASK_ID_ATTRIBUTE]
        first = outbox.register_once(transaction, "orders", b"", task_id="one")
        assert first == (id in ("a", "b")), id
        effect(transaction, of)
        if id in ("a", "c"):
            raise LookupError(id)

    database = Database()
    of = [message("a"), message("b", "k2"), message("c", "k"), message("d", "k"), message("e", "k2")]
    deliver(database, once, *of)
    [transaction] = database.committed
    assert database.rows("Effects") == [["b"], ["e"]]
    assert database.rows("ProcessedTasks") == [["b", "e"]]
    assert ("one",) in inserted(transaction)
    assert seen(*of) == [["nack"], ["ack"], ["nack"], ["nack"], ["ack"]]
    assert outcomes == ["failed", "processed", "failed", "failed", "processed"]
    assert "an earlier message of its ordering key 'k' failed" in caplog.text


SALE = "UPDATE Stock SET Pieces = Pieces - 1 WHERE TRUE"


def not_found() -> None:
    raise NotFound("no topic")


@pytest.mark.parametrize(
    "act",
    [
        lambda transaction: transaction.execute_update(SALE),
        lambda transaction: transaction.execute_update(dml=SALE),
        lambda transaction: transaction.batch_update(iter([SALE])),
        lambda transaction: list(transaction.execute_sql(f"-- take\n{SALE} THEN RETURN Pieces")),
        lambda _transaction: not_found(),
    ],
    ids=["dml", "named dml", "many", "returning", "calls a service"],
)
def test_messages_have_a_transaction_each_if_a_failure_cannot_be_undone(
    act: Any, outcomes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """After DML, and after an error of a Google client. It is logged. An ordering key keeps its order."""

    def handle(transaction: Any, of: Any) -> None:
        if of.attributes[outbox.TASK_ID_ATTRIBUTE] == "bad":
            act(transaction)
            raise LookupError

    database, of = Database(), [message("a"), message("bad", "k"), message("b", "k"), message("c")]
    deliver(database, handle, *of)
    assert database.rows("ProcessedTasks") == [["a"], ["c"]]
    assert seen(*of) == [["ack"], ["nack"], ["nack"], ["ack"]]
    assert outcomes == ["processed", "failed", "failed", "processed"]
    assert "4 messages get a transaction each instead of one together: one failed" in caplog.text


def test_a_query_of_a_failed_message_needs_no_other_transaction(outcomes: list[str]) -> None:
    """DML of another message does not matter."""

    def handle(transaction: Any, of: Any) -> None:
        if of.attributes[outbox.TASK_ID_ATTRIBUTE] == "bad":
            list(transaction.execute_sql("SELECT 1"))
            raise LookupError
        transaction.execute_update("UPDATE Stock SET Pieces = 1 WHERE TRUE")

    database = Database()
    deliver(database, handle, message("a"), message("bad"))
    assert len(database.committed) == 1
    assert outcomes == ["processed", "failed"]


def counts(transaction: Any, _message: Any) -> None:
    list(transaction.read("Stock", ("Pieces",), KeySet(all_=True)))
    transaction.update("Stock", ("Article", "Pieces"), [("book", 1)])


def counts_by_sql(transaction: Any, _message: Any) -> None:
    list(transaction.execute_sql("SELECT Pieces FROM Stock"))
    transaction.update("STOCK", ("Article", "Pieces"), [("book", 1)])


def deletes(transaction: Any, _message: Any) -> None:
    list(transaction.read("Stock", ("Pieces",), KeySet(all_=True)))
    transaction.delete("Parents", KeySet(keys=[["a"]]))


def looks_for_tasks(transaction: Any, _message: Any) -> None:
    list(transaction.execute_sql("SELECT Id FROM asynchronoustasks"))
    outbox.register(transaction, "orders", b"")


@pytest.mark.parametrize("handle", [counts, counts_by_sql, deletes, looks_for_tasks])
def test_a_function_that_reads_what_another_message_changed_has_a_transaction_for_each(
    handle: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A read does not see the mutations of its transaction, so the change of the first message would be lost."""
    database, of = Database(), [message("a"), message("b")]
    deliver(database, handle, *of)
    assert database.rows("ProcessedTasks") == [["a"], ["b"]]
    assert seen(*of) == [["ack"]] * 2
    assert f"{handle.__name__} reads what an earlier message may have changed by a mutation" in caplog.text


def reads_elsewhere(transaction: Any, of: Any) -> None:
    list(transaction.read("Stock", ("Pieces",), KeySet(all_=True)))
    effect(transaction, of)


def dml_and_register(transaction: Any, of: Any) -> None:
    transaction.execute_update("UPDATE Stock SET Pieces = Pieces - 1 WHERE TRUE")
    outbox.register(transaction, "orders", b"")
    outbox.register_once(transaction, "orders", b"", task_id=of.attributes[outbox.TASK_ID_ATTRIBUTE])


@pytest.mark.parametrize("handle", [reads_elsewhere, dml_and_register])
def test_other_reads_and_statements_need_no_transaction_of_their_own(handle: Any) -> None:
    database = Database()
    deliver(database, handle, message("a"), message("b"))
    assert database.rows("ProcessedTasks") == [["a", "b"]]


def test_a_refused_commit_is_tried_for_each_message() -> None:
    """Spanner does not say which message's change it refuses."""
    database, of = Database(refuses=AlreadyExists("row")), [message("a"), message("b")]
    deliver(database, effect, *of)
    assert database.rows("ProcessedTasks") == [["a"], ["b"]]
    assert seen(*of) == [["ack"]] * 2


def test_a_commit_without_an_answer_fails_all_messages(outcomes: list[str]) -> None:
    """They are redelivered, and are duplicates if it was executed."""
    database, of = Database(refuses=DeadlineExceeded("no answer")), [message("a"), message("b")]
    deliver(database, effect, *of)
    assert (database.committed, seen(*of), outcomes) == ([], [["nack"]] * 2, ["failed"] * 2)


@pytest.mark.parametrize("error", [ServiceUnavailable, DeadlineExceeded, Aborted])
def test_a_service_that_fails_for_one_message_fails_no_other(error: type[Exception], outcomes: list[str]) -> None:
    def handle(_transaction: Any, of: Any) -> None:
        if of is bad:
            raise error("away")

    bad, of = message("bad"), [message(str(n)) for n in range(3)]
    deliver(Database(attempts=2), handle, of[0], bad, *of[1:])
    assert seen(bad, *of) == [["nack"], ["ack"], ["ack"], ["ack"]]
    assert sorted(outcomes) == ["failed", "processed", "processed", "processed"]


def test_an_outage_is_waited_for_by_two_messages_and_not_by_each(outcomes: list[str]) -> None:
    calls: list[Any] = []

    def handle(_transaction: Any, of: Any) -> None:
        calls.append(of)
        raise ServiceUnavailable("away")

    of = [message(str(n)) for n in range(5)]
    deliver(Database(), handle, *of)
    assert calls == [of[0], of[0], of[1]]
    assert (seen(*of), outcomes) == ([["nack"]] * 5, ["failed"] * 5)


def away_for_each(_transaction: Any, _message: Any) -> None:
    raise ServiceUnavailable("away")


def wrong_for_each(_transaction: Any, of: Any) -> None:
    raise LookupError(of.attributes[outbox.TASK_ID_ATTRIBUTE])


@pytest.mark.parametrize(
    ("database", "handle", "lines"),
    [
        (Database(refuses=DeadlineExceeded("no answer")), effect, 1),
        (Database(), away_for_each, 2),  # the first line says that each message gets a transaction
        (Database(), wrong_for_each, 50),  # each error has a text of its own
    ],
)  # fmt: skip
def test_an_error_of_all_messages_is_one_traceback_and_one_line_for_each_text(
    database: Database, handle: Any, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    of = [message(f"{n:02}") for n in range(50)]
    deliver(database, handle, *of)
    assert seen(*of) == [["nack"]] * 50
    assert caplog.text.count("Traceback (most recent call last)") == 1
    assert len(caplog.records) == lines
    if lines < 50:
        assert "Consumer billing: 50 tasks (00, 01, 02, 03, 04, ...) failed and will be redelivered" in caplog.text


def test_a_refused_acknowledgement_of_all_messages_is_one_line(
    outcomes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    refused: Future[None] = Future()
    of = [message(f"{n:02}", acknowledged=refused) for n in range(50)]
    deliver(Database(), effect, *of)
    refused.set_exception(AcknowledgeError(AcknowledgeStatus.OTHER, "away"))
    [line] = caplog.messages
    assert line.startswith("Consumer billing: 50 tasks (00, 01, 02, 03, 04, ...) may be redelivered, because")
    assert outcomes.count("not_acknowledged") == 50


@pytest.mark.parametrize(
    ("raised", "seen_by_pull"),
    [(NotFound("Table not found: ProcessedTasks"), NotReached), (SystemExit(3), SystemExit)],
)
def test_an_error_that_ends_the_pull_redelivers_all_messages(
    raised: BaseException, seen_by_pull: type[BaseException]
) -> None:
    """No message waits until its lease ends."""
    database, of = mock.Mock(), [message("a"), message("b")]
    database.run_in_transaction.side_effect = raised
    with pytest.raises(seen_by_pull):
        deliver(database, effect, *of)
    assert seen(*of) == [["nack"]] * 2


def test_a_message_without_a_task_id_joins_no_batch(outcomes: list[str]) -> None:
    receive = deliver(Database(), effect, message("a"), message("b"))
    of = message("")
    receive(of)
    assert of.seen == ["nack"]
    assert outcomes[-1] == "missing_task_id"
    receive = deliver(Database(), effect, message("a"), message("b"), missing_task_id="raise")
    with pytest.raises(outbox.MissingTaskId):
        receive(message(""))


def test_process_has_a_transaction_for_its_message() -> None:
    database = Database()
    receive = inbox.Handler(database, consumer="billing", max_batch=50)(effect)  # type: ignore[arg-type]  # a fake
    assert receive.process(message("a")) is True
    assert database.rows("ProcessedTasks") == [["a"]]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_batch": 0}, ValueError, "max_batch is 0. It must be 1 to 1,000"),
        ({"max_batch": 1_001}, ValueError, "max_batch is 1001"),
        ({"max_batch": "5"}, ValueError, "max_batch is '5'. It must be 1 to 1,000"),
        ({"max_batch": 2.5}, ValueError, "max_batch is 2.5"),
        ({"max_batch": None}, ValueError, "max_batch is None"),
        ({"max_batch": 5, "max_delay": "1"}, ValueError, "max_delay is '1'. It must be 0 to 3,600 seconds"),
        ({"max_batch": 5, "max_delay": timedelta(seconds=1)}, ValueError, "max_delay is datetime.timedelta"),
        ({"max_batch": 5, "max_delay": float("inf")}, ValueError, "max_delay is inf"),
        ({"max_batch": 5, "max_delay": -1.0}, ValueError, "max_delay is -1.0"),
        ({"max_batch": 5, "max_delay": float("nan")}, ValueError, "max_delay is nan"),
        ({"max_batches": 5}, TypeError, "max_batches is no option of Handler, nor of run_in_transaction"),
        ({"database": object()}, TypeError, r"With SQLAlchemy, Django or DB-API, call process_once of outbox\.ext"),
    ],
)
def test_wrong_settings_are_refused(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        inbox.Handler(**{"database": mock.Mock(), "consumer": "billing", **options})


def test_each_item_is_in_one_list_and_lists_do_not_overlap() -> None:
    """Items of a thread keep their order, and no thread waits while another one processes."""
    lists, at_once = list[list[tuple[int, int]]](), threading.Semaphore(1)

    def process(items: list[tuple[int, int]]) -> None:
        assert at_once.acquire(blocking=False)
        lists.append(items)
        time.sleep(0.001)
        at_once.release()

    collector = Collector(process, 7, 0.001)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(lambda n=n: [collector.add((n, k)) for k in range(50)]) for n in range(8)]:
            done.result(SECONDS)
    items = [item for each in lists for item in each]
    assert sorted(items) == [(n, k) for n in range(8) for k in range(50)]
    assert all([k for n, k in items if n == thread] == list(range(50)) for thread in range(8))
    assert max(map(len, lists)) == 7


def test_a_full_list_does_not_wait_and_another_one_waits_for_its_delay() -> None:
    lists = list[list[str]]()
    full = Collector(lists.append, 2, SECONDS)
    thread = threading.Thread(target=full.add, args=["a"])
    thread.start()
    eventually(lambda: full._is_busy)
    full.add("b")
    thread.join(SECONDS / 2)
    assert lists == [["a", "b"]]
    start = time.monotonic()
    Collector(lists.append, 2, 0.1).add("c")
    assert lists[1:] == [["c"]]
    assert 0.1 <= time.monotonic() - start < SECONDS


def test_an_error_reaches_the_thread_that_processes_and_loses_no_item() -> None:
    """The items that were not processed are in the next list."""
    answers: Iterator[Exception | None] = iter([LookupError(), None])
    lists = list[list[str]]()

    def process(items: list[str]) -> None:
        lists.append(items)
        collector._items.extend([("left", 0.0)] * (len(lists) == 1))
        if error := next(answers):
            raise error

    collector = Collector(process, 5, 0.0)
    with pytest.raises(LookupError):
        collector.add("a")
    collector.add("b")
    assert lists == [["a"], ["left", "b"]]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "outbox")
