"""What a topic may do: routes, retry policies, rate limits, and its circuit breaker."""

import dataclasses
import math
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.base.schedules import OUTAGE_PROBE, TOPIC_PROBE
from outbox.table.controls import LIMITS, NO_CONTROLS, TopicControls, column
from publishworker.host import Host
from publishworker.topics import availability
from publishworker.topics.availability import (
    FORGET_TOPIC_SECONDS,
    CircuitBreakers,
    CircuitChange,
    RateLimits,
    Topics,
    split_valid,
)
from publishworker.types import Answer, Claim, ClaimedTask, Delivered, Failed, Kind, Published, Skipped
from tests.support.parts import Bench, claim_of, policy

NEW = "projects/other/topics/orders-v2"
NOT_FOUND = Failed("not_found", "no such topic")


def claim(topic: str = "orders", kind: Kind = Kind.PUBLISH) -> Claim:
    return Claim(topic, (ClaimedTask("a", None, 0),), kind)


def topics(**controls: TopicControls) -> Topics:
    found = Topics(Host(random=Random(1)))
    found.apply(controls, 1)
    return found


def test_a_new_destination_is_tried_at_once_although_the_circuit_was_open(bench: Bench) -> None:
    """The former destination is missing. A worker reads the topic controls soon while a circuit is open."""
    bench.publisher.topics.clear()
    bench.insert("a")
    turns = bench.turns()
    assert bench.publisher.ids() == []
    assert turns[-1].seconds_to_change <= 1
    bench.publisher.topics.add(NEW)
    bench.store.control("orders", publish_to=NEW)
    bench.relay.turn()  # reads the topic controls
    bench.turns()
    assert bench.publisher.ids() == ["a"]


def test_each_change_of_a_route_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "publishworker")
    found = topics(orders=TopicControls(publish_to="orders-1"))
    found.apply({"orders": TopicControls(publish_to="orders-2")}, 1)
    found.apply({}, 1)
    assert caplog.messages == [f"Messages of topic orders go to {name}" for name in ("orders-1", "orders-2", "orders")]


ASKED, AGAIN = (TopicControls(probe_requested_at=datetime(2026, 11, 28, hour, tzinfo=UTC)) for hour in (1, 2))


@pytest.mark.parametrize(
    ("before", "changes", "is_due"),
    [
        (NO_CONTROLS, [TopicControls(paused=True), NO_CONTROLS], True),
        (NO_CONTROLS, [ASKED], True),
        (ASKED, [AGAIN], True),
        (ASKED, [dataclasses.replace(ASKED, max_attempts=3)], False),
        (ASKED, [NO_CONTROLS], False),
    ],
)
def test_the_end_of_a_pause_and_a_request_make_a_probe_due(
    before: TopicControls, changes: list[TopicControls], *, is_due: bool
) -> None:
    """So an operator who has repaired a topic does not wait for the next probe. It is a probe, not a whole batch."""
    found = topics(orders=before)
    for _ in range(9):
        found.observe(Delivered(found.permit(claim()), answers={"a": NOT_FOUND}))
    for each in (before, *changes):
        found.apply({"orders": each}, 1)
    assert found.unavailable == (frozenset() if is_due else {"orders"})
    assert [*found.circuits.states()] == ["orders"]
    assert found.admit([])[1] == {"orders": 1}


def test_a_batch_to_the_former_destination_says_nothing_about_the_new_one() -> None:
    found = topics()
    before = found.permit(claim())
    found.apply({"orders": TopicControls(publish_to=NEW)}, 1)
    assert found.observe(Delivered(before, answers={"a": NOT_FOUND})) is None
    assert found.circuits.states() == {}
    after = found.permit(claim())
    assert (before.destination, after.destination) == ("orders", NEW)
    change = found.observe(Delivered(after, answers={"a": NOT_FOUND}))
    assert change is not None
    assert [*found.circuits.states()] == ["orders"]


def test_a_topic_replaces_only_the_values_that_it_has() -> None:
    worker = policy()
    assert worker.for_topic(NO_CONTROLS) == worker
    changed = worker.for_topic(TopicControls(max_attempts=3, backoff_max_seconds=60.0))
    assert (changed.max_attempts, changed.longest) == (3, 60.0)
    assert (changed.initial, changed.dead_after, changed.random) == (1, 86_400, worker.random)
    late = worker.for_topic(TopicControls(backoff_initial_seconds=worker.longest + 1))
    assert late.longest == late.initial == worker.longest + 1


def test_a_deferral_ends_within_the_max_backoff_of_its_topic(bench: Bench) -> None:
    """Behind a head that is scheduled for much later."""
    bench.store.control("orders", backoff_max_seconds=5.0)
    bench.line("head", available_at=bench.store.now + timedelta(hours=9))
    bench.line("behind")
    bench.turns()
    assert bench.waits("behind") == pytest.approx(5, abs=0.1)


