"""Ordering keys from outside: real workers on the emulators, whoever dies, whatever fails, and a subscriber."""

import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
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
from tests.support.outages import count, dead, hang, seconds_until
from tests.support.processes import Process
from tests.support.pubsub import PubSub
from tests.support.pubsub_server import accept, pubsub_server
from tests.support.relays import execute, first_deliveries, insert_undecodable, key_orders, unsent, worker
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(180)

KEYS = [f"key-{n:02}" for n in range(20)]
#: Tasks of one transaction.
TOGETHER = 6
#: Transactions of one round, in which one worker is killed.
COMMITS = 8
ROUNDS = 8
#: What Pub/Sub does in place of accepting a request.
FAULTS = ("unavailable", "unknown", "late", "in doubt")
ASSIGNMENTS = ("divided", "shared", "shared")


def register_some(database: Database, topic: str, random: Random, keys: Sequence[str] = KEYS) -> list[str]:
    """Register tasks of one to three keys in one transaction, one after the other in turn."""
    some = random.choices(keys, k=random.randint(1, 3))
    with database.batch(default_retry_delay=0.02) as batch:  # the emulator aborts us, or the worker
        return [outbox.register(batch, topic, b"x" * 100, ordering_key=random.choice(some)) for _ in range(TOGETHER)]


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
    orders = key_orders(database, topic)
    assert first_deliveries(received) == orders
    assert {id for order in orders.values() for id in order} == set(ids)


class FaultyPubSub:
    """Answers at random: it accepts, refuses, accepts and says that it has not, or accepts too late."""

    def __init__(self, random: Random) -> None:
        """Begin faulty; `calm` ends it."""
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


