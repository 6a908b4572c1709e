"""The relay in this process on the real emulators: polls, publishes and marks."""

import base64
import uuid
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeyRange, KeySet
from google.cloud.spanner_v1.database import Database

import outbox
from outbox.program.channels import open_pubsub
from outbox.table.connection import open_database
from outbox.table.ddl import Layout
from outbox.table.states import NEVER
from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.spanner.grants import verify_grants
from publishworker.spanner.store import SpannerStore
from publishworker.spanner.write_errors import DatabaseMissing
from publishworker.telemetry import metrics as m
from publishworker.turn.relay import Relay
from publishworker.types import Answer, Failed, LockedRow, Published
from tests.support import real
from tests.support.fakes import Counted, FakePublisher
from tests.support.parts import poll_request, relay_of
from tests.support.pubsub import PubSub, Subscription
from tests.support.relays import EACH_ONCE, account, execute, register, unsent
from tests.support.spanner import PROJECT, place, query
from tests.support.waiting import eventually


def make_relay(
    database: Database | SpannerStore,
    publisher: PubSubPublisher | None = None,
    counted: Counted | None = None,
    *,
    size: int = 50,
    emulator: bool = True,
    **options: Any,
) -> Relay:
    kind = real.Store if emulator else SpannerStore
    store = kind(database, Layout(10)) if isinstance(database, Database) else database
    return relay_of(store, publisher or PubSubPublisher(open_pubsub(place()), PROJECT), counted, size=size, **options)


def turn_until_all_sent(relay: Relay, database: Database, max_turns: int = 60) -> int:
    """Turn until nothing is unsent; return how many tasks were published."""
    published = 0
    for _ in range(max_turns):
        turn = relay.turn()
        published += turn.published
        if not (unsent(database) or turn.in_flight):
            return published
    pytest.fail(f"{len(unsent(database))} unsent after {max_turns} turns")


def test_a_dropped_table_counts_as_a_missing_database(own_database: Database) -> None:
    """Spanner answers a query of a missing table with INVALID_ARGUMENT, and not with NOT_FOUND."""
    own_database.update_ddl(["DROP TABLE AsynchronousTaskTopics"]).result(30)
    with pytest.raises(DatabaseMissing, match="Table not found: AsynchronousTaskTopics"):
        make_relay(own_database).turn()


def test_a_worker_starts_beside_the_open_transaction_of_a_killed_client(database: Database) -> None:
    """The emulator aborts the writes of the check at the start several times before it ends that transaction."""
    session = database.session()
    session.create()
    abandoned = session.transaction()
    abandoned.begin()
    abandoned.execute_update("DELETE FROM AsynchronousTasks WHERE Id = 'none'")
    verify_grants(open_database(place(database.database_id)))


def test_the_subscriber_receives_the_registered_messages(
    database: Database, topic: str, subscription: Subscription
) -> None:
    """Byte for byte (A05, A06); nothing of a rolled back transaction (A02). Another service may write rows itself."""

    def roll_back(transaction: Any) -> None:
        outbox.register(transaction, topic, b"rolled back")
        raise LookupError

    counted = Counted()
    outbox.set_metrics(counted)
    try:
        with pytest.raises(LookupError):
            database.run_in_transaction(roll_back)
    finally:
        outbox.set_metrics(None)
    assert counted.counts == {m.REGISTERED.name: 1}  # of calls, so it may exceed the rows (A11)
    data = bytes(range(256)) + b"hell"
    with database.batch() as batch:
        ours = outbox.register(batch, topic, data, {"kind": "\u0000\u00fc"}, ordering_key="customer 1")
        columns = ("Id", "Topic", "Data", "Priority", "CreatedAt")
        hello = base64.b64encode(b"\x0a\x05hello")
        batch.insert("AsynchronousTasks", columns, [("theirs", topic, hello, 1, COMMIT_TIMESTAMP)])
    turn_until_all_sent(make_relay(database), database)
    received = [(each.data, dict(each.attributes), each.ordering_key) for each in subscription.drain()]
    assert sorted(received, key=lambda each: len(each[0])) == [
        (b"hello", {outbox.TASK_ID_ATTRIBUTE: "theirs"}, ""),
        (data, {"kind": "\u0000\u00fc", outbox.TASK_ID_ATTRIBUTE: ours}, "customer 1"),
    ]


def test_everything_registered_is_received_once(database: Database, pubsub: PubSub) -> None:
    """On its topic, by name or ID (A08), in ten shards or one (A17), also of eight batches that abort each other.

    SentAt is Spanner's time, and the row is kept (A34, A35).
    """
    first, second = pubsub.new_topic(), pubsub.new_topic()
    subscriptions = [pubsub.new_subscription(first), pubsub.new_subscription(second)]
    ids: list[list[str]] = [[], []]
    for size, options in ((1, {}), (7, {}), (100, {}), (5, {"batches": 8, "emulator": False})):
        ids[0] += register(database, first, 10)
        ids[1] += register(database, second.rpartition("/")[2], 10, ordering_key="of one shard")
        published = turn_until_all_sent(make_relay(database, size=size, **{"batches": 4, **options}), database)
        assert published == 20 or "emulator" in options
    rows = query(database, "SELECT CreatedAt, SentAt FROM AsynchronousTasks")
    assert len(rows) == 80
    assert all(created_at < sent_at for created_at, sent_at in rows)
    assert [account(*each) for each in zip(ids, subscriptions, strict=True)] == [EACH_ONCE] * 2


