"""Logs, counts and gauges of batches, topics and workers: complete, in pairs, and without repetition."""

import ast
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from outbox.base.schedules import Schedule
from outbox.errors import NotReached
from outbox.rows import backlog, workers
from outbox.rows.backlog import Backlog, Line
from outbox.table.controls import TopicControls
from outbox.table.states import NEVER
from publishworker.process import gauges
from publishworker.process.gauges import BacklogSampler, WorkerGauges, send_ages, send_backlog
from publishworker.spanner.store import Workers
from publishworker.telemetry import metrics as m
from publishworker.telemetry.history import WorkerHistory
from publishworker.telemetry.metrics import Metrics
from publishworker.telemetry.reporter import Reporter, turn_counts
from publishworker.topics.availability import CircuitChange, CircuitState
from publishworker.turn.membership import Membership
from publishworker.types import (
    CLAIM,
    COMMIT,
    PUBLISH,
    Answer,
    Delivered,
    Failed,
    Kind,
    NotSent,
    Published,
    Skipped,
    TransactionError,
    Turn,
    Unmarked,
)
from tests.support.fakes import Counted, FakeStore
from tests.support.parts import claim_of, working_relay
from tests.support.processes import ROOT
from tests.support.waiting import eventually

AWAY = Failed("unavailable", "connection refused")
MISSING = Failed("not_found", "no such topic")
PACKAGES = ("outbox", "publishworker", "outbox_pipeline")
OPENED, CLOSED = "circuit_open", "circuit_closed"


class Watch(Counted):
    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        super().__init__()
        caplog.set_level(logging.INFO, "publishworker")
        self.caplog = caplog
        self.seconds = 100.0
        self.reporter = Reporter(Metrics(self), lambda: self.seconds)

    def actions(self) -> list[str]:
        """Return the action of each line, or the outcome of a delivery that failed."""
        lines = map(vars, self.caplog.records)
        actions = [(each.get("fields") or {}).get("outcome", each["action"]) for each in lines]
        self.caplog.clear()
        return actions

    def lines(self) -> list[tuple[str, dict[str, Any]]]:
        return [(record.getMessage(), record.__dict__["fields"]) for record in self.caplog.records]

    def change(self, failure: Failed | None, seconds: float = 0) -> None:
        self.reporter.report_circuit(CircuitChange("orders", failure, seconds))

    def turns(self, count: int, *delivered: Delivered) -> None:
        for _ in range(count):
            for each in delivered:
                self.reporter.report_batch(each)
            self.reporter.report_turn(turn_counts(delivered))
            self.seconds += 1


@pytest.fixture
def watch(caplog: pytest.LogCaptureFixture) -> Watch:
    return Watch(caplog)


def test_a_flapping_circuit_is_logged_once_a_minute_and_in_pairs(watch: Watch) -> None:
    """It opens and closes every second for ten minutes: no closing is logged without its opening."""
    for _ in range(300):
        watch.change(AWAY)
        watch.seconds += 1
        watch.change(None, 1)
        watch.seconds += 1
    assert watch.actions() == [OPENED, CLOSED] * 10
    watch.seconds += 60
    watch.change(AWAY)
    watch.change(None, 1)
    watch.change(AWAY)
    assert watch.actions() == [OPENED, CLOSED]
    for second in range(1, 62):
        watch.seconds += 1
        watch.change(AWAY, second)
    assert watch.actions() == [OPENED]


def failing(ids: Sequence[str], *, dead: int = 0, error: str = "not_found: no such topic") -> Delivered:
    recorded = {}
    for place, id in enumerate(ids):
        attempts, available_at = (3, NEVER) if place < dead else (2, NEVER.replace(year=2026))
        recorded[id] = NotSent(attempts, available_at, None, error.format(id))
    return Delivered(claim_of("orders", *ids), answers=dict.fromkeys(ids, MISSING), recorded=recorded)


def test_each_failure_is_logged(watch: Watch) -> None:
    """Tasks of a batch that failed with the same error, in the same attempt, share a line."""
    result = failing("abc", dead=1)
    recorded = {**result.recorded, "a": replace(result.recorded["a"], trace_id="1" * 32)}
    result = replace(result, recorded=recorded, aborted=2)
    watch.reporter.report_batch(result)
    about = {"topic": "orders", "reason": "not_found"}
    again = "2 tasks of topic orders (b, c) failed in attempt 2: not_found: no such topic. "
    again += (
        "The first is due at 2026-12-31T00:00:00Z. Until the circuit of the topic closes, only probes are published"
    )
    assert watch.lines() == [
        (
            (
                "Task a of topic orders failed in attempt 3: not_found: no such topic. The task is dead. Fix the "
                "cause, then run `outbox retry` or `outbox cancel`"
            ),
            {**about, "outcome": "dead", "task_id": "a", "attempt": 3, "trace_id": "1" * 32},
        ),
        (again, {**about, "outcome": "retrying", "task_ids": ["b", "c"], "attempt": 2}),
    ]
    assert watch.actions() == ["dead", "retrying"]
    assert watch.counts == {m.FAILED.name: 3, m.DEAD.name: 1, m.ABORTED.name: 2}


