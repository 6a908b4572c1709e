"""The breaker of a topic: when it rests, with what it is probed, and who is charged."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from random import Random

import pytest

from publishworker.task import Candidate, Charged, Failed, Group, GroupResult, Outcome, Sent, Taken
from publishworker.turn.breakers import (
    FORGET_SECONDS,
    LONGEST_OUTAGE_REST,
    LONGEST_TARGET_REST,
    MAX_DEPTH,
    MAX_SUSPECTS,
    Breakers,
)

AWAY = Failed("unavailable", "away")
MISSING = Failed("not_found", "missing")
POISON = Failed("undecodable", "no message")


class Watch:
    """Breakers with a clock that stands still until told."""

    def __init__(self) -> None:
        """Begin with all closed."""
        self.seconds = 1000.0
        self.breakers = Breakers(Random(3), lambda: self.seconds)

    def ended(self, group: Group, **outcomes: Outcome) -> bool:
        """Tell of a group; return whether the breaker has news."""
        result = GroupResult(group, tried=dict(outcomes))
        return self.breakers.learn(result) is not None

    def fail(self, outcome: Failed, *ids: str, topic: str = "orders", **flags: bool) -> None:
        """Let a group fail as a whole."""
        self.ended(Group(topic, ids, **flags), **dict.fromkeys(ids, outcome))

    def probe(self, outcome: Outcome) -> None:
        """Wait until the topic may be probed, and let the probe end so."""
        self.seconds += self.breakers.seconds_to_probe() or 0
        group = self.breakers.start(Group("orders", ("probe",)))
        assert group.probe
        self.ended(group, probe=outcome)


@pytest.fixture
def watch() -> Watch:
    """A fresh one."""
    return Watch()


def candidates(ids: Iterable[str], topic: str = "orders") -> list[Candidate]:
    """Return ready tasks."""
    return [Candidate(id, topic, 0, 50, datetime(2026, 1, 1, tzinfo=UTC), None, None, 1) for id in ids]


@pytest.mark.parametrize("failure", [AWAY, MISSING])
def test_a_topic_that_fails_rests_for_a_second_and_holds_no_other(watch: Watch, failure: Failed) -> None:
    """It is not asked for until then."""
    watch.fail(failure, "a", "b")
    assert watch.breakers.resting() == {"orders"}
    wait = watch.breakers.seconds_to_probe()
    assert wait is not None
    assert 0.85 <= wait <= 1
    watch.seconds += wait
    assert watch.breakers.resting() == frozenset()
    assert watch.breakers.seconds_to_probe() is None


@pytest.mark.parametrize("outcome", [POISON, Taken("sent"), Failed("data_loss", "?")])
def test_what_is_the_tasks_own_matter_rests_no_topic(watch: Watch, outcome: Outcome) -> None:
    """Poison, unknown errors, and tasks of other workers say nothing of the topic."""
    assert not watch.ended(Group("orders", ("a",)), a=outcome)
    assert watch.breakers.resting() == frozenset()


def test_a_group_of_which_some_were_sent_rests_no_topic(watch: Watch) -> None:
    """What met the outage is remembered instead."""
    watch.ended(Group("orders", ("a", "b")), a=Sent("1"), b=AWAY)
    assert watch.breakers.resting() == frozenset()
    assert watch.breakers.start(Group("orders", ("a", "b", "c"))).suspects == {"b"}


@pytest.mark.parametrize(("failure", "longest"), [(AWAY, LONGEST_OUTAGE_REST), (MISSING, LONGEST_TARGET_REST)])
def test_each_probe_that_fails_doubles_the_rest(watch: Watch, failure: Failed, longest: float) -> None:
    """From 1 s up to ten seconds in an outage, up to five minutes where somebody has to act."""
    watch.fail(failure, "a")
    nominal = 1.0
    for _ in range(12):
        wait = watch.breakers.seconds_to_probe()
        assert wait is not None
        assert 0.85 * nominal <= wait <= nominal
        watch.probe(failure)
        nominal = min(nominal * 2, longest)
    assert nominal == longest


def test_what_was_published_ends_the_rest_and_the_next_one_begins_with_a_second(watch: Watch) -> None:
    """Also if it was published by a group that had been in flight."""
    watch.fail(AWAY, "a")
    watch.probe(AWAY)
    watch.probe(Sent("1"))
    assert watch.breakers.resting() == frozenset()
    assert not watch.breakers.start(Group("orders", ("b",))).probe
    watch.fail(AWAY, "a")
    assert (watch.breakers.seconds_to_probe() or 0) <= 1
    assert watch.ended(Group("orders", ("late",)), late=Sent("1"))
    assert watch.breakers.resting() == frozenset()


def test_groups_that_were_in_flight_do_not_prolong_the_rest(watch: Watch) -> None:
    """Eight groups that fail with one outage are one failure."""
    for n in range(8):
        watch.fail(AWAY, str(n))
    assert (watch.breakers.seconds_to_probe() or 0) <= 1


def test_while_a_probe_is_in_flight_there_is_no_second_one(watch: Watch) -> None:
    """Nor a reason to wake up."""
    watch.fail(AWAY, "a")
    watch.seconds += 1
    watch.breakers.start(Group("orders", ("probe",)))
    assert watch.breakers.resting() == {"orders"}
    assert watch.breakers.seconds_to_probe() is None


def test_a_probe_that_says_nothing_is_followed_by_another(watch: Watch) -> None:
    """Its task was sent by another worker, or was poison."""
    watch.fail(AWAY, "a")
    for outcome in (Taken("sent"), POISON):
        watch.seconds += 1
        group = watch.breakers.start(Group("orders", ("probe",)))
        watch.ended(group, probe=outcome)
        assert watch.breakers.resting() == frozenset()


def test_a_missing_topic_is_probed_with_ten_tasks_an_outage_with_one(watch: Watch) -> None:
    """The tasks of other topics are not touched."""
    watch.fail(MISSING, "a")
    watch.fail(AWAY, "x", topic="invoices")
    mine, others = candidates(map(str, range(30))), candidates("xyz", "invoices")
    kept, allowed = watch.breakers.probes([*mine, *others, *candidates("o", "other")])
    assert allowed == {"orders": 10, "invoices": 1}
    assert Counter(each.topic for each in kept) == {"orders": 30, "invoices": 1, "other": 1}


def test_in_an_outage_every_task_is_drawn_before_one_is_drawn_again(watch: Watch) -> None:
    """One message that always times out does not hold its topic for long."""
    watch.fail(AWAY, "a")
    drawn = []
    for _ in range(5):
        watch.seconds += LONGEST_OUTAGE_REST
        [[chosen], _] = watch.breakers.probes(candidates("abcde"))
        drawn.append(chosen.id)
        group = watch.breakers.start(Group("orders", (chosen.id,)))
        watch.ended(group, **{chosen.id: AWAY})
    assert sorted(drawn) == list("abcde")
    assert drawn != list("abcde")


def test_who_met_an_outage_is_a_suspect_until_it_is_sent(watch: Watch) -> None:
    """Once its topic works again: in a probe nobody is."""
    watch.fail(AWAY, "a", "b")
    watch.seconds += 1
    assert watch.breakers.start(Group("orders", ("a",))).suspects == frozenset()
    watch.ended(Group("orders", ("a",), probe=True), a=Sent("1"))
    assert watch.breakers.start(Group("orders", ("a", "b", "c"))).suspects == {"b"}


def test_who_met_an_outage_before_the_last_one_is_no_suspect(watch: Watch) -> None:
    """Others met one since, and their topic rested: it was nobody's fault. Groups that fail together are one outage."""
    watch.fail(AWAY, "a")
    watch.fail(AWAY, "b")
    watch.fail(AWAY, "i", topic="invoices")
    watch.probe(Sent("1"))
    assert watch.breakers.start(Group("orders", ("a", "b"))).suspects == {"a", "b"}
    watch.fail(AWAY, "c")
    watch.probe(Sent("2"))
    assert watch.breakers.start(Group("orders", ("a", "b", "c"))).suspects == {"c"}


