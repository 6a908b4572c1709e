"""The gauges of a worker and of the table: how often, by which worker, and for how long."""

import logging
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from outbox.admin import backlog
from outbox.admin.backlog import Backlog, Line
from outbox.base.schedules import Schedule
from outbox.errors import NotReached
from publishworker.process import gauges
from publishworker.process.gauges import BacklogSampler, WorkerGauges, backlog_counts, oldest_ages
from publishworker.telemetry import metrics as m
from publishworker.telemetry.history import History
from publishworker.telemetry.metrics import Metrics
from publishworker.turn.membership import Membership
from publishworker.turn.relay import Load
from publishworker.types import CircuitState, Failed
from tests.support.fakes import Counted, FakeStore
from tests.support.waiting import eventually


class Relay:
    def __init__(self) -> None:
        self.circuits: dict[str, CircuitState] = {}
        self.asked = 0
        self.seconds = 1000.0
        self.client = Counted()
        self.report = WorkerGauges(Metrics(self.client), membership(), self, lambda: self.seconds)

    @property
    def load(self) -> Load:
        """Nine batches, of which six have freed their places."""
        self.asked += 1
        return Load(9, 3, 0.375, frozenset({"invoices", "orders"}), self.circuits)


def membership(shards: Sequence[int] = range(10)) -> Membership:
    created = Membership(FakeStore(), "me")
    created.shards = tuple(shards)
    return created


def test_a_report_is_sent_every_15_seconds() -> None:
    """Whatever the number of turns. Without an agent no number is computed."""
    relay = Relay()
    for _ in range(60):
        relay.report()
        relay.seconds += 1
    client = relay.client
    zeros = dict.fromkeys((m.PUBLISHED.name, m.FORCED_STOP.name), 0)
    assert client.counts == {m.HEARTBEAT.name: 4, **zeros}  # 0 is sent, so that a first event is an increase
    assert client.samples == [(m.IN_FLIGHT.name, 3, [], 1)] * relay.asked == [(m.IN_FLIGHT.name, 3, [], 1)] * 4
    assert client.gauges[m.WORKERS.name,] == 1
    WorkerGauges(Metrics(None), membership(), relay)()
    assert relay.asked == 4


def circuit(seconds_to_probe: float) -> CircuitState:
    return CircuitState(Failed("not_found", "404"), 10, seconds_to_probe)


def test_circuits_are_reported_while_open_and_for_ten_minutes_after() -> None:
    """Otherwise the last value would stay in the graph. Topics that work cost nothing."""
    relay = Relay()
    for wait, circuits, state in (
        (0, {}, None), (0, {"orders": circuit(2)}, m.OPEN), (0, {"orders": circuit(0)}, m.HALF_OPEN), (0, {}, m.CLOSED),
        (550, {}, m.CLOSED), (600, {}, None),
    ):  # fmt: skip
        relay.client.gauges.clear()
        relay.circuits = circuits
        relay.seconds += wait + 15
        relay.report()
        assert relay.client.gauges.get((m.CIRCUIT_STATE.name, "topic:orders")) == state


def found(*lines: Line) -> Backlog:
    return Backlog(datetime.now(UTC), (), lines)


def test_tasks_are_reported_by_topic_and_state() -> None:
    lines = [
        Line("orders", 100, pending=1, dead=2),
        Line("orders", 50, pending=10, retrying=3, scheduled=4, blocked=1, sent_last_minute=9),
        Line("paused", 50, paused=True, pending=5, dead=6),
    ]
    assert found(*lines).by_topic_and_state() == {
        ("orders", "pending"): 11,
        ("orders", "retrying"): 3,
        ("orders", "scheduled"): 4,
        ("orders", "blocked"): 1,
        ("orders", "dead"): 2,
        ("paused", "paused"): 5,
        ("paused", "dead"): 6,
    }


