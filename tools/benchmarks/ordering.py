"""The costs of ordering keys: the same tasks without keys, with many, and with one, in turns."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import outbox
from tools.benchmarks.bench import MESSAGE, ROWS, Bench, Table, fresh_table
from tools.benchmarks.costs import Counting
from tools.benchmarks.relaying import drive, relay, warm_worker
from tools.benchmarks.results import Section, figures

#: Tasks of a registering commit.
COMMIT = 50

SPEED, PUBLISHED, RUN = "tasks/s", "publish requests", "tasks/publish request"


@dataclass(frozen=True, slots=True)
class Load:
    """So many ordering keys with so many tasks each; no key at all is tasks without order."""

    keys: int
    tasks: int

    @property
    def count(self) -> int:
        return max(1, self.keys) * self.tasks

    @property
    def name(self) -> str:
        if not self.keys:
            return f"{self.tasks:,} without a key"
        return f"1 key of {self.tasks:,}" if self.keys == 1 else f"{self.keys:,} keys of {self.tasks:,}"

    def fill(self, table: Table) -> None:
        keys = [f"key-{number}" for number in range(self.keys)] or [""]
        order = keys * self.tasks
        for begin in range(0, self.count, COMMIT):
            with table.database.batch() as batch:
                for key in order[begin : begin + COMMIT]:
                    outbox.register(batch, table.topic, MESSAGE, ordering_key=key)


UNORDERED, TWENTY, HOT = Load(0, ROWS), Load(20, ROWS // 20), Load(1, ROWS)


def run(bench: Bench) -> Section:
    many = bench.choose(1_000, 2 * ROWS)
    loads = [UNORDERED, TWENTY, Load(ROWS, 1), HOT, Load(0, many), Load(1, many)]
    samples: list[tuple[str, str, float]] = []
    for _ in bench.each_round("ordering"):
        for load in loads:
            samples += relay(bench, bench.emulators, load.fill, load.count).samples(load.name)
            samples += counted(bench, load)
    section = Section(
        "Ordering keys",
        figures(samples),
        conditions(loads),
        "the requests, the tasks in a request, and the CPU of the client.",
    )
    ratio = section.value(TWENTY.name, SPEED) / section.value(UNORDERED.name, SPEED)
    section.at_least(f"{TWENTY.name} / {UNORDERED.name}: tasks/s", ratio, 0.5)
    section.at_least(f"{HOT.name}: tasks/publish request", section.value(HOT.name, RUN), 50)
    return section


def counted(bench: Bench, load: Load) -> Iterator[tuple[str, str, float]]:
    """Relay a table behind proxies; yield the requests for 1,000 tasks, and how long the runs are."""
    hosts = bench.emulators
    with fresh_table(bench) as table, Counting(hosts.spanner_host) as spanner, Counting(hosts.pubsub_host) as pubsub:
        worker = warm_worker(replace(hosts, spanner_host=spanner.address, pubsub_host=pubsub.address), table)
        load.fill(table)
        spanner.clear()
        pubsub.clear()
        drive(worker, load.count)
        yield load.name, "key_heads", spanner.counts["ExecuteStreamingSql", "outbox-order"] / load.count * 1000
        published = pubsub.counts["Publish", ""]
        yield load.name, PUBLISHED, published / load.count * 1000
        yield load.name, RUN, load.count / published


def conditions(loads: list[Load]) -> str:
    sizes = " or ".join(sorted({f"{load.count:,}" for load in loads}, key=lambda text: (len(text), text)))
    return f"""\
- Fresh tables of {sizes} rows, messages of 300 bytes, one topic, one worker with default settings. Each commit
  registers {COMMIT} tasks, of different keys in turn. Requests are those for 1,000 tasks, counted by proxies.
- A publish request has tasks of one key. The next request of a key waits for the answer and the commit of this one."""
