"""Tasks a second: the relay beside a user's own code, and beside its ceilings."""

from collections.abc import Callable

from tqdm import tqdm

from outbox.devtools.emulators import Emulators
from tests.benchmarks import ceilings, naive, relaying
from tests.benchmarks.bench import ROWS, Bench, Speed
from tests.benchmarks.results import Bar, Plot, Section, figures

Way = Callable[[Bench, Emulators], Speed]

A, B, B_OWN = "A: a transaction a task", "B: A in 4 threads", "B: the same, a table each"
P, M, M_READ = "P: publish only", "M: lock and mark only", "M by key, no exclusive lock"
RELAY, TUNED = "relay, defaults", "relay, batches of 200"


def tuned(bench: Bench, hosts: Emulators) -> Speed:
    """Relay with what is best for a table of this size: one batch."""
    return relaying.relay(bench, hosts, batch_size="200")


WAYS: dict[str, Way] = {
    A: naive.sequential,
    B: naive.threads_on_one_table,
    B_OWN: naive.threads_on_own_tables,
    P: ceilings.publish_only,
    M: ceilings.mark_only,
    M_READ: ceilings.read_and_mark_only,
    RELAY: relaying.relay,
    TUNED: tuned,
}

CONDITIONS = f"""\
- Fresh tables of {ROWS} rows, messages of 300 bytes, batches of 100, one worker; one task before the clock starts, so
  that all are connected and the topic is known.
- A and B: plain `spanner.Database` and high-level `PublisherClient` with default settings; lock by id with the
  exclusive hint, publish, wait, mark, commit. They relay 60 of the {ROWS} rows, for time. In B each thread has its own
  clients; on one table the emulator aborts all but one of them, and what was published before an abort is published
  again.
- P: raw protobuf, 100 messages a request, 4 requests in flight.
- M: `SpannerStore.claim` with a decision that everything was sent. M by key reads the same rows by the Read API, which
  the emulator does not answer by a scan; it takes no exclusive lock, so it is no way to relay."""


def measure(bench: Bench, hosts: Emulators, ways: dict[str, Way], title: str) -> list[tuple[str, str, float]]:
    """Take all ways in turns and return their samples."""
    samples: list[tuple[str, str, float]] = []
    for _ in tqdm(range(bench.rounds), desc=title, disable=None):
        for name, way in ways.items():
            samples += way(bench, hosts).samples(name)
    return samples


def ratios(section: Section, least_over_a: float, least_of_ceiling: float | None = None) -> list[Bar]:
    """Return the bars of a table of ways."""

    def speed(row: str) -> float:
        return section.value(row, "tasks/s")

    bars = [Bar("relay / A", speed(RELAY) / speed(A), least_over_a, at_least=True)]
    if least_of_ceiling is not None:
        ceiling = min(speed(P), speed(M))
        bars.append(Bar("relay / min(P, M)", speed(RELAY) / ceiling, least_of_ceiling, at_least=True))
    return bars


def run(bench: Bench) -> Section:
    section = Section(
        "Throughput",
        figures(measure(bench, bench.emulators, WAYS, "throughput")),
        [],
        CONDITIONS,
        "The ratios, and the CPU of the client. Tasks/s are the emulator's: it scans the table for each SQL statement.",
        Plot(["tasks/s"], log=True),
    )
    section.bars.extend(ratios(section, 30, 0.75))
    return section