def test_after_an_outage_a_topic_works_when_it_has_published_something(watch: Watch) -> None:
    """Charged or not: a suspect that fails is no proof that the others would not."""
    watch.ended(Group("orders", ("a", "b")), a=Sent("1"), b=AWAY)
    group = watch.breakers.start(Group("orders", ("b",)))
    assert (group.suspects, group.works) == ({"b"}, True)
    result = GroupResult(group, tried={"b": AWAY})
    result.charged["b"] = Charged(1, datetime(2026, 1, 1, tzinfo=UTC), None, "unavailable: away")
    watch.breakers.learn(result)
    assert not watch.breakers.start(Group("orders", ("b",))).works
    watch.ended(Group("orders", ("c",)), c=Sent("2"))
    assert watch.breakers.start(Group("orders", ("b",))).works


def test_several_groups_that_are_one_probe_double_the_rest_once(watch: Watch) -> None:
    """Ten tasks of a missing topic are ten groups where each task has its own transaction."""
    watch.fail(MISSING, "a")
    watch.seconds += 1
    groups = [watch.breakers.start(Group("orders", (str(n),))) for n in range(10)]
    for n, group in enumerate(groups):
        watch.ended(group, **{str(n): MISSING})
    wait = watch.breakers.seconds_to_probe()
    assert wait is not None
    assert 1.7 <= wait <= 2


