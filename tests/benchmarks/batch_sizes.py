"""Tasks a second and CPU by batch size: why tasks are grouped."""

from functools import partial

from tests.benchmarks import relaying, throughput
from tests.benchmarks.bench import ROWS, Bench
from tests.benchmarks.results import Plot, Section, figures

SIZES = (1, 10, 100)

CONDITIONS = f"""\
- Fresh tables of {ROWS} rows, messages of 300 bytes, one worker, `--concurrency` for 100 tasks in flight."""


def run(bench: Bench) -> Section:
    """Measure one worker at each size, up to 100 tasks a turn."""
    ways = {
        f"batches of {size}": partial(relaying.relay, batch_size=str(size), concurrency=str(max(1, 100 // size)))
        for size in SIZES
    }
    return Section(
        "Batch size",
        figures(throughput.measure(bench, bench.emulators, ways, "batch sizes")),
        [],
        CONDITIONS,
        "The ratios, and the CPU of the client.",
        Plot(["tasks/s", "client CPU us/task"], log=True),
    )
