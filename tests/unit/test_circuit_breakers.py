"""The circuit breaker of a topic: when it opens, which tasks are its probes, and which tasks are suspects."""

from random import Random

import pytest

from outbox.base.schedules import OUTAGE_PROBE, TOPIC_PROBE
from publishworker.delivery.claim import Claim, Delivered
from publishworker.topics import availability
from publishworker.topics.availability import CircuitBreakers, CircuitChange
from publishworker.types import FORGET_TOPIC_SECONDS, Answer, Failed, Published, Skipped
from tests.support.parts import claim_of

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
    watch.fail(AWAY, "a")
    watch.seconds += FORGET_TOPIC_SECONDS + 2
    watch.forget_old()
    assert watch.next("new") == claim_of("orders", "new")