def test_failing_publishes_and_kills_keep_the_order_of_every_key(emulators: Emulators, database: Database) -> None:
    """Refused, answered too late, in doubt, charged or not, while workers that share all shards die: all in order."""
    random = Random(3)
    pubsub = FaultyPubSub(Random(4))
    options = ("--group-size", "20", "--concurrency", "4", "--poll-interval", "0.2", "--publish-timeout", "0.4")
    options += ("--backoff-initial", "2", "--backoff-max", "2", "--max-attempts", "1000", "--assignment", "shared")
    ids: list[str] = []
    begin = time.monotonic()
    with pubsub_server() as server, contextlib.ExitStack() as stack:
        server.publish = pubsub.publish

        def start() -> Process:
            return stack.enter_context(worker(emulators, database, *options, PUBSUB_EMULATOR_HOST=server.address))

        workers = [start() for _ in range(3)]
        for _ in range(5):
            for each in workers:
                each.wait_for_text("relaying")
            for _ in range(COMMITS // 2):
                ids += register_some(database, "orders", random, KEYS[:5])
            moment = len(server.requests) + random.randint(1, 10)
            eventually(
                lambda at=moment: len(server.requests) >= at or not unsent(database),
                seconds=30,
                message="the moment of the next kill",
            )
            victim = random.randrange(len(workers))
            workers[victim].stop(signal.SIGKILL)
            workers[victim].wait()
            workers[victim] = start()
            for _ in range(COMMITS // 2):
                ids += register_some(database, "orders", random, KEYS[:5])
        pubsub.calm.set()
        eventually(lambda: not unsent(database), seconds=60, message="all tasks marked")
        seconds = time.monotonic() - begin
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


def sent_at(database: Database) -> dict[str, datetime]:
    """Return when each task was marked."""
    with database.snapshot() as snapshot:
        return dict(snapshot.execute_sql("SELECT Id, SentAt FROM AsynchronousTasks WHERE SentAt IS NOT NULL"))


@pytest.mark.parametrize("mode", ["block", "skip"])
def test_a_dead_head_holds_back_its_key_or_is_passed_over(
    emulators: Emulators, database: Database, topic: str, pubsub: PubSub, mode: str
) -> None:
    """No other key, and nothing that has none; once an operator has retried it, all goes out in order."""
    subscription = pubsub.new_subscription(topic, ordered=True)
    insert_undecodable(database, "head", topic, "a")
    a1, b1, loose, a2, b2, a3 = register_keys(database, topic, "ab.aba")
    options = ("--on-ordering-failure", mode, "--poll-interval", "0.2")
    with worker(emulators, database, *options, command="drain") as process:
        assert process.wait(60) == 0
        left = process.stdout.splitlines()
    if mode == "skip":
        assert left == [f"1 dead of {topic}", "drained"]
        assert unsent(database) == ["head"]
        assert first_deliveries(subscription.drain()) == {"a": [a1, a2, a3], "b": [b1, b2]}
        return
    assert left == [f"1 dead of {topic}", f"3 scheduled of {topic}", "drained"]
    assert set(unsent(database)) == {"head", a1, a2, a3}
    received = subscription.drain()
    assert first_deliveries(received) == {"b": [b1, b2]}
    assert loose in {message.attributes[outbox.TASK_ID_ATTRIBUTE] for message in received}
    retry = "SET Data = b'', AvailableAt = NULL, Attempts = 0, ExpiresAt = NULL WHERE Id = 'head'"
    assert execute(database, f"UPDATE AsynchronousTasks {retry}") == 1
    with worker(emulators, database, *options, command="drain") as process:
        assert process.wait(60) == 0
        assert process.stdout.splitlines() == ["drained"]
    assert first_deliveries(subscription.drain()) == {"a": ["head", a1, a2, a3]}


@pytest.mark.parametrize("mode", ["block", "skip"])
def test_what_has_expired_holds_back_nothing(
    emulators: Emulators, database: Database, topic: str, pubsub: PubSub, mode: str
) -> None:
    """Neither at the head nor in the middle, whether it is found by its time or was dead before."""
    subscription = pubsub.new_subscription(topic, ordered=True)
    past = datetime.now(UTC) - timedelta(minutes=1)
    insert_undecodable(database, "dead", topic, "a", AvailableAt=NEVER, ExpiresAt=past, Attempts=1)
    dead = ["dead", *register_keys(database, topic, "a", expires_at=past)]
    ids = register_keys(database, topic, "aa")
    dead += register_keys(database, topic, "a", expires_at=past)
    ids += register_keys(database, topic, "aa")
    options = ("--on-ordering-failure", mode, "--poll-interval", "0.2")
    with worker(emulators, database, *options, command="drain") as process:
        assert process.wait(60) == 0
        assert process.stdout.splitlines() == [f"3 dead of {topic}", "drained"]
    assert set(unsent(database)) == set(dead)
    assert first_deliveries(subscription.drain()) == {"a": ids}


def test_a_scheduled_task_holds_back_what_follows_in_its_key(
    emulators: Emulators, database: Database, topic: str, pubsub: PubSub
) -> None:
    """Until its time; what stands before it, other keys and tasks without one are sent at once."""
    subscription = pubsub.new_subscription(topic, ordered=True)
    with worker(emulators, database, "--poll-interval", "0.2") as process:
        process.wait_for_text("relaying")
        at = datetime.now(UTC) + timedelta(seconds=4)
        at_once = register_keys(database, topic, "a")
        held = register_keys(database, topic, "a", available_at=at)
        held += register_keys(database, topic, "aaa")
        at_once += register_keys(database, topic, "bb..")
        eventually(lambda: not unsent(database), seconds=30, message="all tasks marked")
    times = sent_at(database)
    print(f"held tasks marked {(max(times[id] for id in held) - at).total_seconds():.2f} s after their time")
    assert all(times[id] < at for id in at_once)
    assert all(times[id] >= at for id in held)
    assert first_deliveries(subscription.drain()) == key_orders(database, topic)


def test_a_missing_topic_holds_its_own_keys_until_it_is_made(
    emulators: Emulators, database: Database, topic: str, pubsub: PubSub
) -> None:
    """The same keys in another topic are other keys; when the topic is there all arrives in the order of each key."""
    subscription = pubsub.new_subscription(topic, ordered=True)
    late = f"{topic}-late"
    with worker(emulators, database, "--poll-interval", "0.2", "--backoff-initial", "0.1") as process:
        process.wait_for_text("relaying")
        for _ in range(5):
            register_keys(database, late, "abcabcabc.")
            register_keys(database, topic, "abab")
        eventually(lambda: count(database, "SentAt IS NULL") == 50, seconds=30, message="the other topic is done")
        eventually(lambda: count(database, "Attempts > 1"), seconds=30, message="tasks were charged more than once")
        charged = count(database, "Attempts > 0")
        process.stop(signal.SIGSTOP)  # what it publishes to a topic without a subscription is gone
        late_subscription = pubsub.new_subscription(pubsub.new_topic(late.rpartition("/")[2]), ordered=True)
        process.stop(signal.SIGCONT)
        recovered = seconds_until(lambda: not unsent(database), 60, "all tasks marked")
    print(f"{charged} of 50 tasks charged; all sent {recovered:.1f} s after the topic was made")
    assert first_deliveries(subscription.drain()) == key_orders(database, topic)
    assert first_deliveries(late_subscription.drain()) == key_orders(database, late)
    assert dead(database) == 0
