"""The poll with many rows that are not sendable, and with many topics."""

import dataclasses
from typing import Any

from google.cloud.spanner_v1 import KeyRange, KeySet

from outbox.storage.connection import open_database
from publishworker.spanner.statements import POLLS
from publishworker.spanner.store import SpannerStore
from publishworker.types import PollRequest
from tests.benchmarks.backlogs import insert
from tests.benchmarks.bench import Bench, Table, connecting_to, fresh_table, stopwatch
from tests.benchmarks.results import Section, figures
from tests.support.spanner import place

SHARDS = 10
TOPICS = (1, 10, 100)
#: Tasks of one turn with default settings: the target of a poll.
WINDOW = 400
#: The seconds of the emulator's wait in a strong read are the same for all.
TIMES = 10

Samples = list[tuple[str, str, float]]


def beside_sent(bench: Bench) -> Section:
    pending, sent = bench.choose(1_000, 200), bench.choose(100_000, 1_000)
    alone, beside = f"{pending:,} pending", f"and {sent:,} sent, {pending:,} scheduled"
    with fresh_table(bench) as table:
        insert(table, pending)
        found = ranges(table)
        samples = timed(bench, table, alone)
        insert(table, sent, sent=True)
        insert(table, pending, scheduled=True)
        same = ranges(table) == found
        samples += timed(bench, table, beside)
    conditions = f"""\
- Reads by the Read API of exactly the poll's ranges, one for each of {SHARDS} shards: shard, `SentAt` NULL, topic,
  `AvailableAt` NULL in the index `AsynchronousTasksToSend`. They stand for the poll because the emulator answers them
  from the index, but SQL by a scan. Each round is the mean of {TIMES} times all ranges."""
    section = Section(
        "The poll beside sent tasks",
        figures(samples),
        conditions,
        "The rows: sent and scheduled tasks are not in the ranges. The times show no more than that the emulator's "
        "reads do not grow with them.",
    )
    section.at_least("the same rows beside sent ones (1: yes)", float(same), 1)
    ratio = section.value(beside, "ms") / section.value(alone, "ms")
    section.at_most("time beside sent ones / time without", ratio, 1.5)
    return section


def ranges(table: Table) -> list[str]:
    database: Any = table.database
    ids: list[str] = []
    with database.snapshot(multi_use=True) as snapshot:
        for shard in range(SHARDS):
            key = [shard, None, table.topic, None]
            keys = KeySet(ranges=[KeyRange(start_closed=key, end_closed=key)])
            ids += [row[0] for row in snapshot.read("AsynchronousTasks", ["Id"], keys, index="AsynchronousTasksToSend")]
    return ids


def timed(bench: Bench, table: Table, row: str) -> Samples:
    samples: Samples = []
    for _ in bench.each_round(row):
        with stopwatch() as watch:
            for _ in range(TIMES):
                ids = ranges(table)
        samples += [(row, "ms", watch.seconds / TIMES * 1000), (row, "rows", len(ids))]
    return samples


def with_topics(bench: Bench) -> Section:
    pending = bench.choose(1_000, 200)
    tables = TOPICS[:2] if bench.quick else TOPICS
    samples: Samples = []
    for count in tables:
        with fresh_table(bench) as table:
            topics = [f"topic-{number:03}" for number in range(count)]
            for topic in topics:
                insert(table, pending // count, topic=topic)
            samples += polled(bench, table, topics)
    conditions = f"""\
- `SpannerStore.poll` of {pending:,} pending tasks, {SHARDS} shards, a window of {WINDOW} rows over all ranges. *ready*
  is the poll under load, *all* is the idle one: due tasks and topic discovery as well.
- Seeks are counted from the statements, see [the poll](architecture/poll.md#what-it-costs)."""
    return Section(
        "The poll by topics",
        figures(samples),
        conditions,
        "Seeks, rows and client CPU. The milliseconds do not: the emulator scans the table for each range.",
    )


def polled(bench: Bench, table: Table, topics: list[str]) -> Samples:
    with connecting_to(bench.emulators):
        store = SpannerStore(open_database(place(table.id)), SHARDS)
    per_range = max(1, WINDOW // SHARDS // len(topics))
    ready = PollRequest(shards=tuple(range(SHARDS)), topics=frozenset(topics), per_range=per_range)
    everything = dataclasses.replace(ready, due=True)
    row = f"{len(topics)} topics" if len(topics) > 1 else "1 topic"
    store.poll(ready)
    samples: Samples = []
    for _ in range(bench.rounds):
        for name, request in (("ready", ready), ("all", everything)):
            with stopwatch() as watch:
                found = store.poll(request)
                if request is everything:
                    store.discover(request.shards, request.topics)
            samples.append((row, f"{name}: ms", watch.seconds * 1000))
            samples.append((row, f"{name}: client CPU ms", watch.cpu_seconds * 1000))
            if name == "ready":
                samples.append((row, "rows", len(found)))
    samples.append((row, "ready: seeks", index_ranges(ready)))
    samples.append((row, "all: seeks", index_ranges(everything) + discovery_ranges(SHARDS, len(topics))))
    return samples


def index_ranges(request: PollRequest) -> int:
    """Return how many ranges of the index the statement of this poll reads."""
    statement = POLLS[request.due, request.below is not None]
    return statement.count("FORCE_INDEX") * len(request.shards) * len(request.topics)


def discovery_ranges(shards: int, known: int) -> int:
    """Return how many ranges topic discovery reads: in each shard, one in each gap between the known topics."""
    return shards * (known + 1)
