"""What the log says of topics that rest, and of tasks that fail: enough, in pairs, and not again and again."""

import logging

import pytest

from outbox.states import NEVER
from publishworker import metrics as m
from publishworker.breakers import Change
from publishworker.metrics import Metrics
from publishworker.recording import Recorder
from publishworker.task import Charged, Failed, Group, GroupResult
from tests.support.fakes import Counted

AWAY = Failed("unavailable", "connection refused")
MISSING = Failed("not_found", "no such topic")


class Watch:
    """A recorder with a clock that stands still until told."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        """Listen to the log."""
        caplog.set_level(logging.INFO, "publishworker")
        self._caplog = caplog
        self.seconds = 100.0
        self.counted = Counted()
        self.recorder = Recorder(Metrics(self.counted), lambda: self.seconds)

    def told(self) -> list[str]:
        """Return the actions that were logged since the last look."""
        actions = [record.action for record in self._caplog.records]  # type: ignore[attr-defined]  # extra
        self._caplog.clear()
        return actions


@pytest.fixture
def watch(caplog: pytest.LogCaptureFixture) -> Watch:
    """A fresh one."""
    return Watch(caplog)


def test_a_rest_and_its_end_are_told_once_each(watch: Watch) -> None:
    """However many probes fail in between."""
    watch.recorder.change(Change("orders", AWAY))
    for second in range(1, 300):
        watch.seconds += 1
        watch.recorder.change(Change("orders", AWAY, second))
    assert watch.told() == ["topic_rests"]
    watch.recorder.change(Change("orders", None, 300))
    assert watch.told() == ["topic_back"]


def test_a_topic_that_flaps_is_told_of_once_a_minute_and_in_pairs(watch: Watch) -> None:
    """Rest and return every second for ten minutes: no return is told without its rest."""
    for _ in range(300):
        watch.recorder.change(Change("orders", AWAY))
        watch.seconds += 1
        watch.recorder.change(Change("orders", None, 1))
        watch.seconds += 1
    assert watch.told() == ["topic_rests", "topic_back"] * 10


def test_a_rest_that_lasts_is_told_even_if_one_was_told_just_before(watch: Watch) -> None:
    """Within a minute, when a probe fails again."""
    watch.recorder.change(Change("orders", AWAY))
    watch.recorder.change(Change("orders", None, 1))
    watch.recorder.change(Change("orders", AWAY))
    assert watch.told() == ["topic_rests", "topic_back"]
    for second in range(1, 62):
        watch.seconds += 1
        watch.recorder.change(Change("orders", AWAY, second))
    assert watch.told() == ["topic_rests"]


def test_a_topic_that_was_forgotten_while_it_rested_is_told_of_again(watch: Watch) -> None:
    """Its rest ended unseen, when no task was left to probe it with."""
    watch.recorder.change(Change("orders", AWAY))
    watch.seconds += 1000
    watch.recorder.change(Change("orders", AWAY))
    assert watch.told() == ["topic_rests", "topic_rests"]


def test_two_topics_are_told_of_each(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    """With the failure, and with what goes on meanwhile."""
    watch.recorder.change(Change("orders", AWAY))
    watch.recorder.change(Change("invoices", MISSING))
    first, second = [record.getMessage() for record in caplog.records]
    assert "orders" in first
    assert "one task" in first
    assert "connection refused" in first
    assert "invoices" in second
    assert "ten tasks" in second


def test_failures_are_told_by_topic_and_reason_with_ids(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    """Dead ones apart from those that are tried again; no line for each task."""
    ids = [f"task-{n}" for n in range(8)]
    result = GroupResult(Group("orders", tuple(ids)), tried=dict.fromkeys(ids, MISSING))
    result.charged = {id: Charged(3, NEVER, None, "not_found: no such topic") for id in ids[:6]}
    result.charged |= {id: Charged(2, NEVER.replace(year=2026), None, "not_found: no such topic") for id in ids[6:]}
    watch.recorder.group(result)
    dead, retried = [record.getMessage() for record in caplog.records]
    assert watch.told() == ["dead", "publish_failed"]
    assert dead.startswith("6 tasks of orders dead")
    assert "task-0" in dead
    assert "task-5" not in dead
    assert retried.startswith("2 tasks of orders not sent")
    assert "2 at most" in retried
    assert watch.counted.counts == {m.FAILED.name: 8, m.DEAD.name: 6}
    watch.recorder.group(result)
    assert watch.told() == []
