"""The relay in this process on the real emulators, also on one that aborts commits."""

import base64
import threading

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database

import outbox
from outbox.emulators import Emulators
from publishworker.connection import open_database, open_pubsub
from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.spanner.store import SpannerStore
from publishworker.turn import relay as relay_module
from publishworker.turn.relay import Relay
from tests.support.counting import Counting
from tests.support.parts import look, relay_of
from tests.support.pubsub import Subscription
from tests.support.relays import account, register, unsent
from tests.support.spanner import INSTANCE, PROJECT


def make_relay(database: Database, group_size: int = 10, groups: int = 2, *, emulator: bool = True) -> Relay:
    """Return a relay of this process."""
    store = SpannerStore(database, shards=10, emulator=emulator)
    return relay_of(store, PubSubPublisher(open_pubsub(), PROJECT), size=group_size, groups=groups)


def turn_until_all_sent(relay: Relay, database: Database, most: int = 60) -> int:
    """Turn until nothing is unsent; return how many tasks were published."""
    published = 0
    for _ in range(most):
        published += relay.turn().published
        if not unsent(database):
            return published
    pytest.fail(f"{len(unsent(database))} unsent after {most} turns")


@pytest.mark.parametrize("group_size", [1, 7, 100])
def test_everything_registered_is_received_once(
    database: Database, topic: str, subscription: Subscription, group_size: int
) -> None:
    """One transaction a task, or a hundred tasks in one."""
    ids = register(database, topic, 30)
    assert turn_until_all_sent(make_relay(database, group_size, 4), database) == 30
    result = account(ids, subscription)
    assert (result.lost, result.unexpected, result.duplicates) == (frozenset(), frozenset(), 0)


def test_marks_are_commit_timestamps_later_than_the_registration(database: Database, topic: str) -> None:
    """SentAt is Spanner's time, and the row is kept (A34, A35)."""
    register(database, topic, 3)
    turn_until_all_sent(make_relay(database), database)
    with database.snapshot() as snapshot:
        rows = list(snapshot.execute_sql("SELECT CreatedAt, SentAt FROM AsynchronousTasks"))
    assert len(rows) == 3
    assert all(created_at < sent_at for created_at, sent_at in rows)


def test_faults_at_the_commit_publish_nothing_twice(
    faulty_database: Database, topic: str, subscription: Subscription
) -> None:
    """An emulator that aborts commits at random, one worker: all sent, each published once."""
    ids = register(faulty_database, topic, 100)
    assert turn_until_all_sent(make_relay(faulty_database, 2, 4), faulty_database) == 100
    result = account(ids, subscription)
    assert (result.lost, result.unexpected, result.duplicates) == (frozenset(), frozenset(), 0)


def test_groups_that_abort_each_other_lose_nothing(database: Database, topic: str, subscription: Subscription) -> None:
    """Eight groups of one process without the turnstile: the emulator aborts most of them, again and again."""
    ids = register(database, topic, 40)
    turn_until_all_sent(make_relay(database, 5, 8, emulator=False), database)
    result = account(ids, subscription)
    assert (result.lost, result.unexpected, result.duplicates) == (frozenset(), frozenset(), 0)


def test_a_task_is_sent_again_by_plain_dml(database: Database, topic: str, subscription: Subscription) -> None:
    """`UPDATE ... SET SentAt = NULL` alone, also for a task that had failed before: the same id, the same bytes."""
    [id] = register(database, topic, 1, data=b"\x00\xffbody")
    with database.batch() as batch:
        batch.update("AsynchronousTasks", ("Id", "Attempts", "LastError"), [(id, 3, "once")])
    relay = make_relay(database)
    turn_until_all_sent(relay, database)
    statement = f"UPDATE AsynchronousTasks SET SentAt = NULL WHERE Id = '{id}'"
    assert database.run_in_transaction(lambda transaction: transaction.execute_update(statement)) == 1
    turn_until_all_sent(relay, database)
    first, second = subscription.pull_until(2)
    assert first.data == second.data == b"\x00\xffbody"
    assert first.attributes == second.attributes == {outbox.TASK_ID_ATTRIBUTE: id}
    assert first.message_id != second.message_id