def test_each_task_that_may_be_lost_is_named(watch: Watch) -> None:
    """Also in a second batch of the minute: the IDs are nowhere else, and their rows look sent."""
    batches = [[f"id-{number}" for number in range(count)] for count in (200, 2)]
    for ids in batches:
        watch.reporter.report_batch(Delivered(claim_of("orders", *ids), unconfirmed=tuple(ids)))
    named = [record.getMessage().rpartition("IDs: ")[2].split(", ") for record in watch.caplog.records]
    assert named == batches
    assert watch.actions() == ["unconfirmed", "unconfirmed"]
    assert watch.counts[m.UNCONFIRMED.name] == 202


def test_each_task_that_is_no_longer_marked_is_named(watch: Watch) -> None:
    """It may be cancelled later, and then nothing else says that its message is out."""
    for id in ("a", "b"):
        watch.reporter.report_later(Unmarked(claim_of("orders", id), "no answer", "published", given_up=True))
    assert [line.rpartition(" IDs: ")[2] for line in watch.caplog.messages] == ["a", "b"]
    assert watch.actions() == ["given_up"] * 2


def test_ten_thousand_failures_are_a_hundred_lines_a_minute(watch: Watch) -> None:
    watch.reporter.report_batch(failing([f"task-{n}" for n in range(10_000)], error="unknown: task {} is refused"))
    assert watch.actions() == ["retrying"] * 100
    watch.seconds += 60
    watch.reporter.report_batch(failing(["late"]))
    assert watch.actions() == ["retrying"]


def test_an_outage_logs_each_task_only_at_debug(watch: Watch) -> None:
    """No attempt is recorded, and the open circuit is logged. Each turn with work is such a line, with its numbers."""
    watch.caplog.set_level(logging.DEBUG, "publishworker")
    watch.reporter.report_batch(Delivered(claim_of("orders", "a", "b"), answers=dict.fromkeys("ab", AWAY)))
    assert [record.levelname for record in watch.caplog.records] == ["DEBUG"] * 2
    assert [fields["task_id"] for _, fields in watch.lines()] == ["a", "b"]
    watch.caplog.clear()
    watch.reporter.report_turn(Turn())
    watch.reporter.report_turn(Turn(published=3, failed=1))
    [(_, fields)] = watch.lines()
    assert fields["published"] == 3


def test_the_message_id_of_each_published_task_is_logged_at_debug(watch: Watch) -> None:
    """With the topic that received it. A failed task has no message ID."""
    claim = replace(claim_of("orders", "a", "b"), controls=TopicControls(publish_to="orders-v2"))
    result = Delivered(claim, answers={"a": Published("4711"), "b": AWAY})
    watch.reporter.report_batch(result)
    assert watch.actions() == []
    watch.caplog.set_level(logging.DEBUG, "publishworker")
    watch.reporter.report_batch(result)
    line, fields = watch.lines()[0]
    assert line == "Task a was published to orders-v2 as message 4711"
    assert fields == {"task_id": "a", "topic": "orders", "message_id": "4711"}
    assert [record.action for record in watch.caplog.records if hasattr(record, "action")] == ["published"]


def test_a_summary_is_logged_once_a_minute(watch: Watch) -> None:
    ids = [str(number) for number in range(10)]
    watch.turns(150, Delivered(claim_of("orders", *ids, "late"), sent(*ids), {"late": Skipped("sent")}))
    assert watch.actions() == ["summary"] * 2
    watch.reporter.log_summary()
    fields = {"published": 280, "already_sent": 28, "seconds": 28.0}
    assert watch.lines() == [("In the last 28 s: 280 tasks published, 28 tasks sent by others", fields)]
    watch.caplog.clear()
    watch.turns(150)
    watch.reporter.log_summary()
    assert watch.actions() == []
    watch.turns(1, Delivered(claim_of("orders", "a"), sent("a")))
    watch.turns(61)
    assert watch.actions() == ["summary"]


