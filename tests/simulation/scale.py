"""The numbers at scale: simulated loads, checked against measured runs. Writes docs/architecture/scale.md."""

import argparse
import contextlib
import functools
import io
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import ceil, inf
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock
from zlib import crc32

from matplotlib import pyplot as plt
from tqdm import tqdm

from outbox.devtools import emulators
from publishworker.turn.membership import HEARTBEAT_INTERVAL_SECONDS
from tests.benchmarks.bench import Bench
from tests.benchmarks.cost import INSERT, MARK, TTL_DELETE
from tests.benchmarks.page import grid, markdown
from tests.benchmarks.results import ROOT, Figure, Section, circumstances, figures, load, save
from tests.simulation import measured
from tests.simulation.audit import Known
from tests.simulation.autoscaler import Autoscaler, Durations, commit_limit
from tests.simulation.bench import BASE, DIVIDED
from tests.simulation.emulator import Emulator
from tests.simulation.faults import ANSWERS
from tests.simulation.measured import Costs
from tests.simulation.spanner import Cpu, Latencies
from tests.simulation.world import GOOD, World, quiet

#: What 1,000 processing units carry each second at 100 % CPU, rows of 1 KB, one region, SSD; and the part to stay
#: below. https://cloud.google.com/spanner/docs/performance, https://cloud.google.com/spanner/docs/cpu-utilization
ROW_WRITES, ROW_READS, RECOMMENDED = 3_500, 22_500, 0.65
READ = ROW_WRITES / ROW_READS
#: Row writes of each request, and of each row of it; a row that is read counts as a part of one.
WORK = {"insert": (0, INSERT[0]), "commit": (0, MARK[0]), "lock": (0, READ), "poll": (READ, 0), "rows": (0, READ)}
#: Row writes of a task at the end of its shard's range of unsent tasks: its entry is inserted, and then deleted.
TAIL = 2
#: What the server of that range carries, at most: as much as 1,000 processing units.
TAIL_WRITES = ROW_WRITES * RECOMMENDED
#: Of the latencies, in rows that show what they do.
SLOW = 3
#: Tasks of each shard that are sent before a run.
WARMING = 10
#: Seconds of a run that do not count. The workers' pauses are long then.
BEGINNING = 1.0
#: As docs/operations/scaling.md assumes: bytes of a message and of a row with its index entries, days that rows are
#: stored, and the price of Pub/Sub. Hours of a month.
MESSAGE_BYTES, ROW_BYTES, STORED_DAYS, DOLLARS_PER_TIB, HOURS = 300, 700, 10, 40, 730
#: Dollars for a node and an hour, and for a GB and a month: the example of
#: https://kindatechnical.com/google-cloud-spanner-guide/understanding-pricing-models.html, undated.
DOLLARS_PER_NODE, DOLLARS_PER_GB = 0.90, 0.30


def work(kind: str, rows: int) -> float:
    """Return the row writes that a request to Spanner is worth."""
    fixed, each = WORK.get(kind, (READ, 0))
    return fixed + each * rows


def arrive(world: World, rate: float, seconds: float, *, retries: bool = False) -> None:
    """Register single tasks for so many seconds. With `retries` each waits for its commit, as on the emulator."""
    spanner, end = world.spanner, world.clockwork.now + seconds
    random = Random(f"{world.plan.seed}/arrivals/{end}")

    def register() -> None:
        if retries:
            spanner.serve("insert", 1, urgent=True)
        else:
            spanner.book("insert", 1, urgent=True)
        id, now = f"{random.randrange(10**9):09}-{len(world.audit.tasks)}", world.clockwork.now
        spanner.table.insert(id, "orders", GOOD, created_at=spanner.table.commit_time())
        world.audit.committed(id, Known("orders", "", now, now))

    while world.clockwork.now + (pause := random.expovariate(rate)) < end:
        world.clockwork.sleep(pause)
        if retries:
            world.clockwork.spawn(world.application, register)
        else:
            register()


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


# --- the check


