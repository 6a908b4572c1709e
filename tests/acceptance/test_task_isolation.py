"""Scheduled and failing tasks, which delay no other task; with a real worker."""

import time
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from tests.support.commands import row
from tests.support.fakes import serialized
from tests.support.operations import insert
from tests.support.outages import dead, hang, is_sent, recorded, register_beside
from tests.support.pubsub import Subscription
from tests.support.pubsub_server import accept, pubsub_server, refuse
from tests.support.relays import register, worker
from tests.support.spanner import count
from tests.support.waiting import eventually

#: More tasks than a worker has in flight.
MANY = 1_000


def test_a_scheduled_task_is_sent_when_it_is_due_and_not_before(
    emulators: Emulators, database: Database, topic: str, subscription: Subscription
) -> None:
    """By the publish time that Pub/Sub gave each message; tasks that are scheduled for later stay."""
    register(database, topic, 20, available_at=datetime(2090, 1, 1, tzinfo=UTC))
    with worker(emulators, database) as process:
        process.wait_for_text('"start"')
        due = datetime.now(UTC) + timedelta(seconds=3)
        register(database, topic, 20, available_at=due)
        register(database, topic, 1)
        early, *rest = subscription.pull_until(21, seconds=30)
        process.end()
    assert early.publish_time < due
    late = [(message.publish_time - due).total_seconds() for message in rest]
    assert min(late) >= 0
    print(f"sent {min(late):.2f} to {max(late):.2f} s after they were due")
    assert count(database, "SentAt IS NOT NULL") == 21
    assert count(database, "SentAt IS NULL AND AvailableAt > '2089-01-01'") == 20


@pytest.mark.extended
@pytest.mark.parametrize("missing", [True, False], ids=["missing-topic", "undecodable"])
def test_failing_urgent_tasks_delay_no_good_task(
    emulators: Emulators, own_database: Database, topic: str, subscription: Subscription, missing: bool
) -> None:
    """Good tasks of the lowest priority are sent while the others are still there, or dead."""
    data = serialized() if missing else b"\xff"
    bad_topic = "missing-topic" if missing else topic
    insert(own_database, [row(f"bad-{n}", topic=bad_topic, Data=data, Priority=100) for n in range(MANY)])
    waits = []
    with worker(emulators, own_database) as process:
        process.wait_for_text("circuit_open" if missing else '"dead"')
        for _ in range(5):
            begin = time.monotonic()
            register(own_database, topic, 1, priority=0)
            subscription.pull_until(1, seconds=30)
            waits.append(time.monotonic() - begin)
        if not missing:
            eventually(lambda: dead(own_database) == MANY, seconds=60)
        process.end()
    print(f"good tasks arrived after {', '.join(f'{wait:.2f}' for wait in waits)} s")
    assert count(own_database, "SentAt IS NOT NULL") == 5
    assert count(own_database, "SentAt IS NULL") == MANY
    if missing:
        assert dead(own_database) == 0
        assert count(own_database, "Attempts > 0") <= 200


@pytest.mark.extended
def test_failing_topics_delay_no_other_topic(emulators: Emulators, database: Database) -> None:
    """One topic hangs, one fails: their tasks wait without failed attempts. Those of a third are sent in seconds."""
    answers = {"silent": hang, "failing": refuse(grpc.StatusCode.UNAVAILABLE)}
    options = ("--batch-size", "20", "--publish-timeout", "0.5")
    with (
        pubsub_server() as server,
        worker(emulators, database, *options, PUBSUB_EMULATOR_HOST=server.address) as process,
    ):
        server.publish = lambda request, context: answers.get(request.topic.rpartition("/")[2], accept)(
            request, context
        )
        for topic in answers:
            register(database, topic, 60)
        for topic in answers:
            process.wait_for_text(f"Circuit open for topic {topic}")
        for _ in range(5):
            one = register_beside(database, "good", 1)
            eventually(lambda one=one: is_sent(database, one), seconds=10, message="a task of the good topic is sent")
        assert recorded(database) == 0