def sent(*ids: str) -> dict[str, Answer]:
    return {id: Published(id) for id in ids}


def test_durations_and_latencies_are_sampled(watch: Watch) -> None:
    result = Delivered(claim_of("orders", "a", "b"), answers={"a": Published("1"), "b": Published("2")})
    result = replace(result, phases={CLAIM: 0.1, PUBLISH: 0.2, COMMIT: 0.3}, latencies={"a": 1.5, "b": 2.5})
    watch.reporter.report_batch(result)
    watch.reporter.report_turn(Turn(poll_seconds=0.4))
    watch.reporter.report_batch(Delivered(claim_of("orders", "a", "b", kind=Kind.DEFER), phases={CLAIM: 1}))
    assert watch.samples == [
        (m.PHASE_DURATION.name, 0.1, ["phase:claim"], 1),
        (m.PHASE_DURATION.name, 0.2, ["phase:publish", "topic:orders"], 1),
        (m.PHASE_DURATION.name, 0.3, ["phase:commit"], 1),
        (m.LATENCY.name, 1.5, ["topic:orders"], 1),
        (m.LATENCY.name, 2.5, ["topic:orders"], 1),
        (m.PHASE_DURATION.name, 0.4, ["phase:poll"], 1),
    ]
    ids = [str(number) for number in range(1000)]
    watch.reporter.report_batch(Delivered(claim_of("orders", *ids), latencies=dict.fromkeys(ids, 1.0)))
    assert [rate for metric, _, _, rate in watch.samples if metric == m.LATENCY.name] == [1, 1, *[0.02] * 1000]


def test_invalid_topics_share_a_tag(watch: Watch) -> None:
    """A program that writes rows by hand must not create a thousand time series."""
    for topic in ("orders", "projects/p-1/topics/orders", "no topic", "x" * 400, "goog-like"):
        watch.reporter.report_batch(Delivered(claim_of(topic, "a"), answers={"a": Published("1")}))
    assert watch.tags == {"topic:orders", "topic:projects/p-1/topics/orders", "topic:invalid"}


def test_every_metric_belongs_to_a_sender() -> None:
    """A metric that is in no tuple has no page, and no instrument of OpenTelemetry."""
    defined = {each for each in vars(m).values() if isinstance(each, m.Metric)}
    assert defined == {*m.METRICS, *m.APPLICATION, *m.PIPELINE}


def _used(tree: ast.Module) -> set[str]:
    """Return the names that code uses of the module of the metrics, and its texts."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules = {each.asname for node in imports for each in node.names if each.name == "metrics"}
    own = {each.name for node in imports for each in node.names if node.module == m.__name__}
    used = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in modules:
                used.add(name)
            case ast.Name(id=name) if name in own:
                used.add(name)
            case ast.Constant(value=str(text)):
                used.add(text)
    return used


def test_every_metric_is_counted_or_sampled() -> None:
    """By a program, or by its name, as in applications, which do not import it. Otherwise its graph stays empty."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if file != Path(m.__file__)]
    used = set[str]().union(*(_used(ast.parse(file.read_text(encoding="utf-8"))) for file in files))
    unused = {name for name, each in vars(m).items() if isinstance(each, m.Metric) and not {name, each.name} & used}
    assert unused == set()


def test_a_failed_commit_says_what_happens_to_published_tasks(watch: Watch) -> None:
    for tried, effect in (
        ({}, ""),
        ({"a": Published("1")}, ". 1 task in doubt: published, and will be marked without another publish"),
    ):
        claim = claim_of("orders", "a", "b")
        error = TransactionError(claim, COMMIT, "ABORTED")
        watch.reporter.report_batch(Delivered(claim, answers=tried, error=error, unmarked=frozenset(tried)))
        watch.seconds += 60
        assert watch.caplog.messages[-1] == f"Commit failed for 2 tasks of topic orders: ABORTED{effect}"
    assert watch.actions() == ["commit_failed"] * 2
    assert watch.counts == {m.PUBLISHED.name: 1, m.UNCOMMITTED.name: 1}


def test_rows_that_were_not_locked_are_no_failed_commit(watch: Watch) -> None:
    """Also beside a part of the batch whose commit has ended."""
    error = TransactionError(claim_of("orders", "a"), CLAIM, "no answer in time")
    watch.reporter.report_batch(Delivered(claim_of("orders", "a", "b"), error=error, phases={COMMIT: 1.0}))
    [line] = watch.caplog.messages
    assert line == "The rows of 1 task of topic orders were not locked, so nothing was published: no answer in time"
    assert watch.actions() == ["lock_failed"]


