"""What a worker says of itself and of the table: how often, of which worker, and for how long after."""

import logging
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from outbox.errors import NotReached
from outbox.operations import backlog
from outbox.operations.backlog import Backlog, Line
from publishworker import reporting
from publishworker.reporting import Counts, Lookout, Reporter, by_topic_and_state
from publishworker.telemetry import metrics as m
from publishworker.telemetry.metrics import Metrics
from publishworker.turn.fleet import Fleet
from tests.support.fakes import Counted, FakeStore
from tests.support.waiting import eventually


class Tagged(Counted):
    """A metrics client that keeps gauges and counts by name and tags."""

    def __init__(self) -> None:
        """Begin with nothing."""
        super().__init__()
        self.values: dict[tuple[str, ...], float] = {}

    def gauge(self, metric: str, value: float, tags: list[str]) -> None:
        """Keep the last."""
        self.values[metric, *tags] = value


class Relay:
    """Something with a state."""

    in_flight = 3
    topics = ("invoices", "orders")

    def __init__(self) -> None:
        """All topics work."""
        self.rests: dict[str, bool] = {}

    def resting(self) -> Mapping[str, bool]:
        """Return what the test says."""
        return self.rests


class Time:
    """A clock that stands still until told."""

    def __init__(self) -> None:
        """Some time after it began."""
        self.seconds = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.seconds


def fleet(shards: Sequence[int] = range(10)) -> Fleet:
    """Return the fleet of one worker."""
    made = Fleet(FakeStore(), "me", range(10))
    made.shards = tuple(shards)
    return made


def test_a_report_is_sent_every_15_seconds() -> None:
    """Whatever the number of turns."""
    client, time = Tagged(), Time()
    report = Reporter(Metrics(client), fleet(), Relay(), time)
    for _ in range(60):
        report()
        time.seconds += 1
    assert client.counts[m.HEARTBEAT.name] == 4
    assert client.counts[m.PUBLISHED.name] == 0  # said, so that Datadog knows
    assert client.counts[m.IN_FLIGHT.name] == 4
    assert client.values[m.SHARDS.name,] == 10
    assert client.values[m.WORKERS.name,] == 1
    [build] = [tags for name, *tags in client.values if name == m.BUILD.name]
    assert [tag.partition(":")[0] for tag in build] == list(m.BUILD.tags)
    assert all(tag.partition(":")[2] for tag in build)


def test_breakers_are_told_while_they_rest_and_for_ten_minutes_after() -> None:
    """Else the last value would stay in the graph; and topics that work cost nothing."""
    client, time, relay = Tagged(), Time(), Relay()
    report = Reporter(Metrics(client), fleet(), relay, time)

    def state() -> float | None:
        client.values.clear()
        time.seconds += 15
        report()
        return client.values.get((m.BREAKER_STATE.name, "topic:orders"))

    assert state() is None
    relay.rests = {"orders": True}
    assert state() == m.OPEN
    relay.rests = {"orders": False}
    assert state() == m.HALF_OPEN
    relay.rests = {}
    assert state() == m.CLOSED
    time.seconds += 550
    assert state() == m.CLOSED
    time.seconds += 600
    assert state() is None


def test_without_an_agent_nothing_is_made() -> None:
    """Not even the numbers: nobody is asked for them."""
    asked: list[str] = []

    class Asked(Relay):
        def resting(self) -> Mapping[str, bool]:
            asked.append("resting")
            return {}

    Reporter(Metrics(None), fleet(), Asked())()
    assert asked == []
    Reporter(Metrics(Tagged()), fleet(), Asked())()
    assert asked == ["resting"]


def found(*lines: Line) -> Backlog:
    """Return a backlog of these lines."""
    return Backlog(datetime.now(UTC), 1, lines)


def test_tasks_are_told_by_topic_and_state() -> None:
    """Over all priorities; pending tasks of a paused topic are paused."""
    lines = [
        Line("orders", 100, pending=1, dead=2),
        Line("orders", 50, pending=10, retrying=3, scheduled=4, sent_last_minute=9),
        Line("paused", 50, paused=True, pending=5, dead=6),
    ]
    assert by_topic_and_state(found(*lines)) == {
        ("orders", "pending"): 11,
        ("orders", "retrying"): 3,
        ("orders", "scheduled"): 4,
        ("orders", "dead"): 2,
        ("paused", "paused"): 5,
        ("paused", "dead"): 6,
    }


