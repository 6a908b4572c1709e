"""Tasks that wait for a time, a topic or an operator, and hold nobody else up; with a real worker."""

import base64
import time
from datetime import UTC, datetime, timedelta

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database

from outbox.emulators import Emulators
from tests.support.pubsub import Subscription
from tests.support.relays import register, unsent, worker
from tests.support.waiting import eventually

MANY = 2_000


def states(database: Database, where: str = "TRUE") -> dict[str, int]:
    """Count the tasks by what they are."""
    statement = f"""SELECT CASE WHEN SentAt IS NOT NULL THEN 'sent' WHEN AvailableAt IS NULL THEN 'ready'
      WHEN AvailableAt >= TIMESTAMP '9999-12-31T00:00:00Z' THEN 'dead' ELSE 'put off' END AS State, COUNT(*)
      FROM AsynchronousTasks WHERE {where} GROUP BY State"""
    with database.snapshot() as snapshot:
        return dict(snapshot.execute_sql(statement))


def poison(database: Database, topic: str, data: bytes, count: int = MANY) -> None:
    """Write urgent tasks, as another service might."""
    columns = ("Id", "Topic", "Data", "Priority", "CreatedAt")
    body = base64.b64encode(data)
    for start in range(0, count, 100):
        rows = [(f"bad-{n}", topic, body, 100, COMMIT_TIMESTAMP) for n in range(start, start + 100)]
        with database.batch() as batch:
            batch.insert("AsynchronousTasks", columns, rows)


def test_a_scheduled_task_is_sent_when_it_is_due_and_not_before(
    emulators: Emulators, database: Database, topic: str, subscription: Subscription
) -> None:
    """By the publish time that Pub/Sub gave each message; what is scheduled for later stays."""
    register(database, topic, 100, available_at=datetime(2090, 1, 1, tzinfo=UTC))
    with worker(emulators, database) as process:
        process.wait_for_text('"start"')
        due = datetime.now(UTC) + timedelta(seconds=3)
        register(database, topic, 20, available_at=due)
        register(database, topic, 1)
        early, *rest = subscription.pull_until(21, seconds=30)
        process.stop()
        assert process.wait() == 0
    assert early.publish_time < due
    late = [(message.publish_time - due).total_seconds() for message in rest]
    assert min(late) >= 0
    print(f"sent {min(late):.2f} to {max(late):.2f} s after they were due")
    assert states(database) == {"sent": 21, "put off": 100}


@pytest.mark.parametrize("data", [b"\x0a\x05hello", b"\xff\xff"], ids=["missing-topic", "undecodable"])
def test_two_thousand_urgent_tasks_that_fail_keep_no_good_one_waiting(
    emulators: Emulators, database: Database, topic: str, subscription: Subscription, data: bytes
) -> None:
    """Good tasks of the lowest priority are sent while the others are still there, or dead."""
    missing = data != b"\xff\xff"
    poison(database, "missing-topic" if missing else topic, data)
    waits = []
    with worker(emulators, database) as process:
        process.wait_for_text("topic_rests" if missing else '"dead"')
        for _ in range(5):
            begin = time.monotonic()
            register(database, topic, 1, priority=0)
            subscription.pull_until(1, seconds=30)
            waits.append(time.monotonic() - begin)
        if not missing:
            eventually(lambda: not unsent(database) or states(database).get("dead") == MANY, seconds=60)
        process.stop()
        assert process.wait() == 0
    print(f"good tasks arrived after {', '.join(f'{wait:.2f}' for wait in waits)} s")
    left = states(database)
    assert left["sent"] == 5
    assert (left.get("ready", 0) + left.get("put off", 0) if missing else left["dead"]) == MANY
    assert states(database, "Attempts > 0").get("put off", 0) <= 200
