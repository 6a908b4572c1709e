"""1 to 8 live workers: their requests to Spanner while idle, and their collisions under a steady load."""

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from outbox.devtools.emulators import SPANNER, running_one
from outbox.storage.ddl import statements
from publishworker.telemetry import metrics as m
from tests.benchmarks.bench import Bench, Table, fresh_table
from tests.benchmarks.results import Section, figures
from tests.support.counting import Counting
from tests.support.dogstatsd import Agent, listening
from tests.support.processes import Process
from tests.support.relays import divided, shards_of, wait_until_all_sent, worker
from tests.support.spanner import ADMIN_SECONDS
from tests.support.waiting import eventually

SIZES = (1, 2, 4, 8)
DISCOVER = ("ExecuteStreamingSql", "outbox-discover")
REQUESTS, SHARDS = "discoveries/minute", "shards discovered/minute"
MET, ABORTED, TAKEN_OVER = "already published %", "aborted by the emulator %", "s until taken over"

#: Seconds after the last task until the waits between polls have grown to the poll interval.
SETTLE = 4
#: Tasks of one commit, and seconds between two commits: a load that leaves the emulator's one lock mostly free.
ARRIVALS, EVERY = 10, 0.25

CONDITIONS = f"""\
- `publishworker run` processes with default settings on one table of 10 shards, all behind one proxy that counts. An
  idle worker discovers topics, and polls only those with unsent tasks. Shards are those of all discoveries.
- Load: {ARRIVALS} tasks in a commit every {EVERY} s. Already published: of the tasks that were claimed, those that
  another worker had sent.
- Aborted: transactions that ran again, of all. The emulator has one lock for a whole database and aborts one
  of two transactions, whatever their rows. So it cannot show how rarely two workers claim the same rows.
- Discoveries grow with the workers: each reads once a second when idle, so that a task waits no longer
  with many workers than with few ([workers](architecture/workers.md#what-it-costs)).
- Takeover: from SIGKILL of one worker until the others log that they poll its shards."""


WAKE = ("--wake", "change-stream")
ALONE = """\
- Requests per minute of all `publishworker run` processes, with default settings and 10 shards, half a minute after the
  last task, without an agent for metrics. Counted for three minutes, by method and tag, by a proxy that forwards every
  call to the emulator. The emulator ends each partition of a change stream after 20 s, and two or three are open. Each
  costs a request.
- Long partitions: another emulator, with a flag that lets each partition live for at least 10 minutes. Then a partition
  costs a request a minute."""
#: An emulator whose partitions of change streams live long.
LONG_PARTITIONS = ("--override_change_stream_partition_token_alive_seconds", "600")


@dataclass(frozen=True, slots=True)
class LiveWorkers:
    table: Table
    proxy: Counting
    agent: Agent
    workers: list[Process]


@contextlib.contextmanager
def live_workers(bench: Bench, size: int, *flags: str, with_agent: bool = True) -> Iterator[LiveWorkers]:
    with contextlib.ExitStack() as stack:
        table = stack.enter_context(fresh_table(bench))
        if flags:
            table.database.update_ddl(statements(change_stream=True)[-1:]).result(ADMIN_SECONDS)
        proxy = stack.enter_context(Counting(bench.emulators.spanner_host))
        agent = stack.enter_context(listening())
        hosts = replace(bench.emulators, spanner_host=proxy.address)
        variables: Any = agent.environment if with_agent else {}
        workers = [stack.enter_context(worker(hosts, table.database, *flags, **variables)) for _ in range(size)]
        table.fill(1)
        wait_until_all_sent(table.database)
        eventually(lambda: divided(workers), seconds=60, message=f"{size} workers know of each other")
        time.sleep(SETTLE)
        yield LiveWorkers(table, proxy, agent, workers)


def idle(live: LiveWorkers, seconds: int) -> dict[str, float]:
    live.proxy.clear()
    time.sleep(seconds)
    return {REQUESTS: live.proxy.counts[DISCOVER] * 60 / seconds, SHARDS: live.proxy.shards[DISCOVER] * 60 / seconds}


