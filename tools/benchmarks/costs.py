"""The costs of a task under backlog: client CPU, requests, rows and bytes. These transfer."""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from threading import Lock
from typing import Any
from unittest import mock

import grpc
from google.cloud import spanner_v1 as spanner

from outbox.devtools.emulators import Emulators
from tests.support.processes import started
from tests.support.rpc import Forwarding
from tools.benchmarks.bench import Bench, Table, fresh_table
from tools.benchmarks.relaying import PATIENT_SECONDS, drive, warm_worker
from tools.benchmarks.results import Section, figures

#: The sessions that the client uses against the real service; the worker respects the variable.
SESSIONS = {"GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW": "true"}
#: The tags of the poll and of the claim.
POLL, CLAIM = "outbox-poll", "outbox-claim"

CPU, REQUESTS, ROWS, BYTES = "client CPU us/task", "requests/1,000 tasks", "rows/task", "bytes/task"
#: Method and tag: that of the request, else that of its transaction, else nothing.
Key = tuple[str, str]
_TAGGED: dict[str, Any] = {
    "BeginTransaction": spanner.BeginTransactionRequest,
    "Commit": spanner.CommitRequest,
    **dict.fromkeys(("ExecuteSql", "ExecuteStreamingSql"), spanner.ExecuteSqlRequest),
    **dict.fromkeys(("Read", "StreamingRead"), spanner.ReadRequest),
}


class Counting(Forwarding):
    """Counts calls, the bytes of their answers, and the rows in these, by method and tag."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self._lock = Lock()
        self.clear()

    def clear(self) -> None:
        self.counts, self.bytes, self.rows = Counter[Key](), Counter[Key](), Counter[Key]()

    def forward(self, method: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        name, tag = method.rpartition("/")[2], ""
        if name in _TAGGED:
            options = _TAGGED[name].pb().FromString(request).request_options
            tag = options.request_tag or options.transaction_tag
        key = name, tag
        self._add(self.counts, key, 1)
        columns, values = 1, 0
        for answer in super().forward(method, request, context):
            self._add(self.bytes, key, len(answer))
            if name in ("ExecuteStreamingSql", "StreamingRead"):
                part: Any = spanner.PartialResultSet.pb().FromString(answer)
                columns = len(part.metadata.row_type.fields) or columns
                values += len(part.values) - part.chunked_value  # one may be cut over several answers
            yield answer
        self._add(self.rows, key, values // columns)

    def _add(self, counter: Counter[Key], key: Key, number: int) -> None:
        with self._lock:
            counter[key] += number


def run(bench: Bench) -> Section:
    backlog = bench.choose(2_000, 800)
    samples: list[tuple[str, str, float]] = []
    for _ in bench.each_round("costs"):
        with fresh_table(bench) as table:
            samples.append(("all of it", CPU, client_cpu(bench.emulators, table, backlog)))
        with fresh_table(bench) as table:  # not the same: the emulator scans sent rows, too
            samples += counted(bench.emulators, table, backlog)
    conditions = f"""\
- A backlog of {backlog:,} tasks of 300 bytes, one topic, 10 shards, default settings, without the worker's start.
- CPU: all threads of a process that only relays. The others are counted by a proxy. The poll returns candidates, and
  the claim the same tasks under the lock, with their messages. A turn may wait for its batches for a minute instead of
  0.25 s, because the emulator runs one transaction at a time."""
    section = Section("Costs per task", figures(samples), conditions, "all of it.")
    for what, column, limit in ((REQUESTS, REQUESTS, 13), ("rows to the worker/task", ROWS, 2.3)):
        section.at_most(what, section.value("all of it", column), limit)
    return section


def client_cpu(hosts: Emulators, table: Table, tasks: int) -> float:
    """Relay a backlog in a process of its own, which has sent one task before; return the CPU in us per task."""
    table.fill(1)
    arguments = ("--database", table.id, "--tasks", str(tasks))
    with started("tools.benchmarks.child", *arguments, environment=hosts.environment() | SESSIONS) as process:
        process.wait_for_text("connected")
        table.fill(tasks)
        process.stop(signal.SIGUSR1)
        if process.wait(300) != 0:
            raise RuntimeError(process.stderr)
        took = json.loads(process.stdout.splitlines()[-1])
    return took["cpu_seconds"] / took["published"] * 1e6


def counted(hosts: Emulators, table: Table, tasks: int) -> Iterator[tuple[str, str, float]]:
    """Relay through the counting proxy; yield its counts, of all and by the worker's own tags."""
    patient = mock.patch("publishworker.turn.in_flight.MAX_TURN_WAIT_SECONDS", PATIENT_SECONDS)
    with mock.patch.dict(os.environ, SESSIONS), patient, Counting(hosts.spanner_host) as proxy:
        worker = warm_worker(replace(hosts, spanner_host=proxy.address), table)
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
