"""What grows with the number of workers: reads of heartbeats and of the change stream, and the time to take over."""

import statistics
from dataclasses import replace
from random import Random

from tests.simulation.world import World, quiet
from tools.scale.rates import BASE

#: Seconds until the workers know each other, and for which reads are counted.
STARTED, COUNTED = 30.0, 20.0
#: Tasks that wake idle workers, one after the other.
TASKS = 100


def _world(workers: int, *, wake: bool) -> World:
    world = World(replace(BASE, seed=1, workers=workers, shards=max(10, workers // 2), wake=wake))
    world.clockwork.run(STARTED)
    return world


def heartbeats(workers: int) -> dict[str, float]:
    """Kill a worker. Return the heartbeat rows read per second before, and when the last of the others noticed."""
    with quiet():
        world = _world(workers, wake=False)
        clockwork, (killed, *others) = world.clockwork, world.nodes
        rows = world.spanner.heartbeat_rows
        clockwork.run(STARTED + COUNTED)
        rows = world.spanner.heartbeat_rows - rows
        killed.kill()
        seen_at = world.spanner.table.seen_at[killed.process.name]
        clockwork.run(clockwork.now + 60, lambda: all(each.membership.size < workers for each in others))
        took = (world.spanner.table.time() - seen_at).total_seconds()
        clockwork.close()
    return {"heartbeat rows read/s": rows / COUNTED, "taken over after, s": took}


def wake_ups(workers: int) -> dict[str, float]:
    """Register single tasks while all workers are idle. Return how soon they are received, and the records read."""
    with quiet():
        world = _world(workers, wake=True)
        clockwork, random = world.clockwork, Random(1)
        waits = list[float]()
        for number in range(TASKS):
            clockwork.run(clockwork.now + random.uniform(0.5, 1.5))
            task, now = world.add(f"{random.randrange(10**9):09}-{number}"), clockwork.now
            clockwork.after(random.uniform(0.03, 0.15), world._wake)
            clockwork.run(now + 60, lambda task=task: task.received > 0)
            waits.append(1000 * (clockwork.now - now))
        clockwork.close()
    cuts = statistics.quantiles(waits, n=100, method="inclusive")
    return {"records read/task": world.records / TASKS, "p50 ms": cuts[49], "p99 ms": cuts[98]}
