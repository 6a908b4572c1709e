"""How long a task takes from its commit to a subscriber, at several offered rates."""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from statistics import quantiles

from google.cloud import pubsub_v1
from google.pubsub_v1.types import PubsubMessage
from tqdm import tqdm

import outbox
from outbox.table.ddl import statements
from publishworker.spanner.change_stream import ChangeStream
from tests.support.relays import divided, worker
from tests.support.spanner import ADMIN_SECONDS
from tests.support.waiting import eventually
from tools.benchmarks.bench import MESSAGE, Bench, Table, connecting_to, fresh_table
from tools.benchmarks.results import Section, figures

WAKE = ("--wake", "change-stream")
#: Seconds between two tasks so that each is the first for long, and how many of them; fewer in a quick run.
SELDOM = (20.0, 30.0)
SELDOM_TASKS = (15, 1)
#: Messages that are published without an outbox, one a second, to see how much of the latency is Pub/Sub's.
PUBLISHED = (30, 3)
#: Threads that register, so that one slow commit does not delay the next arrivals.
REGISTRARS = 8
ALONE, STREAM_ALONE = "publish alone", "change stream alone"
#: Tasks that are registered without a worker, one or two a second, to see how much of it is the change stream's.
REPORTED = (60, 3)
#: The pause after ABORTED, which the emulator answers while a relay's transaction is open.
RETRY_DELAY = 0.005

CONDITIONS = f"""\
- `publishworker run` processes with default settings, one unless the row says four, and a fresh table for each row.
  Arrivals are a seeded Poisson process. The time runs from the return of the commit call to the callback of a streaming
  pull.
- First tasks: {SELDOM_TASKS[0]} tasks, each {SELDOM[0]:.0f} to {SELDOM[1]:.0f} s after the one before.
- Publish alone: from the answer to a publish request without an outbox to the callback. Change stream alone: from the
  return of the commit call until a reader hears of it, without a worker. The emulator reports inserts about every
  100 ms."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Tasks a second for some seconds; or, without a rate, single tasks with long pauses."""

    rate: float | None
    seconds: int = 0
    workers: int = 1
    wake: bool = True

    @property
    def name(self) -> str:
        what = "first tasks" if self.rate is None else "1 task/s" if self.rate == 1 else f"{self.rate:g} tasks/s"
        workers = f", {self.workers} workers" if self.workers > 1 else ""
        return f"{what}{', change stream' if self.wake else ''}{workers}"

    def arrivals(self, bench: Bench) -> Iterator[None]:
        """Yield when a task arrives."""
        if self.rate is not None:
            return arrivals(self.rate, bench.choose(self.seconds, 3))
        return seldom(bench.choose(*SELDOM_TASKS))


ONE, TEN, FOUR, FIRST = Offer(1, 100), Offer(10, 40), Offer(1, 100, workers=4), Offer(None, workers=4)
OFFERS = (Offer(1, 100, wake=False), Offer(10, 45, wake=False), Offer(100, 20, wake=False), ONE, TEN, FOUR, FIRST)


def run(bench: Bench) -> Section:
    samples: list[tuple[str, str, float]] = []

    def add(row: str, waits: list[float]) -> None:
        cuts = quantiles(waits, n=100, method="inclusive") if len(waits) > 1 else waits * 99
        samples.extend((row, f"p{share} ms", cuts[share - 1] * 1000) for share in (50, 95, 99))
        samples.append((row, "tasks", len(waits)))

    for offer in tqdm(OFFERS, desc="latency", disable=None):
        with fresh_table(bench) as table:
            if offer.wake:
                table.database.update_ddl(statements(change_stream=True)[-1:]).result(ADMIN_SECONDS)
            add(offer.name, latencies(bench, table, offer))
    add(STREAM_ALONE, reporting_alone(bench, bench.choose(*REPORTED)))
    add(ALONE, publishing_alone(bench, bench.choose(*PUBLISHED)))
    section = Section(
        "Latency",
        figures(samples),
        CONDITIONS,
        "that a task waits for the next poll and for little else.",
    )
    for column, limit in (("p50 ms", 150), ("p95 ms", 600)):
        section.at_most(f"{column} at 10 tasks/s", section.value("10 tasks/s", column), limit)
    for offer in (ONE, TEN, FOUR, FIRST):
        for column, limit in (("p50 ms", 100), ("p95 ms", 250), ("p99 ms", 400)):
            section.at_most(f"{column} at {offer.name}", section.value(offer.name, column), limit)
    return section