def test_topics_without_tasks_are_reported_as_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Counted()
    counts = backlog_counts(Metrics(client), History(), lambda: ["known"], lambda: 0.0)
    now = found(Line("orders", 50, pending=7), Line("paused", 50, paused=True, pending=5))
    monkeypatch.setattr(backlog, "read_unsent", lambda _table, _age: now)
    counts(None)
    assert client.gauges[m.PENDING.name,] == 7
    now = found()
    counts(None)
    assert client.gauges == {
        (m.PENDING.name,): 0,
        (m.TOPIC_TASKS.name, "topic:known", "state:pending"): 0,
        (m.TOPIC_TASKS.name, "topic:orders", "state:pending"): 0,
        (m.TOPIC_TASKS.name, "topic:paused", "state:paused"): 0,
    }


class Sampler(BacklogSampler):
    """The sampler of a worker with these shards; a count takes its time, and fails if a test wants it."""

    def __init__(self, shards: Sequence[int] = range(10), takes: float = 0.1) -> None:
        self.seconds, self.takes = 1000.0, takes
        self.tables: list[Any] = []
        self.opened = 0
        self.error: Exception | None = None
        super().__init__(self.count, self.open, membership(shards), lambda: self.seconds)

    def open(self) -> Any:
        self.opened += 1
        return self.opened

    def count(self, table: Any) -> None:
        self.tables.append(table)
        self.seconds += self.takes
        if self.error is not None:
            raise self.error


def test_a_slow_count_of_the_backlog_is_followed_by_a_long_wait() -> None:
    """Every 15 s if it is quick, but never so rarely that the autoscaler takes the figure for unknown."""
    for takes, waits in ((0.1, 15), (3, 15), (10, 40), (60, 120), (1000, 120)):
        assert Sampler(takes=takes).once() == pytest.approx(waits)


def test_only_the_worker_of_shard_0_counts_the_backlog() -> None:
    for shards, counts in (((0,), 1), ((0, 5), 1), ((1, 2), 0), ((), 0)):
        sampler = Sampler(shards)
        assert sampler.once() == 15
        assert len(sampler.tables) == counts


def test_a_failed_count_is_logged_once_a_minute_and_delays_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """However long it took. The table is opened again, because its session may be lost."""
    sampler = Sampler(takes=60)
    sampler.error = NotReached("no answer")
    with caplog.at_level(logging.INFO, "publishworker"):
        for _ in range(4):
            assert sampler.once() == 15
            sampler.takes = 0.1
            sampler.seconds += 15
        sampler.error = None
        sampler.once(), sampler.once()
    assert [record.getMessage() for record in caplog.records] == [
        "Counting the backlog failed. Its metrics are missing until a count succeeds: no answer"
    ]
    assert sampler.tables == [1, 2, 3, 4, 5, 5]


def test_the_backlog_is_counted_until_the_sampler_stops(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a thread of its own, which survives a defect of a count."""
    monkeypatch.setattr(gauges, "REPORT_SECONDS", 0.01)
    monkeypatch.setattr(gauges, "COUNT", Schedule(0, 0))
    counts = [0]

    def count(_table: Any) -> None:
        counts[0] += 1
        if counts[0] == 2:
            raise ZeroDivisionError("a defect")

    out = BacklogSampler(count, lambda: None, membership())
    out.start()
    eventually(lambda: counts[0] > 5)
    out.stop()
    eventually(lambda: not any(thread.name == "backlog" for thread in threading.enumerate()))
    assert [record.__dict__["action"] for record in caplog.records] == ["backlog"]


def test_the_oldest_age_is_reported_of_all_topics_and_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic without pending tasks is 0 for ten minutes, so that its last age does not stay in the graph."""
    client = Counted()
    send = oldest_ages(Metrics(client), History(), lambda: 0.0)
    for ages in ({"orders": 7.0, "mails": 300.0}, {"orders": 8.0}, {}):
        monkeypatch.setattr(backlog, "oldest_ages", lambda _table, found=ages: found)
        send(None)
        assert client.gauges == {
            (m.OLDEST_AGE.name,): max(ages.values(), default=0),
            (m.TOPIC_OLDEST_AGE.name, "topic:orders"): ages.get("orders", 0),
            (m.TOPIC_OLDEST_AGE.name, "topic:mails"): ages.get("mails", 0),
        }
