"""Failing, scheduled, expiring and at-most-once tasks on the real emulators, the relay in this process."""

import base64
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeyRange, KeySet
from google.cloud.spanner_v1.database import Database
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport

import outbox
from outbox.states import NEVER
from publishworker.connection import open_pubsub
from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.spanner.store import SpannerStore
from publishworker.turn.relay import Relay
from tests.support.parts import look, relay_of
from tests.support.pubsub import PubSub, Subscription
from tests.support.pubsub_server import accept, pubsub_server
from tests.support.relays import account, register, unsent
from tests.support.spanner import PROJECT
from tests.support.waiting import eventually

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "delivery.md"
STATE = "SELECT Attempts, LastError, AvailableAt, SentAt FROM AsynchronousTasks ORDER BY CreatedAt, Sequence"


def make_relay(database: Database, **options: Any) -> Relay:
    """Return a relay of this process that waits little."""
    store = SpannerStore(database, shards=10, emulator=True)
    publisher = options.pop("publisher", None) or PubSubPublisher(open_pubsub(), PROJECT)
    return relay_of(store, publisher, size=100, groups=4, **{"retries": {"initial": 0.1}, **options})


def states(database: Database) -> list[list[Any]]:
    """Return attempts, error, availability and mark of each task."""
    with database.snapshot() as snapshot:
        return list(snapshot.execute_sql(STATE))


def execute(database: Database, statement: str) -> int:
    """Run one DML statement as any SQL client would."""
    changed: int = database.run_in_transaction(lambda transaction: transaction.execute_update(statement))
    return changed


def test_a_topic_that_is_missing_and_comes_back_loses_nothing(
    database: Database, pubsub: PubSub, subscription: Subscription
) -> None:
    """Probed tasks alone are charged; when somebody has made the topic all are sent, and their rows are clean."""
    topic_id = f"late-{subscription.topic.rpartition('-')[2]}"
    ids = register(database, topic_id, 30)
    relay = make_relay(database)

    def charged() -> int:
        relay.turn()
        return sum(attempts for attempts, *_ in states(database))

    eventually(lambda: charged() >= 10, seconds=30)
    assert all(error is None or error.startswith("not_found: ") for _, error, *_ in states(database))
    late = pubsub.new_subscription(pubsub.new_topic(topic_id))
    eventually(lambda: relay.turn() and not unsent(database), seconds=60)
    assert {(attempts, error, available_at) for attempts, error, available_at, _ in states(database)} == {
        (0, None, None)
    }
    assert account(ids, late).lost == frozenset()


