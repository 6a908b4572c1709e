"""Workers divide the shards: they join, leave, crash, freeze and come back, and every shard always has a worker."""

import contextlib
import signal

from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from tests.support.pubsub import PubSub
from tests.support.relays import account, divided, register, wait_until_all_sent, worker
from tests.support.spanner import query
from tests.support.waiting import eventually

#: Seconds after which the liveness timeout assigns a silent worker's shards to others, and a little for a busy machine.
TIMEOUT = 15.0
SLACK = 10.0


def test_workers_join_crash_freeze_come_back_and_leave(
    emulators: Emulators, database: Database, topic: str, pubsub: PubSub
) -> None:
    """After each event the shards are assigned anew within the liveness timeout; tasks of every shard are sent."""
    subscription = pubsub.new_subscription(topic)
    ids: list[str] = []

    def send_some() -> None:
        ids.extend(register(database, topic, 40))
        wait_until_all_sent(database)

    with contextlib.ExitStack() as stack:
        first, crashing, freezing = (stack.enter_context(worker(emulators, database)) for _ in range(3))
        eventually(lambda: divided([first, crashing, freezing]), seconds=30, message="three workers divide the shards")
        send_some()

        crashing.stop(signal.SIGKILL)
        ids.extend(register(database, topic, 40))
        eventually(
            lambda: divided([first, freezing]), seconds=TIMEOUT + SLACK, message="two have the dead one's shards"
        )
        wait_until_all_sent(database)

        freezing.stop(signal.SIGSTOP)
        ids.extend(register(database, topic, 40))
        eventually(lambda: divided([first]), seconds=TIMEOUT + SLACK, message="one worker has all shards")
        wait_until_all_sent(database)

        freezing.stop(signal.SIGCONT)
        eventually(lambda: divided([first, freezing]), seconds=SLACK, message="the frozen one is back")
        send_some()

        freezing.end(signal.SIGTERM)
        eventually(lambda: divided([first]), seconds=SLACK, message="the leaver's shards are assigned at once")
        send_some()
        # The first one, and the dead one for an hour.
        assert query(database, "SELECT COUNT(*) FROM AsynchronousTaskWorkers") == [[2]]
    result = account(ids, subscription)
    assert (result.lost, result.unexpected) == (frozenset(), frozenset())
