"""Tasks a second: the relay compared with a user's own code."""

from collections.abc import Callable
from functools import partial

from outbox.devtools.emulators import Emulators
from tools.benchmarks import naive, relaying
from tools.benchmarks.bench import ROWS, Bench, Speed
from tools.benchmarks.results import Section, figures

Way = Callable[[Bench, Emulators], Speed]

ALONE, CPU = "a transaction for each task", "client CPU us/task"
RELAY, SMALLER = "relay, defaults", "relay, batches of 100"

WAYS: dict[str, Way] = {
    ALONE: naive.relay,
    RELAY: relaying.relay,
    SMALLER: partial(relaying.relay, batch_size="100"),
}

CONDITIONS = f"""\
- Fresh tables of {ROWS} rows, messages of 300 bytes, one worker with its default of 200 tasks in a batch. One task is
  sent before the clock starts.
- *A transaction for each task* is what a first relay of your own does, with Google's clients and their default
  settings: lock by ID, publish, wait, mark, commit."""


def measure(bench: Bench, hosts: Emulators, ways: dict[str, Way], title: str) -> list[tuple[str, str, float]]:
    samples: list[tuple[str, str, float]] = []
    for _ in bench.each_round(title):
        for name, way in ways.items():
            samples += way(bench, hosts).samples(name)
    return samples


def ratio(section: Section, way: str) -> float:
    return section.value(way, "tasks/s") / section.value(ALONE, "tasks/s")


def run(bench: Bench) -> Section:
    section = Section(
        "Throughput",
        figures(measure(bench, bench.emulators, WAYS, "throughput")),
        CONDITIONS,
        "the ratios, and the CPU of the client.",
    )
    # Not tasks/s: most of them are the emulator's, whose share differs from machine to machine.
    ratio_of_cpu = section.value(ALONE, CPU) / section.value(RELAY, CPU)
    section.at_least("client CPU without a relay / of the relay", ratio_of_cpu, 50)
    return section