def test_a_task_is_sent_again_by_plain_dml(
    database: Database, topic: str, subscription: Subscription
) -> None:  # OUT-TWICE-1
    """`SentAt = NULL` alone, with the count of rows as its answer (A41, by hand), also for one that had failed."""
    ids = register(database, topic, 3, data=b"\x00\xffbody")
    with database.batch() as batch:
        batch.update("AsynchronousTasks", ("Id", "Attempts", "LastError"), [(ids[0], 3, "once")])
    relay = make_relay(database)
    turn_until_all_sent(relay, database)
    again = f"UPDATE AsynchronousTasks SET SentAt = NULL WHERE Topic = '{topic}' AND SentAt > '2020-01-01'"
    assert execute(database, again) == 3
    turn_until_all_sent(relay, database)
    received = subscription.pull_until(6)
    assert {each.data for each in received} == {b"\x00\xffbody"}
    assert sorted(each.attributes[outbox.TASK_ID_ATTRIBUTE] for each in received) == sorted(ids * 2)
    assert all(len(each.attributes) == 1 for each in received)
    assert len({each.message_id for each in received}) == 6


def test_the_poll_returns_the_same_tasks_as_a_scan_of_the_table(database: Database, topic: str) -> None:
    """The same ids as plain SQL over the table, in the same order within each shard and topic (A21).

    The ranges of the index that it reads have no sent, scheduled or dead task (A22).
    """
    now, random, other = datetime.now(UTC), Random(5), f"{topic}-other"
    times = [None, None, now - timedelta(hours=1), now - timedelta(days=1), now + timedelta(days=1), NEVER]
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
    polled = SpannerStore(database, Layout(10)).poll(poll_request(topic, other, per_range=150, due=True))
    first = datetime.min.replace(tzinfo=UTC)
    found = sorted(
        polled, key=lambda each: (each.shard, each.topic, each.available_at or first, -each.priority, each.created_at)
    )
    assert [[each.id, each.topic, each.shard, each.available_at is None] for each in found] == scanned

    def in_range(name: str, start: datetime | None, end: datetime | None) -> set[str]:
        keys = [[[shard, None, name, each] for each in (start, end)] for shard in range(10)]
        ranges = KeySet(ranges=[KeyRange(start_closed=first, end_closed=last) for first, last in keys])
        with database.snapshot() as snapshot:
            return {id for [id] in snapshot.read("AsynchronousTasks", ["Id"], ranges, index="AsynchronousTasksToSend")}

    ranges = [(name, *each) for name in (topic, other) for each in ((None, None), (first, now))]
    assert set().union(*(in_range(*each) for each in ranges)) == {id for id, *_ in scanned}


def test_two_relays_publish_a_task_once(database: Database, topic: str, subscription: Subscription) -> None:
    """Both have polled it; the first sends it, the other counts that it came too late (A30, A44)."""
    counted = Counted()
    [id] = register(database, topic, 1)
    first = make_relay(database, counted=counted)

    class Overtaken(SpannerStore):
        def claim(self, *arguments: Any, **options: Any) -> None:
            turn_until_all_sent(first, database)
            super().claim(*arguments, **options)

    second = make_relay(Overtaken(database, Layout(10)), counted=counted)
    assert eventually(lambda: second.turn().already_sent) == 1
    assert [message.attributes[outbox.TASK_ID_ATTRIBUTE] for message in subscription.drain()] == [id]
    published, already = counted.counts[m.PUBLISHED.name], counted.counts[m.ALREADY_PUBLISHED.name]
    assert (published, already, already / (already + published)) == (1, 1, 0.5)


def test_sent_at_is_written_only_after_pubsub_has_answered(database: Database, topic: str) -> None:  # OUT-LOSS-3
    """While Pub/Sub has not answered the row is unsent; with another answer, or none, it stays so (A31, A32)."""
    answered, refused, untried = ids = register(database, topic, 3)
    seen = []

    class Observed(FakePublisher):
        def publish(
            self, topic: str, rows: Sequence[LockedRow], seconds: float, alone: Collection[str] = frozenset()
        ) -> dict[str, Answer]:
            seen.append(set(unsent(database)))
            return {answered: Published("1"), refused: Failed("unavailable", "later")}

    relay = make_relay(database, Observed())
    while not relay.turn().published:
        assert not seen
    assert seen == [set(ids)]
    assert set(unsent(database)) == {refused, untried}