def test_what_has_been_sent_is_told_as_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is paused does not count for the autoscaler."""
    client = Tagged()
    counts = Counts(Metrics(client), lambda: ["known"], Time())
    now = found(Line("orders", 50, pending=7), Line("paused", 50, paused=True, pending=5))
    monkeypatch.setattr(backlog, "read", lambda _table, **_keywords: now)
    counts(None)
    assert client.values[m.PENDING.name,] == 7
    now = found()
    counts(None)
    assert client.values == {
        (m.PENDING.name,): 0,
        (m.TOPIC_TASKS.name, "topic:known", "state:pending"): 0,
        (m.TOPIC_TASKS.name, "topic:orders", "state:pending"): 0,
        (m.TOPIC_TASKS.name, "topic:paused", "state:paused"): 0,
    }


class Look:
    """A look that takes its time, and fails if told."""

    def __init__(self, time: Time) -> None:
        """Take no time."""
        self.time = time
        self.tables: list[Any] = []
        self.opened = 0
        self.takes = 0.0
        self.error: Exception | None = None

    def open(self) -> Any:
        """Open a table."""
        self.opened += 1
        return f"table {self.opened}"

    def __call__(self, table: Any) -> None:
        """Look at it."""
        self.tables.append(table)
        self.time.seconds += self.takes
        if self.error is not None:
            raise self.error

    def out(self, shards: Sequence[int] = range(10)) -> Lookout:
        """Return the lookout of a worker with these shards."""
        return Lookout(self, self.open, fleet(shards), self.time)


@pytest.fixture
def look() -> Look:
    """A look that works."""
    return Look(Time())


@pytest.mark.parametrize(("takes", "waits"), [(0.1, 15), (3, 15), (10, 40), (60, 120), (1000, 120)])
def test_a_look_that_takes_long_is_followed_by_a_long_wait(look: Look, takes: float, waits: float) -> None:
    """Every 15 s if it is quick; but never so late that the autoscaler takes the figure for unknown."""
    look.takes = takes
    assert look.out().once() == pytest.approx(waits)


@pytest.mark.parametrize(("shards", "looks"), [((0,), 1), ((0, 5), 1), ((1, 2), 0), ((), 0)], ids=str)
def test_only_the_worker_of_shard_0_looks(look: Look, shards: Sequence[int], looks: int) -> None:
    """The others would only read the same."""
    assert look.out(shards).once() == 15
    assert len(look.tables) == looks


def test_a_look_that_fails_is_told_once_a_minute_and_holds_nothing_up(
    look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    """However long it took; and the table is opened anew: its session may be lost."""
    look.error = NotReached("no answer")
    look.takes = 60
    out = look.out()
    with caplog.at_level(logging.INFO, "publishworker"):
        for _ in range(4):
            assert out.once() == 15
            look.takes = 0.1
            look.time.seconds += 15
        look.error = None
        out.once()
        out.once()
    assert [record.getMessage() for record in caplog.records] == ["how much waits is not known: no answer"]
    assert look.tables == ["table 1", "table 2", "table 3", "table 4", "table 5", "table 5"]


def test_a_lookout_looks_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """On a thread of its own, which outlives a defect of a figure."""
    monkeypatch.setattr(reporting, "INTERVAL", 0.01)
    monkeypatch.setattr(reporting, "FIRST_WAIT", 0)
    monkeypatch.setattr(reporting, "RESTS", 0)
    looks = [0]

    def look_at(_table: Any) -> None:
        looks[0] += 1
        if looks[0] == 2:
            raise ZeroDivisionError("a defect")

    out = Lookout(look_at, lambda: None, fleet())
    out.start()
    eventually(lambda: looks[0] > 5)
    out.stop()
    eventually(lambda: not any(thread.name == "lookout" for thread in threading.enumerate()))
    assert [record.__dict__["action"] for record in caplog.records] == ["backlog"]
