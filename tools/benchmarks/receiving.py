"""Effects a second of a subscriber: without an inbox, with the inbox one by one, and with the inbox in batches."""

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from google.cloud.pubsub_v1 import SubscriberClient
from google.cloud.spanner_v1.database import Database

import outbox
from outbox import inbox
from outbox.devtools.emulators import Emulators
from outbox.table import ddl
from tests.support.inbox_subscriber import EFFECTS
from tests.support.spanner import INSTANCE, client, fresh_database
from tools.benchmarks.bench import MESSAGE, Bench, connecting_to, stopwatch
from tools.benchmarks.delayed import PUBSUB, SPANNER, far_away
from tools.benchmarks.results import Section, figures

SIZE = 100
#: Max seconds of one way.
SECONDS = 90.0
#: The emulator does not say when to retry an aborted transaction.
RETRY = {"default_retry_delay": 0.02}
WITHOUT, SINGLY, BATCHES = "no inbox", "inbox, one by one", f"inbox, batches of {SIZE}"
SPEED, CPU, REQUESTS = "effects/s", "client CPU us/effect", "requests/1,000 effects"
CALLS = (
    "create_session", "batch_create_sessions", "get_session", "begin_transaction", "streaming_read",
    "execute_streaming_sql", "execute_sql", "commit", "rollback",
)  # fmt: skip

CONDITIONS = f"""\
- One process with Google's streaming pull and its defaults, {{count}} waiting messages of {len(MESSAGE)} bytes. The
  effect of each is one inserted row. *No inbox* is a transaction for each message with the effect alone.
- *Delayed*: behind proxies as under [throughput with network delay](#throughput-with-network-delay),
  {SPANNER * 1000:g} ms each way to Spanner and {PUBSUB * 1000:g} ms to Pub/Sub.
- Requests to Spanner, with those for sessions: the emulator needs one for each transaction, Spanner needs none."""

#: Wraps the effect for a database as the callback of a streaming pull.
Way = Callable[[Database], Callable[[Any], None]]


def effect(transaction: Any, message: Any) -> None:
    effects(transaction, [message])


def effects(transaction: Any, messages: Any) -> None:
    ids = [message.attributes[outbox.TASK_ID_ATTRIBUTE] for message in messages]
    transaction.insert("Effects", ("EffectId", "TaskId"), [(str(uuid.uuid4()), task_id) for task_id in ids])


def without(database: Database) -> Callable[[Any], None]:
    def receive(message: Any) -> None:
        database.run_in_transaction(effect, message, **RETRY)
        message.ack()

    return receive


def singly(database: Database) -> Callable[[Any], None]:
    return inbox.Handler(database, consumer="billing", **RETRY)(effect)


def in_batches(database: Database) -> Callable[[Any], None]:
    return inbox.BatchHandler(database, consumer="billing", max_batch=SIZE, **RETRY)(effects)


WAYS: dict[str, Way] = {WITHOUT: without, SINGLY: singly, BATCHES: in_batches}


def run(bench: Bench) -> Section:
    count = bench.choose(600, 200)
    samples = []
    with far_away(bench.emulators) as distant:
        for _ in bench.each_round("inbox"):
            for suffix, hosts in (("", bench.emulators), (", delayed", distant)):
                for name, way in WAYS.items():
                    samples += [(name + suffix, *each) for each in measured(bench, hosts, way, count)]
    conditions = CONDITIONS.format(count=f"{count:,}")
    section = Section("Inbox", figures(samples), conditions, "the ratios, roughly, and the requests.")
    for suffix in ("", ", delayed"):
        speed = section.value(BATCHES + suffix, SPEED)
        for way, limit in ((SINGLY, 4), (WITHOUT, 2)):
            ratio = speed / section.value(way + suffix, SPEED)
            section.at_least(f"{BATCHES + suffix} / {way}: effects/s", ratio, limit)
        section.at_most(f"{BATCHES + suffix}: {REQUESTS}", section.value(BATCHES + suffix, REQUESTS), 40)
    return section


def measured(bench: Bench, hosts: Emulators, way: Way, count: int) -> Iterator[tuple[str, float]]:
    topic = bench.pubsub.new_topic()
    subscription = bench.pubsub.new_subscription(topic)
    for _ in range(count // SIZE):
        some = [{"data": MESSAGE, "attributes": {outbox.TASK_ID_ATTRIBUTE: str(uuid.uuid4())}} for _ in range(SIZE)]
        bench.pubsub.publisher.publish(topic=topic, messages=some)
    with fresh_database(bench.instance, [*ddl.statements(), EFFECTS]) as created, connecting_to(hosts):
        database = client(hosts.spanner_host).instance(INSTANCE).database(created.database_id)
        with database.batch() as batch:  # connects
            batch.insert("Effects", ("EffectId", "TaskId"), [("first", "first")])
        requests = counted_requests(database)
        with stopwatch() as watch:
            receive(way(database), subscription.name, count)
    yield SPEED, count / watch.seconds
    yield CPU, watch.cpu_seconds / count * 1e6
    yield REQUESTS, len(requests) / count * 1_000


def counted_requests(database: Any) -> list[str]:
    """Return a list that gets the name of each later request."""
    requests: list[str] = []

    def counting(name: str) -> Callable[..., Any]:
        method = getattr(database.spanner_api, name)

        def call(*arguments: Any, **options: Any) -> Any:
            requests.append(name)
            return method(*arguments, **options)

        return call

    for name in CALLS:
        setattr(database.spanner_api, name, counting(name))
    return requests


def receive(callback: Callable[[Any], None], subscription: str, count: int) -> None:
    """Return when `count` messages were acknowledged."""
    acknowledged, done = threading.Semaphore(0), threading.Event()

    def received(message: Any) -> None:
        for name in ("ack", "ack_with_response"):
            setattr(message, name, counted(getattr(message, name)))
        callback(message)

    def counted(method: Callable[[], Any]) -> Callable[[], Any]:
        def acknowledge() -> Any:
            acknowledged.release()
            return method()

        return acknowledge

    def wait() -> None:
        for _ in range(count):
            acknowledged.acquire()
        done.set()

    threading.Thread(target=wait, daemon=True).start()
    with SubscriberClient() as subscriber:
        future = subscriber.subscribe(subscription, received)
        try:
            assert done.wait(SECONDS)
        finally:
            future.cancel()
            with contextlib.suppress(Exception):
                future.result(10)
