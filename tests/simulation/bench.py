"""Figures that only virtual time can show: `make bench-simulation` prints them as Markdown tables.

The latencies are assumptions (`Latencies`), so the figures compare and explain. None is a promise.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from random import Random

from outbox.program.terminal import cell
from tests.simulation.audit import Known
from tests.simulation.spanner import DEFAULT_LATENCIES, Cpu
from tests.simulation.world import GOOD, Plan, World, quiet

SEEDS = (1, 2, 3)
TASKS = 20_000
#: Seconds until the workers have divided the shards.
DIVIDED = 15.0
#: CPU seconds of a worker for each task, of the order that `make bench` measures.
CPU = Cpu(task=0.0001)
Figures = Mapping[str, float]


def drained(plan: Plan, tasks: int = TASKS) -> Figures:
    """Send a backlog when the workers have divided the shards."""
    world = World(plan)
    with quiet():
        world.clockwork.run(DIVIDED)
        before = sum(world.spanner.requests.values())
        world.load(tasks)
        # Without the first poll, the last batches, and a last worker that has more to do than the others.
        began = world.run_until(unsent=round(0.9 * tasks))
        seconds = world.run_until(unsent=round(0.2 * tasks)) - began
        world.run_until(unsent=0)
        world.clockwork.close()
    held = world.spanner.locks.held_seconds
    return {
        "tasks/s": 0.7 * tasks / seconds,
        "aborted transactions": world.spanner.aborts,
        "lock waits": world.spanner.locks.waits,
        "duplicates": world.audit.duplicates,
        "requests per 1,000 tasks": 1000 * (sum(world.spanner.requests.values()) - before) / tasks,
        "rows are locked for, ms": 1000 * statistics.median(held) if held else 0,
    }


def taken_over(plan: Plan) -> float:
    """Kill one worker, and register one task for each shard: the seconds until the last is sent."""
    world = World(plan)
    with quiet():
        world.clockwork.run(30.0)
        world.nodes[0].kill()
        killed = world.clockwork.now
        world.load(20 * plan.shards)
        seconds = world.run_until(unsent=0) - killed
        world.clockwork.close()
    return seconds


def overloaded(plan: Plan) -> Figures:
    """For ten minutes applications send ten times as many transactions as Spanner can serve."""
    capacity, burst = 30.0, (300.0, 900.0)
    world = World(replace(plan, seconds=burst[1] + 60))
    world.spanner.capacity = capacity
    world.rate = lambda: 10 * capacity if burst[0] < world.clockwork.now < burst[1] else capacity / 4
    with quiet():
        world.clockwork.spawn(world.application, world.applications)
        world.clockwork.run(burst[0])
        calm, world.registered_in = world.registered_in, []
        world.clockwork.run(burst[1])
        busy, backlog = world.registered_in, world.spanner.table.unsent_count
        seconds = world.run_until(unsent=0) - burst[1]
        world.clockwork.close()
    return {
        "registrations/s before": len(calm) / burst[0],
        "in the burst": len(busy) / (burst[1] - burst[0]),
        "median ms before": 1000 * statistics.median(calm),
        "in the burst, ms": 1000 * statistics.median(busy),
        "backlog after it": backlog,
        "duplicates": world.audit.duplicates,
        "all sent after, s": seconds if plan.workers else float("nan"),
    }


def urgent(plan: Plan, priority: int, tasks: int = 100_000) -> Figures:
    """Register single tasks of a priority beside a backlog of priority 50: the seconds until they are received."""
    world, random = World(plan), Random(plan.seed)
    waited: list[float] = []
    with quiet():
        world.clockwork.run(DIVIDED)
        world.load(tasks)
        while len(waited) < 20 and world.spanner.table.unsent_count > tasks / 5:
            world.clockwork.run(world.clockwork.now + 0.2)
            id, now = f"{random.randrange(10**9):09}-urgent", world.clockwork.now
            task = Known("orders", "", now, now)
            created_at = world.spanner.table.commit_time()
            world.spanner.table.insert(id, "orders", GOOD, created_at=created_at, priority=priority)
            world.audit.committed(id, task)
            world.clockwork.run(now + 600, lambda task=task: task.received > 0)
            waited.append(world.clockwork.now - now)
        world.clockwork.close()
    return {"median s": statistics.median(waited), "max s": max(waited)}


def rows(name: str, cases: Iterable[tuple[str, Callable[[int], Figures]]], *columns: str) -> Iterator[str]:
    """Yield the lines of a table: one row for each case, medians of all seeds, and only `columns` if any are given."""
    head: list[str] = []
    for value, measure in cases:
        found = [measure(seed) for seed in SEEDS]
        figures = {column: statistics.median(each[column] for each in found) for column in columns or found[0]}
        if not head:
            head = [name, *figures]
            yield f"| {' | '.join(head)} |"
            yield "|---|" + "---:|" * len(figures)
        yield f"| {value} | {' | '.join(map(_shown, figures.values()))} |"


def _shown(value: float) -> str:
    return "-" if value != value else f"{value:.2f}" if 0 < value < 10 and value % 1 else cell(round(value))  # noqa: PLR0124 - NaN


def drain(plan: Plan, **changes: object) -> Callable[[int], Figures]:
    return lambda seed: drained(replace(plan, seed=seed, **changes))  # type: ignore[arg-type]  # fields by name


def fleet(plan: Plan) -> Callable[[int], Figures]:
    """Return a function that drains a backlog, and lets one of several workers die."""
    return lambda seed: {
        **drained(replace(plan, seed=seed)),
        "take-over, s": taken_over(replace(plan, seed=seed)) if plan.workers > 1 else float("nan"),
    }


BASE = Plan(0, workers=4, shards=10, batch_size=200, concurrency=8, rate=1e-9, seconds=0.0, keys=0.0, cpu=CPU)
ONE = replace(BASE, workers=1)
SECTIONS: dict[str, Callable[[], Iterator[str]]] = {
    "The lock hint, workers that share one shard": lambda: rows(
        "workers, lock",
        [
            (f"{workers}, {name}", drain(BASE, workers=workers, shards=1, exclusive=exclusive))
            for workers in (1, 2, 4, 8, 16)
            for name, exclusive in (("exclusive", True), ("shared", False))
        ],
        "tasks/s",
        "aborted transactions",
        "lock waits",
        "duplicates",
    ),
    "Workers and shards": lambda: rows(
        "workers, shards",
        [
            (f"{workers}, {shards}", fleet(replace(BASE, workers=workers, shards=shards)))
            for shards in (10, 100)
            for workers in (1, 4, 16, 64)
        ],
        "tasks/s",
        "aborted transactions",
        "lock waits",
        "duplicates",
        "requests per 1,000 tasks",
        "take-over, s",
    ),
    "Batch size, one worker": lambda: rows(
        "batch size",
        [(f"{size}", drain(ONE, batch_size=size)) for size in (1, 10, 50, 100, 200, 500, 1000)],
        "tasks/s",
        "requests per 1,000 tasks",
        "rows are locked for, ms",
    ),
    "Latency of Pub/Sub, one worker": lambda: rows(
        "publish",
        [
            (f"{seconds:g} s", drain(ONE, latencies=replace(DEFAULT_LATENCIES, publish=seconds)))
            for seconds in (0.02, 0.2, 1.0, 3.0)
        ],
        "tasks/s",
        "rows are locked for, ms",
    ),
    "All latencies of Spanner, one worker": lambda: rows(
        "times the default",
        [(f"{factor:g}", drain(ONE, latencies=DEFAULT_LATENCIES.times(factor))) for factor in (0.3, 1, 3, 10)],
        "tasks/s",
        "rows are locked for, ms",
    ),
    "Ten times the capacity for ten minutes": lambda: rows(
        "workers",
        [
            (f"{workers}", lambda seed, workers=workers: overloaded(replace(BASE, seed=seed, workers=workers)))
            for workers in (0, 1, 4)
        ],
    ),
    "A task among 100,000 others of priority 50, four workers": lambda: rows(
        "priority, fair share",
        [
            (
                f"{priority}, {share:g}",
                lambda seed, priority=priority, share=share: urgent(
                    replace(BASE, seed=seed, fair_share=share), priority
                ),
            )
            for priority, share in ((100, 0.1), (100, 0.0), (50, 0.1), (0, 0.0), (0, 0.1), (0, 0.5))
        ],
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SECTIONS, help="print only this section")
    options = parser.parse_args()
    for title, section in SECTIONS.items():
        if options.only in (None, title):
            print(f"\n### {title}\n", *section(), sep="\n", flush=True)


if __name__ == "__main__":
    main()
