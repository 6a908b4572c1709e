"""The relay's pipeline on a store in memory whose calls take the time of round trips: the cost of waiting for batches.

No emulator: a database of it runs one transaction at a time, so concurrent batches cannot be measured there.
"""

import itertools
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from typing import Any, cast

from outbox.storage.layout import Layout
from publishworker.spanner.store import Decide
from publishworker.types import Candidate, Discovery, Failed, LockedRow, Outcome, PollRequest, Sent
from tests.benchmarks.bench import Bench
from tests.benchmarks.results import Section, figures
from tests.support.parts import relay_of

#: Milliseconds of a poll, a lock query, a publish request, a commit; each varies, lognormal with sigma 0.35.
POLL, LOCK, PUBLISH, COMMIT = 8, 8, 20, 8
#: How many times longer a slow call takes.
SLOW = 10
#: Seconds for one measurement, which takes a second or two.
LIMIT = 60.0
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)

CONDITIONS = f"""\
- The relay itself, batches of 100, one topic, 10 shards, on a store and a publisher in memory: a poll takes {POLL} ms,
  a lock query {LOCK}, a publish request {PUBLISH}, a commit {COMMIT}, each with a lognormal spread (sigma 0.35). In the
  second column one call of fifty takes {SLOW} times as long.
- *n left*: a turn ends when n of its batches are still in flight; *all*: it waits for all.
- *Polls for nothing*: the same with polls that take no time, the upper bound of what prefetching could gain."""


@dataclass(frozen=True, slots=True)
class Way:
    batches: int
    left: int
    poll: float = POLL


WAYS = {
    "4 batches, all": Way(4, 0),
    "8 batches, all": Way(8, 0),
    "8 batches, 1 left (as it ships)": Way(8, 1),
    "8 batches, 2 left": Way(8, 2),
    "8 batches, 4 left": Way(8, 4),
    "8 batches, 1 left, polls for nothing": Way(8, 1, 0.0),
}


class DistantStore:
    """Unsent tasks by shard, at a distance: those verbs of Store that a relay uses."""

    def __init__(self, tasks: int, seed: int, slow: float, poll: float) -> None:
        """Begin with so many tasks; `slow` is the share of slow calls, `poll` the milliseconds of one."""
        self.layouts = (Layout(10),)
        self.polls = self.rows = 0
        self._random = Random(seed)
        self._slow = slow
        self._poll = poll
        self._lock = threading.Lock()
        candidates = [Candidate(str(n), "topic", n % 10, 50, NOON, None, None, 300) for n in range(tasks)]
        self.unsent_of = [{each.id: each for each in candidates if each.shard == shard} for shard in range(10)]

    def travel(self, milliseconds: float) -> None:
        with self._lock:
            factor = self._random.lognormvariate(0, 0.35) * (SLOW if self._random.random() < self._slow else 1)
        time.sleep(milliseconds / 1000 * factor)

    def poll(self, request: PollRequest) -> Sequence[Candidate]:
        self.travel(self._poll)
        limit = request.per_range if request.topics else 0
        with self._lock:
            found = [list(itertools.islice(each.values(), limit)) for each in self.unsent_of]
        candidates = tuple(each for some in found for each in some)
        self.polls += 1
        self.rows += len(candidates)
        return candidates

    def discover(self, shards: Sequence[int], known: Collection[str]) -> Discovery:
        self.travel(self._poll)
        return Discovery(topics=frozenset({"topic"}.difference(known)))

    def claim(self, ids: Sequence[str], decide: Decide) -> datetime:
        self.travel(LOCK)
        decide([LockedRow(id, "topic", b"", None, NOON, None, None, clean=True) for id in ids], NOON)
        self.travel(COMMIT)
        with self._lock:
            for id in ids:
                del self.unsent_of[int(id) % 10][id]
        return NOON

    def heartbeat(self, worker: str, started_at: datetime, remove: Collection[str]) -> None:
        """Do nothing: there are no other workers."""


class DistantPublisher:
    def __init__(self, store: DistantStore) -> None:
        self._store = store

    def publish(
        self, topic: str, rows: Sequence[LockedRow], seconds: float, singly: Collection[str] = frozenset()
    ) -> dict[str, Outcome]:
        self._store.travel(PUBLISH)
        return {row.id: Sent("1") for row in rows}

    def refusals(self, topic: str, rows: Sequence[LockedRow]) -> dict[str, Failed]:
        return {}


def relay(way: Way, tasks: int, seed: int, slow: float) -> tuple[float, float, float]:
    store = DistantStore(tasks, seed, slow, way.poll)
    limits: dict[str, Any] = {"batches": way.batches, "stragglers": way.left}
    created = relay_of(cast("Any", store), DistantPublisher(store), size=100, discovery_seconds=0.5, **limits)
    created.turn()  # learns the topic
    store.polls = store.rows = 0
    begin, published = time.perf_counter(), 0
    while published < tasks and time.perf_counter() < begin + LIMIT:
        published += created.turn().published
    return tasks / (time.perf_counter() - begin), store.polls / tasks * 1000, store.rows / tasks


def run(bench: Bench) -> Section:
    tasks = bench.choose(10_000, 2_000)
    samples = []
    for seed in bench.each_round("pipeline"):
        for name, way in WAYS.items():
            steady, polls, rows = relay(way, tasks, seed, 0.0)
            with_slow, *_ = relay(way, tasks, seed, 0.02)
            samples += [(name, "tasks/s", steady), (name, "tasks/s with slow calls", with_slow)]
            samples += [(name, "polls/1,000 tasks", polls), (name, "rows polled/task", rows)]
    return Section("The pipeline", figures(samples), CONDITIONS, "The ratios, for round trips like these.")
