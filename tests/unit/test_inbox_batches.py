"""The callback of `BatchHandler`: the lists that its function gets, and the end of each message, without a service."""

import logging
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from math import inf, nan
from typing import Any
from unittest import mock

import pytest
from google.api_core.exceptions import Aborted, AlreadyExists, DeadlineExceeded, NotFound, ServiceUnavailable
from google.cloud.pubsub_v1.subscriber.exceptions import AcknowledgeError, AcknowledgeStatus

import outbox
from outbox import inbox
from outbox.errors import NotReached
from outbox.inbox.receiver import Collector
from tests.support.waiting import eventually
from tests.unit.test_inbox import Database
from tests.unit.test_inbox import message as single

SECONDS = 30.0


def message(task_id: str, key: str = "", **more: Any) -> Any:
    of = single(task_id, **more)
    of.ordering_key = key
    return of


def ids_of(messages: Any) -> list[str]:
    return [of.attributes[outbox.TASK_ID_ATTRIBUTE] for of in messages]


def effect(transaction: Any, messages: Any) -> None:
    transaction.insert("Effects", ("TaskId",), [(id,) for id in ids_of(messages)])


def deliver(database: Any, handle: Any, *messages: Any, **options: Any) -> inbox.BatchReceiver:
    """Deliver messages in this order, so that they are one batch."""
    options |= {"consumer": "billing", "max_batch": len(messages), "max_delay": SECONDS}
    receive: Any = inbox.BatchHandler(database, **options)(handle)
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


@pytest.mark.parametrize("attempts", [1, 3])
def test_messages_of_a_batch_have_one_transaction(attempts: int, outcomes: list[str]) -> None:
    """New ones, one that was processed before, and one that is there twice. An abort changes nothing."""
    database, of = Database("old", attempts=attempts), [message(id) for id in ("a", "old", "b", "a")]
    deliver(database, effect, *of)
    assert database.rows("Effects") == [["a", "b"]]
    assert database.rows("ProcessedTasks") == [["a", "b"]]
    assert len(database.committed) == 1
    assert seen(*of) == [["ack"]] * 4
    assert outcomes == ["processed", "duplicate", "processed", "duplicate"]
    handle = mock.Mock()
    deliver(Database("old"), handle, message("old"), message("old"))
    handle.assert_not_called()


