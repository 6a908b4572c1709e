"""`outbox retry` as a process: sent and dead tasks arrive again, and the printed commands do the same."""

from collections import Counter
from unittest import mock

from google.cloud.spanner_v1.database import Database

import outbox as api
from outbox.cli import bulk
from outbox.devtools.emulators import Emulators
from tests.support.commands import SECONDS, Commands, row, table
from tests.support.operations import insert
from tests.support.pubsub import Subscription
from tests.support.relays import execute, register, worker

MAKE_DEAD = """
UPDATE AsynchronousTasks SET AvailableAt = TIMESTAMP '9999-12-31T00:00:00Z', Attempts = 16 WHERE """
RETRIED = "SentAt IS NULL AND Attempts = 0 AND AvailableAt <= CURRENT_TIMESTAMP()"


def test_tasks_arrive_again_with_their_id_and_data(
    outbox: Commands, emulators: Emulators, database: Database, topic: str, subscription: Subscription
):
    """A worker sends a sent task a second time and a dead one at last, and leaves their neighbours."""
    again, once = register(database, topic, 2, b"sent data")
    with worker(emulators, database, command="drain") as process:
        assert process.wait(SECONDS) == 0
    dead, stays = register(database, topic, 2, b"dead data")
    execute(database, f"{MAKE_DEAD} SentAt IS NULL")
    done = outbox.run("retry", again, dead)
    assert (done.code, done.stdout, done.stderr) == (0, "due now: 2 tasks\n", "")
    with worker(emulators, database, command="drain") as process:
        assert process.wait(SECONDS) == 0
    received = subscription.pull_until(4) + subscription.drain()
    found = Counter((message.attributes[api.TASK_ID_ATTRIBUTE], message.data) for message in received)
    assert found == {(again, b"sent data"): 2, (once, b"sent data"): 1, (dead, b"dead data"): 1}
    assert list(table(database, "SentAt IS NULL")) == [stays]


def test_a_retry_of_many_tasks_asks_first(outbox: Commands, database: Database):
    insert(database, [row(f"{n}", "dead") for n in range(3)])
    with mock.patch.object(bulk, "CONFIRM_ABOVE", 2):
        many = outbox.here("retry", "--state", "dead", "--topic", "orders")
    assert (many.code, "Pass --yes to confirm: 3 tasks will become due now" in many.stderr) == (2, True)
