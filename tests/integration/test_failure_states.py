"""Failing, expiring, hostile and at-most-once rows on the real emulators, the relay in this process."""

import itertools
import re
import time
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport

import outbox
from outbox.program.pubsub import open_pubsub
from outbox.table.connection import open_database
from outbox.table.layouts import Layout
from outbox.table.states import NEVER
from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.telemetry import metrics as m
from publishworker.turn.relay import Relay
from publishworker.types import Failed
from tests.support import real
from tests.support.fakes import Counted, FakePublisher
from tests.support.parts import relay_of
from tests.support.pubsub import Subscription
from tests.support.pubsub_server import PubSubServer, accept, refuse
from tests.support.relays import register, unsent
from tests.support.spanner import PROJECT, place, query
from tests.support.store_harness import SpannerHarness
from tests.support.waiting import eventually

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


def test_an_at_most_once_task_is_marked_before_pubsub_receives_it(database: Database) -> None:
    """If Pub/Sub refuses, the mark is removed, and the attempt is recorded."""
    [id] = register(database, "orders", 1, at_most_once=True, expires_at=NEVER)
    seen: list[list[Any]] = []

    def look_and_refuse(request: Any, context: grpc.ServicerContext) -> Any:
        seen.extend(query(database, STATE))
        return refuse(grpc.StatusCode.NOT_FOUND)(request, context)

    with PubSubServer() as server:
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


MAX, MIN = 2**63 - 1, -(2**63)
FIRST, LAST = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
#: The ends of each column that another writer can set. The values of ID are the ends of Id.
ENDS: dict[str, tuple[Any, ...]] = {
    "times_sent": (MAX, MAX - 1, MIN, -1),
    "attempts": (MAX, MIN, -1),
    "priority": (MAX, MIN),
    "sequence": (MAX, MIN),
    "available_at": (FIRST, LAST),
    "expires_at": (FIRST, LAST),
    "created_at": (FIRST,),
    "last_error": ("", "\0\U0010ffff" * 1000),
    "blocked_by": ("", "\U0010ffff" * 64),
    "ordering_key": ("\U0010ffff" * 256, "\0"),
    "topic": ("", "\U0010ffff" * 400),
}
GOOD = tuple(f"good {number}" for number in range(20))


@pytest.mark.parametrize(
    ("failing", "once"),
    [
        (False, False),
        pytest.param(True, False, marks=pytest.mark.extended),
        pytest.param(False, True, marks=pytest.mark.extended),
        pytest.param(True, True, marks=pytest.mark.long("both")),
    ],
)
def test_no_value_of_a_row_makes_spanner_refuse_a_batch(
    database: Database, caplog: pytest.LogCaptureFixture, *, once: bool, failing: bool
) -> None:
    """The end of each column, and all pairs of ends: the commits that mark, record failures and undo marks succeed."""
    harness, counted, publisher, seconds = SpannerHarness(database), Counted(), FakePublisher("orders"), 0.0
    store = real.Store(open_database(place(database.database_id)), Layout(10))
    relay = relay_of(store, publisher, counted, size=50, clock=lambda: seconds)
    harness.insert("", at_most_once=once)
    values = [(name, value) for name, ends in ENDS.items() for value in ends]
    rows = [dict([each]) for each in values]
    rows += [dict(pair) for pair in itertools.combinations(values[::2], 2) if len(dict(pair)) == 2]
    for number, columns in enumerate(rows):
        harness.insert(f"{number}", **{"at_most_once": once, **columns})
    if failing:
        failure = Failed("data_loss" if not once else "invalid_argument", "no")
        publisher.failing = dict.fromkeys(map(str, range(len(rows))), failure)
    for id in GOOD:
        harness.insert(id, at_most_once=once)
    for _ in range(20):
        relay.turn()
        seconds += 0.5
    relay.finish()
    assert not re.search("ommit failed|cannot be changed", caplog.text)
    assert counted.counts[m.UNCOMMITTED.name] == counted.counts[m.UNCONFIRMED.name] == 0
    assert len(publisher.ids()) == len(set(publisher.ids()))
    states = query(database, "SELECT Id, SentAt, AvailableAt FROM AsynchronousTasks WHERE Topic = 'orders'")
    assert {id for id, sent_at, _ in states if sent_at} >= {*GOOD}
    assert not [id for id, sent_at, available_at in states if sent_at is None and available_at is None]
