"""Statements of the acceptance list that no other test shows, on the emulators: docs/acceptance.md has all of them."""

import contextlib
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from google.cloud.spanner_v1 import param_types
from google.cloud.spanner_v1.database import Database

import outbox
from publishworker.connection import open_pubsub
from publishworker.pubsub.publisher import Publisher, PubSubPublisher
from publishworker.spanner.store import SpannerStore, Store
from publishworker.task import Failed, Outcome, Row, Sent
from publishworker.telemetry import metrics as m
from publishworker.turn.relay import Relay
from tests.support.fakes import Counted, FakePublisher, FakeStore, serialized
from tests.support.parts import look, relay_of
from tests.support.pubsub import Subscription
from tests.support.relays import register, unsent
from tests.support.spanner import PROJECT
from tests.support.waiting import eventually


def store_of(database: Database) -> SpannerStore:
    """Return the real store."""
    return SpannerStore(database, shards=10, emulator=True)


def make_relay(
    store: Store,
    publisher: Publisher | None = None,
    counted: Counted | None = None,
    *,
    size: int = 50,
    groups: int = 2,
    clock: Callable[[], float] = time.monotonic,
) -> Relay:
    """Return a relay of this process, to the emulator unless a publisher is given."""
    publisher = publisher or PubSubPublisher(open_pubsub(), PROJECT)
    return relay_of(store, publisher, counted, size=size, groups=groups, clock=clock)


def turn_until_all_sent(relay: Relay, database: Database, most: int = 60) -> None:
    """Turn until nothing is unsent."""
    for _ in range(most):
        relay.turn()
        if not unsent(database):
            return
    pytest.fail(f"{len(unsent(database))} unsent after {most} turns")


def query(database: Database, sql: str, **ids: list[str]) -> list[list[Any]]:
    """Return the rows of a strong read; parameters are lists of texts."""
    with database.snapshot() as snapshot:
        types = {name: param_types.Array(param_types.STRING) for name in ids}
        return [list(row) for row in snapshot.execute_sql(sql, params=ids or None, param_types=types or None)]


def test_a_rolled_back_transaction_sends_nothing(database: Database, topic: str, subscription: Subscription) -> None:
    """The caller's exception: no row, no message (A02)."""

    def work(transaction: Any) -> None:
        outbox.register(transaction, topic, b"rolled back")
        raise LookupError

    with pytest.raises(LookupError):
        database.run_in_transaction(work)
    register(database, topic, 1, b"committed")
    turn_until_all_sent(make_relay(store_of(database)), database)
    assert [message.data for message in subscription.drain()] == [b"committed"]


def test_a_registration_that_rolls_back_is_counted(database: Database, topic: str) -> None:
    """The registered count is of calls, so it may exceed the rows (A11)."""
    counted = Counted()

    def work(transaction: Any) -> None:
        outbox.register(transaction, topic, b"")
        raise LookupError

    outbox.set_metrics(counted)
    try:
        with contextlib.suppress(LookupError):
            database.run_in_transaction(work)
    finally:
        outbox.set_metrics(None)
    assert counted.counts == {m.REGISTERED.name: 1}
    assert unsent(database) == []


def test_the_subscriber_receives_what_was_registered(
    database: Database, topic: str, subscription: Subscription
) -> None:
    """Id, data, attributes and ordering key, byte for byte (A05, A06)."""
    data = bytes(range(256)) + b"hell"
    with database.batch() as batch:
        id = outbox.register(batch, topic, data, {"kind": "\u0000\u00fc"}, ordering_key="customer 1")
    turn_until_all_sent(make_relay(store_of(database)), database)
    [message] = subscription.pull_until(1)
    assert message.data == data
    assert dict(message.attributes) == {"kind": "\u0000\u00fc", outbox.TASK_ID_ATTRIBUTE: id}
    assert message.ordering_key == "customer 1"


def test_one_table_serves_several_topics(
    database: Database, new_topic: Callable[..., str], new_subscription: Callable[..., Subscription]
) -> None:
    """Each row goes to its own topic, by its full name or by its id (A08)."""
    first, second = new_topic(), new_topic()
    subscriptions = [new_subscription(first), new_subscription(second)]
    to_first = register(database, first, 3)
    to_second = register(database, second.rpartition("/")[2], 2)
    turn_until_all_sent(make_relay(store_of(database)), database)
    received = [
        {message.attributes[outbox.TASK_ID_ATTRIBUTE] for message in subscription.drain()}
        for subscription in subscriptions
    ]
    assert received == [set(to_first), set(to_second)]


