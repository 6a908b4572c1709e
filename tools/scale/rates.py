"""Figures that only virtual time can show: `make bench-simulation` prints them as Markdown tables.

The latencies are assumptions (`Latencies`), so the figures compare and explain. None is a promise.
"""

import statistics
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from tests.simulation.audit import Known
from tests.simulation.plan import Plan
from tests.simulation.spanner import Cpu
from tests.simulation.world import GOOD, World, quiet
from tools.benchmarks.page import grid, markdown
from tools.benchmarks.results import figures

SEEDS = (1, 2, 3)
#: Tasks of a backlog, and those among which a task of another priority arrives.
TASKS, OTHERS = 20_000, 100_000
#: Seconds until the workers have divided the shards.
DIVIDED = 15.0
#: CPU seconds of a worker for each task, of the order that `make bench` measures.
CPU = Cpu(task=0.0001)
BASE = Plan(0, workers=4, shards=10, batch_size=200, concurrency=8, rate=1e-9, seconds=0.0, keys=0.0, cpu=CPU)
#: Workers, shards, and whether the lock is exclusive.
WORKERS = ((1, 10, True), (4, 10, True), (64, 10, True), (8, 1, True), (8, 1, False))
#: The priority of a task among others of priority 50, and the fair share.
PRIORITIES = ((100, 0.1), (50, 0.1), (0, 0.1), (0, 0.0))
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


def urgent(seed: int, priority: int, fair_share: float) -> Iterator[Sample]:
    """Register single tasks of a priority beside a backlog of priority 50: the seconds until they are received."""
    world, random = World(replace(BASE, seed=seed, fair_share=fair_share)), Random(seed)
    waited: list[float] = []
    with quiet():
        world.clockwork.run(DIVIDED)
        world.load(OTHERS)
        while len(waited) < 20 and world.spanner.table.unsent_count > OTHERS / 5:
            world.clockwork.run(world.clockwork.now + 0.2)
            id, now = f"{random.randrange(10**9):09}-urgent", world.clockwork.now
            task = Known("orders", "", now, now)
            created_at = world.spanner.table.commit_time()
            world.spanner.table.insert(id, "orders", GOOD, created_at=created_at, priority=priority)
            world.audit.committed(id, task)
            world.clockwork.run(now + 600, lambda task=task: task.received > 0)
            waited.append(world.clockwork.now - now)
        world.clockwork.close()
    yield f"{priority}, {fair_share:g}", "median s", statistics.median(waited)


def main() -> None:
    """Print the medians of all seeds."""
    samples = [each for case in WORKERS for seed in SEEDS for each in drained(seed, *case)]
    print("\n### Workers, shards, lock\n", markdown(*grid(figures(samples))), sep="\n", flush=True)
    samples = [each for case in PRIORITIES for seed in SEEDS for each in urgent(seed, *case)]
    print(
        f"### A task among {OTHERS:,} of priority 50: priority, fair share\n",
        markdown(*grid(figures(samples))),
        sep="\n",
    )


if __name__ == "__main__":
    main()
