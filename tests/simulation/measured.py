"""Runs of real workers on the emulators: what the requests cost, and the figures that the simulation must repeat."""

import contextlib
import functools
import os
import signal
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.api_core.exceptions import Aborted
from google.pubsub_v1.types import PubsubMessage

from outbox.message import TASK_ID_ATTRIBUTE
from publishworker.types import PollRequest
from tests.benchmarks import latency, relaying
from tests.benchmarks.backlogs import insert
from tests.benchmarks.bench import MESSAGE, Bench, Table, fresh_table, stopwatch
from tests.simulation.emulator import Time
from tests.simulation.spanner import Cpu
from tests.support import counted_worker
from tests.support.processes import Process
from tests.support.relays import divided, wait_until_all_sent, worker
from tests.support.spanner import query
from tests.support.waiting import eventually

#: Tasks of a batch in the runs that are compared. A backlog then has many batches, so that it hardly matters which of
#: two transactions the emulator aborts.
BATCH_SIZE = 50
#: Rows of the table, tasks of a batch, and tasks that are sent, of the runs that give the costs of transactions. On the
#: emulator a commit takes time with the square of its rows, so the large batches have the size that is compared.
TRANSACTIONS = ((500, BATCH_SIZE, 400), (2_000, BATCH_SIZE, 800), (500, 10, 200))
#: Rows of the table, and rows that a poll returns.
POLLS = ((500, 100), (500, 400), (2_000, 100), (2_000, 800))
#: Seconds between two checks whether all tasks are sent. A check takes the emulator a tenth of a second, so the first
#: one comes when they probably are.
CHECK_SECONDS = 4.0
_UNSENT = "SELECT COUNT(*) FROM AsynchronousTasks WHERE SentAt IS NULL"
_SENT = "SELECT SentAt FROM AsynchronousTasks WHERE SentAt IS NOT NULL ORDER BY SentAt"


#: By kind of request: rows of the table, rows of the request, seconds.
_Seconds = dict[str, list[tuple[int, int, float]]]


@dataclass(frozen=True, slots=True)
class Costs:
    """`times` are the service's seconds by kind of request, `publish` those of a publish request of 100 tasks."""

    cpu: Cpu
    times: dict[str, Time]
    publish: float
    #: Seconds from the answer to a publish request to the subscriber.
    delivery: float


