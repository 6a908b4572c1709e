"""Tasks a second: the relay compared with a user's own code, and with its ceilings."""

from collections.abc import Callable
from functools import partial

from outbox.devtools.emulators import Emulators
from tests.benchmarks import ceilings, naive, relaying
from tests.benchmarks.bench import ROWS, Bench, Speed
from tests.benchmarks.results import Plot, Section, figures

Way = Callable[[Bench, Emulators], Speed]

A, B, B_OWN = "A: a transaction a task", "B: A in 4 threads", "B: the same, a table each"
P, M, M_READ = "P: publish only", "M: lock and mark only", "M by key, no exclusive lock"
CPU = "client CPU us/task"
RELAY, SMALLER = "relay, defaults", "relay, batches of 100"


WAYS: dict[str, Way] = {
    A: partial(naive.relay, threads=1, tables=1),
    B: partial(naive.relay, threads=4, tables=1),
    B_OWN: partial(naive.relay, threads=4, tables=4),
    P: ceilings.publish_only,
    M: ceilings.mark_only,
    M_READ: ceilings.read_and_mark_only,
    RELAY: relaying.relay,
    SMALLER: partial(relaying.relay, batch_size="100"),
}

CONDITIONS = f"""\
- Fresh tables of {ROWS} rows, messages of 300 bytes, one worker with its default of 200 tasks in a batch. One task is
  sent before the clock starts, so that every client is connected and the topic is known.
- A and B: plain `spanner.Database` and high-level `PublisherClient` with default settings; lock by ID with the
  exclusive hint, publish, wait, mark, commit. They relay only 60 of the {ROWS} rows, to save time. In B each thread has
  its own clients. On one table the emulator aborts all threads but one, and tasks that were published before an abort
  are published again.
- P: raw protobuf, 200 messages a request, 4 requests in flight.
- M: `SpannerStore.claim` with a decision that every task was sent. M by key reads the same rows by the Read API, which
  the emulator answers without a scan. The Read API takes no exclusive lock, so a relay cannot use it."""


def measure(bench: Bench, hosts: Emulators, ways: dict[str, Way], title: str) -> list[tuple[str, str, float]]:
    samples: list[tuple[str, str, float]] = []
    for _ in bench.each_round(title):
        for name, way in ways.items():
            samples += way(bench, hosts).samples(name)
    return samples


def ratio(section: Section, *ways: str) -> float:
    return section.value(RELAY, "tasks/s") / min(section.value(way, "tasks/s") for way in ways)


def run(bench: Bench) -> Section:
    section = Section(
        "Throughput",
        figures(measure(bench, bench.emulators, WAYS, "throughput")),
        CONDITIONS,
        "The ratios, and the CPU of the client. Tasks/s are the emulator's: it scans the table for each SQL statement.",
        Plot(["tasks/s"], log=True),
    )
    # Not tasks/s: most of them are the emulator's, whose share differs from machine to machine.
    cpu = {way: section.value(way, CPU) for way in (A, P, M, RELAY)}
    section.at_least("client CPU of A / of the relay", cpu[A] / cpu[RELAY], 50)
    section.at_most("client CPU of the relay / of P and M", cpu[RELAY] / (cpu[P] + cpu[M]), 2.5)
    return section
