"""Runs of real workers on the emulators: what the requests cost, and the figures that the simulation must repeat."""

import contextlib
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from google.cloud.spanner_v1 import KeySet
from google.pubsub_v1.types import PubsubMessage

from outbox.message import TASK_ID_ATTRIBUTE
from publishworker.types import PollRequest
from tests.benchmarks import latency, relaying
from tests.benchmarks.backlogs import insert
from tests.benchmarks.bench import MESSAGE, Bench, Table, fresh_table, stopwatch
from tests.simulation.emulator import Time
from tests.simulation.spanner import Cpu
from tests.support.counting import Counting
from tests.support.processes import Process
from tests.support.relays import divided, wait_until_all_sent, worker
from tests.support.spanner import query
from tests.support.waiting import eventually

#: Rows of the table, tasks of a batch, and tasks that are sent, of the runs that give the costs of transactions. On the
#: emulator a commit takes time with the square of its rows, so the large batches have the default size.
TRANSACTIONS = ((500, 200, 400), (2_000, 200, 800), (500, 20, 200))
#: Rows of the table, and rows that a poll returns.
POLLS = ((500, 100), (500, 400), (2_000, 100), (2_000, 800))
#: How often each of them runs.
ROUNDS = 5
#: Seconds within which the workers learn that a topic is paused or no longer paused.
LEARNED = 2.0
#: Requests to Spanner that tasks cause.
SENT_BY_TASKS = ("ExecuteStreamingSql", "Commit")
_UNSENT = "SELECT COUNT(*) FROM AsynchronousTasks WHERE SentAt IS NULL"
_SENT = "SELECT SentAt FROM AsynchronousTasks WHERE SentAt IS NOT NULL ORDER BY SentAt"


@dataclass(frozen=True, slots=True)
class Costs:
    """`times` are the service's seconds by kind of request, `publish` those of a publish request of 100 tasks."""

    cpu: Cpu
    times: dict[str, Time]
    publish: float
    #: Seconds from the answer to a publish request to the subscriber.
    delivery: float


def costs(bench: Bench) -> Costs:
    """Time each request of one worker, on tables and batches of different sizes."""
    samples: dict[str, list[tuple[int, int, float]]] = defaultdict(list)  # rows of the table, of the request, seconds
    work: dict[tuple[int, ...], list[tuple[int, float]]] = defaultdict(list)  # requests, CPU seconds
    for case in TRANSACTIONS * ROUNDS:
        rows, size, tasks = case
        found: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
        with fresh_table(bench) as table:
            worker = relaying.warm_worker(bench.emulators, table, batch_size=f"{size}", concurrency="1")
            insert(table, rows)
            with _timed(worker.store, rows, found), stopwatch() as watch:
                relaying.drive(worker, tasks)
        work[case].append((sum(map(len, found.values())), watch.cpu_seconds))
        for kind in ("lock", "publish", "commit"):
            samples[kind] += found[kind]
    for rows in sorted({rows for rows, _ in POLLS}):
        with fresh_table(bench) as table:
            worker = relaying.warm_worker(bench.emulators, table)
            insert(table, rows)
            topics = frozenset({table.topic})
            with _timed(worker.store, rows, samples):
                for number in [number for each, number in POLLS if each == rows] * ROUNDS:
                    worker.store.discover(range(10), ())
                    worker.store.poll(PollRequest(shards=tuple(range(10)), topics=topics, per_range=number // 10))
    runs = [(requests, case[-1], seconds) for case, values in work.items() for requests, seconds in values]
    request, task = _fitted([run[:2] for run in runs], [run[2] for run in runs])
    times = {kind: _time(found, request) for kind, found in samples.items()}
    return Costs(Cpu(request, task), times, times["publish"].seconds(0, 100), delivery(bench))


def _time(samples: Sequence[tuple[int, int, float]], request: float) -> Time:
    """Fit the median seconds without the client's."""
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    for rows, number, seconds in samples:
        groups[rows, 10 * round(number / 10)].append(max(0.0, seconds - request))
    return Time(*_fitted([(1, *group) for group in groups], list(map(statistics.median, groups.values()))))


@contextlib.contextmanager
def _timed(store: Any, rows: int, samples: dict[str, list[tuple[int, int, float]]]) -> Iterator[None]:
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


def delivery(bench: Bench) -> float:
    topic = bench.pubsub.new_topic()
    waits = []
    with latency.receiving(bench, topic) as received:
        for number in range(30):
            id = f"{number}"
            message = PubsubMessage(data=MESSAGE, attributes={TASK_ID_ATTRIBUTE: id})
            bench.pubsub.publisher.publish(topic=topic, messages=[message])
            published = time.monotonic()
            eventually(partial(received.__contains__, id), seconds=10, message="the message received")
            waits.append(received[id] - published)
    return statistics.median(waits)


def drained(bench: Bench, workers: int, tasks: int) -> Generator[dict[str, float], None, None]:
    """Send backlogs by `publishworker run` processes. The middle of each is measured, by the times of the commits."""
    with _started(bench, workers) as (table, processes):
        while True:
            with _backlog(table, tasks):
                before = sum(map(_cpu_seconds, processes))
            cpu = sum(map(_cpu_seconds, processes)) - before
            sent = [at for [at] in query(table.database, _SENT)]
            first, last = sent[round(0.1 * tasks)], sent[round(0.8 * tasks) - 1]
            yield {"tasks/s": 0.7 * tasks / (last - first).total_seconds(), "CPU us/task": 1e6 * cpu / tasks}


def counted(bench: Bench, workers: int, tasks: int) -> float:
    """Do it once behind a proxy, which is slow and counts; return the requests per 1,000 tasks."""
    with Counting(bench.emulators.spanner_host) as proxy:
        behind = replace(bench, emulators=replace(bench.emulators, spanner_host=proxy.address))
        with _started(behind, workers) as (table, _):
            with _backlog(table, tasks):
                proxy.clear()
            requests = sum(number for (method, _), number in proxy.counts.items() if method in SENT_BY_TASKS)
    return 1000 * requests / tasks


@contextlib.contextmanager
def _started(bench: Bench, workers: int) -> Iterator[tuple[Table, list[Process]]]:
    with contextlib.ExitStack() as stack:
        table = stack.enter_context(fresh_table(bench))
        processes = [stack.enter_context(worker(bench.emulators, table.database)) for _ in range(workers)]
        table.fill(1)
        wait_until_all_sent(table.database)
        eventually(lambda: divided(processes), seconds=60, message=f"{workers} workers know of each other")
        yield table, processes


@contextlib.contextmanager
def _backlog(table: Table, tasks: int) -> Iterator[None]:
    """Register tasks of a paused topic, beside no others. Afterwards wait until all are sent."""
    with table.database.batch(default_retry_delay=0.02) as batch:
        batch.delete("AsynchronousTasks", KeySet(all_=True))
    _pause(table, paused=True)
    time.sleep(LEARNED)
    insert(table, tasks)
    yield
    _pause(table, paused=False)
    while query(table.database, _UNSENT) != [[0]]:
        time.sleep(0.5)


def _pause(table: Table, *, paused: bool) -> None:
    with table.database.batch(default_retry_delay=0.02) as batch:
        batch.insert_or_update("AsynchronousTaskTopics", ("Topic", "Paused"), [(table.topic, paused)])


def _cpu_seconds(process: Process) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def received(bench: Bench, rate: int, seconds: int) -> list[float]:
    """Return the seconds from each commit to its receipt by a subscriber, of tasks that one worker sends."""
    with fresh_table(bench) as table:
        return latency.latencies(bench, table, rate, seconds)