def busy(live: LiveWorkers, seconds: int) -> dict[str, float]:
    before = live.agent.counts.copy()
    live.proxy.clear()
    commits = int(seconds / EVERY)
    end = time.monotonic()
    for _ in range(commits):
        end += EVERY
        live.table.fill(ARRIVALS)
        time.sleep(max(0.0, end - time.monotonic()))
    wait_until_all_sent(live.table.database)
    sent = before[m.PUBLISHED.name] + commits * ARRIVALS
    eventually(lambda: live.agent.counts[m.PUBLISHED.name] >= sent, seconds=30, message="the counts have arrived")
    heard = {metric: live.agent.counts[metric.name] - before[metric.name] for metric in m.METRICS}
    claimed = heard[m.PUBLISHED] + heard[m.ALREADY_PUBLISHED]
    runs = live.proxy.counts["Commit", "outbox-relay"] + heard[m.ABORTED]
    return {MET: 100 * heard[m.ALREADY_PUBLISHED] / claimed, ABORTED: 100 * heard[m.ABORTED] / max(1, runs)}


def take_over(live: LiveWorkers) -> dict[str, float]:
    killed, *others = live.workers
    parts = [shards_of(each) for each in others]
    killed.stop(signal.SIGKILL)
    begin = time.monotonic()
    eventually(lambda: divided(others), seconds=60, message="the dead worker's shards have others")
    assert [shards_of(each) for each in others] != parts
    return {TAKEN_OVER: time.monotonic() - begin}


def alone(bench: Bench) -> Section:
    """Idle workers: the requests of one that polls, and of four that a change stream wakes."""
    one, four = "1 worker", "4 workers, --wake change-stream"
    counts = {one: idle_requests(bench, 1), four: idle_requests(bench, 4, *WAKE)}
    with running_one(SPANNER, LONG_PARTITIONS) as host:
        other = replace(bench, emulators=replace(bench.emulators, spanner_host=host))
        counts[f"{four}, long partitions"] = idle_requests(other, 4, *WAKE)
    samples = [(kind, name, value) for name, of_kind in counts.items() for kind, value in of_kind.items()]
    section = Section("Idle workers", figures(samples), ALONE, "All but the requests of the emulator's partitions.")
    for name, limit in zip(counts, (90, 60, 60), strict=True):
        section.at_most(f"requests/minute of {name}", section.value("all", name), limit)
    return section


def idle_requests(bench: Bench, size: int, *flags: str) -> dict[str, float]:
    """Return the requests per minute of idle workers, all and by method and tag."""
    seconds = bench.choose(180, 5)
    with live_workers(bench, size, *flags, with_agent=False) as created:
        time.sleep(bench.choose(30, 1))  # topics are forgotten, and pauses are at their longest
        created.proxy.clear()
        time.sleep(seconds)
        counts = {" ".join(key).strip(): each * 60 / seconds for key, each in sorted(created.proxy.counts.items())}
    return {"all": sum(counts.values())} | counts


def run(bench: Bench) -> Section:
    seconds = bench.choose(20, 3)
    samples = []
    sizes = SIZES[: bench.choose(len(SIZES), 1)]
    for size in sizes:
        with live_workers(bench, size) as created:
            found = idle(created, seconds) | busy(created, seconds)
            if size > 1:
                found |= take_over(created)
            samples += [(f"{size}", column, value) for column, value in found.items()]
    section = Section("Live workers", figures(samples), CONDITIONS, "All but the aborts: they are the emulator's.")
    largest = sizes[-1]
    one, most = (section.value(f"{size}", SHARDS) for size in (1, largest))
    section.at_most(f"shards discovered by {largest} workers / by one", most / one, 1.2)
    section.at_most("already published, %", section.value(f"{largest}", MET), 1)
    section.at_most("aborted by the emulator, %", section.value(f"{largest}", ABORTED), 1)
    return section
