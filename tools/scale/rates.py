"""Figures that only virtual time can show: `make bench-simulation` prints them as Markdown tables.

The latencies are assumptions (`Latencies`), so the figures compare and explain. None is a promise.
"""

from collections.abc import Iterator
from dataclasses import replace

from tests.simulation.plan import Plan
from tests.simulation.spanner import Cpu
from tests.simulation.world import World, quiet
from tools.benchmarks.page import grid, markdown
from tools.benchmarks.results import figures

SEEDS = (1, 2, 3)
#: Tasks of a backlog.
TASKS = 20_000
#: Seconds until the workers have divided the shards.
DIVIDED = 15.0
#: CPU seconds of a worker for each task, of the order that `make bench` measures.
CPU = Cpu(task=0.0001)
BASE = Plan(0, workers=4, shards=10, batch_size=200, concurrency=8, rate=1e-9, seconds=0.0, keys=0.0, cpu=CPU)
#: Workers, shards, and whether the lock is exclusive.
WORKERS = ((1, 10, True), (4, 10, True), (64, 10, True), (8, 1, True), (8, 1, False))
Sample = tuple[str, str, float]


def drained(seed: int, workers: int, shards: int, exclusive: bool) -> Iterator[Sample]:
    """Send a backlog when the workers have divided the shards."""
    world = World(replace(BASE, seed=seed, workers=workers, shards=shards, exclusive=exclusive))
    with quiet():
        world.clockwork.run(DIVIDED)
        world.load(TASKS)
        # Without the first poll, the last batches, and a last worker that has more to do than the others.
        began = world.run_until(unsent=round(0.9 * TASKS))
        seconds = world.run_until(unsent=round(0.2 * TASKS)) - began
        world.run_until(unsent=0)
        world.clockwork.close()
    case = f"{workers}, {shards}, {'exclusive' if exclusive else 'shared'}"
    yield case, "tasks/s", 0.7 * TASKS / seconds
    yield case, "aborted transactions", world.spanner.aborts
    yield case, "duplicates", world.audit.duplicates


def main() -> None:
    """Print the medians of all seeds."""
    samples = [each for case in WORKERS for seed in SEEDS for each in drained(seed, *case)]
    print("\n### Workers, shards, lock\n", markdown(*grid(figures(samples))), sep="\n", flush=True)


if __name__ == "__main__":
    main()
