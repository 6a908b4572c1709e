"""The circuit breaker of a topic: when it opens, which tasks are its probes, and which tasks are suspects."""

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from random import Random

import pytest

from publishworker.delivery.claim import Claim, Delivered
from publishworker.topics import circuit_breaker
from publishworker.topics.circuit_breaker import MAX_OUTAGE_PROBE_SECONDS, CircuitBreakers, CircuitChange
from publishworker.types import Answer, Candidate, CircuitState, Failed, NotSent, Published, Skipped
from tests.support.parts import claim_of

AWAY = Failed("unavailable", "away")
MISSING = Failed("not_found", "missing")
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Watch(CircuitBreakers):
    def __init__(self) -> None:
        self.seconds = 1000.0
        super().__init__(Random(3), lambda: self.seconds, places=8)

    def ended(self, batch: Claim, *recorded: str, **outcomes: Answer) -> bool:
        """Learn of a batch, of which some tasks are recorded; return whether its topic's state has changed."""
        failures = {id: NotSent(1, NOON, None, "unavailable: away") for id in recorded}
        return self.observe(Delivered(batch, answers=outcomes, recorded=failures)) is not None

    def fail(self, outcome: Failed, *ids: str, topic: str = "orders") -> None:
        self.ended(claim_of(topic, *ids), **dict.fromkeys(ids, outcome))

    def probe(self, outcome: Answer) -> None:
        self.seconds += self.seconds_to_probe() or 0
        batch = self.next("probe")
        assert batch.hints.probe
        self.ended(batch, probe=outcome)

    def next(self, *ids: str) -> Claim:
        return self.begin_batch(claim_of("orders", *ids))


@pytest.fixture
def watch() -> Watch:
    return Watch()


def candidates(ids: Iterable[str], topic: str = "orders") -> list[Candidate]:
    return [Candidate(id, topic, 0, 50, NOON, None, None, 1) for id in ids]


@pytest.mark.parametrize(
    ("failure", "max_delay"), [(AWAY, MAX_OUTAGE_PROBE_SECONDS), (MISSING, circuit_breaker.MAX_TARGET_PROBE_SECONDS)]
)
def test_an_open_circuit_is_probed_after_a_second_then_after_growing_delays(
    watch: Watch, failure: Failed, max_delay: float
) -> None:
    """Up to ten seconds in an outage, up to five minutes where an operator must act. Other topics continue."""
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


def test_failures_of_single_tasks_open_no_circuit(watch: Watch) -> None:
    """Poison, unknown errors and tasks of other workers say nothing about a topic, nor does one failure of several."""
    for outcome in (Failed("undecodable", "no message"), Skipped("sent"), Failed("data_loss", "?")):
        assert not watch.ended(claim_of("orders", "a"), a=outcome)
    watch.ended(claim_of("orders", "a", "b"), a=Published("1"), b=AWAY)
    assert watch.suspended() == frozenset()
    assert watch.next("a", "b", "c").hints.suspects == {"b"}  # it is remembered instead


def test_a_publish_closes_the_circuit_and_resets_its_delay(watch: Watch) -> None:
    watch.fail(AWAY, "a")
    watch.probe(AWAY)
    watch.probe(Published("1"))
    assert watch.suspended() == frozenset()
    assert not watch.next("b").hints.probe
    watch.fail(AWAY, "a")
    assert (watch.seconds_to_probe() or 0) <= 1
    assert watch.ended(claim_of("orders", "late"), late=Published("1"))
    assert watch.suspended() == frozenset()


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


def test_a_circuit_is_open_until_its_probe_then_half_open(watch: Watch) -> None:
    watch.fail(MISSING, "a")
    opened = watch.states()["orders"]
    assert (opened.failure, opened.seconds_open, opened.is_open) == (MISSING, 0, True)
    assert 0.85 <= opened.seconds_to_probe <= 1
    watch.seconds += 1
    assert watch.states() == {"orders": CircuitState(MISSING, 1, 0)}
    assert not watch.states()["orders"].is_open
    watch.probe(Published("1"))
    assert watch.states() == {}


def test_batches_that_fail_together_are_one_failure(watch: Watch) -> None:
    for n in range(8):
        watch.fail(MISSING, str(n))
    assert (watch.seconds_to_probe() or 0) <= 1
    watch.seconds += 1
    batches = [watch.next(str(n)) for n in range(10)]
    for n, batch in enumerate(batches):
        watch.ended(batch, **{str(n): MISSING})
    assert 1.7 <= (watch.seconds_to_probe() or 0) <= 2


