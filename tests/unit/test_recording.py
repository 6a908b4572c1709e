"""What the log says of topics that rest, and of tasks that fail: enough, in pairs, and not again and again."""

import logging
from collections.abc import Sequence

import pytest

from outbox.states import NEVER
from publishworker.task import Charged, Failed, Group, GroupResult, Sent, Turn
from publishworker.telemetry import metrics as m
from publishworker.telemetry.metrics import Metrics
from publishworker.turn.breakers import Change
from publishworker.turn.recording import Recorder
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
        actions = [record.action for record in self._caplog.records]
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


def failing(ids: Sequence[str], *, dead: int) -> GroupResult:
    """Return a group whose tasks have failed; the first `dead` of them are dead."""
    result = GroupResult(Group("orders", tuple(ids)), tried=dict.fromkeys(ids, MISSING))
    result.charged = {id: Charged(3, NEVER, None, "not_found: no such topic") for id in ids[:dead]}
    result.charged |= {id: Charged(2, NEVER.replace(year=2026), None, "not_found: no such topic") for id in ids[dead:]}
    return result


def test_each_failure_has_a_line(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    """With its task, topic, reason and attempt, and the trace that the task belongs to."""
    result = failing(["a", "b", "c"], dead=1)
    result.traces = {"a": "1" * 32}
    watch.recorder.group(result)
    lines = [(record.getMessage(), record.__dict__["fields"]) for record in caplog.records]
    assert watch.told() == ["dead", "publish_failed", "publish_failed"]
    about = {"topic": "orders", "reason": "not_found"}
    again = "task {} of orders was not sent (attempt 2) and is tried again from 2026-12-31T00:00:00Z on: "
    again += "not_found: no such topic"
    assert lines == [
        (
            "task a of orders is dead (attempt 3), an operator has to act: not_found: no such topic",
            {**about, "task_id": "a", "attempt": 3, "trace_id": "1" * 32},
        ),
        *((again.format(id), {**about, "task_id": id, "attempt": 2}) for id in ("b", "c")),
    ]
    assert watch.counted.counts == {m.FAILED.name: 3, m.DEAD.name: 1, m.GROUP_SIZE.name: 1}


def test_ten_thousand_failures_are_a_hundred_lines_a_minute(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    """For each topic and reason; the others are counted in the first line of the next minute."""
    watch.recorder.group(failing([f"task-{n}" for n in range(10_000)], dead=0))
    assert watch.told() == ["publish_failed"] * 100
    watch.seconds += 60
    watch.recorder.group(failing(["late"], dead=0))
    assert caplog.records[0].getMessage().endswith("[and 9900 times more since the last such line]")
    assert watch.told() == ["publish_failed"]


def test_an_outage_has_a_line_for_each_task_only_at_debug(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    """No task was charged; the rest of the topic is told."""
    caplog.set_level(logging.DEBUG, "publishworker")
    result = GroupResult(Group("orders", ("a", "b")), tried=dict.fromkeys("ab", AWAY))
    watch.recorder.group(result)
    assert [record.levelname for record in caplog.records] == ["DEBUG"] * 2
    assert [record.__dict__["fields"]["task_id"] for record in caplog.records] == ["a", "b"]


def test_what_was_done_is_told_once_a_minute(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    """And at the end; nothing is told where nothing was done."""
    for _ in range(150):
        watch.recorder.turn(Turn(published=10, taken=1), worked=True)
        watch.seconds += 1
    assert watch.told() == ["summary"] * 2
    watch.recorder.end()
    [record] = caplog.records
    assert record.getMessage() == "tasks in 28 s: 280 published, 28 sent by others"
    assert record.__dict__["fields"] == {"published": 280, "sent by others": 28, "seconds": 28.0}
    caplog.clear()
    for _ in range(150):
        watch.recorder.turn(Turn(), worked=False)
        watch.seconds += 1
    watch.recorder.end()
    assert watch.told() == []


def test_what_was_done_before_a_lull_is_told_in_it(watch: Watch) -> None:
    """Not only when there is work again."""
    watch.recorder.turn(Turn(published=1), worked=True)
    for _ in range(61):
        watch.seconds += 1
        watch.recorder.turn(Turn(), worked=False)
    assert watch.told() == ["summary"]


def test_each_turn_with_work_is_a_line_at_debug(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    """With its numbers."""
    caplog.set_level(logging.DEBUG, "publishworker")
    watch.recorder.turn(Turn(), worked=False)
    watch.recorder.turn(Turn(published=3, failed=1), worked=True)
    [record] = caplog.records
    assert record.__dict__["fields"]["published"] == 3


def test_durations_and_latencies_are_sampled() -> None:
    """One for each phase of a group, one for each task that was published, none for a group that only parks."""
    samples: list[tuple[str, float, list[str]]] = []

    class Sampling(Counted):
        def distribution(self, metric: str, value: float, tags: list[str], sample_rate: float = 1) -> None:
            assert sample_rate == 1
            samples.append((metric, value, tags))

    recorder = Recorder(Metrics(Sampling()))
    result = GroupResult(Group("orders", ("a", "b")), tried={"a": Sent("1"), "b": Sent("2")})
    result.phases = {m.CLAIM: 0.1, m.PUBLISH: 0.2, m.COMMIT: 0.3}
    result.waited = {"a": 1.5, "b": 2.5}
    recorder.group(result)
    recorder.poll(0.4)
    recorder.group(GroupResult(Group("orders", ("a", "b"), parks=True), phases={m.CLAIM: 1}))
    assert samples == [
        (m.GROUP_SIZE.name, 2, ["topic:orders"]),
        (m.PHASE_DURATION.name, 0.1, ["phase:claim"]),
        (m.PHASE_DURATION.name, 0.2, ["phase:publish"]),
        (m.PHASE_DURATION.name, 0.3, ["phase:commit"]),
        (m.LATENCY.name, 1.5, ["topic:orders"]),
        (m.LATENCY.name, 2.5, ["topic:orders"]),
        (m.PHASE_DURATION.name, 0.4, ["phase:poll"]),
    ]


def test_a_large_group_sends_few_latencies() -> None:
    """Each at the rate that says for how many it stands, so that percentiles stay true."""
    rates: list[float] = []

    class Sampling(Counted):
        def distribution(self, metric: str, value: float, tags: list[str], sample_rate: float = 1) -> None:
            if metric == m.LATENCY.name:
                rates.append(sample_rate)

    ids = [str(number) for number in range(1000)]
    result = GroupResult(Group("orders", tuple(ids)), waited=dict.fromkeys(ids, 1.0))
    Recorder(Metrics(Sampling())).group(result)
    assert rates == [0.02] * 1000


def test_topics_that_can_be_none_share_a_tag() -> None:
    """Who writes rows by hand must not make a thousand series."""
    seen: set[str] = set()

    class Tagging(Counted):
        def increment(self, metric: str, value: float, tags: list[str]) -> None:
            seen.update(tags)

    recorder = Recorder(Metrics(Tagging()))
    for topic in ("orders", "projects/p-1/topics/orders", "no topic", "x" * 400, "goog-like"):
        recorder.group(GroupResult(Group(topic, ("a",)), tried={"a": Sent("1")}))
    assert seen == {"topic:orders", "topic:projects/p-1/topics/orders", "topic:invalid"}
