"""Ordering keys with real workers: their order while workers are killed and publishes fail, and tasks that block it."""

import contextlib
import signal
import threading
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import grpc
import pytest
from google.cloud.spanner_v1.database import Database
from google.pubsub_v1.types import PubsubMessage

import outbox
from outbox.emulators import Emulators
from outbox.states import NEVER
from tests.support.outages import hang
from tests.support.processes import Process
from tests.support.pubsub import PubSub
from tests.support.pubsub_server import accept, pubsub_server
from tests.support.relays import execute, first_deliveries, insert_undecodable, key_orders, unsent, worker
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(180)

KEYS = [f"key-{n}" for n in range(8)]
#: In each round the application commits transactions of several tasks, and one worker is killed.
ROUNDS, COMMITS, TOGETHER = 6, 8, 6
#: What Pub/Sub does in place of accepting a request.
FAULTS = ("unavailable", "unknown", "late", "in doubt")
#: Two workers poll the same shards.
ASSIGNMENTS = ("divided", "shared", "shared")


def register_some(database: Database, random: Random) -> list[str]:
    """Register tasks of one to three keys in one transaction, one after the other in turn."""
    keys = random.choices(KEYS, k=random.randint(1, 3))
    with database.batch(default_retry_delay=0.02) as batch:  # the emulator aborts us, or the worker
        return [outbox.register(batch, "orders", b"x" * 100, ordering_key=random.choice(keys)) for _ in range(TOGETHER)]


class FaultyPubSub:
    """Accepts a request, refuses it, accepts it and answers with an error, or accepts it too late, at random."""

    def __init__(self, random: Random) -> None:
        """Begin with faults; `calm` ends them."""
        self._random = random
        self._next: list[str] = []
        self._lock = threading.Lock()
        self.calm = threading.Event()
        self.received: list[PubsubMessage] = []
        self.faults: Counter[str] = Counter()

    def publish(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Answer one publish request."""
        with self._lock:
            if not self._next:
                self._next = [*FAULTS, "unknown", "unknown", *[""] * 12]
                self._random.shuffle(self._next)
            fault = "" if self.calm.is_set() else self._next.pop()
            self.faults[fault] += 1
        if fault in ("unavailable", "unknown"):
            context.abort(grpc.StatusCode[fault.upper()], fault)
        if fault == "late":
            hang(request, context)
        with self._lock:
            self.received += (PubsubMessage.wrap(message) for message in request.messages)
        if fault == "in doubt":
            context.abort(grpc.StatusCode.UNAVAILABLE, fault)
        return accept(request, context)


@pytest.mark.extended
def test_workers_that_are_killed_keep_the_order_of_every_key(emulators: Emulators, database: Database) -> None:
    """Three workers, two of which share all shards, are killed while publishes are refused, late or in doubt."""
    random, pubsub = Random(3), FaultyPubSub(Random(4))
    options = ("--group-size", "20", "--concurrency", "4", "--poll-interval", "0.2", "--publish-timeout", "0.4")
    options += ("--backoff-initial", "2", "--backoff-max", "2", "--max-attempts", "1000")
    ids: list[str] = []
    begin = time.monotonic()
    with pubsub_server() as server, contextlib.ExitStack() as stack:
        server.publish = pubsub.publish

        def start(assignment: str) -> Process:
            words = (*options, "--assignment", assignment)
            return stack.enter_context(worker(emulators, database, *words, PUBSUB_EMULATOR_HOST=server.address))

        workers = [start(assignment) for assignment in ASSIGNMENTS]
        for _ in range(ROUNDS):
            for each in workers:
                each.wait_for_text("relaying")
            for _ in range(COMMITS // 2):
                ids += register_some(database, random)
            moment = len(server.requests) + random.randint(1, 10)
            eventually(
                lambda at=moment: len(server.requests) >= at or not unsent(database),
                seconds=30,
                message="the moment of the next kill",
            )
            victim = random.randrange(len(workers))
            workers[victim].stop(signal.SIGKILL)
            workers[victim].wait()
            workers[victim] = start(ASSIGNMENTS[victim])
            for _ in range(COMMITS // 2):
                ids += register_some(database, random)
        pubsub.calm.set()
        eventually(lambda: not unsent(database), seconds=60, message="all tasks marked")
        seconds = time.monotonic() - begin
        for each in workers:
            each.wait_for_text("relaying")
            each.stop()
        assert [each.wait() for each in workers] == [0] * 3
    duplicates, faults = len(pubsub.received) - len(ids), {name: pubsub.faults[name] for name in FAULTS}
    print(f"{len(ids)} tasks, {len(server.requests)} requests, {faults}: {duplicates} duplicates, {seconds:.1f} s")
    orders = key_orders(database, "orders")
    assert first_deliveries(pubsub.received) == orders
    assert {id for order in orders.values() for id in order} == set(ids)
    assert all(faults.values())


def register_keys(database: Database, topic: str, keys: str, **options: Any) -> list[str]:
    """Register a task for each letter of `keys`, in one transaction; a dot is no key."""
    with database.batch(default_retry_delay=0.02) as batch:
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
        assert left == [f"4 dead of {topic}", f"2 scheduled of {topic}", "drained"]
        assert set(unsent(database)) == {"head", *stay}
        assert first_deliveries(received) == sent | {"a": [a1, a2, a3]}
        return
    assert left == [f"4 dead of {topic}", f"5 scheduled of {topic}", "drained"]
    assert set(unsent(database)) == {"head", a1, a2, a3, *stay}
    assert first_deliveries(received) == sent
    retry = "SET Data = b'', AvailableAt = NULL, Attempts = 0, ExpiresAt = NULL WHERE Id = 'head'"
    assert execute(database, f"UPDATE AsynchronousTasks {retry}") == 1
    with worker(emulators, database, *options, command="drain") as process:
        assert process.wait(60) == 0
    assert set(unsent(database)) == stay
    assert first_deliveries(subscription.drain()) == {"a": ["head", a1, a2, a3]}
