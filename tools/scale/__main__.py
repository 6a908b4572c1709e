"""The numbers at scale: simulated loads and the autoscaler. Writes docs/architecture/scale.md."""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import ceil, inf
from pathlib import Path
from random import Random
from zlib import crc32

from matplotlib import pyplot as plt
from tqdm import tqdm

from tests.simulation.plan import ANSWERS
from tests.simulation.spanner import Cpu
from tests.simulation.world import World, quiet
from tools.benchmarks.cost import INSERT, MARK, TTL_DELETE
from tools.benchmarks.page import grid, markdown
from tools.benchmarks.results import ROOT, Figure, Section, circumstances, figures, load, save
from tools.scale import fleets
from tools.scale.autoscaler import Autoscaler, Durations, commit_limit
from tools.scale.rates import BASE, DIVIDED

#: The part of the CPU to stay below. https://cloud.google.com/spanner/docs/cpu-utilization
RECOMMENDED = 0.65
#: Row writes and row reads per second of 1,000 processing units. https://cloud.google.com/spanner/docs/performance
ROW_WRITES, ROW_READS = 3_500, 22_500
READ = ROW_WRITES / ROW_READS
#: Row writes of each request, and of each row of it; a row that is read counts as a part of one.
WORK = {"insert": (0, INSERT[0]), "commit": (0, MARK[0]), "lock": (0, READ), "poll": (READ, 0), "rows": (0, READ)}
#: Of a worker in the loads. With full batches it is about what `python -m tools.benchmarks --only costs` measures.
CPU = Cpu(request=1341e-6, task=42.629e-6)
#: Of the latencies, in rows that show what they do.
SLOW = 3
#: Tasks of each shard that are sent before a run.
WARMING = 10
#: Seconds of a run that do not count. The workers' pauses are long then.
BEGINNING = 1.0


def work(kind: str, rows: int) -> float:
    """Return the row writes that a request to Spanner is worth."""
    fixed, each = WORK.get(kind, (READ, 0))
    return fixed + each * rows


def arrive(world: World, rate: float, seconds: float) -> None:
    """Register single tasks for so many seconds."""
    spanner, end = world.spanner, world.clockwork.now + seconds
    random = Random(f"{world.plan.seed}/arrivals/{end}")
    while world.clockwork.now + (pause := random.expovariate(rate)) < end:
        world.clockwork.sleep(pause)
        spanner.book("insert", 1, urgent=True)
        world.add(f"{random.randrange(10**9):09}-{len(world.audit.tasks)}")


def warm(world: World, tasks: int) -> float:
    """Send tasks, so that the workers know the topic. Return the time afterwards."""
    world.clockwork.run(DIVIDED)
    world.load(tasks)
    return world.run_until(unsent=0)


def waits(world: World, since: float) -> list[float]:
    """Return the seconds from each commit to the receipt by Pub/Sub, of tasks registered since then."""
    return sorted(task.last_at - task.at for task in world.audit.tasks.values() if task.received and task.at >= since)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"p{share} ms": 1000 * cuts[share - 1] for share in (50, 95, 99)}


# --- loads


@dataclass(frozen=True, slots=True)
class Load:
    """Tasks per second, and what carries them."""

    rate: float
    workers: int
    shards: int
    units: int  # processing units
    seconds: float = 20.0

    @property
    def capacity(self) -> float:
        """Return the row writes per second for tasks: without the deletions of older tasks."""
        return self.units / 1000 * ROW_WRITES - TTL_DELETE[0] * self.rate


def carried(load: Load, factor: float = 1.0) -> dict[str, float]:
    """Register tasks at the rate while the workers send them. `factor` is that of all latencies."""
    latencies = BASE.latencies.times(factor)
    plan = replace(BASE, seed=1, workers=load.workers, shards=load.shards, cpu=CPU, latencies=latencies)
    world = World(plan)
    spanner, clockwork = world.spanner, world.clockwork
    spanner.capacity, spanner.work = load.capacity, work
    splits = load.units // 1000  # at least one for each server
    spanner.split_of = lambda row: crc32(row.id.encode()) % splits
    with quiet():
        begin = warm(world, WARMING * load.shards) + BEGINNING
        clockwork.spawn(world.application, lambda: arrive(world, load.rate, BEGINNING + load.seconds))
        clockwork.run(begin)
        requests, done = sum(spanner.requests.values()), spanner.worked
        worked = [node.process.worked for node in world.nodes]
        clockwork.run(begin + load.seconds)
        done, requests = spanner.worked - done, sum(spanner.requests.values()) - requests
        busiest = max(node.process.worked - before for node, before in zip(world.nodes, worked, strict=True))
        world.run_until(unsent=0)
        clockwork.close()
    seconds = waits(world, begin)
    received_at = [task.last_at for task in world.audit.tasks.values()]
    tasks = len(seconds)
    all_work = done + TTL_DELETE[0] * load.rate * load.seconds
    return {
        "received by Pub/Sub, tasks/s": sum(begin <= at < begin + load.seconds for at in received_at) / load.seconds,
        **percentiles(seconds),
        "requests/1,000 tasks": 1000 * requests / tasks,
        "CPU of the busiest worker, %": 100 * busiest / load.seconds,
        "CPU of Spanner, %": 100 * all_work / load.seconds / (load.units / 1000 * ROW_WRITES),
        "duplicates": world.audit.duplicates,
    }


