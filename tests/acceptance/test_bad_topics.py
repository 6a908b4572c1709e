"""One topic, or one message, that does not work, and what it costs the others. Real workers on the emulators.

The emulator runs one transaction at a time in a database, so a batch that waits for Pub/Sub delays the others here, for
as long as `--publish-timeout`. Spanner does not.
"""

import signal
from typing import Any

import grpc
import pytest
from google.cloud.spanner_v1.database import Database

from outbox.emulators import Emulators
from publishworker.turn.breakers import LONGEST_OUTAGE_REST, TARGET_PROBE_TASKS
from tests.support import outages
from tests.support.outages import charged, dead, hang, is_sent, lasting, register_beside, seconds_until, told
from tests.support.pubsub import CALL_SECONDS, PubSub
from tests.support.pubsub_server import accept, pubsub_server, refuse
from tests.support.relays import account, register, unsent, wait_until_all_sent, worker
from tests.support.waiting import eventually

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]

POISON = b"poison"


def test_topics_that_do_not_work_hold_up_no_other(
    emulators: Emulators, database: Database, outage_seconds: float
) -> None:
    """One topic is silent, one fails: their tasks wait, without failed attempts. A third one's are sent in seconds."""
    answers = {"silent": hang, "failing": refuse(grpc.StatusCode.UNAVAILABLE)}

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        return answers.get(request.topic.rpartition("/")[2], accept)(request, context)

    waits: list[float] = []
    options = ("--group-size", "20", "--publish-timeout", "0.5")
    with (
        pubsub_server() as server,
        worker(emulators, database, *options, PUBSUB_EMULATOR_HOST=server.address) as process,
    ):
        server.publish = answer
        bad = {topic: register(database, topic, 60) for topic in answers}
        for topic in bad:
            eventually(lambda about=topic: told(process, "topic_rests", f"{about} rests"), message=f"{topic} rests")

        def send_one() -> None:
            one = register_beside(database, "good", 1)
            waits.append(seconds_until(lambda: is_sent(database, one), 10, "a task of the good topic sent"))

        lasting(outage_seconds / 2, send_one)
        assert len(unsent(database)) == 120
        assert charged(database) == 0
        server.publish = accept
        recovered = seconds_until(lambda: not unsent(database), LONGEST_OUTAGE_REST + 20, "all tasks sent")
        assert charged(database) == 0
        assert [told(process, "topic_back", f"{topic} works") for topic in bad] == [1, 1]
    print(
        f"{len(waits)} good tasks sent after {max(waits):.1f} s at most; all the others {recovered:.1f} s after the end"
    )


def test_a_message_that_always_times_out_costs_its_topic_seconds(emulators: Emulators, database: Database) -> None:
    """A hundred good tasks of its topic are sent within 30 s; only it gets failed attempts and dies; others go on."""

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        poisoned = any(message.data == POISON for message in request.messages)
        return (hang if poisoned else accept)(request, context)

    good = [*register(database, "orders", 50)]
    [poison] = register(database, "orders", 1, data=POISON)
    good += register(database, "orders", 50)
    options = ("--publish-timeout", "1", "--max-attempts", "2", "--backoff-initial", "0.1")
    with pubsub_server() as server:
        server.publish = answer
        with worker(emulators, database, *options, PUBSUB_EMULATOR_HOST=server.address) as process:
            sent_after = seconds_until(lambda: unsent(database) == [poison], 30, "all but one message sent")
            while not dead(database):
                assert len(good) < 200
                good += (one := register_beside(database, "orders", 1))
                eventually(lambda one=one: is_sent(database, one), seconds=20, message="a good task sent beside it")
            register_beside(database, "orders", 10)
            eventually(lambda: unsent(database) == [poison], seconds=5, message="the others go on")
            assert told(process, "dead", poison) == 1
    with database.snapshot() as snapshot:
        found = snapshot.execute_sql("SELECT Id, Attempts, LastError FROM AsynchronousTasks WHERE LastError != ''")
        [[id, attempts, error]] = found
    print(f"100 good tasks sent after {sent_after:.1f} s; {len(good) - 100} more until the bad one was dead")
    assert (id, attempts) == (poison, 2)
    assert error.startswith("deadline_exceeded: ")
    assert charged(database) == 1


def test_a_topic_that_was_deleted_gets_all_tasks_once_it_is_made_again(
    emulators: Emulators, database: Database, pubsub: PubSub, topic: str
) -> None:
    """As after a restart of the emulator: few tasks have failed attempts, none is dead, and in the end all are sent."""
    with worker(emulators, database) as process:
        register(database, topic, 20)
        wait_until_all_sent(database)
        pubsub.publisher.delete_topic(topic=topic, timeout=CALL_SECONDS)
        ids = register_beside(database, topic, 100)
        eventually(lambda: told(process, "publish_failed", "not_found"), seconds=30, message="a probe has failed")
        lasting(3)
        once = outages.count(database, "Attempts > 0")
        assert 0 < once <= 3 * TARGET_PROBE_TASKS
        assert dead(database) == 0
        process.stop(signal.SIGSTOP)  # a message that arrives before there is a subscription is lost
        subscription = pubsub.new_subscription(pubsub.new_topic(topic.rpartition("/")[2]))
        process.stop(signal.SIGCONT)
        recovered = seconds_until(lambda: not unsent(database), 60, "all tasks sent")
        result = account(ids, subscription)
        process.stop()
        assert process.wait() == 0
        assert told(process, "topic_rests", "not_found") == told(process, "topic_back") == 1
        assert not [line for line in outages.log_lines(process) if "error.stack" in line]
    print(
        f"{once} of 100 tasks charged; all sent {recovered:.1f} s after the topic was made, {result.duplicates} twice"
    )
    assert (result.lost, result.unexpected, result.duplicates) == (frozenset(), frozenset(), 0)
    assert charged(database) == 0