class Samples:
    """Timed requests of one worker, on tables and batches of different sizes.

    Rounds of them alternate with the runs that are compared, because the speed of a shared machine changes.
    """

    def __init__(self, bench: Bench) -> None:
        """Begin without samples."""
        self._bench = bench
        self._seconds: _Seconds = defaultdict(list)
        self._work: list[tuple[int, int, float]] = []  # requests, tasks, CPU seconds
        self._deliveries: list[float] = []

    def add_round(self) -> None:
        """Time every request."""
        for rows, size, tasks in TRANSACTIONS:
            found: _Seconds = defaultdict(list)
            with fresh_table(self._bench) as table:
                worker = relaying.warm_worker(self._bench.emulators, table, batch_size=f"{size}", concurrency="1")
                insert(table, rows)
                with _timed(worker.store, rows, found), stopwatch() as watch:
                    relaying.drive(worker, tasks)
            self._work.append((sum(map(len, found.values())), tasks, watch.cpu_seconds))
            for kind in ("lock", "publish", "commit"):
                self._seconds[kind] += found[kind]
        for rows in sorted({rows for rows, _ in POLLS}):
            with fresh_table(self._bench) as table:
                worker = relaying.warm_worker(self._bench.emulators, table)
                insert(table, rows)
                topics = frozenset({table.topic})
                with _timed(worker.store, rows, self._seconds):
                    for number in [number for each, number in POLLS if each == rows]:
                        worker.store.discover(range(10), ())
                        worker.store.poll(PollRequest(shards=tuple(range(10)), topics=topics, per_range=number // 10))
        self._deliveries += deliveries(self._bench)

    def costs(self) -> Costs:
        """Fit the costs to all rounds."""
        request, task = _fitted([each[:2] for each in self._work], [each[2] for each in self._work])
        times = {kind: _time(found, request) for kind, found in self._seconds.items()}
        publish = times["publish"].seconds(0, 100)
        return Costs(Cpu(request, task), times, publish, statistics.median(self._deliveries))


def _time(samples: Sequence[tuple[int, int, float]], request: float) -> Time:
    """Fit the median seconds without the client's."""
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    for rows, number, seconds in samples:
        groups[rows, 10 * round(number / 10)].append(max(0.0, seconds - request))
    return Time(*_fitted([(1, *group) for group in groups], list(map(statistics.median, groups.values()))))


@contextlib.contextmanager
def _timed(store: Any, rows: int, samples: _Seconds) -> Iterator[None]:
    """Add the seconds of each request of a store to `samples`. A publish request is within a claim."""
    last = threading.local()

    def lap(kind: str, number: int) -> None:
        now = time.perf_counter()
        samples[kind].append((rows, number, now - last.at))
        last.at = now

    def read(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def ours(*arguments: Any, **options: Any) -> Any:
            last.at = time.perf_counter()
            found = call(*arguments, **options)
            lap(kind, len(found) if kind == "poll" else 0)
            return found

        return ours

    def claim(ids: Sequence[str], decide: Callable[..., Any]) -> Any:
        def ours(locked: Sequence[Any], now: Any) -> Any:
            lap("lock", len(ids))
            marks = decide(locked, now)
            lap("publish", len(ids))
            return marks

        last.at = time.perf_counter()
        committed = real_claim(ids, ours)
        lap("commit", len(ids))
        return committed

    real_claim = store.claim
    store.poll, store.discover, store.claim = read("poll", store.poll), read("discover", store.discover), claim
    yield
    del store.poll, store.discover, store.claim


def _fitted(causes: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the least squares factors, none below 0."""
    found = np.linalg.lstsq(np.array(causes, float), np.array(seconds), rcond=None)[0]
    return [max(0.0, float(each)) for each in found]


def deliveries(bench: Bench) -> list[float]:
    """Return the seconds from the answer to a publish request to the subscriber."""
    topic = bench.pubsub.new_topic()
    waits = []
    with latency.receiving(bench, topic) as received:
        for number in range(10):
            id = f"{number}"
            message = PubsubMessage(data=MESSAGE, attributes={TASK_ID_ATTRIBUTE: id})
            bench.pubsub.publisher.publish(topic=topic, messages=[message])
            published = time.monotonic()
            eventually(functools.partial(received.__contains__, id), seconds=10, message="the message received")
            waits.append(received[id] - published)
    return waits


def drained(bench: Bench, workers: int, tasks: int) -> dict[str, float]:
    """Send a backlog by `publishworker run` processes. The middle of it is measured, by the times of the commits.

    On a new table, because the emulator slows down with each row that was deleted from a table.
    """
    with _started(bench, workers) as (table, processes, used):
        with _backlog(table, processes, tasks):
            cpu, requests = used()
        cpu, requests = used()[0] - cpu, used()[1] - requests
        _learned_the_topic, *sent = [at for [at] in query(table.database, _SENT)]
    first, last = sent[round(0.1 * tasks)], sent[round(0.8 * tasks) - 1]
    return {
        "tasks/s": 0.7 * tasks / (last - first).total_seconds(),
        "CPU us/task": 1e6 * cpu / tasks,
        "requests/1,000 tasks": 1000 * requests / tasks,
    }


@contextlib.contextmanager
def _started(bench: Bench, workers: int) -> Iterator[tuple[Table, list[Process], Callable[[], tuple[float, int]]]]:
    """Start workers on a table. Yield both with a function for their CPU seconds and requests to Spanner so far."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        table = stack.enter_context(fresh_table(bench))
        files = [counted_worker.new_file(folder / f"{number}") for number in range(workers)]
        start = functools.partial(worker, bench.emulators, table.database, "--batch-size", f"{BATCH_SIZE}")
        processes = [
            stack.enter_context(start(module="tests.support.counted_worker", COUNT_FILE=f"{file}")) for file in files
        ]
        table.fill(1)
        wait_until_all_sent(table.database)
        eventually(lambda: divided(processes), seconds=60, message=f"{workers} workers know of each other")
        yield table, processes, lambda: (sum(map(_cpu_seconds, processes)), sum(map(counted_worker.count, files)))


@contextlib.contextmanager
def _backlog(table: Table, processes: Sequence[Process], tasks: int) -> Iterator[None]:
    """Register tasks while the workers are stopped, so that they begin together. Afterwards wait until all are sent."""
    _signal(processes, signal.SIGSTOP)
    while True:
        try:
            insert(table, tasks)
        except Aborted:  # by the first commit: a worker was stopped in its heartbeat's transaction
            _signal(processes, signal.SIGCONT)
            time.sleep(CHECK_SECONDS)
            _signal(processes, signal.SIGSTOP)
        else:
            break
    yield
    _signal(processes, signal.SIGCONT)
    time.sleep(CHECK_SECONDS)
    while query(table.database, _UNSENT) != [[0]]:
        time.sleep(CHECK_SECONDS)


def _signal(processes: Sequence[Process], number: signal.Signals) -> None:
    for process in processes:
        os.kill(process.pid, number)


def _cpu_seconds(process: Process) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def received(bench: Bench, rate: int, seconds: int) -> list[float]:
    """Return the seconds from each commit to its receipt by a subscriber, of tasks that one worker sends."""
    with fresh_table(bench) as table:
        return latency.latencies(bench, table, latency.Offer(rate, seconds, seconds, wake=False))
