"""OUT-ORDER-1: order while real workers are killed and publishes fail, and tasks that block their key."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database

import outbox
from outbox.devtools.emulators import Emulators
from outbox.table.states import NEVER
from tests.support.pubsub import PubSub
from tests.support.relays import execute, first_deliveries, insert_undecodable, unsent, worker

pytestmark = pytest.mark.timeout(180)


def register_keys(database: Database, topic: str, keys: str, **options: Any) -> list[str]:
    """Register a task for each letter of `keys`, in one transaction; a dot is no key."""
    with database.batch() as batch:
        return [
            outbox.register(batch, topic, b"", ordering_key=key.strip("."), priority=n, **options)
            for n, key in enumerate(keys)
        ]


@pytest.mark.parametrize("mode", ["block", "skip"])
def test_a_dead_head_blocks_its_key_or_is_skipped(
    emulators: Emulators, database: Database, topic: str, pubsub: PubSub, mode: str
) -> None:
    """It blocks no other key, and no task without one; once an operator has retried it, all goes out in order.

    Key s: a scheduled task blocks the tasks behind it. Key x: an expired task blocks nothing, at the head or in the
    middle, whether it was dead before or not.
    """
    subscription = pubsub.new_subscription(topic, ordered=True)
    past, future = datetime.now(UTC) - timedelta(minutes=1), datetime(2090, 1, 1, tzinfo=UTC)
    insert_undecodable(database, "head", topic, "a")
    insert_undecodable(database, "dead", topic, "x", AvailableAt=NEVER, ExpiresAt=past, Attempts=1)
    expired = register_keys(database, topic, "x", expires_at=past)
    a1, b1, loose, a2, b2, a3, x1, s1 = register_keys(database, topic, "ab.abaxs")
    expired += register_keys(database, topic, "x", expires_at=past)
    [scheduled] = register_keys(database, topic, "s", available_at=future)
    x2, s2 = register_keys(database, topic, "xs")
    stay = {"dead", *expired, scheduled, s2}
    sent = {"b": [b1, b2], "s": [s1], "x": [x1, x2]}
    options = ("--on-ordering-failure", mode, "--poll-interval", "0.2")
    with worker(emulators, database, *options, command="drain") as process:
        assert process.wait(60) == 0
        left = process.stdout.splitlines()
    received = subscription.drain()
    assert loose in {message.attributes[outbox.TASK_ID_ATTRIBUTE] for message in received}
    if mode == "skip":
        assert left == [
            f"1 blocked in topic {topic}",
            f"4 dead in topic {topic}",
            f"1 scheduled in topic {topic}",
            "drained",
        ]
        assert set(unsent(database)) == {"head", *stay}
        assert first_deliveries(received) == sent | {"a": [a1, a2, a3]}
        return
    assert left == [
        f"4 blocked in topic {topic}",
        f"4 dead in topic {topic}",
        f"1 scheduled in topic {topic}",
        "drained",
    ]
    assert set(unsent(database)) == {"head", a1, a2, a3, *stay}
    assert first_deliveries(received) == sent
    retry = "SET Data = b'', AvailableAt = NULL, Attempts = 0, ExpiresAt = NULL WHERE Id = 'head'"
    assert execute(database, f"UPDATE AsynchronousTasks {retry}") == 1
    with worker(emulators, database, *options, command="drain") as process:
        assert process.wait(60) == 0
    assert set(unsent(database)) == stay
    assert first_deliveries(subscription.drain()) == {"a": ["head", a1, a2, a3]}
