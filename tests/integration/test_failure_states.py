"""Failing, expiring and at-most-once tasks on the real emulators, the relay in this process."""

import base64
import re
import time
from pathlib import Path
from typing import Any

import grpc
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport

import outbox
from outbox.table.layouts import Layout
from outbox.table.states import NEVER
from publishworker.pubsub.client import open_pubsub
from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.turn.relay import Relay
from tests.support import real
from tests.support.parts import relay_of
from tests.support.pubsub import PubSub, Subscription
from tests.support.pubsub_server import accept, pubsub_server, refuse
from tests.support.relays import UNDECODABLE, account, execute, register, unsent
from tests.support.spanner import PROJECT, place, query
from tests.support.waiting import eventually

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "delivery.md"
#: Attempts, error, availability and mark of each task.
STATE = "SELECT Attempts, LastError, AvailableAt, SentAt FROM AsynchronousTasks ORDER BY CreatedAt, Sequence"


def make_relay(database: Database, **options: Any) -> Relay:
    """Return a relay of this process that waits little: its clock runs ten times as fast."""
    store = real.Store(database, Layout(10))
    publisher = options.pop("publisher", None) or PubSubPublisher(open_pubsub(place()), PROJECT)
    return relay_of(
        store,
        publisher,
        size=100,
        batches=4,
        **{"retries": {"initial": 0.1}, "clock": lambda: 10 * time.monotonic(), **options},
    )


def test_a_topic_that_is_created_later_loses_no_task(
    database: Database, pubsub: PubSub, subscription: Subscription
) -> None:
    """Only attempts of probed tasks are recorded. Once the topic exists, all are sent, and their rows are clean."""
    topic_id = f"late-{subscription.topic.rpartition('-')[2]}"
    ids = register(database, topic_id, 30)
    relay = make_relay(database)

    def recorded() -> int:
        relay.turn()
        return sum(attempts for attempts, *_ in query(database, STATE))

    eventually(lambda: recorded() >= 10, seconds=30)
    assert all(error is None or error.startswith("not_found: ") for _, error, *_ in query(database, STATE))
    late = pubsub.new_subscription(pubsub.new_topic(topic_id))
    eventually(lambda: relay.turn() and not unsent(database), seconds=60)
    assert {tuple(state[:3]) for state in query(database, STATE)} == {(0, None, None)}
    assert account(ids, late).lost == frozenset()


def test_a_dead_task_is_listed_and_sent_after_an_operators_retry(
    database: Database, topic: str, subscription: Subscription
) -> None:
    """Undecodable, then repaired by hand, with the statements of the guide."""
    listing, retry = re.findall(r"```sql\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    with database.batch() as batch:
        columns = ("Id", "Topic", "Data", "Priority", "CreatedAt")
        batch.insert("AsynchronousTasks", columns, [("bad", topic, UNDECODABLE, 1, COMMIT_TIMESTAMP)])
    relay = make_relay(database)
    eventually(lambda: relay.turn().recorded, seconds=20)
    [[attempts, error, available_at, sent_at]] = query(database, STATE)
    assert (attempts, available_at, sent_at) == (1, NEVER, None)
    assert error == "undecodable: Data is not a serialized google.pubsub.v1.PubsubMessage"
    assert relay.turn().polled == 0
    good = base64.b64encode(b"\x0a\x05hello").decode()
    assert execute(database, f"UPDATE AsynchronousTasks SET Data = FROM_BASE64('{good}') WHERE TRUE") == 1
    assert query(database, listing) == [["bad", topic, 1, error]]
    assert execute(database, retry.replace("the-id", "bad")) == 1
    eventually(lambda: relay.turn() and not unsent(database), seconds=20)
    [message] = subscription.pull_until(1)
    assert message.data == b"hello"
    assert query(database, STATE)[0][:3] == [0, None, None]


def test_an_at_most_once_task_is_marked_before_pubsub_receives_it(database: Database) -> None:
    """If Pub/Sub refuses, the mark is removed, and the attempt is recorded."""
    [id] = register(database, "orders", 1, at_most_once=True, expires_at=NEVER)
    seen: list[list[Any]] = []

    def look_and_refuse(request: Any, context: grpc.ServicerContext) -> Any:
        seen.extend(query(database, STATE))
        return refuse(grpc.StatusCode.NOT_FOUND)(request, context)

    with pubsub_server() as server:
        server.publish = look_and_refuse
        transport = PublisherGrpcTransport(channel=grpc.insecure_channel(server.address))
        relay = make_relay(database, publisher=PubSubPublisher(transport, PROJECT))
        eventually(lambda: relay.turn().recorded, seconds=20)
        [[attempts, error, available_at, sent_at]] = query(database, STATE)
        assert (attempts, error.partition(":")[0], sent_at) == (1, "not_found", None)
        assert available_at < NEVER
        server.publish, refused = accept, len(server.requests)
        eventually(lambda: relay.turn() and not unsent(database), seconds=20)
        relay.finish()
        assert len(server.requests) == refused + 1
        assert {each.attributes[outbox.TASK_ID_ATTRIBUTE] for r in server.requests for each in r.messages} == {id}
    assert all(sent_at for *_, sent_at in seen)


def test_names_that_register_refuses_are_dead_or_sent(
    database: Database, topic: str, subscription: Subscription
) -> None:
    """Invalid topics, the empty one too. An ID may be empty, and the message has it."""
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
        return [
            error.partition(":")[0] for _, error, available_at, _ in query(database, STATE) if available_at == NEVER
        ]

    eventually(lambda: len(dead()) == len(topics), seconds=20)
    assert set(dead()) == {"invalid_topic"}
    assert sorted(unsent(database)) == [id for id in names if id]
    assert [message.attributes["asynchronous_task_id"] for message in subscription.drain()] == [""]
