"""The worker's parts, put together for a test: small numbers, one seed, a turn that waits for its batches; and a bench.

A bench is a relay between fakes, for tests without emulators.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import zip_longest
from random import Random
from typing import Any
from unittest import mock

import pytest

from publishworker.delivery.delivery import Tools
from publishworker.delivery.marking import SharedMarking
from publishworker.delivery.rules import RetryPolicy
from publishworker.host import Event, Host, Thread, Threads
from publishworker.process.worker_settings import WorkerSettings
from publishworker.telemetry import metrics as m
from publishworker.telemetry.metrics import Client, Metrics
from publishworker.telemetry.reporter import Reporter
from publishworker.topics.availability import CircuitState
from publishworker.turn.in_flight import Limits
from publishworker.turn.membership import Membership
from publishworker.turn.relay import Relay
from publishworker.types import Answer, Claim, ClaimedTask, Kind, LockedRow, PollRequest, Turn
from tests.specification.trace import Trace
from tests.support.fakes import Abort, Counted, FakePublisher, FakeStore, serialized

HOST, SHARES = {"clock", "random", "threads", "progress"}, {"fair_share"}


def policy(**values: Any) -> RetryPolicy:
    """Return the default retry policy, with other values, and random times of one seed."""
    defaults = {"initial": 1, "longest": 3600, "max_attempts": 10, "dead_after": 86_400, "random": Random(1)}
    return RetryPolicy(**{**defaults, **values})


def relay_of(
    store: Any,  # by its methods, such as a FakeStore
    publisher: Any,
    client: Client | None = None,
    *,
    size: int = 10,
    batches: int = 2,
    batch_bytes: int = 10**6,
    membership: Membership | None = None,
    retries: Mapping[str, float] | None = None,
    **options: Any,
) -> Relay:
    host = Host(**{"random": Random(1)} | {name: options.pop(name) for name in HOST & options.keys()})
    trace: Trace | None = options.pop("trace", None)
    store = trace.store(store) if trace else store
    shares = {name: options.pop(name) for name in SHARES & options.keys()}
    relay = Relay(
        Tools(
            store=store,
            publisher=publisher,
            policy=policy(random=host.random, skip_dead=options.pop("skip_dead", False), **(retries or {})),
            marking=SharedMarking(host, options.pop("shutdown_seconds", 0.0)),
            host=host,
        ),
        Limits(size, batch_bytes, batches, **shares),
        membership or Membership(store, "worker"),
        Reporter(Metrics(client), host.clock),
        **{"discovery_seconds": 0, **options},
    )
    return trace.batches_of(relay) if trace else relay


def claim_of(
    topic: str,
    *ids: str,
    keys: Iterable[str | None] = (),
    releases: Iterable[str] = (),
    kind: Kind = Kind.PUBLISH,
    bytes: int = 0,
    **more: Any,
) -> Claim:
    """Return a claim. Each task in `releases` has the last key."""
    tasks = tuple(ClaimedTask(*pair, shard=3) for pair in zip_longest(ids, keys))
    after = tuple(ClaimedTask(id, tasks[-1].ordering_key, 3) for id in releases)
    return Claim(topic, tasks, kind, after, bytes, **more)


def poll_request(*topics: str, shards: Iterable[int] = range(10), per_range: int = 100, **more: Any) -> PollRequest:
    return PollRequest(shards=tuple(shards), topics=frozenset(topics), per_range=per_range, **more)


class SteppedThreads(Threads):
    """Threads that wait by the clock of a bench, while they mark tasks again."""

    def __init__(self, bench: "Bench") -> None:
        self.bench = bench
        self.changed = threading.Condition()
        self.until: dict[Thread, float] = {}  # by each waiting thread

    def event(self) -> Event:
        return SteppedEvent(self)

    def sleep(self, seconds: float) -> None:
        self.bench.seconds += seconds

    def step(self) -> None:
        """Let the threads whose time has come act, until they wait again or end."""
        with self.changed:
            self.changed.notify_all()
        end = time.monotonic() + 1
        while time.monotonic() < end and any(map(self._acts, [*self.until, *self.bench.marking()])):
            time.sleep(0.001)

    def _acts(self, thread: Thread) -> bool:
        """Tell whether the time of a thread has come, or it has not begun to wait."""
        return thread.is_alive() and self.until.get(thread, 0.0) <= self.bench.seconds


class SteppedEvent(Event):
    def __init__(self, threads: SteppedThreads) -> None:
        super().__init__()
        self.threads = threads

    def set(self) -> None:
        super().set()
        with self.threads.changed:
            self.threads.changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        end = self.threads.bench.seconds + (timeout or 0)
        with self.threads.changed:
            self.threads.until[threading.current_thread()] = end
            self.threads.changed.wait_for(lambda: self.is_set() or self.threads.bench.seconds >= end)
        return self.is_set()


class Bench:
    def __init__(self, **options: Any) -> None:
        self.store = FakeStore()
        self.publisher = FakePublisher("orders", "invoices")
        self.counted = Counted()
        self.seconds = 0.0
        self.threads = SteppedThreads(self)
        self.relays: list[Relay] = []
        self.relay = self.another(**options)

    def another(self, **options: Any) -> Relay:
        options = {"clock": lambda: self.seconds, "batch_bytes": 10_000, "threads": self.threads, **options}
        self.relays.append(relay_of(self.store, options.pop("publisher", self.publisher), self.counted, **options))
        return self.relays[-1]

    def marking(self) -> list[Thread]:
        """Return the threads of the batches that were reported and mark tasks again, or are about to."""
        running = [each for relay in self.relays for each in relay.in_flight._running.items()]
        return [thread for entry, thread in running if entry.reported]

    def insert(self, *ids: str, topic: str = "orders", **columns: Any) -> None:
        for id in ids:
            self.store.insert(id, topic, serialized(), **columns)

    def line(self, *ids: str, key: str = "k", topic: str = "orders", **columns: Any) -> None:
        for sequence, id in enumerate(ids, len(self.store.rows)):
            self.insert(id, topic=topic, ordering_key=key, sequence=sequence, **columns)

    def published(self, *ids: str) -> list[str]:
        return [id for id in self.publisher.ids() if id in ids]

    def waits(self, id: str) -> float | None:
        at = self.store.rows[id].available_at
        return None if at is None else (at - self.store.now).total_seconds()

    def turns(self, max_turns: int = 20) -> list[Turn]:
        done: list[Turn] = []
        end = time.monotonic() + 60  # the machine may be busy
        while len(done) < max_turns and time.monotonic() < end:
            turn = self.relay.turn()
            if turn.made_progress or not self.relay.in_flight.unreported:
                done.append(turn)
                if not turn.made_progress:
                    return done
            else:
                time.sleep(0.001)  # a batch is on its way on a thread of its own
        pytest.fail(f"no end after {max_turns} turns: {done}")

    def wait(self, seconds: float) -> None:
        self.seconds += seconds
        self.store.now += timedelta(seconds=seconds)
        self.threads.step()

    def run_for(self, seconds: float, step: float = 1.0) -> None:
        """Turn until nothing is left to do, every `step` seconds, for so long."""
        for _ in range(round(seconds / step)):
            self.turns()
            self.wait(step)

    def change(self, id: str, **columns: Any) -> None:
        self.store.change(id, **columns)

    def commits(self, *errors: Exception | None) -> None:
        """Let the next commits raise these errors, None being no error; later commits succeed."""
        left = list(errors)

        def commit() -> None:
            if left and (error := left.pop(0)):
                raise error

        self.store.before_commit = commit

    def abort_once(self, act: Callable[[], object]) -> None:
        def abort() -> None:
            self.store.before_commit = lambda: None
            act()
            raise Abort

        self.store.before_commit = abort

    def unsent(self) -> list[str]:
        return [row.id for row in self.store.unsent_rows()]

    def count(self, metric: m.Metric) -> int:
        return self.counted.counts[metric.name]


class SlowPublisher(FakePublisher):
    def __init__(self, *topics: str) -> None:
        super().__init__(*topics)
        self.hanging: set[str] = set()
        self.release = threading.Event()
        self.seconds = 0.0

    def publish(
        self, topic: str, rows: Sequence[LockedRow], seconds: float, alone: Collection[str] = frozenset()
    ) -> dict[str, Answer]:
        self.release.wait(30 if topic in self.hanging else self.seconds)
        return super().publish(topic, rows, seconds, alone)


def overtake(bench: Bench, act: Callable[[], object]) -> None:
    claim = bench.store.claim

    def claim_too_late(*arguments: Any, **options: Any) -> None:
        bench.store.claim = claim  # type: ignore[method-assign]  # a fault on purpose
        act()
        claim(*arguments, **options)

    bench.store.claim = claim_too_late  # type: ignore[method-assign,assignment]  # a fault on purpose


def working_relay(**circuits: CircuitState) -> Any:
    """Return a relay with three batches in flight, as far as a heartbeat or a gauge asks for it."""
    in_flight = mock.MagicMock(utilization=0.375, **{"__len__.return_value": 3})
    in_flight.places_by_topic.return_value = Counter({"orders": 3})
    topics = mock.Mock(**{"circuits.states.return_value": circuits})
    return mock.Mock(in_flight=in_flight, topics=topics, **{"discoverer.active_topics": {"invoices", "orders"}})


def worker_settings(**flags: str) -> WorkerSettings:
    """Return the settings of a worker with these flags."""
    return WorkerSettings.read({"project": "my-project", "instance": "main", "database": "shop", **flags}, {})
