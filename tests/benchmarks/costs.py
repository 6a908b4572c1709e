"""What a task costs under backlog: client CPU, requests, rows and bytes. These transfer."""

import os
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

from tqdm import tqdm

from outbox.devtools.emulators import Emulators
from tests.benchmarks.bench import Bench, Table, fresh_table
from tests.benchmarks.relaying import drive, open_worker
from tests.benchmarks.results import Bar, Plot, Section, figures
from tests.benchmarks.silent import answer
from tests.support.counting import Counting

#: The sessions that the client uses against the real service; the worker respects the variable.
SESSIONS = {"GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW": "true"}
#: The tags of the poll and of the claim.
POLL, CLAIM = "outbox-poll", "outbox-claim"

CPU, REQUESTS, ROWS, BYTES = "client CPU us/task", "requests/1,000 tasks", "rows/task", "bytes/task"


def run(bench: Bench) -> Section:
    """Measure over a backlog of several turns."""
    backlog = bench.choose(2_000, 800)
    samples: list[tuple[str, str, float]] = []
    for _ in tqdm(range(bench.rounds), desc="costs", disable=None):
        with fresh_table(bench) as table:
            table.fill(backlog)
            samples.append(("all of it", CPU, cpu(bench.emulators, table, backlog)))
        with fresh_table(bench) as table:  # not the same: the emulator scans sent rows, too
            samples += counted(bench.emulators, table, backlog)
    conditions = f"""\
- A backlog of {backlog:,} tasks of 300 bytes, one topic, 10 shards, default settings; the start of the worker and its
  first task are not counted.
- CPU: of a process that does nothing but relay, all its threads, with the client's default sessions.
- Requests, rows and bytes: counted by a proxy that forwards every call to the emulator; bytes are those of the answers'
  protobuf messages. The poll gives candidates, the claim gives the same tasks again under the lock, with their
  messages."""
    section = Section(
        "Costs per task",
        figures(samples),
        [],
        conditions,
        "All of it: none of these depends on how fast the services answer. How many rows a poll returns, and how often "
        "it runs, depend a little on it.",
        Plot([REQUESTS, ROWS, BYTES]),
    )
    for what, column, limit in ((CPU, CPU, 120), (REQUESTS, REQUESTS, 25), ("rows to the worker/task", ROWS, 3)):
        section.bars.append(Bar(what, section.value("all of it", column), limit, at_least=False))
    return section


def cpu(hosts: Emulators, table: Table, tasks: int) -> float:
    """Return microseconds a task, of a process of its own."""
    arguments = ("--database", table.id, "--tasks", str(tasks))
    took = answer("tests.benchmarks.child", *arguments, environment=hosts.environment() | SESSIONS, seconds=120)
    return float(took["cpu_seconds"] / took["published"] * 1e6)


def counted(hosts: Emulators, table: Table, tasks: int) -> Iterator[tuple[str, str, float]]:
    """Relay through the counting proxy; yield what was counted, of all and by the worker's own tags."""
    with mock.patch.dict(os.environ, SESSIONS), Counting(hosts.spanner_host) as proxy:
        worker = open_worker(replace(hosts, spanner_host=proxy.address), table.id)
        table.fill(1)
        drive(worker, 1)
        table.fill(tasks)
        proxy.clear()
        drive(worker, tasks)
        for row, key in (("poll", ("ExecuteStreamingSql", POLL)), ("claim", ("ExecuteStreamingSql", CLAIM))):
            yield row, REQUESTS, proxy.counts[key] / tasks * 1000
            yield row, ROWS, proxy.rows[key] / tasks
            yield row, BYTES, proxy.bytes[key] / tasks
        commits = sum(count for (method, _), count in proxy.counts.items() if method == "Commit")
        yield "commit", REQUESTS, commits / tasks * 1000
        yield "all of it", REQUESTS, proxy.counts.total() / tasks * 1000
        yield "all of it", ROWS, proxy.rows.total() / tasks
        yield "all of it", BYTES, proxy.bytes.total() / tasks
