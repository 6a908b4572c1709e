"""One day at 100,000 tasks per second at its peak, in compressed form: an hour lasts a minute.

All numbers of tasks are divided by SCALE. The time limits of workers, such as the liveness timeout, are not compressed,
so a fault that they end lasts 60 times as long in the picture.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import cos, pi
from pathlib import Path
from random import Random
from typing import Any

from matplotlib import pyplot as plt

from tests.simulation.audit import Known
from tests.simulation.faults import stop
from tests.simulation.plan import Fault
from tests.simulation.spanner import Cpu
from tests.simulation.world import GOOD, World, quiet
from tools.benchmarks.cost import TTL_DELETE
from tools.scale.rates import BASE, DIVIDED

SCALE, HOUR = 5_000, 60.0
PEAK, WORKERS, OF_ALL_WORKERS = 100_000, 6, 200_000
#: The events of the day, by their hour.
EVENTS = {9.0: "first of the month", 11.0: "deployment", 14.0: "zone fails", 18.0: "Spanner slow"}
#: Of the first of the month: times the usual rate, for so many hours. Of the brown-out: the part of Spanner, and hours.
RUSH, RUSH_HOURS, SLOW, SLOW_HOURS = 1.8, 0.5, 0.5, 0.5
#: Hours between two points of the picture.
STEP = 0.25


def rate(hour: float) -> float:
    """Return the tasks per second that are registered: few at night, most at 15 h."""
    usual = PEAK * (0.55 + 0.45 * cos((hour - 15) / 12 * pi))
    return usual * (RUSH if 9.0 <= hour < 9.0 + RUSH_HOURS else 1.0)


@dataclass
class Day:
    """The points of the picture, by name."""

    points: dict[str, list[float]] = field(default_factory=dict)
    duplicates: int = 0
    lost: int = 0


def play(row_writes: float, work: Callable[[str, int], float], hours: float = 24.0) -> Day:
    """Play the day. Spanner carries `row_writes` per second, and a request costs `work`."""
    cpu = Cpu(task=SCALE * WORKERS / OF_ALL_WORKERS)
    world = World(replace(BASE, seed=1, workers=WORKERS, shards=12, batch_size=1, cpu=cpu))
    clockwork, spanner, day = world.clockwork, world.spanner, Day()
    spanner.work = work
    with quiet():
        clockwork.run(DIVIDED)
        spanner.capacity = capacity = row_writes / SCALE
        _plan_events(world, capacity)
        clockwork.spawn(world.application, functools.partial(_register, world, hours))
        clockwork.after(STEP * HOUR, functools.partial(_note, world, day, capacity, spanner.worked))
        clockwork.run(DIVIDED + hours * HOUR)
        world.run_until(unsent=0)
        clockwork.close()
    day.duplicates = world.audit.duplicates
    day.lost = sum(not task.received for task in world.audit.tasks.values())
    return day


def _register(world: World, hours: float) -> None:
    spanner, random = world.spanner, Random("day")
    while (hour := (world.clockwork.now - DIVIDED) / HOUR) < hours:
        world.clockwork.sleep(random.expovariate(rate(hour) / SCALE))
        spanner.book("insert", 1, urgent=True)
        id, now = f"{random.randrange(10**9):09}-{len(world.audit.tasks)}", world.clockwork.now
        spanner.table.insert(id, "orders", GOOD, created_at=spanner.table.commit_time())
        world.audit.committed(id, Known("orders", "", now, now))


def _plan_events(world: World, capacity: float) -> None:
    def at(hour: float, call: Callable[..., object], *values: Any) -> None:
        world.clockwork.after(hour * HOUR, functools.partial(call, *values))

    for number, node in enumerate(world.nodes):  # one after the other
        at(11.0 + number / 30, _restart, world, node)
    for node in world.nodes[: WORKERS // 3]:
        at(14.0, node.kill)
        at(14.5, node.start)
    at(18.0, setattr, world.spanner, "capacity", SLOW * capacity)
    at(18.0 + SLOW_HOURS, setattr, world.spanner, "capacity", capacity)


def _restart(world: World, node: Any) -> None:
    end = stop(world, node, Fault(0.0, "stop", 0, 0.0))
    world.clockwork.after(2.0, end)


def _note(world: World, day: Day, capacity: float, before: float) -> None:
    now, worked = world.clockwork.now, world.spanner.worked
    since = now - STEP * HOUR
    hour = (now - DIVIDED) / HOUR
    waits = sorted(task.last_at - task.at for task in world.audit.tasks.values() if task.last_at >= since)
    deletions = TTL_DELETE[0] * rate(hour) / SCALE
    values = {
        "hour": hour,
        "registered, 1,000/s": rate(hour) / 1000,
        "backlog, 1,000 tasks": world.spanner.table.unsent_count * SCALE / 1000,
        "p99, s": waits[int(0.99 * len(waits))] if waits else 0.0,
        "CPU of Spanner, %": 100 * ((worked - before) / (now - since) + deletions) / capacity,
        "duplicates": world.audit.duplicates,
    }
    for name, value in values.items():
        day.points.setdefault(name, []).append(round(value, 3))
    world.clockwork.after(STEP * HOUR, functools.partial(_note, world, day, capacity, worked))


def draw(points: dict[str, list[float]], file: Path) -> None:
    """Draw the day."""
    names = [name for name in points if name != "hour"]
    figure, axes = plt.subplots(len(names), 1, figsize=(7, 1.5 * len(names)), sharex=True, layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        axis.fill_between(points["hour"], points[name], color="0.8", step="pre")
        axis.set_ylabel(name, fontsize="x-small")
        for hour in EVENTS:
            axis.axvline(hour, color="tab:orange", linewidth=0.8)
    for hour, text in EVENTS.items():
        axes[0].text(hour, axes[0].get_ylim()[1], text, fontsize="xx-small", rotation=20)
    axes[-1].set_xlabel("hour of the day")
    figure.savefig(file, dpi=110, metadata={"Software": None})
    plt.close(figure)