def units(rate: float) -> int:
    """Return the processing units that carry unordered tasks at the recommended CPU: whole nodes."""
    row_writes = rate * (INSERT[0] + MARK[0] + TTL_DELETE[0] + 2 * READ)
    return 1000 * ceil(row_writes / (ROW_WRITES * RECOMMENDED))


# --- the autoscaler

#: All numbers of tasks, batches and row writes are divided by this, and the CPU of a task is multiplied.
SCALE = 20
#: Tasks per second that a worker can send, as docs/operations/scaling.md assumes.
OF_A_WORKER = 1_000
#: Tasks per second before and after.
CALM = 500


@dataclass(frozen=True, slots=True)
class Episode:
    """`rate` tasks per second arrive from minute 5 on. Spanner carries `capacity` row writes per second."""

    rate: float
    minutes: float
    capacity: float = 1e9
    broken: str = ""  # pubsub or spanner
    limit: float = inf


def scaled(episode: Episode) -> Autoscaler:
    """Play 40 minutes."""
    cpu = Cpu(task=SCALE / OF_A_WORKER)
    plan = replace(BASE, seed=1, workers=2, batch_size=BASE.batch_size // SCALE, cpu=cpu)
    durations = Durations()
    world = World(plan, metrics=durations)
    clockwork, spanner = world.clockwork, world.spanner
    spanner.capacity, spanner.work = episode.capacity / SCALE, work
    with quiet():
        scaler = Autoscaler(world, SCALE, episode.limit, durations)
        clockwork.run(DIVIDED)
        for rate, minutes in ((CALM, 5), (episode.rate, episode.minutes), (CALM, 35 - episode.minutes)):
            end = clockwork.now + 60 * minutes
            if episode.broken and rate != CALM:
                _break(world, episode.broken, 60 * minutes)
            clockwork.spawn(world.application, functools.partial(arrive, world, rate / SCALE, 60 * minutes))
            clockwork.run(end)
        clockwork.close()
    return scaler


def _break(world: World, service: str, seconds: float) -> None:
    if service == "pubsub":
        world.pubsub.broken["orders"] = ANSWERS["topic away"]
        world.clockwork.after(seconds, world.pubsub.broken.clear)
    else:
        world.troubles.append(("all", 1.0, "refused"))
        world.clockwork.after(seconds, world.troubles.clear)


# --- the page

PAGE = ROOT / "docs/architecture/scale.md"
FILE, PICTURE = (PAGE.with_suffix("") / name for name in ("results.json", "autoscaler.png"))

LOADS = {
    rate: Load(rate, workers, shards, units(rate), seconds)
    for rate, workers, shards, seconds in ((1_000, 2, 10, 20.0), (10_000, 4, 20, 10.0), (100_000, 40, 200, 4.0))
}
EPISODES = {
    "burst: 6,000 tasks/s for 5 minutes": Episode(6_000, 5),
    "Pub/Sub fails for 10 minutes, 1,500 tasks/s": Episode(1_500, 10, broken="pubsub"),
    "Spanner fails for 10 minutes, 1,500 tasks/s": Episode(1_500, 10, broken="spanner"),
    "Spanner is the limit, 2,000 tasks/s for 15 minutes": Episode(2_000, 15, capacity=8_000, limit=commit_limit()),
    "the same without the rule": Episode(2_000, 15, capacity=8_000),
}
Rows = list[tuple[str, str, float]]


def section(title: str, rows: Rows) -> Section:
    return Section(title, figures(rows), conditions="", transfers="")


def loads() -> dict[str, Section]:
    """Simulate each load, also with all latencies three times as long."""
    rows = Rows()
    for rate, load_ in tqdm(LOADS.items(), desc="loads", disable=None):
        column = f"{rate:,}/s"
        found = carried(load_)
        slow = carried(load_, factor=SLOW) if rate < 100_000 else {}
        values = {
            "workers": load_.workers,
            "shards": load_.shards,
            "processing units": load_.units,
            **found,
            **{f"{name}, with latencies three times as long": slow[name] for name in ("p50 ms", "p99 ms") if slow},
        }
        rows += [(name, column, value) for name, value in values.items()]
    return {"loads": section("Loads", rows)}


def large_fleets() -> dict[str, Section]:
    rows = Rows()
    for simulate, numbers in ((fleets.heartbeats, (10, 40, 100, 400)), (fleets.wake_ups, (2, 10, 40, 100))):
        for workers in tqdm(numbers, desc=simulate.__name__, disable=None):
            rows += [(f"{workers} workers", name, value) for name, value in simulate(workers).items()]
    rows.sort(key=lambda row: int(row[0].split()[0]))
    return {"fleets": section("Large fleets", rows)}


def episodes() -> dict[str, Section]:
    rows, series = Rows(), []
    for name, episode in tqdm(EPISODES.items(), desc="autoscaler", disable=None):
        scaler = scaled(episode)
        history = [(at - DIVIDED, *others) for at, *others in scaler.history]  # tasks arrive from DIVIDED on
        ends = 60 * (5 + episode.minutes)
        sent_at = next((at for at, backlog, *_ in history if at > ends and backlog < CALM), inf)
        rows += [
            (name, "largest number of workers", max(workers for _, _, workers, _ in history)),
            (name, "largest backlog", max(backlog for _, backlog, _, _ in history)),
            (name, "backlog sent after, minutes", (sent_at - ends) / 60),
            (name, "slowest commits, ms", 1000 * max(commit for *_, commit in history)),
            (name, "aborted transactions", scaler.world.spanner.aborts),
            (name, "duplicates", scaler.world.audit.duplicates),
        ]
        for column, values in zip(("minute", "backlog", "workers"), zip(*history, strict=True), strict=False):
            series.append(Figure(name, column, [each / 60 if column == "minute" else each for each in values]))
    return {"autoscaler": section("Autoscaler", rows), "series": Section("Series", series, "", "")}


def draw(results: dict[str, Section], file: Path) -> None:
    """Draw the autoscaler."""
    figure, axes = plt.subplots(len(EPISODES), 1, figsize=(7, 2 * len(EPISODES)), sharex=True, layout="constrained")
    series = {(each.row, each.column): each.values for each in results["series"].figures}
    for axis, name in zip(axes, EPISODES, strict=True):
        axis.fill_between(series[name, "minute"], [each / 1000 for each in series[name, "backlog"]], color="0.8")
        axis.set_ylabel("1,000 tasks")
        axis.set_title(name, fontsize="small", loc="left")
        right = axis.twinx()
        right.step(series[name, "minute"], series[name, "workers"], where="post", color="tab:orange")
        right.set_ylim(0, 11)
        right.set_yticks((0, 5, 10))
        right.set_ylabel("workers")
    axes[-1].set_xlabel("minutes")
    figure.savefig(file, dpi=110, metadata={"Software": None})
    plt.close(figure)


def text(results: dict[str, Section], page: str) -> str:
    """Return the page with its tables, and the lines that say when they were made, written from the results."""
    for name in TABLES:
        header, rows = grid(results[name].figures)
        ran = results[name].ran
        line = f"{ran['date']}, {ran['machine']}"
        begin, end = f"<!-- {name}: written from results.json -->\n", "<!-- end -->"
        before, _, rest = page.partition(begin)
        page = before + begin + "\n" + markdown(header, rows) + "\n" + line + "\n\n" + end + rest.partition(end)[2]
    return page


TABLES = ("loads", "fleets", "autoscaler")
SECTIONS: dict[str, Callable[[], dict[str, Section]]] = {
    "loads": loads, "fleets": large_fleets, "autoscaler": episodes
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.scale", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    options = parser.parse_args()
    for name in options.only:
        ran = circumstances()
        began = time.monotonic()
        found = SECTIONS[name]()
        ran |= {
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "seconds": f"{time.monotonic() - began:.0f}",
            "command": " ".join(["python -m tools.scale", *sys.argv[1:]]),
        }
        for each in found.values():
            each.ran.update(ran)
        save(load(FILE) | found, FILE)
    results = load(FILE)
    draw(results, PICTURE)
    PAGE.write_text(text(results, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}, {FILE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
