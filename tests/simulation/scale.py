"""The numbers at scale: simulated loads. Writes docs/architecture/scale.md."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import ceil
from random import Random
from zlib import crc32

from tqdm import tqdm

from publishworker.turn.membership import HEARTBEAT_INTERVAL_SECONDS
from tests.benchmarks.cost import INSERT, MARK, TTL_DELETE
from tests.benchmarks.page import grid, markdown
from tests.benchmarks.results import ROOT, Section, circumstances, figures, save
from tests.simulation.audit import Known
from tests.simulation.bench import BASE, DIVIDED
from tests.simulation.spanner import Cpu
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
#: Of a worker in the loads. With full batches it is about what `python -m tests.benchmarks --only costs` measures.
CPU = Cpu(request=1341e-6, task=42.629e-6)
#: Of the latencies, in rows that show what they do.
SLOW = 3
#: Tasks of each shard that are sent before a run.
WARMING = 10
#: Seconds of a run that do not count. The workers' pauses are long then.
BEGINNING = 1.0
#: As docs/operations/scaling.md assumes: bytes of a message and of a row with its index entries, days that rows are
#: stored, and the price of Pub/Sub. Hours of a month.
MESSAGE_BYTES, ROW_BYTES, STORED_DAYS, DOLLARS_PER_TIB, HOURS = 300, 700, 10, 40, 730


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
        id, now = f"{random.randrange(10**9):09}-{len(world.audit.tasks)}", world.clockwork.now
        spanner.table.insert(id, "orders", GOOD, created_at=spanner.table.commit_time())
        world.audit.committed(id, Known("orders", "", now, now))


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
    writes = rate * (INSERT[0] + MARK[0] + TTL_DELETE[0] + 2 * READ)
    return 1000 * ceil(writes / (ROW_WRITES * RECOMMENDED))


# --- the page

PAGE = ROOT / "docs/architecture/scale.md"
FILE = PAGE.with_suffix("") / "results.json"

LOADS = {
    rate: Load(rate, workers, shards, units(rate), seconds)
    for rate, workers, shards, seconds in ((1_000, 2, 10, 20.0), (10_000, 4, 20, 10.0), (100_000, 40, 200, 4.0))
}
Rows = list[tuple[str, str, float]]


def loads() -> dict[str, Section]:
    """Simulate each load, also with all latencies three times as long, and calculate what else it needs."""
    rows, needs = Rows(), Rows()
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
        values = {
            "writes to the tail of a shard, % of a server": 100 * TAIL * rate / load_.shards / TAIL_WRITES,
            "heartbeats/s": load_.workers / HEARTBEAT_INTERVAL_SECONDS,
            "MB/s to Pub/Sub": rate * MESSAGE_BYTES / 1e6,
            "with `--wake change-stream`: records/s that all workers read together": rate * load_.workers,
            "workers: core hours per month": load_.workers * HOURS,
            "Spanner: node hours per month": load_.units / 1000 * HOURS,
            "Spanner: TB stored": rate * 86_400 * STORED_DAYS * ROW_BYTES / 1e12,
            "Pub/Sub: $ per month to publish": rate * 3600 * HOURS * MESSAGE_BYTES / 2**40 * DOLLARS_PER_TIB,
        }
        needs += [(name, column, value) for name, value in values.items()]
    return {"loads": Section("Loads", figures(rows), "", ""), "needs": Section("Needs", figures(needs), "", "")}


def text(results: dict[str, Section], page: str) -> str:
    """Return the page with its tables, and the lines that say when they were made, written from the results."""
    for name, section in results.items():
        header, rows = grid(section.figures)
        ran = section.ran
        line = f"{ran['date']}, {ran['machine']}"
        begin, end = f"<!-- {name}: written from results.json -->\n", "<!-- end -->"
        before, _, rest = page.partition(begin)
        page = before + begin + "\n" + markdown(header, rows) + "\n" + line + "\n\n" + end + rest.partition(end)[2]
    return page


def main() -> None:
    ran, began = circumstances(), time.monotonic()
    results = loads()
    ran |= {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": f"{time.monotonic() - began:.0f}",
        "command": "python -m tests.simulation.scale",
    }
    for each in results.values():
        each.ran.update(ran)
    save(results, FILE)
    PAGE.write_text(text(results, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}, {FILE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
