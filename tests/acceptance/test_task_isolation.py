"""Scheduled and failing tasks, which delay no other task; with a real worker."""

from datetime import UTC, datetime, timedelta

from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from tests.support.pubsub import Subscription
from tests.support.relays import register, worker
from tests.support.spanner import count


def test_a_scheduled_task_is_sent_when_it_is_due_and_not_before(
    emulators: Emulators, database: Database, topic: str, subscription: Subscription
) -> None:  # OUT-ORDER-2
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
