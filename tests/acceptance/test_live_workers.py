"""Workers divide the shards: they join, leave, crash, freeze and come back, and every shard always has a worker."""

import contextlib
import signal

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from outbox.table import ddl
from tests.support.pubsub import PubSub
from tests.support.relays import account, divided, register, wait_until_all_sent, worker
from tests.support.spanner import ADMIN_SECONDS, query
from tests.support.waiting import eventually

#: For a busy machine.
SLACK = 10.0


@pytest.mark.parametrize(
    ("flags", "seconds"), [((), 15.0), pytest.param(("--wake", "change-stream"), 30.0, marks=pytest.mark.extended)]
)
def test_workers_join_crash_freeze_come_back_and_leave(
    flags: tuple[str, ...], seconds: float, emulators: Emulators, own_database: Database, pubsub: PubSub
) -> None:
    """After each event the shards are assigned anew within the promised seconds; tasks of every shard are sent."""
    database = own_database
    if flags:
        database.update_ddl(ddl.statements(change_stream=True)[-1:]).result(ADMIN_SECONDS)
    topic = pubsub.new_topic()
    subscription = pubsub.new_subscription(topic)
    ids: list[str] = []

    def send_some() -> None:
        ids.extend(register(database, topic, 40))
        wait_until_all_sent(database)

    with contextlib.ExitStack() as stack:
        first, crashing, freezing = (stack.enter_context(worker(emulators, database, *flags)) for _ in range(3))
        eventually(lambda: divided([first, crashing, freezing]), seconds=30, message="three workers divide the shards")
        send_some()

        crashing.stop(signal.SIGKILL)
        ids.extend(register(database, topic, 40))
        eventually(
            lambda: divided([first, freezing]), seconds=seconds + SLACK, message="two have the dead one's shards"
        )
        wait_until_all_sent(database)

        freezing.stop(signal.SIGSTOP)
        ids.extend(register(database, topic, 40))
        eventually(lambda: divided([first]), seconds=seconds + SLACK, message="one worker has all shards")
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