def test_probes_of_outages_have_a_quarter_of_the_places(watch: Watch) -> None:
    """They may hang; those that have waited longest go first, missing topics are not held back."""
    topics = [f"t{n}" for n in range(6)]
    for topic in topics:
        watch.fail(AWAY, "a", topic=topic)
        watch.seconds += 0.01
    watch.fail(MISSING, "a", topic="missing")
    watch.seconds += 2
    held = watch.breakers.resting()
    assert (len(held), "missing" in held) == (4, False)
    probed = set(topics) - held
    for topic in probed:
        watch.breakers.start(Group(topic, ("a",)))
    assert watch.breakers.resting() == set(topics)
    watch.ended(Group(probed.pop(), ("a",), probe=True), a=AWAY)
    assert len(watch.breakers.resting()) == 5


def test_at_most_once_tasks_are_risked_in_an_outage_only_where_nothing_else_is_found(watch: Watch) -> None:
    """Three draws are spared; in a missing topic nothing is risked, as it refuses; beside a rest they wait."""

    def looked(*, probe: bool = True) -> GroupResult:
        result = GroupResult(Group("orders", ("once",), probe=probe))
        result.outcomes["once"] = Taken("at_most_once")
        watch.breakers.learn(result)
        return result

    assert watch.breakers.may_be_risked(looked(probe=False))
    watch.fail(AWAY, "a")
    assert not watch.breakers.may_be_risked(looked(probe=False))
    assert [watch.breakers.may_be_risked(looked()) for _ in range(8)] == [False, False, False, True] * 2
    watch.probe(MISSING)
    assert watch.breakers.may_be_risked(looked())


def test_a_probe_makes_no_suspects(watch: Watch) -> None:
    """That the topic does not work was known."""
    watch.fail(AWAY, "a")
    watch.probe(AWAY)
    watch.probe(Sent("1"))
    assert watch.breakers.start(Group("orders", ("a", "probe"))).suspects == {"a"}


def test_a_suspect_that_was_charged_rests_no_topic_and_stays_one(watch: Watch) -> None:
    """The outage was its own."""
    watch.ended(Group("orders", ("a", "b")), a=Sent("1"), b=AWAY)
    result = GroupResult(watch.breakers.start(Group("orders", ("b",))), tried={"b": AWAY})
    result.charged["b"] = Charged(1, datetime(2026, 1, 1, tzinfo=UTC), None, "unavailable: away")
    assert watch.breakers.learn(result) is None
    assert watch.breakers.resting() == frozenset()
    assert watch.breakers.start(Group("orders", ("b",))).suspects == {"b"}


def test_the_memory_of_suspects_is_bounded_and_the_oldest_go_first(watch: Watch) -> None:
    """An outage of a large topic does not grow the worker."""
    ids = [str(n) for n in range(MAX_SUSPECTS + 10)]
    watch.fail(AWAY, *ids)
    watch.probe(Sent("1"))
    assert watch.breakers.start(Group("orders", tuple(ids))).suspects == set(ids[10:])


def test_a_topic_that_nobody_can_probe_is_forgotten_with_its_suspects(watch: Watch) -> None:
    """Its tasks are gone; whoever meets an outage there next has met none before."""
    watch.fail(AWAY, "a")
    watch.seconds += FORGET_SECONDS + 2
    assert watch.breakers.resting() == frozenset()
    assert watch.breakers.start(Group("orders", ("a",))) == Group("orders", ("a",))


def test_a_missing_topic_that_turns_into_an_outage_is_probed_as_one(watch: Watch) -> None:
    """The last failure says what is wrong, and how long the next rest may be."""
    watch.fail(MISSING, "a")
    for _ in range(8):
        watch.probe(MISSING)
    watch.probe(AWAY)
    assert (watch.breakers.seconds_to_probe() or 0) <= LONGEST_OUTAGE_REST
    assert watch.breakers.probes(candidates("ab"))[1] == {"orders": 1}


def test_a_ready_task_probes_an_outage_before_a_due_one(watch: Watch) -> None:
    """What is due may have failed before."""
    watch.fail(AWAY, "a")
    watch.seconds += 1
    due = [replace(each, available_at=each.created_at) for each in candidates(map(str, range(50)))]
    [[chosen], _] = watch.breakers.probes([*due, *candidates(["ready"])])
    assert chosen.id == "ready"


def test_the_poll_looks_deeper_while_it_sees_probes_only(watch: Watch) -> None:
    """And only where the topic has more than it showed: each time twice as deep, up to a bound."""
    watch.fail(AWAY, "a")
    watch.probe(AWAY)
    watch.seconds += LONGEST_OUTAGE_REST
    assert watch.breakers.depth() == 2
    watch.breakers.probes(candidates(["probe", "fresh"]), {"orders"})
    assert watch.breakers.depth() == 2
    watch.breakers.probes(candidates(["probe"]), {"invoices"})
    assert watch.breakers.depth() == 2
    depths = []
    for _ in range(9):
        watch.breakers.probes(candidates(["probe"]), {"orders"})
        depths.append(watch.breakers.depth())
    assert depths == [100, 200, 400, 800, 1600, 3200, MAX_DEPTH, MAX_DEPTH, MAX_DEPTH]
    watch.probe(Sent("1"))
    assert watch.breakers.depth() == 0