def test_a_circuit_has_one_probe_in_flight(watch: Watch) -> None:
    """The worker need not poll then. If a probe says nothing, because its task was poison or sent, another follows."""
    watch.fail(AWAY, "a")
    for outcome in (Skipped("sent"), Failed("undecodable", "no message")):
        watch.seconds += 1
        batch = watch.next("probe")
        assert (watch.suspended(), watch.seconds_to_probe()) == ({"orders"}, None)
        watch.ended(batch, probe=outcome)
        assert watch.suspended() == frozenset()


def test_a_missing_topic_is_probed_with_ten_tasks_an_outage_with_one(watch: Watch) -> None:
    watch.fail(MISSING, "a")
    watch.fail(AWAY, "x", topic="invoices")
    mine, others = candidates(map(str, range(30))), candidates("xyz", "invoices")
    kept, allowed = watch.draw_probes([*mine, *others, *candidates("o", "other")])
    assert allowed == {"orders": 10, "invoices": 1}
    assert Counter(each.topic for each in kept) == {"orders": 30, "invoices": 1, "other": 1}
    for failure in (*[MISSING] * 8, AWAY):  # the last failure is the reason, and sets the max delay of the next probe
        watch.probe(failure)
    assert (watch.seconds_to_probe() or 0) <= MAX_OUTAGE_PROBE_SECONDS
    assert watch.draw_probes(candidates("ab"))[1]["orders"] == 1


def test_outage_probes_use_every_task_before_repeating_one(watch: Watch) -> None:
    """A message that always times out does not block its topic for long. A due task, perhaps the cause, goes last."""
    watch.fail(AWAY, "a")
    drawn = []
    due = [each._replace(available_at=each.created_at) for each in candidates(map(str, range(50)))]
    for _ in range(5):
        watch.seconds += MAX_OUTAGE_PROBE_SECONDS
        [[chosen], _] = watch.draw_probes([*due, *candidates("abcde")])
        drawn.append(chosen.id)
        watch.ended(watch.next(chosen.id), **{chosen.id: AWAY})
    assert sorted(drawn) == list("abcde")
    assert drawn != list("abcde")


def test_outage_probes_use_at_most_a_quarter_of_the_places(watch: Watch) -> None:
    """They may hang. Topics that have waited longest go first. Probes of missing topics are not limited."""
    topics = [f"t{n}" for n in range(6)]
    for topic in topics:
        watch.fail(AWAY, "a", topic=topic)
        watch.seconds += 0.01
    watch.fail(MISSING, "a", topic="missing")
    watch.seconds += 2
    held = watch.suspended()
    assert (len(held), "missing" in held) == (4, False)
    probed = set(topics) - held
    for topic in probed:
        watch.begin_batch(claim_of(topic, "a"))
    assert watch.suspended() == set(topics)
    watch.ended(claim_of(probed.pop(), "a", probe=True), a=AWAY)
    assert len(watch.suspended()) == 5


def test_topics_without_tasks_do_not_keep_others_from_a_probe(watch: Watch) -> None:
    """Another worker may have sent their tasks, or they are paused. Each turn then lets two other topics be polled."""
    for topic in "abcde":
        watch.fail(AWAY, "1", topic=topic)
        watch.seconds += 0.01
    watch.seconds += 2
    for _ in range(2):
        assert "e" in watch.suspended()
        assert watch.seconds_to_probe() == circuit_breaker.FIRST_PROBE_SECONDS
        watch.seconds += 1
        watch.draw_probes([])
    assert "e" not in watch.suspended()
    assert [each.topic for each in watch.draw_probes(candidates(["1"], "e"))[0]] == ["e"]
    assert "e" not in watch.suspended()


def test_an_outage_is_probed_with_at_most_once_tasks_only_as_a_last_resort(watch: Watch) -> None:
    """Three draws skip them. A missing topic risks nothing, because it refuses. A batch that is no probe waits."""

    def is_risked(*, probe: bool = True) -> bool:
        result = Delivered(claim_of("orders", "once", probe=probe), skipped={"once": Skipped("at_most_once")})
        watch.observe(result)
        return watch.admit_at_most_once(result)

    assert is_risked(probe=False)
    watch.fail(AWAY, "a")
    assert not is_risked(probe=False)
    assert [is_risked() for _ in range(8)] == [False, False, False, True] * 2
    watch.probe(MISSING)
    assert is_risked()