def on_emulator(costs: Costs, workers: int, seed: int) -> World:
    plan = replace(BASE, seed=seed, workers=workers, cpu=costs.cpu, batch_size=measured.BATCH_SIZE)
    latencies = Latencies(read=0, lock=0, commit=0, participant=0, publish=costs.publish, sigma=0)
    plan = replace(plan, latencies=latencies)
    times = {**costs.times, **dict.fromkeys(("key_heads", "next_due", "has_work"), costs.times["discover"])}
    return World(plan, functools.partial(Emulator, times=times))


def drained(costs: Costs, workers: int, tasks: int, seed: int) -> dict[str, float]:
    """Do in the simulation what `measured.drained` does on the emulator."""
    world = on_emulator(costs, workers, seed)
    with quiet():
        world.clockwork.run(warm(world, WARMING * world.plan.shards) + 1)
        world.load(tasks)
        requests = sum(world.spanner.requests.values())
        worked = sum(node.process.worked for node in world.nodes)
        for node in world.nodes:  # they begin together, as in `measured`
            node.relay.wake()
        began = world.clockwork.now
        first = world.run_until(unsent=round(0.9 * tasks))
        seconds = world.run_until(unsent=round(0.2 * tasks)) - first
        checks_at = began
        while checks_at < world.clockwork.now or world.spanner.table.unsent_count:
            checks_at += measured.CHECK_SECONDS
            world.clockwork.run(checks_at)
        requests = sum(world.spanner.requests.values()) - requests
        worked = sum(node.process.worked for node in world.nodes) - worked
        world.clockwork.close()
    return {
        "tasks/s": 0.7 * tasks / seconds,
        "requests/1,000 tasks": 1000 * requests / tasks,
        "CPU us/task": 1e6 * worked / tasks,
    }


def received(costs: Costs, rate: float, seconds: float, seed: int) -> list[float]:
    world = on_emulator(costs, 1, seed)
    with quiet():
        begin = warm(world, 1)
        world.clockwork.spawn(world.application, lambda: arrive(world, rate, seconds, retries=True))
        world.clockwork.run(begin + seconds + 5)
        world.clockwork.close()
    return [each + costs.delivery for each in waits(world, begin)]


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


def carried(load: Load, cpu: Cpu, seed: int = 1, factor: float = 1.0) -> dict[str, float]:
    """Register tasks at the rate while the workers send them. `factor` is that of all latencies."""
    latencies = BASE.latencies.times(factor)
    plan = replace(BASE, seed=seed, workers=load.workers, shards=load.shards, cpu=cpu, latencies=latencies)
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
    writes = rate * (INSERT[0] + MARK[0] + TTL_DELETE[0] + 2 * READ)
    return 1000 * ceil(writes / (ROW_WRITES * RECOMMENDED))


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