def test_a_failed_message_leaves_nothing_behind_and_the_others_are_committed(
    outcomes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Each is tried alone, and not even a task is remembered that the failed call has registered.

    Later messages of its ordering key wait for it.
    """
    calls: list[list[str]] = []

    def once(transaction: Any, messages: Any) -> None:
        calls.append(ids_of(messages))
        assert outbox.register_once(transaction, "orders", b"", task_id="one")
        effect(transaction, messages)
        transaction.execute_update("UPDATE Stock SET Pieces = Pieces - 1 WHERE TRUE")
        if {"a", "c"} & {*ids_of(messages)}:
            raise LookupError(str(ids_of(messages)))

    database = Database()
    of = [message("a"), message("b", "k2"), message("c", "k"), message("d", "k"), message("e", "k2")]
    deliver(database, once, *of)
    assert calls == [["a", "b", "c", "d", "e"], ["a"], ["b"], ["c"], ["e"]]
    assert database.rows("Effects") == [["b"], ["e"]]
    assert database.rows("ProcessedTasks") == [["b"], ["e"]]
    assert seen(*of) == [["nack"], ["ack"], ["nack"], ["nack"], ["ack"]]
    assert outcomes == ["failed", "processed", "failed", "failed", "processed"]
    assert "an earlier message of its ordering key 'k' failed" in caplog.text


def test_a_batch_of_one_and_process_call_the_function_with_a_list_of_one() -> None:
    calls: list[list[str]] = []
    database: Any = Database()
    receive = inbox.BatchHandler(database, consumer="billing", max_batch=1)(
        lambda _transaction, messages: calls.append(ids_of(messages))
    )
    receive(message("a"))
    assert receive.process(message("b")) is True
    assert receive.process(message("c")) is True
    assert calls == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize("error", [AlreadyExists("row"), DeadlineExceeded("no answer")])
def test_a_refused_commit_is_tried_for_each_message(error: Exception) -> None:
    """Spanner does not say which message's change it refuses. If it has committed, they are duplicates."""
    database, of = Database(refuses=error), [message("a"), message("b")]
    deliver(database, effect, *of)
    assert database.rows("ProcessedTasks") == [["a"], ["b"]]
    assert seen(*of) == [["ack"]] * 2


@pytest.mark.parametrize("error", [ServiceUnavailable, DeadlineExceeded, Aborted])
def test_a_service_that_fails_for_one_message_fails_no_other(error: type[Exception], outcomes: list[str]) -> None:
    def handle(_transaction: Any, messages: Any) -> None:
        if bad in messages:
            raise error("away")

    bad, of = message("bad"), [message(str(n)) for n in range(3)]
    deliver(Database(attempts=2), handle, of[0], bad, *of[1:])
    assert seen(bad, *of) == [["nack"], ["ack"], ["ack"], ["ack"]]
    assert sorted(outcomes) == ["failed", "processed", "processed", "processed"]


def test_an_outage_is_waited_for_by_two_messages_and_not_by_each(outcomes: list[str]) -> None:
    calls: list[Any] = []

    def handle(_transaction: Any, messages: Any) -> None:
        calls.append(messages)
        raise ServiceUnavailable("away")

    of = [message(str(n)) for n in range(5)]
    deliver(Database(), handle, *of)
    assert calls == [of, of[:1], of[1:2]]
    assert (seen(*of), outcomes) == ([["nack"]] * 5, ["failed"] * 5)


def away_for_each(_transaction: Any, _message: Any) -> None:
    raise ServiceUnavailable("away")


def wrong_for_each(_transaction: Any, messages: Any) -> None:
    raise LookupError(str(ids_of(messages)))


#: The first line says that each message gets a transaction. Each error of the second function has a text of its own.
@pytest.mark.parametrize(("handle", "lines"), [(away_for_each, 2), (wrong_for_each, 51)])
def test_an_error_of_all_messages_is_one_traceback_and_one_line_for_each_text(
    handle: Any, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    of = [message(f"{n:02}") for n in range(50)]
    deliver(Database(), handle, *of)
    assert seen(*of) == [["nack"]] * 50
    assert caplog.text.count("Traceback (most recent call last)") == 1
    assert len(caplog.records) == lines
    if lines == 2:
        assert "Consumer billing: 50 tasks (00, 01, 02, 03, 04, ...) failed and will be redelivered" in caplog.text


@pytest.mark.parametrize("kind", [inbox.Handler, inbox.BatchHandler])
def test_a_traceback_is_logged_once_in_the_life_of_a_receiver(
    kind: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the message is redelivered. Each line has the class of the error, and few tracebacks are kept."""
    monkeypatch.setattr("outbox.inbox.receiver.MAX_ORIGINS", 2)
    fails = [lambda: {}["cents"], lambda: 1 / 0, lambda: int("x")]

    def handle(_transaction: Any, _message: Any) -> None:
        fails[0]()

    receive = kind(Database(), consumer="billing")(handle)

    def tracebacks() -> int:
        caplog.clear()
        for n in range(10):
            receive(message(str(n)))
        return caplog.text.count("Traceback (most recent call last)")

    assert [tracebacks(), tracebacks()] == [1, 0]
    assert "task 9 (message 4711) failed and will be redelivered: KeyError('cents')" in caplog.text
    for expected in (1, 1, 1):
        fails.append(fails.pop(0))
        assert tracebacks() == expected


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


def test_wrong_settings_are_refused() -> None:
    numbers = [("max_batch", each, "1 to 1,000") for each in (0, 1_001, "5", 2.5, None, True)]
    delays = ("1", timedelta(seconds=1), inf, -1.0, nan)
    numbers += [("max_delay", each, "0 to 3,600 seconds") for each in delays]
    for options, error, text in (
        *(({name: each}, ValueError, f"{name} is {each!r}. It must be {allowed}") for name, each, allowed in numbers),
        ({"max_batches": 5}, TypeError, "max_batches is no option of BatchHandler, nor of run_in_transaction"),
        ({"database": object()}, TypeError, "With SQLAlchemy, Django or DB-API, call process_once of outbox.ext"),
    ):
        with pytest.raises(error, match=re.escape(text)):
            inbox.BatchHandler(**{"database": mock.Mock(), "consumer": "billing", "max_batch": 5, **options})


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


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "outbox")


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
