"""A relay between fakes, for tests without emulators."""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import pytest

from publishworker.host import Event, Thread, Threads
from publishworker.telemetry import metrics as m
from publishworker.turn.relay import Relay
from publishworker.types import Answer, LockedRow, Turn
from tests.support.fakes import Abort, Counted, FakePublisher, FakeStore, serialized
from tests.support.parts import relay_of


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
        running = [each for relay in self.relays for each in relay._in_flight._running.items()]
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
            if turn.made_progress or not self.relay._in_flight.unreported:
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
        for name, value in columns.items():
            setattr(self.store.rows[id], name, value)

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
        return [row.id for row in self.store.rows.values() if row.sent_at is None]

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