def test_a_task_that_met_an_outage_is_a_suspect_until_it_is_sent(watch: Watch) -> None:
    """Once its topic works again. A probe has no suspects and creates none, because the outage was known."""
    watch.fail(AWAY, "a", "b")
    watch.probe(AWAY)
    watch.seconds += 2
    assert watch.next("a").hints.suspects == frozenset()
    watch.ended(claim_of("orders", "a", probe=True), a=Published("1"))
    assert watch.next("a", "b", "c", "probe").hints.suspects == {"b"}


def test_only_tasks_of_the_last_outage_are_suspects(watch: Watch) -> None:
    """Other tasks have met one since, so no task caused it. Batches that fail together are one outage."""
    watch.fail(AWAY, "a")
    watch.fail(AWAY, "b")
    watch.fail(AWAY, "i", topic="invoices")
    watch.probe(Published("1"))
    assert watch.next("a", "b").hints.suspects == {"a", "b"}
    watch.fail(AWAY, "c")
    watch.probe(Published("2"))
    assert watch.next("a", "b", "c").hints.suspects == {"c"}


def test_a_suspect_whose_failure_is_recorded_opens_no_circuit(watch: Watch) -> None:
    """It stays a suspect: other tasks might fail as well, so the topic works only once it publishes something."""
    watch.ended(claim_of("orders", "a", "b"), a=Published("1"), b=AWAY)
    batch = watch.next("b")
    assert (batch.hints.suspects, batch.hints.accepts) == ({"b"}, True)
    assert not watch.ended(batch, "b", b=AWAY)
    assert watch.suspended() == frozenset()
    batch = watch.next("b")
    assert (batch.hints.suspects, batch.hints.accepts) == ({"b"}, False)
    watch.ended(claim_of("orders", "c"), c=Published("2"))
    assert watch.next("b").hints.accepts


def test_suspects_are_bounded_and_the_oldest_are_forgotten_first(watch: Watch) -> None:
    """An outage of a large topic does not grow the worker. A topic without tasks to probe is forgotten with them."""
    ids = [str(n) for n in range(circuit_breaker.MAX_SUSPECTS + 10)]
    watch.fail(AWAY, *ids)
    watch.probe(Published("1"))
    assert watch.next(*ids).hints.suspects == set(ids[10:])
    watch.fail(AWAY, "a")
    watch.seconds += circuit_breaker.FORGET_SECONDS + 2
    watch.forget_old()
    assert watch.next("a", "20") == claim_of("orders", "a", "20")


def test_a_thousand_suspects_are_remembered(watch: Watch) -> None:
    """Of all topics together, because an outage of Pub/Sub concerns all topics. The oldest are forgotten."""
    for topic in range(30):
        batch = claim_of(f"topic {topic}", *(f"{topic}/{number}" for number in range(100)))
        watch.observe(Delivered(batch, answers=dict.fromkeys(batch.ids, AWAY)))
    remembered = [topic for topic, ids in watch._suspects.items() if ids]
    assert remembered == [f"topic {topic}" for topic in range(20, 30)]
    for topic in range(20, 30):
        batch = claim_of(f"topic {topic}", *(f"{topic}/{number}" for number in range(100)), probe=True)
        watch.observe(Delivered(batch, answers=dict.fromkeys(batch.ids, Published("1"))))
    assert watch._suspects == {}


def test_the_poll_reads_deeper_after_it_has_returned_only_probed_tasks(watch: Watch) -> None:
    """Only where the topic has more than the poll returned, and until the circuit closes."""
    watch.fail(AWAY, "a")
    watch.probe(AWAY)
    watch.seconds += MAX_OUTAGE_PROBE_SECONDS
    for ids, cut_off in ((["probe", "fresh"], {"orders"}), (["probe"], {"invoices"})):
        watch.draw_probes(candidates(ids), cut_off)
        assert watch.depths() == {}
    depth = circuit_breaker.FIRST_SEARCH_DEPTH
    while depth < circuit_breaker.MAX_SEARCH_DEPTH:
        watch.draw_probes(candidates(["probe"]), {"orders"})
        assert watch.depths() == {"orders": depth}
        depth *= 2
    watch.probe(AWAY)
    assert watch.depths() == {}  # not before the next probe
    watch.seconds += MAX_OUTAGE_PROBE_SECONDS
    watch.probe(MISSING)
    watch.seconds += circuit_breaker.MAX_TARGET_PROBE_SECONDS
    assert watch.depths() == {}  # a missing topic is probed with any task
    watch.probe(Published("1"))
    watch.seconds += MAX_OUTAGE_PROBE_SECONDS
    assert watch.depths() == {}
