"""The reader of the change stream on a scripted database: what it logs, and how often it reads a stream that fails."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.api_core.exceptions import NotFound, OutOfRange, ServiceUnavailable

from outbox.base.schedules import Schedule
from publishworker.spanner import change_stream
from publishworker.spanner.change_stream import ChangeStream
from tests.support.waiting import eventually

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
#: Attempts to read the stream after which it would have been logged more than once.
ATTEMPTS = 8


class Scripted:
    """A database whose change stream has the partitions a and b.

    A partition sends `first` heartbeats. Then it answers with its error, or goes on as long as it has none.
    """

    def __init__(self) -> None:
        self.now = NOON
        self.first = 0
        self.errors: dict[str, BaseException] = {}
        self.starts: list[datetime] = []
        self.attempts = self.renewals = 0
        #: When these partitions end. The partition ab follows.
        self.ends: dict[str, threading.Event] = {}
        self.read: list[str] = []
        self.closed = threading.Event()

    def renewed(self) -> "Scripted":
        self.renewals += 1
        return self

    @contextlib.contextmanager
    def snapshot(self) -> Iterator["Scripted"]:
        yield self

    def execute_sql(self, statement: str, *, params: Any, **_options: Any) -> Iterator[Any]:
        values = params
        if "READ_" not in statement:
            self.now += timedelta(seconds=1)
            yield [self.now]
        elif values["token"] is None:
            self.attempts += 1
            self.starts.append(values["start"])
            yield [[([], [], [(values["start"], "1", [("a", []), ("b", [])])])]]
        else:
            self.read.append(values["token"])
            sent, end = 0, self.ends.get(values["token"], self.closed)
            while not end.is_set():
                if sent >= self.first and values["token"] in self.errors:
                    raise self.errors[values["token"]]
                yield [[([], [NOON], [])]]
                sent += 1
                end.wait(0.01)
            if end is not self.closed:
                yield [[([], [], [(NOON, "1", [("ab", ["a", "b"])])])]]


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    monkeypatch.setattr(change_stream, "ROUND", Schedule(0.01, 0.05))
    monkeypatch.setattr(change_stream, "MAX_SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(change_stream, "RESTART_SECONDS", 1.0)
    created = Scripted()
    yield created
    created.closed.set()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return the actions that are logged so far."""
    caplog.set_level(logging.INFO, "publishworker")
    return lambda: [vars(record)["action"] for record in caplog.records]


@contextlib.contextmanager
def reading(database: Scripted, inserted: Callable[[], None] = lambda: None) -> Iterator[ChangeStream]:
    stream = ChangeStream(database, inserted)
    stream.start()
    yield stream
    stream.stop()


@pytest.mark.parametrize(
    ("error", "first"),
    [
        (NotFound("Session not found: projects/p/instances/i/databases/d/sessions/s"), 0),
        (OutOfRange("start_timestamp is before the retention period"), 0),
        (ServiceUnavailable("connection reset"), 3),
    ],
)
def test_a_partition_that_cannot_be_read_is_logged_once_until_it_can(
    error: Exception, first: int, database: Scripted, lines: Callable[[], list[str]]
) -> None:
    """Also one that sends a few records each time, a lost token or session, and an expired retention.

    Each attempt begins now, so an expired retention or a lost token cannot come again. Only a lost session needs a new
    one: each costs a thread of the client.
    """
    database.errors["b"], database.first = error, first
    with reading(database) as stream:
        eventually(lambda: database.attempts >= ATTEMPTS, seconds=60)
        eventually(lambda: not stream.works, seconds=60)
        assert lines() == ["change_stream_failed"]
        database.errors.clear()
        eventually(lambda: len(lines()) == 2, seconds=60)
        assert stream.works
        database.errors["a"] = error
        eventually(lambda: len(lines()) == 3, seconds=60)
    assert lines() == ["change_stream_failed", "change_stream_works", "change_stream_failed"]
    assert sorted(set(database.starts)) == database.starts
    assert (database.renewals >= ATTEMPTS - 1) == isinstance(error, NotFound) == (database.renewals > 0)


def test_a_worker_reads_nothing_while_enough_others_follow(database: Scripted) -> None:
    follows = threading.Event()
    stream = ChangeStream(database, lambda: None, follows=follows.is_set)
    stream.start()
    try:
        assert not stream.works
        assert not database.attempts
        follows.set()
        eventually(lambda: stream.works and {"a", "b"} <= {*database.read})
        follows.clear()
        eventually(lambda: not stream.works)
    finally:
        stream.stop()


def test_after_a_partition_ends_the_stream_is_read_again(database: Scripted, lines: Callable[[], list[str]]) -> None:
    """Spanner has divided or moved it. The worker polls, because other partitions follow."""
    database.ends["a"], polls = threading.Event(), threading.Semaphore(0)
    with reading(database, polls.release) as stream:
        assert polls.acquire(timeout=60)  # at the beginning, at the end, and at the next beginning
        database.ends["a"].set()
        assert polls.acquire(timeout=60)
        assert polls.acquire(timeout=60)
        assert database.attempts >= 2
        del database.ends["a"]
        eventually(lambda: stream.works, seconds=60)
    assert lines() == []


def test_a_stream_with_too_many_partitions_counts_as_a_failure(
    database: Scripted, lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_stream, "MAX_PARTITIONS", 1)
    with reading(database) as stream:
        eventually(lambda: database.attempts >= 2, seconds=60)
        assert lines() == ["change_stream_failed"]
        monkeypatch.setattr(change_stream, "MAX_PARTITIONS", 2)
        eventually(lambda: stream.works and len(lines()) == 2, seconds=60)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_thread_of_a_partition_that_ends_without_an_error_is_replaced(
    database: Scripted, lines: Callable[[], list[str]]
) -> None:
    """As if it had been killed: the partition is silent, which counts as a failure."""
    with reading(database) as stream:
        eventually(lambda: stream.works, seconds=60)
        database.errors["b"] = SystemExit()
        eventually(lambda: not stream.works, seconds=60)
        eventually(lambda: lines() == ["change_stream_failed"], seconds=60)
        database.errors.clear()
        eventually(lambda: lines() == ["change_stream_failed", "change_stream_works"], seconds=60)
        assert stream.works
