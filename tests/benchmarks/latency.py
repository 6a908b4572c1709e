"""How long a task takes from its commit to a subscriber, at several offered rates."""

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from statistics import quantiles

from google.cloud import pubsub_v1
from google.pubsub_v1.types import PubsubMessage
from tqdm import tqdm

import outbox
from outbox.storage.ddl import statements
from tests.benchmarks.bench import MESSAGE, Bench, Table, connecting_to, fresh_table
from tests.benchmarks.results import Plot, Section, figures
from tests.support.relays import worker
from tests.support.spanner import ADMIN_SECONDS
from tests.support.waiting import eventually

#: Tasks a second that are offered, and for how many seconds; fewer in a quick run.
OFFERED = ((1, 45, 3), (10, 45, 3), (100, 20, 2))
#: The same with early polls.
WOKEN = ((1, 40, 3), (10, 30, 3))
WAKE = ("--wake", "change-stream")
#: Messages that are published without an outbox, one a second, to see how much of the latency is Pub/Sub's.
PUBLISHED = (30, 3)
#: Threads that register, so that one slow commit does not delay the next arrivals.
REGISTRARS = 8
ALONE = "publish alone"
#: The pause after ABORTED, which the emulator answers while a relay's transaction is open.
RETRY_DELAY = 0.005

CONDITIONS = f"""\
- A `publishworker run` process with default settings, a fresh table for each rate. Arrivals are a seeded
  Poisson process. One of {REGISTRARS} threads commits each arrival on its own, so no arrival waits for an earlier
  commit.
- The time runs from the return of the commit call to the callback of a streaming pull in the same process, by the same
  clock.
- One run of each rate: {", ".join(f"{seconds} s at {rate}/s" for rate, seconds, _ in OFFERED)}.
- Publish alone: from the answer to a publish request without an outbox to the callback, one message after the other.
  The other rows include this. With the change stream they also include the time until the emulator reports an insert,
  which it does about every 100 ms.
- The emulator runs one transaction at a time in a database and aborts the others: registrations and relay take turns,
  which they do not on Spanner. Its polls scan the table, which at 100/s grows to some 2,000 rows."""


def run(bench: Bench) -> Section:
    samples: list[tuple[str, str, float]] = []
    runs = [*((each, ()) for each in OFFERED), *((each, WAKE) for each in WOKEN)]
    for (rate, seconds, quick_seconds), flags in tqdm(runs, desc="latency", disable=None):
        with fresh_table(bench) as table:
            if flags:
                table.database.update_ddl(statements(change_stream=True)[-1:]).result(ADMIN_SECONDS)
            waits = latencies(bench, table, rate, bench.choose(seconds, quick_seconds), *flags)
        cuts = quantiles(waits, n=100, method="inclusive")
        row = (f"{rate} tasks/s" if rate > 1 else "1 task/s") + (", change stream" if flags else "")
        samples += [(row, f"p{share} ms", cuts[share - 1] * 1000) for share in (50, 95, 99)]
        samples.append((row, "tasks", len(waits)))
    waits = publishing_alone(bench, bench.choose(*PUBLISHED))
    cuts = quantiles(waits, n=100, method="inclusive")
    samples += [(ALONE, f"p{share} ms", cuts[share - 1] * 1000) for share in (50, 95, 99)]
    samples.append((ALONE, "tasks", len(waits)))
    section = Section(
        "Latency",
        figures(samples),
        CONDITIONS,
        "That a task waits for the next poll and for little else. The times of polls and commits are the emulators'.",
        Plot(["p50 ms", "p95 ms", "p99 ms"]),
    )
    section.at_most("p50 at 10/s, ms", section.value("10 tasks/s", "p50 ms"), 150)
    section.at_most("p95 at 10/s, ms", section.value("10 tasks/s", "p95 ms"), 600)
    for row in ("1 task/s, change stream", "10 tasks/s, change stream"):
        for column, limit in (("p50 ms", 100), ("p95 ms", 250), ("p99 ms", 400)):
            section.at_most(f"{column} at {row}", section.value(row, column), limit)
    return section


def latencies(bench: Bench, table: Table, rate: int, seconds: int, *flags: str) -> list[float]:
    committed: dict[str, float] = {}

    def register() -> None:
        with table.database.batch(default_retry_delay=RETRY_DELAY) as batch:
            id = outbox.register(batch, table.topic, MESSAGE)
        committed[id] = time.monotonic()

    with worker(bench.emulators, table.database, *flags), receiving(bench, table.topic) as received:
        register()
        eventually(lambda: received.keys() >= committed.keys(), seconds=30, message="the first task received")
        committed.clear()
        with ThreadPoolExecutor(REGISTRARS) as pool:
            done = [pool.submit(register) for _ in arrivals(rate, seconds)]
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


def arrivals(rate: int, seconds: int) -> Iterator[float]:
    random, begin, at = Random(rate), time.monotonic(), 0.0
    while (at := at + random.expovariate(rate)) < seconds:
        time.sleep(max(0.0, begin + at - time.monotonic()))
        yield at


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
