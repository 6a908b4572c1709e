"""One topic, or one message, that does not work, and what it costs the others. Real workers on the emulators.

The emulator runs one group at a time in a database, so what waits for Pub/Sub holds up the others here for as long as
`--publish-timeout`, and nowhere else.
"""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.cloud.spanner_v1.database import Database

from outbox.emulators import Emulators, running
from publishworker.turn.breakers import LONGEST_OUTAGE_REST, TARGET_PROBE_TASKS
from tests.support.outages import (
    charged,
    count,
    dead,
    hang,
    is_sent,
    lasting,
    log_lines,
    register_beside,
    seconds_until,
    told,
)
from tests.support.proxy import silent_port
from tests.support.pubsub import PubSub
from tests.support.pubsub_server import PubSubServer, accept, pubsub_server, refuse
from tests.support.relays import account, register, unsent, wait_until_all_sent, worker
from tests.support.spanner import PROJECT
from tests.support.waiting import eventually

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]

POISON = b"poison"


@pytest.fixture
def server() -> Iterator[PubSubServer]:
    """A server in Pub/Sub's place that takes everything until told otherwise."""
    with pubsub_server() as started:
        yield started


def test_topics_that_do_not_work_hold_up_no_other(
    emulators: Emulators, database: Database, server: PubSubServer, outage_seconds: float
) -> None:
    """One is silent, one fails: their tasks wait, uncharged. A third one's go on being sent, each within seconds."""
    unavailable = refuse(grpc.StatusCode.UNAVAILABLE)

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        answers = {"silent": hang, "failing": unavailable}
        return answers.get(request.topic.rpartition("/")[2], accept)(request, context)

    server.publish = answer
    waits: list[float] = []
    options = ("--group-size", "20", "--publish-timeout", "0.5")
    with worker(emulators, database, *options, PUBSUB_EMULATOR_HOST=server.address) as process:
        bad = {topic: register(database, topic, 100) for topic in ("silent", "failing")}
        for topic in bad:
            eventually(lambda about=topic: told(process, "topic_rests", f"{about} rests"), message=f"{topic} rests")

        def send_one() -> None:
            one = register_beside(database, "good", 1)
            waits.append(seconds_until(lambda: is_sent(database, one), 10, "a task of the good topic sent"))

        lasting(outage_seconds, send_one)
        assert len(unsent(database)) == 200
        assert charged(database) == 0
        server.publish = accept
        recovered = seconds_until(lambda: not unsent(database), LONGEST_OUTAGE_REST + 20, "all tasks sent")
        assert charged(database) == 0
        assert [told(process, "topic_back", f"{topic} works") for topic in bad] == [1, 1]
    print(
        f"{len(waits)} good tasks sent after {max(waits):.1f} s at most; all the others {recovered:.1f} s after the end"
    )


def test_a_message_that_always_times_out_costs_its_topic_seconds(
    emulators: Emulators, database: Database, server: PubSubServer
) -> None:
    """Two hundred good tasks of its topic are sent within 30 s; it is charged alone, and dead while others go on."""

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        poisoned = any(message.data == POISON for message in request.messages)
        return (hang if poisoned else accept)(request, context)

    server.publish = answer
    good = [*register(database, "orders", 100)]
    [poison] = register(database, "orders", 1, data=POISON)
    good += register(database, "orders", 100)
    options = ("--publish-timeout", "2", "--max-attempts", "2", "--backoff-initial", "0.1")
    with worker(emulators, database, *options, PUBSUB_EMULATOR_HOST=server.address) as process:
        sent_after = seconds_until(lambda: unsent(database) == [poison], 30, "all but one message sent")
        while not dead(database):
            assert len(good) < 300
            good += (one := register_beside(database, "orders", 1))
            eventually(lambda one=one: is_sent(database, one), seconds=20, message="a good task sent beside it")
        register_beside(database, "orders", 10)
        eventually(lambda: unsent(database) == [poison], seconds=5, message="the others go on")
        assert told(process, "dead", poison) == 1
    with database.snapshot() as snapshot:
        found = snapshot.execute_sql("SELECT Id, Attempts, LastError FROM AsynchronousTasks WHERE LastError != ''")
        [[id, attempts, error]] = found
    print(f"200 good tasks sent after {sent_after:.1f} s; {len(good) - 200} more until the bad one was dead")
    assert (id, attempts) == (poison, 2)
    assert error.startswith("deadline_exceeded: ")
    assert charged(database) == 1


def test_a_pubsub_that_has_lost_its_topics_gets_all_tasks_once_they_are_made_again(
    emulators: Emulators, database: Database
) -> None:
    """A restarted emulator knows no topic: few tasks are charged, none is dead, and in the end all are sent."""
    topic = f"projects/{PROJECT}/topics/orders"
    with silent_port() as host, worker(emulators, database, PUBSUB_EMULATOR_HOST=host) as process:
        port = int(host.rpartition(":")[2])
        with running(pubsub_port=port):
            first = PubSub.on(host).new_subscription(PubSub.on(host).new_topic("orders"))
            ids = register(database, topic, 20)
            wait_until_all_sent(database)
            assert account(ids, first).lost == frozenset()
        with running(pubsub_port=port):
            ids = register_beside(database, topic, 200)
            eventually(lambda: told(process, "publish_failed", "not_found"), seconds=30, message="a probe was charged")
            lasting(3)
            once = count(database, "Attempts > 0")
            assert 0 < once <= 3 * TARGET_PROBE_TASKS
            assert dead(database) == 0
            subscription = PubSub.on(host).new_subscription(PubSub.on(host).new_topic("orders"))
            recovered = seconds_until(lambda: not unsent(database), 60, "all tasks sent")
            result = account(ids, subscription)
        process.stop()
        assert process.wait() == 0
        assert told(process, "topic_rests", "not_found") == told(process, "topic_back") == 1
        assert not [line for line in log_lines(process) if "error.stack" in line]
    print(
        f"{once} of 200 tasks charged; all sent {recovered:.1f} s after the topic was made, {result.duplicates} twice"
    )
    assert (result.lost, result.unexpected, result.duplicates) == (frozenset(), frozenset(), 0)
    assert charged(database) == 0