def test_no_key_begins_with_a_time(database: Database) -> None:
    """The first column of a primary key or an index is never a timestamp: no hot spot (A13)."""
    first_columns = query(
        database,
        """
        SELECT i.TABLE_NAME, i.INDEX_NAME, i.COLUMN_NAME, c.SPANNER_TYPE
        FROM INFORMATION_SCHEMA.INDEX_COLUMNS AS i
        JOIN INFORMATION_SCHEMA.COLUMNS AS c USING (TABLE_SCHEMA, TABLE_NAME, COLUMN_NAME)
        WHERE i.TABLE_SCHEMA = '' AND i.ORDINAL_POSITION = 1""",
    )
    assert len(first_columns) == 6
    assert not [row for row in first_columns if row[3] == "TIMESTAMP"]


def test_the_poll_finds_what_a_scan_of_the_table_finds(
    database: Database, topic: str, new_topic: Callable[..., str]
) -> None:
    """The same ids as plain SQL over the table, in the same order within each shard and topic (A21)."""
    other = new_topic()
    now, random = datetime.now(UTC), Random(5)
    times = [None, None, now - timedelta(hours=1), now - timedelta(days=1), now + timedelta(days=1)]
    columns = ("Id", "Topic", "Data", "Priority", "CreatedAt", "AvailableAt", "SentAt")
    rows = [
        (
            str(uuid.UUID(int=random.getrandbits(128))),
            random.choice([topic, other]),
            b"",
            random.randrange(3),
            now - timedelta(seconds=random.randrange(10**6)),
            random.choice(times),
            random.choice([None, None, None, now]),
        )
        for _ in range(150)
    ]
    with database.batch() as batch:
        batch.insert("AsynchronousTasks", columns, rows)
    scanned = query(
        database,
        """
        SELECT Id, Topic, Shard, AvailableAt IS NULL FROM AsynchronousTasks@{FORCE_INDEX=_BASE_TABLE}
        WHERE SentAt IS NULL AND (AvailableAt IS NULL OR AvailableAt <= CURRENT_TIMESTAMP())
        ORDER BY Shard, Topic, AvailableAt, Priority DESC, CreatedAt""",
    )
    polled = store_of(database).poll(look(topic, other, per_range=150, due=True)).candidates
    found = sorted(
        polled,
        key=lambda each: (
            each.shard,
            each.topic,
            each.available_at or datetime.min.replace(tzinfo=UTC),
            -each.priority,
            each.created_at,
        ),
    )
    assert [[each.id, each.topic, each.shard, each.available_at is None] for each in found] == scanned


def test_urgent_tasks_go_before_older_ones_that_are_not(database: Database, topic: str) -> None:
    """Ten urgent tasks are all in the first turn that sends anything, ninety at most of two hundred others (A16)."""
    ordinary = register(database, topic, 200)
    urgent = register(database, topic, 10, priority=outbox.Priority.HIGH)
    relay = make_relay(store_of(database))
    while not relay.turn().published:
        assert len(unsent(database)) == 210
    left = set(unsent(database))
    assert not left & set(urgent)
    assert len(left & set(ordinary)) >= 110


@pytest.mark.parametrize("one_shard", [False, True])
def test_the_spread_over_the_shards_does_not_matter(database: Database, topic: str, one_shard: bool) -> None:
    """Forty tasks in ten shards or all in one: all are sent, each once, in as few turns as they need (A17)."""
    drawn = [str(uuid.uuid4()) for _ in range(600)]
    of_shard = query(
        database,
        "SELECT id FROM UNNEST(@drawn) AS id WHERE ABS(MOD(FARM_FINGERPRINT(id), 10)) = 3",
        drawn=drawn,
    )
    ids = [id for [id] in of_shard][:40] if one_shard else drawn[:40]
    assert len(ids) == 40
    with database.batch() as batch:
        for id in ids:
            outbox.register(batch, topic, b"", task_id=id)
    publisher = FakePublisher(topic)
    relay = make_relay(store_of(database), publisher, size=20)
    turn_until_all_sent(relay, database, most=6)
    assert sorted(publisher.ids()) == sorted(ids)


def test_a_slow_publish_holds_no_other_group_of_its_turn() -> None:
    """The fast topic is published and marked while the slow one still waits for its answer (A26)."""
    store = FakeStore()
    store._lock = contextlib.nullcontext()  # transactions at once, as on the real service
    for topic in ("slow", "fast"):
        store.insert(topic, topic, serialized())

    class Slow(FakePublisher):
        def publish(
            self, topic: str, rows: Sequence[Row], seconds: float, singly: Collection[str] = frozenset()
        ) -> dict[str, Outcome]:
            if topic == "slow":
                eventually(lambda: store.rows["fast"].sent_at, message="the fast task marked")
            return super().publish(topic, rows, seconds, singly)

    relay = make_relay(store, Slow("slow", "fast"))
    assert 2 in [relay.turn().published for _ in range(5)]