class Relay:
    def __init__(self) -> None:
        self.relay = working_relay()
        self.seconds = 1000.0
        self.client = Counted()
        metrics = Metrics(self.client, lambda: self.seconds)
        self.report = WorkerGauges(metrics, membership(), self.relay, lambda: self.seconds)


def membership(others: Sequence[str] = ()) -> Membership:
    created = Membership(FakeStore(), "me")
    created.assign(Workers(dict.fromkeys(others, 14.0)))
    return created


def test_a_report_is_sent_every_15_seconds() -> None:
    """Whatever the number of turns. Without an agent no number is computed."""
    relay = Relay()
    for _ in range(60):
        relay.report()
        relay.seconds += 1
    client = relay.client
    zeros = dict.fromkeys((m.PUBLISHED.name, m.FORCED_STOP.name, m.DEAD.name, m.UNCONFIRMED.name), 0)
    assert client.counts == {m.HEARTBEAT.name: 4, **zeros}  # 0 is sent, so that a first event is an increase
    assert client.samples == [(m.IN_FLIGHT.name, 3, [], 1)] * 4
    assert client.gauges[m.WORKERS.name,] == 1
    WorkerGauges(Metrics(None), membership(), relay.relay)()
    assert relay.relay.in_flight.places_by_topic.call_count == 4


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
        relay.relay.topics.circuits.states.return_value = circuits
        relay.seconds += wait + 15
        relay.report()
        assert relay.client.gauges.get((m.CIRCUIT_STATE.name, "topic:orders")) == state


def found(*lines: Line) -> Backlog:
    return Backlog(datetime.now(UTC), (), lines)


def test_tasks_are_reported_by_topic_and_state() -> None:
    lines = [
        Line("orders", pending=11, retrying=3, scheduled=4, blocked=1, dead=2, sent_last_minute=9),
        Line("paused", paused=True, pending=5, dead=6),
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
    client, clock = Counted(), mock.Mock(return_value=0.0)
    metrics = Metrics(client, clock)
    now = found(Line("orders", pending=7), Line("paused", paused=True, pending=5))
    monkeypatch.setattr(backlog, "read_unsent", lambda _table, _age: now)
    send_backlog(metrics, WorkerHistory(), ["known"], None)
    assert client.gauges[m.PENDING.name,] == 7
    now = found()
    send_backlog(metrics, WorkerHistory(), ["known"], None)
    assert client.gauges == {
        (m.PENDING.name,): 0,
        (m.TOPIC_TASKS.name, "topic:known", "state:pending"): 0,
        (m.TOPIC_TASKS.name, "topic:orders", "state:pending"): 0,
        (m.TOPIC_TASKS.name, "topic:paused", "state:paused"): 0,
    }
    clock.return_value = 600.0
    client.gauges.clear()
    send_backlog(metrics, WorkerHistory(), [], None)
    assert client.gauges == {(m.PENDING.name,): 0}  # ten minutes after the last task, also for the known topic


class Sampler(BacklogSampler):
    """The sampler of a worker beside others; a count takes its time, and fails if a test wants it."""

    def __init__(self, others: Sequence[str] = (), takes: float = 0.1) -> None:
        self.seconds, self.takes = 1000.0, takes
        self.tables: list[Any] = []
        self.opened = 0
        self.error: Exception | None = None
        super().__init__(self.count, self.open, membership(others), lambda: self.seconds)

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


def test_two_workers_count_the_backlog() -> None:
    """So that one that hangs, or cannot count, leaves no gap."""
    for others, counts in (((), 1), (("a",), 1), (("z", "y"), 1), (("a", "b"), 0), (("a", "z"), 1)):
        sampler = Sampler(others)
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
    metrics = Metrics(client, lambda: 0.0)
    monkeypatch.setattr(workers, "died", lambda _table: 3)
    for ages in ({"orders": 7.0, "mails": 300.0}, {"orders": 8.0}, {}):
        monkeypatch.setattr(backlog, "oldest_ages", lambda _table, found=ages: backlog.Ages(found, 7.0))
        send_ages(metrics, WorkerHistory(), None)
        assert client.gauges == {
            (m.DIED_WORKERS.name,): 3,
            (m.OLDEST_AGE.name,): 7.0,
            (m.TOPIC_OLDEST_AGE.name, "topic:orders"): ages.get("orders", 0),
            (m.TOPIC_OLDEST_AGE.name, "topic:mails"): ages.get("mails", 0),
        }