def test_the_articles_columns_alone_make_a_task(database: Database, topic: str, subscription: Subscription) -> None:
    """Another service may write rows itself: without sequence, bytes and shard."""
    data = base64.b64encode(b"\x0a\x05hello")
    with database.batch() as batch:
        columns = ("Id", "Topic", "Data", "Priority", "CreatedAt")
        batch.insert("AsynchronousTasks", columns, [("theirs", topic, data, 1, COMMIT_TIMESTAMP)])
    turn_until_all_sent(make_relay(database), database)
    [message] = subscription.pull_until(1)
    assert (message.data, message.attributes[outbox.TASK_ID_ATTRIBUTE]) == (b"hello", "theirs")


def test_polling_neither_blocks_nor_aborts_a_callers_transaction(database: Database, topic: str) -> None:
    """A snapshot takes no locks: a registration that is open all the while commits at its first attempt (A18)."""
    store = SpannerStore(database, shards=10)
    runs = []

    def work(transaction: object) -> None:
        runs.append(1)
        outbox.register(transaction, topic, b"")
        polled = threading.Thread(target=lambda: store.poll(look(topic, known=[], due=True)))
        polled.start()
        polled.join(20)
        assert not polled.is_alive()

    database.run_in_transaction(work)
    assert runs == [1]


def test_the_poll_reads_the_same_range_beside_sent_rows(database: Database, topic: str) -> None:
    """The index range of the poll, read as a range: pending rows only, however many sent ones lie beside them."""
    from google.cloud.spanner_v1 import KeyRange, KeySet

    pending = set(register(database, topic, 20))
    with database.batch() as batch:
        columns = ("Id", "Topic", "Data", "Priority", "CreatedAt", "SentAt")
        rows = [(f"sent-{n}", topic, b"", 1, COMMIT_TIMESTAMP, COMMIT_TIMESTAMP) for n in range(200)]
        batch.insert("AsynchronousTasks", columns, rows)
    ranges = [KeyRange(start_closed=[n, None, topic, None], end_closed=[n, None, topic, None]) for n in range(10)]
    with database.snapshot() as snapshot:
        found = snapshot.read("AsynchronousTasks", ["Id"], KeySet(ranges=ranges), index="AsynchronousTasksToSend")
        in_range = {row[0] for row in found}
    assert in_range == pending
    polled = SpannerStore(database, shards=10).poll(look(topic)).candidates
    assert {each.id for each in polled} == pending


def test_a_backlog_costs_few_requests_and_few_rows(
    emulators: Emulators, database: Database, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the client's default sessions: at most 25 requests for 1,000 tasks, 3 rows for each, its body once."""
    monkeypatch.delenv("GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW")
    monkeypatch.setattr(relay_module, "LONGEST_TURN_WAIT", 60.0)  # the numbers must not depend on a busy machine
    register(database, topic, 2000)
    with Counting(emulators.spanner_host) as proxy:
        monkeypatch.setenv("SPANNER_EMULATOR_HOST", proxy.address)
        store = SpannerStore(open_database(PROJECT, INSTANCE, database.database_id), shards=10, emulator=True)
        publisher = PubSubPublisher(open_pubsub(), PROJECT)
        relay = relay_of(store, publisher, size=100, groups=8, stragglers=2, look_further_seconds=1000)
        relay.turn()
        proxy.clear()
        published = 0
        while published < 2000:
            published += relay.turn().published
        assert proxy.counts.total() <= 25 * 2
        assert proxy.rows.total() <= 3 * 2000
        assert proxy.rows["ExecuteStreamingSql", "outbox-claim"] == 2000
