"""The reader of the change stream: it tells of inserts, says when it does not work, and begins anew."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.instance import Instance

import outbox
from outbox.devtools.emulators import Emulators
from outbox.table import ddl
from outbox.table.connection import open_database
from publishworker.spanner.change_stream import MAX_SILENCE_SECONDS, ChangeStream
from tests.support.proxy import Proxy
from tests.support.pubsub import PubSub
from tests.support.relays import register, wait_until_all_sent, worker
from tests.support.spanner import fresh_database, place
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
    with streamed.batch() as batch:
        batch.update("AsynchronousTasks", ["Id", "SentAt"], [[id, datetime.now(UTC)]])
    assert not inserted.wait(1)


@pytest.mark.extended
def test_it_follows_the_partitions_for_as_long_as_it_runs(
    streamed: Database, reading: Callable[[Database], tuple[ChangeStream, threading.Event]]
) -> None:
    """The emulator replaces each partition after 20 to 40 s."""
    stream, inserted = reading(streamed)
    eventually(lambda: stream.works, seconds=20)
    end = time.monotonic() + 75
    while time.monotonic() < end:
        inserted.clear()
        register(streamed, "orders", 1)
        assert inserted.wait(30)
    eventually(lambda: stream.works, seconds=30)


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
@pytest.mark.parametrize("fault", ["hang", "refuse"])
def test_a_broken_or_hung_stream_is_noticed_and_read_anew(
    fault: str,
    streamed: Database,
    emulators: Emulators,
    reading: Callable[[Database], tuple[ChangeStream, threading.Event]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Proxy(emulators.spanner_host) as proxy:
        monkeypatch.setenv("SPANNER_EMULATOR_HOST", proxy.address)
        stream, inserted = reading(streamed)
        eventually(lambda: stream.works, seconds=20)
        getattr(proxy, fault)()
        eventually(lambda: not stream.works, seconds=MAX_SILENCE_SECONDS + 2)
        proxy.forward()
        eventually(lambda: stream.works, seconds=60)
        inserted.clear()
        register(streamed, "orders", 1)
        assert inserted.wait(20)


def _empty(database: Database) -> None:
    """Delete the tasks of other tests, which have no topic, and the heartbeats of their workers, which have shards."""
    with database.batch() as batch:
        for table in ("AsynchronousTasks", "AsynchronousTaskWorkers"):
            batch.delete(table, KeySet(all_=True))


@pytest.mark.extended
def test_an_idle_worker_polls_at_an_insert_and_when_a_task_is_due(
    streamed: Database, emulators: Emulators, pubsub: PubSub
) -> None:
    """Long before its poll interval, and the longer idle interval, are over."""
    _empty(streamed)
    topic = pubsub.new_topic()
    subscription = pubsub.new_subscription(topic)
    flags = ("--wake", "change-stream", "--poll-interval", "30", "--idle-interval", "300")
    with worker(emulators, streamed, *flags) as process:
        process.wait_for_text("relaying")
        register(streamed, topic, 1)
        subscription.pull_until(1, seconds=25)
        wait_until_all_sent(streamed)
        register(streamed, topic, 1)
        register(streamed, topic, 1, available_at=datetime.now(UTC) + timedelta(seconds=4))
        subscription.pull_until(2, seconds=25)


@pytest.mark.extended
def test_the_first_task_of_a_topic_is_found_soon_after_a_wake_up_in_vain(
    streamed: Database, emulators: Emulators, pubsub: PubSub
) -> None:
    """Each wake-up in vain doubles the pause. Before the last one, the worker has probably just discovered."""
    topic = pubsub.new_topic()
    subscription = pubsub.new_subscription(topic)
    _empty(streamed)
    flags = ("--wake", "change-stream", "--poll-interval", "30", "--idle-interval", "300")
    with worker(emulators, streamed, *flags) as process:
        process.wait_for_text("relaying")
        for _ in range(15):
            with streamed.batch() as batch:
                id = outbox.register(batch, "orders", b"")
                batch.update("AsynchronousTasks", ["Id", "SentAt"], [[id, datetime.now(UTC)]])
            time.sleep(0.3)
        register(streamed, topic, 1)
        subscription.pull_until(1, seconds=25)