TOGETHER = "RatePerSecond and Burst go together. Set both or neither"
RATE = "a number from 1e-09 to 1.79769313486e+308"


@pytest.mark.parametrize(
    ("controls", "sentence"),
    [
        ({"max_attempts": 0}, "0. It must be a whole number from 1 to 1,000,000"),
        ({"backoff_initial_seconds": math.nan}, "nan. It must be a number from 0.05 to 3,600"),
        ({"backoff_max_seconds": 1e30}, "1e+30. It must be a number from 0.05 to 604,800"),
        ({"dead_after_seconds": -1.0}, "-1.0. It must be a number from 0 to 31,536,000"),
        (
            {"backoff_initial_seconds": 60.0, "backoff_max_seconds": 5.0},
            "60.0. It must not exceed BackoffMaxSeconds, which is 5.0",
        ),
        ({"rate_per_second": 5.0}, TOGETHER),
        ({"burst": 5, "max_in_flight": 3}, TOGETHER),
        ({"burst": 0, "rate_per_second": 5.0}, "0. It must be a whole number from 1 to 1,000,000,000"),
        ({"max_in_flight": -7}, "-7. It must be a whole number from 1 to 1,000,000,000"),
        *(
            ({"rate_per_second": rate, "burst": 5}, f"{rate!r}. It must be {RATE}")
            for rate in (0.0, -2.5, math.nan, math.inf, -math.inf, 5e-324)
        ),
    ],
)
def test_an_invalid_control_is_ignored_and_logged(
    controls: dict[str, Any], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The other part of the row applies, and so do the rows of other topics. One line a minute for each topic."""
    limits, policy = {"max_in_flight": 2}, {"max_attempts": 3}
    is_limit = not {*LIMITS}.isdisjoint(controls)
    row = TopicControls(**controls, **(policy if is_limit else limits))
    found = topics(orders=row, invoices=TopicControls(max_in_flight=5))
    found.apply({"orders": row}, 1)
    assert found.permit(claim()).controls == TopicControls(**(policy if is_limit else limits))
    [line] = [each for each in caplog.messages if "ignored" in each]
    what = "The limits of topic orders are" if is_limit else "The retry policy of topic orders is"
    sentence = sentence if sentence == TOGETHER else f"{column(next(iter(controls)))} is {sentence}"
    assert line == f"{what} ignored: {sentence}. See AsynchronousTaskTopics"


@pytest.mark.parametrize("to", ["", "ab", "goog-x", "projects/p/topics/", "a b c", "orders\n"])
def test_a_name_that_pubsub_refuses_is_no_destination(to: str) -> None:
    right, wrong = split_valid({"bad": TopicControls(publish_to=to), "good": TopicControls(publish_to=NEW)})
    assert right == {"bad": TopicControls(paused=True), "good": TopicControls(publish_to=NEW)}
    assert wrong["route", "bad"].startswith("Topic bad counts as paused: PublishTo is ")


BEGIN = 1000.0


class Timed(RateLimits):
    def __init__(self) -> None:
        self.now = BEGIN
        super().__init__(lambda: self.now)

    def limit(self, per_second: float, burst: int, in_flight: int | None = None, workers: int = 1) -> None:
        self.apply({"orders": TopicControls(False, per_second, burst, in_flight)}, workers)

    def allowed(self, in_flight: int = 0) -> int | None:
        return self.allowances({"orders": in_flight} if in_flight else {}).get("orders")


@pytest.fixture
def throttle() -> Timed:
    return Timed()


@given(
    per_second=st.floats(1e-9, 1.79769313486e308),
    burst=st.integers(1, 10**9),
    workers=st.integers(1, 20),
    steps=st.lists(st.tuples(st.floats(0, 20), st.floats(0, 1)), max_size=40),
)
def test_no_history_of_requests_exceeds_rate_and_burst(
    per_second: float, burst: int, workers: int, steps: list[tuple[float, float]]
) -> None:
    """At any times, with any part of the allowance used, whatever limits are read again in between."""
    throttle, total = Timed(), 0
    max_tasks = max(1.0, burst / workers)
    for seconds, part in [(0.0, 1.0), *steps]:
        throttle.now += seconds
        throttle.limit(per_second, burst, workers=workers)
        tasks = throttle.allowed()
        assert tasks is not None
        assert 0 <= tasks <= max_tasks
        throttle.use("orders", int(tasks * part))
        total += int(tasks * part)
    assert total <= max_tasks + (throttle.now - BEGIN) * per_second / workers + 1e-6 * (1 + total)


def test_unsent_tasks_return_their_tokens_and_overdrafts_are_repaid(throttle: Timed) -> None:
    """Tasks that other workers sent use none of the rate, but never raise the tokens above the burst."""
    throttle.limit(1, 10)
    for tasks, allowed in ((10, 0), (-4, 4), (-400, 10), (-400, 10), (10, 0), (-10, 10), (13, 0)):
        throttle.use("orders", tasks)
        assert throttle.allowed() == allowed
    throttle.now += 3.5
    assert throttle.allowed() == 0
    throttle.now += 1
    assert throttle.allowed() == 1


AWAY = Failed("unavailable", "away")
MISSING = Failed("not_found", "missing")


class Watch(CircuitBreakers):
    def __init__(self) -> None:
        self.seconds = 1000.0
        super().__init__(Random(3), lambda: self.seconds)

    def ended(self, batch: Claim, **outcomes: Answer) -> None:
        self.observe(Delivered(batch, answers=outcomes))

    def fail(self, outcome: Failed, *ids: str) -> None:
        self.ended(claim_of("orders", *ids), **dict.fromkeys(ids, outcome))

    def probe(self, outcome: Answer) -> None:
        self.seconds += self.seconds_to_probe() or 0
        batch = self.next("probe")
        assert batch.probe
        self.ended(batch, probe=outcome)

    def next(self, *ids: str) -> Claim:
        return self.begin_batch(claim_of("orders", *ids))


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.mark.parametrize(("failure", "max_delay"), [(AWAY, OUTAGE_PROBE.most), (MISSING, TOPIC_PROBE.most)])
def test_an_open_circuit_is_probed_after_a_second_then_after_growing_delays(
    watch: Watch, failure: Failed, max_delay: float
) -> None:
    """Up to ten seconds in an outage, up to five minutes where an operator must act. The last failure decides."""
    watch.fail(failure, "a", "b")
    nominal = 1.0
    for _ in range(12):
        assert watch.suspended() == {"orders"}
        wait = watch.seconds_to_probe()
        assert wait is not None
        assert 0.85 * nominal <= wait <= nominal
        watch.seconds += wait
        assert (watch.suspended(), watch.seconds_to_probe()) == (frozenset(), None)
        watch.probe(failure)
        nominal = min(nominal * 2, max_delay)
    assert nominal == max_delay
    watch.probe(AWAY)
    assert (watch.seconds_to_probe() or 0) <= OUTAGE_PROBE.most


def test_each_change_of_a_circuit_reports_its_failure_and_duration(watch: Watch) -> None:
    """It opens, a probe fails, it closes. Failures of other batches and successes while closed change nothing."""
    opened = watch.observe(Delivered(claim_of("orders", "a"), answers={"a": MISSING}))
    assert opened == CircuitChange("orders", MISSING, 0.0)
    assert watch.observe(Delivered(claim_of("orders", "b"), answers={"b": AWAY})) is None
    watch.seconds += 1.5
    failed = watch.observe(Delivered(watch.next("c"), answers={"c": AWAY}))
    assert failed == CircuitChange("orders", AWAY, 1.5)
    watch.seconds += 2
    closed = watch.observe(Delivered(watch.next("d"), answers={"d": Published("1")}))
    assert closed == CircuitChange("orders", None, 3.5)
    assert watch.observe(Delivered(watch.next("e"), answers={"e": Published("2")})) is None


def test_a_circuit_has_one_probe_in_flight(watch: Watch) -> None:
    """The worker need not poll then. If a probe says nothing, because its task was poison or sent, another follows."""
    watch.fail(AWAY, "a")
    for outcome in (Skipped("sent"), Failed("undecodable", "no message")):
        watch.seconds += 1
        batch = watch.next("probe")
        assert (watch.suspended(), watch.seconds_to_probe()) == ({"orders"}, None)
        watch.ended(batch, probe=outcome)
        assert watch.suspended() == frozenset()


def test_suspects_are_bounded_and_the_oldest_are_forgotten_first(watch: Watch) -> None:
    """An outage of a large topic does not grow the worker. A topic without tasks to probe is forgotten with them."""
    ids = [str(n) for n in range(availability.MAX_SUSPECTS + 10)]
    watch.fail(AWAY, *ids)
    watch.probe(Published("1"))
    assert watch.next(*ids).suspects == set(ids[10:])
    found = Topics(Host(random=Random(1), clock=lambda: watch.seconds))
    found.observe(Delivered(found.permit(claim()), answers={"a": NOT_FOUND}))
    watch.seconds += FORGET_TOPIC_SECONDS + 2
    found.apply({}, 1)
    assert found.circuits.states() == {}
