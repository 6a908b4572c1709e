"""The same ways behind a network: where a service is milliseconds away, the round trips of each task dominate."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from outbox.devtools.emulators import Emulators
from tests.support.processes import started
from tests.support.waiting import eventually
from tools.benchmarks import relaying, throughput
from tools.benchmarks.bench import ROWS, Bench, Speed, fresh_table, stopwatch
from tools.benchmarks.results import Section, figures

#: Seconds each way.
SPANNER, PUBSUB = 0.004, 0.010
#: Relays at once, each with a database: an emulator's database runs one transaction at a time.
RELAYS = 4

RELAYS_AT_ONCE = f"relay, {RELAYS} of them, a table each"

CONDITIONS = f"""\
- As under [throughput](#throughput), but each service is behind a proxy that delivers every byte {SPANNER * 1000:g} ms
  (Spanner) and {PUBSUB * 1000:g} ms (Pub/Sub) after it was sent.
- A database of the emulator runs one read-write transaction at a time. {RELAYS} relays with a table each, in threads of
  one process, show the effect of several batches in flight."""


def run(bench: Bench) -> Section:
    with far_away(bench.emulators) as hosts:
        samples = throughput.measure(bench, hosts, {**throughput.WAYS, RELAYS_AT_ONCE: at_once}, "delayed")
    section = Section(
        "Throughput with network delay",
        figures(samples),
        CONDITIONS,
        "the ratios.",
    )
    for way, limit in ((throughput.RELAY, 60), (RELAYS_AT_ONCE, 150)):
        section.at_least(f"{way} / without a relay: tasks/s", throughput.ratio(section, way), limit)
    return section


@contextlib.contextmanager
def far_away(emulators: Emulators) -> Iterator[Emulators]:
    targets = (f"{emulators.spanner_host}={SPANNER}", f"{emulators.pubsub_host}={PUBSUB}")
    with started("tests.support.proxy", *targets) as process:
        eventually(lambda: process.stdout.count("\n") == len(targets), message="addresses")
        spanner_host, pubsub_host = process.stdout.splitlines()
        yield Emulators(spanner_host, pubsub_host)


def at_once(bench: Bench, hosts: Emulators) -> Speed:
    with contextlib.ExitStack() as stack:
        tables = [stack.enter_context(fresh_table(bench)) for _ in range(RELAYS)]
        workers = [relaying.warm_worker(hosts, table) for table in tables]
        for table in tables:
            table.fill(ROWS)
        pool = stack.enter_context(ThreadPoolExecutor(RELAYS))
        with stopwatch() as watch:
            list(pool.map(relaying.drive, workers, [ROWS] * RELAYS))
        return Speed(ROWS * RELAYS, watch)
