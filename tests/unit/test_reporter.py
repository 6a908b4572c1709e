"""The logs and counts of batches, turns and topics: complete, in pairs, and without repetition."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from outbox.table.controls import TopicControls
from outbox.table.states import NEVER
from publishworker.delivery.claim import Delivered, Kind, Unmarked, turn_counts
from publishworker.telemetry import metrics as m
from publishworker.telemetry.metrics import Metrics
from publishworker.telemetry.reporter import Reporter
from publishworker.topics.availability import CircuitChange
from publishworker.types import CLAIM, COMMIT, PUBLISH, Answer, Failed, NotSent, Published, Skipped, Turn
from tests.support.fakes import Counted
from tests.support.parts import claim_of

AWAY = Failed("unavailable", "connection refused")
MISSING = Failed("not_found", "no such topic")
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

    def change(self, failure: Failed | None, seconds: float = 0, topic: str = "orders") -> None:
        self.reporter.report_circuit(CircuitChange(topic, failure, seconds))

    def keep_failing(self, seconds: int) -> None:
        for second in range(1, seconds):
            self.seconds += 1
            self.change(AWAY, second)

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
    watch.keep_failing(62)
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
    result = replace(result, recorded=recorded)
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
    assert watch.counts == {m.FAILED.name: 3, m.DEAD.name: 1}


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


def test_a_failed_commit_says_what_happens_to_published_tasks(watch: Watch) -> None:
    for tried, effect in (
        ({}, ""),
        ({"a": Published("1")}, ". 1 task in doubt: published, and will be marked without another publish"),
    ):
        unmarked, phases = frozenset(tried), {"commit": 1.0}
        watch.reporter.report_batch(
            Delivered(claim_of("orders", "a", "b"), answers=tried, error="ABORTED", unmarked=unmarked, phases=phases)
        )
        watch.seconds += 60
        assert watch.caplog.messages[-1] == f"Commit failed for 2 tasks of topic orders: ABORTED{effect}"
    assert watch.actions() == ["commit_failed"] * 2
    assert watch.counts == {m.PUBLISHED.name: 1, m.UNCOMMITTED.name: 1}


def test_rows_that_were_not_locked_are_no_failed_commit(watch: Watch) -> None:
    watch.reporter.report_batch(Delivered(claim_of("orders", "a"), error="no answer in time", phases={"claim": 10.0}))
    assert watch.caplog.messages == [
        "The rows of 1 task of topic orders were not locked, so nothing was published: no answer in time"
    ]
    assert watch.actions() == ["lock_failed"]
