"""Pauses and limits that running workers follow, by the commands; two workers, audited by what subscribers receive."""

from contextlib import ExitStack
from datetime import UTC, datetime

from google.cloud.spanner_v1.database import Database

from outbox.emulators import Emulators
from tests.support import processes
from tests.support.pubsub import Subscription
from tests.support.relays import divided, register, unsent, wait_until_all_sent, worker
from tests.support.spanner import INSTANCE, PROJECT
from tests.support.waiting import eventually


def outbox(emulators: Emulators, database: Database, *arguments: str) -> str:
    """Run a command, which must succeed, and return what it says."""
    where = ("--project", PROJECT, "--instance", INSTANCE, "--database", database.database_id)
    done = processes.run("outbox", *arguments, *where, environment=emulators.environment())
    assert done.code == 0, done.stderr
    return done.stdout


def test_workers_follow_pauses_and_limits_within_ten_seconds(
    emulators: Emulators, database: Database, topic: str, subscription: Subscription
) -> None:
    """Without a restart: nothing of a paused topic, no more than the fleet's rate of a limited one, all at the end."""
    with ExitStack() as stack:
        workers = [stack.enter_context(worker(emulators, database)) for _ in range(2)]
        eventually(lambda: divided(workers), seconds=30)
        register(database, topic, 20)
        wait_until_all_sent(database)
        subscription.pull_until(20)

        assert outbox(emulators, database, "pause", topic) == f"{topic}: paused\n"
        for each in workers:
            each.wait_for_text('"action": "paused"', seconds=10)
        ids = register(database, topic, 100, priority=100)
        # Tried by both, which have polled since.
        register(database, "missing-topic", 20, priority=0)
        for each in workers:
            each.wait_for_text("missing-topic rests")
        assert subscription.drain() == []

        outbox(emulators, database, "limit", topic, "--rate", "10", "--burst", "10")
        begin = datetime.now(UTC)
        assert "resumed" in outbox(emulators, database, "resume", topic)
        for each in workers:
            each.wait_for_text("10 tasks a second, 10 at once, of which this worker has 1/2", seconds=10)
        received = subscription.pull_until(40, seconds=30)
        seconds = (max(message.publish_time for message in received) - begin).total_seconds()
        assert len(received) <= 10 + 10 * seconds
        print(f"{len(received)} tasks in {seconds:.1f} s at 10 a second with a burst of 10")

        outbox(emulators, database, "limit", topic, "--off")
        eventually(lambda: not set(unsent(database)) & set(ids), seconds=10)
        for each in workers:
            each.stop()
        assert [each.wait() for each in workers] == [0, 0]
    assert len(received) + len(subscription.drain()) >= 100