def scaled(episode: Episode, seed: int = 1) -> Autoscaler:
    """Play 40 minutes."""
    cpu = Cpu(task=SCALE / OF_A_WORKER)
    plan = replace(BASE, seed=seed, workers=2, batch_size=BASE.batch_size // SCALE, cpu=cpu)
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
FOLDER = PAGE.with_suffix("")
FILE = FOLDER / "results.json"

#: Workers and tasks of the measured backlogs.
BACKLOGS = {"1 worker, 2,000 tasks": (1, 2_000), "2 workers, 2,000 tasks": (2, 2_000)}
#: Tasks per second of the measured arrivals, and seconds.
ARRIVALS, SECONDS = {"1 worker, 10 tasks/s": 10, "1 worker, 20 tasks/s": 20}, 20
#: How often each is measured.
ROUNDS = 5
#: Simulated figures are medians of the histories with these seeds.
SEEDS = range(1, 16)
LOADS = {
    rate: Load(rate, workers, shards, units(rate), seconds)
    for rate, workers, shards, seconds in ((1_000, 2, 10, 20.0), (10_000, 4, 20, 10.0), (100_000, 40, 200, 4.0))
}
#: Parts of the largest load with their shares of everything.
SLICES = {f"1/{part} of 100,000/s": part for part in (40, 20, 10, 5)}
EPISODES = {
    "burst: 6,000 tasks/s for 5 minutes": Episode(6_000, 5),
    "Pub/Sub fails for 10 minutes, 1,500 tasks/s": Episode(1_500, 10, broken="pubsub"),
    "Spanner fails for 10 minutes, 1,500 tasks/s": Episode(1_500, 10, broken="spanner"),
    "Spanner is the limit, 2,000 tasks/s for 15 minutes": Episode(2_000, 15, capacity=8_000, limit=commit_limit()),
    "the same without the rule": Episode(2_000, 15, capacity=8_000),
}
Rows = list[tuple[str, str, float]]


def measure() -> tuple[Costs, Rows]:
    """Measure on the emulators, and repeat it in the simulation with the measured costs."""
    rows: Rows = []

    def compare(case: str, real: Sequence[dict[str, float]], simulated: Sequence[dict[str, float]]) -> None:
        for column, value in _medians(real).items():
            name, other = f"{case}: {column}", _medians(simulated)[column]
            rows.extend([(name, "measured", value), (name, "simulated", other)])
            rows.append((name, "deviation, %", 100 * (other / value - 1)))
            values = [each[column] for each in real]
            rows.extend([(name, "min", min(values)), (name, "max", max(values))])

    with emulators.running() as hosts, mock.patch.dict(os.environ, hosts.environment()):
        bench = Bench(hosts, 1, quick=False)
        samples = measured.Samples(bench)
        runs: dict[str, list[dict[str, float]]] = defaultdict(list)
        with contextlib.redirect_stdout(io.StringIO()):  # processes of tests.support print a report at their end
            for _ in range(ROUNDS):
                samples.add_round()
                for name, backlog in BACKLOGS.items():
                    runs[name].append(measured.drained(bench, *backlog))
                for name, rate in ARRIVALS.items():
                    runs[name].append(percentiles(measured.received(bench, rate, SECONDS)))
    costs = samples.costs()
    for name, backlog in BACKLOGS.items():
        compare(name, runs[name], [drained(costs, *backlog, seed) for seed in SEEDS])
    for name, rate in ARRIVALS.items():
        compare(name, runs[name], [percentiles(received(costs, rate, SECONDS, seed)) for seed in SEEDS])
    return costs, rows


def _medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {column: statistics.median(each[column] for each in runs) for column in runs[0]}


def checked() -> dict[str, Section]:
    costs, rows = measure()
    kinds = [("client CPU, each request", costs.cpu.request), ("client CPU, each task", costs.cpu.task)]
    found = [(name, "us", 1e6 * seconds) for name, seconds in kinds]
    for kind, cost in costs.times.items():
        found.append((kind, "us", 1e6 * cost.fixed))
        found.append((kind, "us for each row of the table", 1e6 * cost.of_table))
        found.append((kind, "us for each row of the request", 1e6 * cost.of_request))
    found.append(("delivery to the subscriber", "us", 1e6 * costs.delivery))
    return {"costs": section("Costs", found), "check": section("Check", rows)}


def kept_cpu() -> Cpu:
    costs = load(FILE)["costs"]
    return Cpu(*(1e-6 * costs.value(f"client CPU, each {each}", "us") for each in ("request", "task")))


def section(title: str, rows: Rows) -> Section:
    return Section(title, figures(rows), conditions="", transfers="")


def loads() -> dict[str, Section]:
    """Simulate each load, also with all latencies three times as long, and calculate what else it needs."""
    cpu, rows, needs = kept_cpu(), Rows(), Rows()
    for rate, load_ in tqdm(LOADS.items(), desc="loads", disable=None):
        column = f"{rate:,}/s"
        found = carried(load_, cpu)
        slow = carried(load_, cpu, factor=SLOW) if rate < 100_000 else {}
        values = {
            "workers": load_.workers,
            "shards": load_.shards,
            "processing units": load_.units,
            **found,
            **{f"{name}, with latencies three times as long": slow[name] for name in ("p50 ms", "p99 ms") if slow},
        }
        rows += [(name, column, value) for name, value in values.items()]
        node_hours = load_.units / 1000 * HOURS
        gigabytes = rate * 86_400 * STORED_DAYS * ROW_BYTES / 1e9
        pubsub = rate * 3600 * HOURS * MESSAGE_BYTES / 2**40 * DOLLARS_PER_TIB
        spanner = node_hours * DOLLARS_PER_NODE + gigabytes * DOLLARS_PER_GB
        values = {
            "writes to the tail of a shard, % of a server": 100 * TAIL * rate / load_.shards / TAIL_WRITES,
            "heartbeats/s": load_.workers / HEARTBEAT_INTERVAL_SECONDS,
            "MB/s to Pub/Sub": rate * MESSAGE_BYTES / 1e6,
            "with `--wake change-stream`: records/s that all workers read together": rate * load_.workers,
            "workers: core hours per month": load_.workers * HOURS,
            "Spanner: node hours per month": node_hours,
            "Spanner: TB stored": gigabytes / 1000,
            "Pub/Sub: $ per month to publish": pubsub,
            "Spanner: $ per month, at the example prices": spanner,
            "Spanner and Pub/Sub: $ per month": spanner + pubsub,
        }
        needs += [(name, column, value) for name, value in values.items()]
    return {"loads": section("Loads", rows), "needs": section("Needs", needs)}


def slices() -> dict[str, Section]:
    """Simulate parts of the largest load, to be compared with all of it."""
    whole, cpu, rows = LOADS[100_000], kept_cpu(), Rows()
    columns = ("p50 ms", "p95 ms", "p99 ms", "requests/1,000 tasks", "CPU of the busiest worker, %")
    for name, part in tqdm(SLICES.items(), desc="slices", disable=None):
        units_ = whole.units // part
        share = Load(whole.rate / part, whole.workers // part, whole.shards // part, units_, whole.seconds)
        found = carried(share, cpu)
        rows += [(name, column, found[column]) for column in columns]
    rows += [("all of it", column, load(FILE)["loads"].value(column, "100,000/s")) for column in columns]
    return {"slices": section("Slices", rows)}


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


def draw(results: dict[str, Section], folder: Path) -> None:
    """Draw the check, the latencies and the autoscaler."""
    check = results["check"]
    names = list(dict.fromkeys(each.row for each in check.figures))
    figure, axis = plt.subplots(figsize=(7, 0.3 * len(names) + 1), layout="constrained")
    axis.barh(names, [check.value(name, "deviation, %") for name in names], color="tab:blue")
    axis.axvspan(-20, 20, color="0.9", zorder=0)
    axis.invert_yaxis()
    axis.set_xlabel("simulated against measured, %")
    _save(figure, folder / "check.png")

    figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
    for column in ("p50 ms", "p95 ms", "p99 ms"):
        values = [results["loads"].value(column, f"{rate:,}/s") for rate in LOADS]
        axis.plot([f"{rate:,}/s" for rate in LOADS], values, marker="o", label=column.removesuffix(" ms"))
    axis.set_ylabel("ms from commit to receipt")
    axis.set_ylim(0)
    axis.legend()
    _save(figure, folder / "latency.png")

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
    _save(figure, folder / "autoscaler.png")


def _save(figure: Any, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
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


TABLES = ("check", "loads", "needs", "autoscaler")
SECTIONS: dict[str, Callable[[], dict[str, Section]]] = {
    "check": checked,
    "loads": loads,
    "slices": slices,
    "autoscaler": episodes,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    options = parser.parse_args()
    for name in options.only:
        ran = circumstances()
        began = time.monotonic()
        found = SECTIONS[name]()
        ran |= {
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "seconds": f"{time.monotonic() - began:.0f}",
            "command": " ".join(["python -m tests.simulation.scale", *sys.argv[1:]]),
        }
        for each in found.values():
            each.ran.update(ran)
        save(load(FILE) | found, FILE)
    results = load(FILE)
    draw(results, FOLDER)
    PAGE.write_text(text(results, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}, {FILE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