def latencies(bench: Bench, table: Table, offer: Offer) -> list[float]:
    """Return the seconds from each task's commit to its receipt."""
    committed: dict[str, float] = {}

    def register() -> None:
        with table.database.batch(default_retry_delay=RETRY_DELAY) as batch:
            id = outbox.register(batch, table.topic, MESSAGE)
        committed[id] = time.monotonic()

    with contextlib.ExitStack() as stack:
        flags = WAKE if offer.wake else ()
        workers = [stack.enter_context(worker(bench.emulators, table.database, *flags)) for _ in range(offer.workers)]
        received = stack.enter_context(receiving(bench, table.topic))
        eventually(lambda: divided(workers), seconds=60, message="the workers know of each other")
        register()
        eventually(lambda: received.keys() >= committed.keys(), seconds=30, message="the first task received")
        committed.clear()
        with ThreadPoolExecutor(REGISTRARS) as pool:
            done = [pool.submit(register) for _ in offer.arrivals(bench)]
        for each in done:
            each.result()
        eventually(lambda: received.keys() >= committed.keys(), seconds=60, message="every task received")
    return [received[id] - at for id, at in committed.items()]


def publishing_alone(bench: Bench, count: int) -> list[float]:
    """Return the seconds from the answer to each publish request to the receipt of its message."""
    topic = bench.pubsub.new_topic()
    waits = []
    with receiving(bench, topic) as received:
        for id, _ in zip(map(str, range(count)), arrivals(1, 2 * count + 10), strict=False):
            message = PubsubMessage(data=MESSAGE, attributes={outbox.TASK_ID_ATTRIBUTE: id})
            bench.pubsub.publisher.publish(topic=topic, messages=[message])
            published = time.monotonic()
            eventually(lambda sent=id: sent in received, seconds=10, message="received")  # type: ignore[misc]  # a default of a lambda
            waits.append(received[id] - published)
    return waits


def reporting_alone(bench: Bench, count: int) -> list[float]:
    """Return the seconds from each commit until a reader of the change stream hears of it."""
    random, reported, waits = Random(count), threading.Event(), []
    with fresh_table(bench) as table:
        table.database.update_ddl(statements(change_stream=True)[-1:]).result(ADMIN_SECONDS)
        stream = ChangeStream(table.database, reported.set)
        stream.start()
        eventually(lambda: stream.works, seconds=30, message="the change stream is read")
        for _ in range(count):
            time.sleep(random.uniform(0.5, 1))
            reported.clear()
            with table.database.batch(default_retry_delay=RETRY_DELAY) as batch:
                outbox.register(batch, table.topic, MESSAGE)
            committed = time.monotonic()
            reported.wait(10)
            waits.append(time.monotonic() - committed)
        stream.stop()
    return waits


def arrivals(rate: float, seconds: int) -> Iterator[None]:
    random, begin, at = Random(rate), time.monotonic(), 0.0
    while (at := at + random.expovariate(rate)) < seconds:
        time.sleep(max(0.0, begin + at - time.monotonic()))
        yield


def seldom(tasks: int) -> Iterator[None]:
    random = Random(tasks)
    for _ in range(tasks):
        time.sleep(random.uniform(*SELDOM))
        yield


@contextlib.contextmanager
def receiving(bench: Bench, topic: str) -> Iterator[dict[str, float]]:
    received: dict[str, float] = {}

    def receive(message: pubsub_v1.subscriber.message.Message) -> None:
        received.setdefault(message.attributes[outbox.TASK_ID_ATTRIBUTE], time.monotonic())
        message.ack()

    subscription = bench.pubsub.new_subscription(topic)
    with connecting_to(bench.emulators):
        client = pubsub_v1.SubscriberClient()
    streaming = client.subscribe(subscription.name, receive)
    try:
        yield received
    finally:
        streaming.cancel()
        streaming.result(timeout=10)
        client.close()