def test_two_relays_and_one_task_are_one_publish(database: Database, topic: str, subscription: Subscription) -> None:
    """Both have polled it; the first sends it, the other counts that it came too late (A30, A44)."""
    counted = Counted()
    [id] = register(database, topic, 1)
    first = make_relay(store_of(database), counted=counted)

    class Overtaken(SpannerStore):
        def claim(self, *arguments: Any) -> None:
            """The other worker is faster."""
            turn_until_all_sent(first, database)
            super().claim(*arguments)

    second = make_relay(Overtaken(database, shards=10), counted=counted)
    assert second.turn().discovered
    assert eventually(lambda: second.turn().taken) == 1
    assert [message.attributes[outbox.TASK_ID_ATTRIBUTE] for message in subscription.drain()] == [id]
    published, already = counted.counts[m.PUBLISHED.name], counted.counts[m.ALREADY_PUBLISHED.name]
    assert (published, already, already / (already + published)) == (1, 1, 0.5)


def test_sent_at_is_written_only_after_the_answer(database: Database, topic: str) -> None:
    """While Pub/Sub has not answered the row is unsent; with another answer, or none, it stays so (A31, A32)."""
    answered, refused, untried = ids = register(database, topic, 3)
    seen = []

    class Observed(FakePublisher):
        def publish(
            self, topic: str, rows: Sequence[Row], seconds: float, singly: Collection[str] = frozenset()
        ) -> dict[str, Outcome]:
            """Answer for two of the three."""
            seen.append(set(unsent(database)))
            return {answered: Sent("1"), refused: Failed("unavailable", "later")}

    relay = make_relay(store_of(database), Observed())
    while not relay.turn().published:
        assert not seen
    assert seen == [set(ids)]
    assert set(unsent(database)) == {refused, untried}


def test_the_clock_of_the_worker_decides_nothing_about_a_task(database: Database, topic: str) -> None:
    """A worker whose clock is a day ahead neither sends a scheduled task nor writes its own time (G3)."""
    [early] = register(database, topic, 1, available_at=datetime.now(UTC) + timedelta(hours=1))
    [ready] = register(database, topic, 1)
    ahead = make_relay(store_of(database), clock=lambda: time.monotonic() + 86_400)
    while not ahead.turn().published:
        assert len(unsent(database)) == 2
    ahead.turn()
    assert unsent(database) == [early]
    [[in_order]] = query(
        database,
        "SELECT CreatedAt < SentAt AND SentAt <= CURRENT_TIMESTAMP() FROM AsynchronousTasks WHERE Id IN UNNEST(@ids)",
        ids=[ready],
    )
    assert in_order


def test_replay_by_any_condition_reports_the_count(database: Database, topic: str, subscription: Subscription) -> None:
    """Plain DML by topic and time sends tasks again, with the count of rows as its answer (A41, by hand)."""
    ids = register(database, topic, 5)
    relay = make_relay(store_of(database))
    turn_until_all_sent(relay, database)
    count = database.run_in_transaction(
        lambda transaction: transaction.execute_update(
            "UPDATE AsynchronousTasks SET SentAt = NULL WHERE Topic = @topic AND SentAt > '2020-01-01'",
            params={"topic": topic},
            param_types={"topic": param_types.STRING},
        )
    )
    turn_until_all_sent(relay, database)
    received = [message.attributes[outbox.TASK_ID_ATTRIBUTE] for message in subscription.pull_until(10)]
    assert count == 5
    assert sorted(received) == sorted(ids * 2)


def test_the_shard_of_the_smallest_number_does_not_overflow(database: Database) -> None:
    """`ABS` after `MOD`: the other way round fails for one hash in 2^64 (G6)."""
    [[expression]] = query(
        database,
        """
        SELECT GENERATION_EXPRESSION FROM INFORMATION_SCHEMA.COLUMNS
        WHERE TABLE_NAME = 'AsynchronousTasks' AND COLUMN_NAME = 'Shard'""",
    )
    hashed = "FARM_FINGERPRINT(COALESCE(OrderingKey, Id))"
    assert hashed in expression
    smallest = expression.replace(hashed, "CAST('-9223372036854775808' AS INT64)")
    assert query(database, f"SELECT {smallest}") == [[8]]
