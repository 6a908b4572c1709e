"""The requests of idle workers to Spanner: of one that polls, and of four that a change stream wakes."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace

from outbox.devtools.emulators import SPANNER, running_one
from outbox.table.ddl import statements
from tests.support.counting import Counting
from tests.support.relays import divided, wait_until_all_sent, worker
from tests.support.spanner import ADMIN_SECONDS
from tests.support.waiting import eventually
from tools.benchmarks.bench import Bench, fresh_table
from tools.benchmarks.results import Section, figures

#: Seconds after the last task until the waits between polls have grown to the poll interval.
SETTLE = 4
WAKE = ("--wake", "change-stream")
CONDITIONS = """\
- Requests per minute of all `publishworker run` processes, with default settings and 10 shards, half a minute after the
  last task, without an agent for metrics, counted for three minutes by a proxy.
- The emulator ends each partition of a change stream after 20 s, which costs a request. Long partitions: another
  emulator, with a flag that lets each partition live for at least 10 minutes."""
#: An emulator whose partitions of change streams live long.
LONG_PARTITIONS = ("--override_change_stream_partition_token_alive_seconds", "600")


@contextlib.contextmanager
def live_workers(bench: Bench, size: int, *flags: str) -> Iterator[Counting]:
    with contextlib.ExitStack() as stack:
        table = stack.enter_context(fresh_table(bench))
        if flags:
            table.database.update_ddl(statements(change_stream=True)[-1:]).result(ADMIN_SECONDS)
        proxy = stack.enter_context(Counting(bench.emulators.spanner_host))
        hosts = replace(bench.emulators, spanner_host=proxy.address)
        workers = [stack.enter_context(worker(hosts, table.database, *flags)) for _ in range(size)]
        table.fill(1)
        wait_until_all_sent(table.database)
        eventually(lambda: divided(workers), seconds=60, message=f"{size} workers know of each other")
        time.sleep(SETTLE)
        yield proxy


def run(bench: Bench) -> Section:
    one, four = "1 worker", "4 workers, --wake change-stream"
    counts = {one: idle_requests(bench, 1), four: idle_requests(bench, 4, *WAKE)}
    with running_one(SPANNER, LONG_PARTITIONS) as host:
        other = replace(bench, emulators=replace(bench.emulators, spanner_host=host))
        counts[f"{four}, long partitions"] = idle_requests(other, 4, *WAKE)
    samples = [(kind, name, value) for name, of_kind in counts.items() for kind, value in of_kind.items()]
    section = Section("Idle workers", figures(samples), CONDITIONS, "all but the requests of the partitions.")
    for name, limit in zip(counts, (90, 60, 60), strict=True):
        section.at_most(f"requests/minute of {name}", section.value("all", name), limit)
    return section


def idle_requests(bench: Bench, size: int, *flags: str) -> dict[str, float]:
    """Return the requests per minute of idle workers, all and by method and tag."""
    seconds = bench.choose(180, 5)
    with live_workers(bench, size, *flags) as proxy:
        time.sleep(bench.choose(30, 1))  # topics are forgotten, and pauses are at their longest
        proxy.clear()
        time.sleep(seconds)
        counts = {" ".join(key).strip(): each * 60 / seconds for key, each in sorted(proxy.counts.items())}
    return {"all": sum(counts.values())} | counts