def test_a_dead_task_is_listed_stays_and_is_sent_when_an_operator_says_so(
    database: Database, topic: str, subscription: Subscription
) -> None:
    """Undecodable, then mended by hand; by the statements of the guide."""
    listing, retry = re.findall(r"```sql\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    data = base64.b64encode(b"\xff\xff not a message")
    with database.batch() as batch:
        columns = ("Id", "Topic", "Data", "Priority", "CreatedAt")
        batch.insert("AsynchronousTasks", columns, [("bad", topic, data, 1, COMMIT_TIMESTAMP)])
    relay = make_relay(database)
    eventually(lambda: relay.turn().charged, seconds=20)
    [[attempts, error, available_at, sent_at]] = states(database)
    assert (attempts, available_at, sent_at) == (1, NEVER, None)
    assert error == "undecodable: Data is not a serialized google.pubsub.v1.PubsubMessage"
    assert relay.turn().polled == 0
    good = base64.b64encode(b"\x0a\x05hello").decode()
    assert execute(database, f"UPDATE AsynchronousTasks SET Data = FROM_BASE64('{good}') WHERE TRUE") == 1
    with database.snapshot() as snapshot:
        assert list(snapshot.execute_sql(listing)) == [["bad", topic, 1, error]]
    assert execute(database, retry.replace("the-id", "bad")) == 1
    eventually(lambda: relay.turn() and not unsent(database), seconds=20)
    [message] = subscription.pull_until(1)
    assert message.data == b"hello"
    assert states(database)[0][:3] == [0, None, None]


def test_an_expired_task_is_dead_and_a_sent_one_is_sent_again_after_its_time(
    database: Database, topic: str, subscription: Subscription
) -> None:
    """ExpiresAt is looked at under the lock, and a mark takes it away."""
    now = datetime.now(UTC)
    [late] = register(database, topic, 1, expires_at=now - timedelta(seconds=1))
    [good] = register(database, topic, 1, expires_at=now + timedelta(hours=1))
    relay = make_relay(database)
    eventually(lambda: relay.turn() and len(unsent(database)) == 1, seconds=20)
    assert unsent(database) == [late]
    assert states(database)[0][1].startswith("expired: ExpiresAt was ")
    execute(database, f"UPDATE AsynchronousTasks SET SentAt = NULL WHERE Id = '{good}'")
    eventually(lambda: relay.turn() and len(unsent(database)) == 1, seconds=20)
    received = [message.attributes[outbox.TASK_ID_ATTRIBUTE] for message in subscription.pull_until(2)]
    assert received == [good, good]


def test_an_at_most_once_task_is_marked_when_pubsub_sees_it(database: Database) -> None:
    """The commit is over before the request is made."""
    [id] = register(database, "orders", 1, at_most_once=True)
    seen: list[list[Any]] = []

    def look_and_accept(request: Any, context: grpc.ServicerContext) -> Any:
        seen.extend(states(database))
        return accept(request, context)

    with pubsub_server() as server:
        server.publish = look_and_accept
        transport = PublisherGrpcTransport(channel=grpc.insecure_channel(server.address))
        relay = make_relay(database, publisher=PubSubPublisher(transport, PROJECT))
        eventually(lambda: relay.turn() and not unsent(database) and seen, seconds=20)
        relay.finish()
        assert [message.attributes[outbox.TASK_ID_ATTRIBUTE] for r in server.requests for message in r.messages] == [id]
    assert seen[0][3] is not None


def test_an_at_most_once_task_that_is_refused_is_unsent_again(database: Database) -> None:
    """Pub/Sub said no: the mark is taken back, with the attempt."""
    register(database, "missing", 1, at_most_once=True, expires_at=NEVER)
    relay = make_relay(database)
    eventually(lambda: relay.turn().charged, seconds=20)
    [[attempts, error, available_at, sent_at]] = states(database)
    assert (attempts, sent_at) == (1, None)
    assert error.startswith("not_found: ")
    assert available_at is not None
    assert available_at < NEVER


def test_a_topic_outside_the_allowed_ones_is_never_published_to(
    database: Database, topic: str, subscription: Subscription
) -> None:
    """Dead at once, with the reason, also if the topic exists."""
    register(database, topic, 3)
    publisher = PubSubPublisher(open_pubsub(), PROJECT, lambda _name: False)
    relay = make_relay(database, publisher=publisher)
    eventually(lambda: relay.turn().charged, seconds=20)
    assert {error.partition(":")[0] for _, error, *_ in states(database)} == {"topic_not_allowed"}
    assert {available_at for _, _, available_at, _ in states(database)} == {NEVER}
    assert subscription.drain() == []


def test_names_that_only_another_writer_can_give_are_dead_or_sent(
    database: Database, topic: str, subscription: Subscription
) -> None:
    """Topics that no topic can have, the empty one too; an id may be empty, and the message goes out with it."""
    topics = ["", "\0", "\U0010ffff" * 400, "projects/x/topics/", "a b"]
    names = {f"bad {n}": name for n, name in enumerate(topics)} | {"": topic}
    with database.batch() as batch:
        batch.insert(
            "AsynchronousTasks",
            ("Id", "Topic", "Data", "Priority", "CreatedAt"),
            [(id, name, b"", 50, COMMIT_TIMESTAMP) for id, name in names.items()],
        )
    relay = make_relay(database)

    def dead() -> list[str]:
        relay.turn()
        return [error.partition(":")[0] for _, error, available_at, _ in states(database) if available_at == NEVER]

    eventually(lambda: len(dead()) == len(topics), seconds=20)
    assert set(dead()) == {"invalid_topic"}
    assert sorted(unsent(database)) == [id for id in names if id]
    assert [message.attributes["asynchronous_task_id"] for message in subscription.drain()] == [""]


def test_scheduled_and_dead_tasks_lie_outside_of_the_ranges_of_the_poll(database: Database, topic: str) -> None:
    """The due range, read as a range of the index up to now: what is due, and none of those that are not."""
    due = set(register(database, topic, 5, available_at=datetime.now(UTC) - timedelta(hours=1)))
    register(database, topic, 300, available_at=datetime.now(UTC) + timedelta(hours=1))
    with database.batch() as batch:
        columns = ("Id", "Topic", "Data", "Priority", "CreatedAt", "AvailableAt")
        batch.insert(
            "AsynchronousTasks", columns, [(f"d{n}", topic, b"", 1, COMMIT_TIMESTAMP, NEVER) for n in range(300)]
        )
    first, now = datetime(1, 1, 1, tzinfo=UTC), datetime.now(UTC)
    ranges = [
        KeyRange(start_closed=[shard, None, topic, first], end_closed=[shard, None, topic, now]) for shard in range(10)
    ]
    ready = [KeyRange(start_closed=[n, None, topic, None], end_closed=[n, None, topic, None]) for n in range(10)]
    with database.snapshot(multi_use=True) as snapshot:
        index = "AsynchronousTasksToSend"
        in_range = {row[0] for row in snapshot.read("AsynchronousTasks", ["Id"], KeySet(ranges=ranges), index=index)}
        in_ready = list(snapshot.read("AsynchronousTasks", ["Id"], KeySet(ranges=ready), index=index))
    assert (in_range, in_ready) == (due, [])
    polled = SpannerStore(database, shards=10).poll(look(topic, due=True)).candidates
    assert {each.id for each in polled} == due


@pytest.mark.parametrize("off", [-60, 60])
def test_every_time_that_is_written_is_the_databases(database: Database, off: int) -> None:
    """A worker whose clocks are a minute off: a schedule and a backoff are what the database says."""
    register(database, "missing", 1)
    later = datetime.now(UTC) + timedelta(seconds=30)
    register(database, "missing", 1, available_at=later)
    clock = datetime.now(UTC).timestamp() + off
    seconds = iter(range(10**6))
    relay = make_relay(database, clock=lambda: clock + next(seconds), retries={"initial": 1000})
    before = datetime.now(UTC)
    eventually(lambda: relay.turn().charged, seconds=20)
    after = datetime.now(UTC)
    [[attempts, _, available_at, _], scheduled] = states(database)
    assert attempts == 1
    assert before + timedelta(seconds=500) <= available_at <= after + timedelta(seconds=1000)
    assert scheduled == [0, None, later, None]
