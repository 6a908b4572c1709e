"""The reader of the change stream: it tells of inserts, says when it does not work, and begins anew."""

import logging
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.instance import Instance

from outbox.devtools.emulators import Emulators
from outbox.table import ddl
from outbox.table.connection import open_database
from publishworker.process.app import open_store
from publishworker.process.worker_settings import WorkerSettings
from publishworker.spanner import change_stream
from publishworker.spanner.change_stream import ChangeStream
from tests.support.proxy import Proxy
from tests.support.relays import register
from tests.support.spanner import fresh_database, place, variables
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def streamed(spanner_instance: Instance) -> Iterator[Database]:
    """A database whose outbox has the change stream."""
    with fresh_database(spanner_instance, ddl.statements(change_stream=True)) as database:
        yield database


@pytest.fixture
def reading(emulators: Emulators) -> Iterator[Callable[[Database], tuple[ChangeStream, threading.Event]]]:
    """Start readers, each with the event that it sets at an insert."""
    assert emulators
    started: list[ChangeStream] = []

    def start(database: Database) -> tuple[ChangeStream, threading.Event]:
        inserted, opened = threading.Event(), open_database(place(database.database_id))
        started.append(ChangeStream(opened, inserted.set))
        started[-1].start()
        return started[-1], inserted

    yield start
    for each in started:
        each.stop()


def test_an_insert_is_told_and_a_mark_is_not(
    streamed: Database, reading: Callable[[Database], tuple[ChangeStream, threading.Event]]
) -> None:
    stream, inserted = reading(streamed)
    eventually(lambda: stream.works, seconds=20)
    for _ in range(2):
        [id] = register(streamed, "orders", 1)
        assert inserted.wait(20)
        inserted.clear()

    def is_told_of_a_mark() -> bool:
        inserted.clear()
        with streamed.batch() as batch:
            batch.update("AsynchronousTasks", ["Id", "SentAt"], [[id, datetime.now(UTC)]])
        return inserted.wait(1)

    # The emulator ends a partition after half a minute, and then the stream wakes the worker.
    assert not all(is_told_of_a_mark() for _ in range(3))


def test_a_missing_stream_is_logged_once(
    database: Database,
    reading: Callable[[Database], tuple[ChangeStream, threading.Event]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And the worker polls, because `inserted` is called after each attempt."""
    caplog.set_level(logging.INFO, logger="publishworker")
    stream, inserted = reading(database)
    for _ in range(2):
        assert inserted.wait(20)
        inserted.clear()
    assert not stream.works
    [line] = [record for record in caplog.records if getattr(record, "action", "") == "change_stream_failed"]
    assert "AsynchronousTasksInserts" in line.getMessage()


@pytest.mark.extended
def test_a_stream_that_falls_silent_is_read_again(
    emulators: Emulators,
    streamed: Database,
    reading: Callable[[Database], tuple[ChangeStream, threading.Event]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its requests hang: there is neither a record nor an error. That is logged once, and the worker polls."""
    caplog.set_level(logging.INFO, logger="publishworker")
    monkeypatch.setattr(change_stream, "RESTART_SECONDS", 4.0)
    with Proxy(emulators.spanner_host) as proxy:
        monkeypatch.setenv("SPANNER_EMULATOR_HOST", proxy.address)
        stream, inserted = reading(streamed)
        eventually(lambda: stream.works, seconds=20)
        proxy.hang()
        eventually(lambda: "no record for" in caplog.text, seconds=30)
        assert not stream.works
        inserted.clear()
        assert inserted.wait(20)
        proxy.forward()
        eventually(lambda: "can be read again" in caplog.text, seconds=60)
        assert stream.works
    assert [getattr(each, "action", "") for each in caplog.records] == ["change_stream_failed", "change_stream_works"]


def test_heartbeats_and_the_change_stream_have_connections_of_their_own(
    emulators: Emulators, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads and batches share another one."""
    with Proxy(emulators.spanner_host) as proxy:
        monkeypatch.setenv("SPANNER_EMULATOR_HOST", proxy.address)
        store = open_store(WorkerSettings.read({}, variables(database.database_id)))
        store.discover((), ())
        before = proxy.accepted
        store.discover((), ())
        assert proxy.accepted == before
        store.heartbeat("me", datetime.now(UTC), ())
        assert proxy.accepted == before + 1
        with store.database.on_own_connection().snapshot() as snapshot:
            assert snapshot.execute_sql("SELECT 1").one() == [1]
        assert proxy.accepted == before + 2
