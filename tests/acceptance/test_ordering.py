"""Ordering keys from outside: real workers on the emulators, whoever dies, whatever fails, and a subscriber."""

import contextlib
import signal
import time
from random import Random

import pytest
from google.cloud.spanner_v1.database import Database
from google.pubsub_v1.types import PubsubMessage

import outbox
from outbox.emulators import Emulators
from tests.support.processes import Process
from tests.support.pubsub import PubSub
from tests.support.relays import first_deliveries, key_orders, unsent, worker
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(180)

KEYS = [f"key-{n:02}" for n in range(20)]
#: Tasks of one transaction.
TOGETHER = 6
#: Transactions of one round, in which one worker is killed.
COMMITS = 8
ROUNDS = 10
ASSIGNMENTS = ("divided", "shared", "shared")


def register_some(database: Database, topic: str, random: Random) -> list[str]:
    """Register tasks of one to three keys in one transaction, one after the other in turn."""
    keys = random.choices(KEYS, k=random.randint(1, 3))
    with database.batch(default_retry_delay=0.02) as batch:  # the emulator aborts us, or the worker
        return [outbox.register(batch, topic, b"x" * 100, ordering_key=random.choice(keys)) for _ in range(TOGETHER)]


def test_workers_that_are_killed_keep_the_order_of_every_key(
    emulators: Emulators, database: Database, topic: str, pubsub: PubSub
) -> None:
    """Three processes, two of which meet in every shard; twenty keys; killed while messages arrive: all in order."""
    random = Random(7)
    subscription = pubsub.new_subscription(topic, ordered=True)
    ids: list[str] = []
    received: list[PubsubMessage] = []
    options = ("--group-size", "20", "--concurrency", "4", "--poll-interval", "0.2")
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:

        def start(assignment: str) -> Process:
            return stack.enter_context(worker(emulators, database, *options, "--assignment", assignment))

        workers = [start(assignment) for assignment in ASSIGNMENTS]
        for _ in range(ROUNDS):
            for each in workers:
                each.wait_for_text("relaying")
            moment = len(received) + random.randint(1, COMMITS * TOGETHER)
            registered = 0
            while registered < COMMITS and len(received) < moment:
                ids += register_some(database, topic, random)
                registered += 1
                received += subscription.pull_until(0)
            received += subscription.pull_until(moment - len(received), seconds=30)
            # What has just arrived is not marked yet, or only just.
            victim = random.randrange(len(workers))
            workers[victim].stop(signal.SIGKILL)
            workers[victim].wait()
            workers[victim] = start(ASSIGNMENTS[victim])
            for _ in range(COMMITS - registered):
                ids += register_some(database, topic, random)
        eventually(lambda: not unsent(database), seconds=60, message="all tasks marked")
        seconds = time.monotonic() - begin
        for each in workers:
            each.wait_for_text("relaying")
            each.stop()
        assert [each.wait() for each in workers] == [0] * 3
    received += subscription.drain(0.5)
    duplicates = len(received) - len(ids)
    print(f"{len(ids)} tasks, {len(KEYS)} keys, {ROUNDS} workers killed: {duplicates} duplicates, {seconds:.1f} s")
    assert first_deliveries(received) == key_orders(database)
    assert {id for order in key_orders(database).values() for id in order} == set(ids)
