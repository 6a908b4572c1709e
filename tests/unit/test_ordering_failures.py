"""What a failure does to the tasks behind it in their key, between fakes."""

from collections.abc import Collection, Sequence
from datetime import timedelta

import pytest

from outbox.states import NEVER
from publishworker.spanner.store import StoreError
from publishworker.task import Failed, Outcome, Row
from publishworker.telemetry import metrics as m
from tests.support.fakes import Abort, FakePublisher
from tests.support.relay_bench import Bench, times

UNKNOWN = Failed("data_loss", "no")
REFUSED = Failed("invalid_argument", "no")


@pytest.fixture
def bench() -> Bench:
    """A relay between fakes, two groups of ten."""
    return Bench()


def test_a_failing_head_gets_the_failure_and_the_others_its_time(bench: Bench) -> None:
    """One attempt is charged, to the first; then it goes alone, and the others when it has gone."""
    bench.line("a", "b", "c")
    bench.publisher.failing = {"a": UNKNOWN}
    bench.turns()
    assert bench.publisher.ids() == []
    rows = bench.store.rows
    assert {id: rows[id].attempts for id in "abc"} == {"a": 1, "b": 0, "c": 0}
    assert rows["a"].available_at == rows["b"].available_at == rows["c"].available_at
    assert rows["a"].last_error == "data_loss: no"
    bench.publisher.failing = {}
    bench.wait(2)
    bench.turns()
    assert bench.publisher.requests == [["a", "b", "c"], ["a"], ["b", "c"]]
    assert rows["c"].last_error is None


def test_an_outage_parks_nothing(bench: Bench) -> None:
    """It is nobody's fault: the rows stay as they are, and the whole run goes when it is over."""
    bench.line("a", "b", "c")
    bench.publisher.down = {"projects/test-project/topics/orders": Failed("unavailable", "no")}
    bench.turns()
    assert {(row.available_at, row.attempts, row.last_error) for row in bench.store.rows.values()} == {(None, 0, None)}
    assert bench.count(m.PARKED) == 0
    bench.publisher.down = {}
    for _ in range(3):
        bench.wait(10)
        bench.turns()
    assert bench.publisher.ids() == ["a", "b", "c"]


def test_the_probe_of_an_outage_is_the_head_of_a_key(bench: Bench) -> None:
    """Any other task of the key would overtake it."""
    bench.line("c", "b", "a")
    bench.publisher.down = {"projects/test-project/topics/orders": Failed("unavailable", "no")}
    bench.turns()
    bench.publisher.requests.clear()
    for _ in range(4):
        bench.wait(10)
        bench.turns()
    assert bench.publisher.requests == [["c"]] * 4


def test_a_missing_topic_is_charged_to_the_heads_that_probe_it(bench: Bench) -> None:
    """Not to what stands behind them, which goes in order once the topic is there."""
    bench.line("a1", "a2", key="a", topic="missing")
    bench.line("b1", "b2", key="b", topic="missing")
    for _ in range(4):
        bench.turns()
        bench.wait(5)
    rows = bench.store.rows
    assert rows["a1"].attempts >= 1
    assert rows["b1"].attempts >= 1
    assert (rows["a2"].attempts, rows["b2"].attempts) == (0, 0)
    bench.publisher.topics.add("projects/test-project/topics/missing")
    for _ in range(10):
        bench.wait(300)
        bench.turns()
    assert bench.published("a1", "a2") == ["a1", "a2"]
    assert bench.published("b1", "b2") == ["b1", "b2"]


def test_a_dead_head_is_passed_over_if_so_wished() -> None:
    """Those behind it go at once, also if it dies in their midst; tried later it comes late."""
    bench = Bench(pass_dead=True)
    bench.line("dead", "a", "bad", "b", "worse", "c")
    bench.store.rows["dead"].available_at = NEVER
    bench.publisher.failing = {"bad": REFUSED, "worse": REFUSED}
    bench.turns()
    assert bench.publisher.ids() == ["a", "b", "c"]
    assert bench.count(m.PARKED) == 0
    assert bench.count(m.DEAD) == 2


def test_a_failing_head_is_not_passed_over_before_it_is_dead() -> None:
    """Its order is kept as long as it may still be sent."""
    bench = Bench(pass_dead=True, retries={"max_attempts": 2})
    bench.line("a", "b")
    bench.publisher.failing = {"a": UNKNOWN}
    bench.turns()
    assert bench.publisher.ids() == []
    bench.wait(2)
    bench.turns()
    assert bench.store.rows["a"].available_at == NEVER
    bench.wait(2)
    bench.turns()
    assert bench.publisher.ids() == ["b"]


@pytest.mark.parametrize("pass_dead", [False, True])
def test_an_expired_head_never_blocks(pass_dead: bool) -> None:
    """Whether it expired when it was due, while it was retried, or long ago."""
    bench = Bench(pass_dead=pass_dead)
    past = bench.store.now - timedelta(seconds=1)
    bench.line("dead", available_at=NEVER, expires_at=past, attempts=1)
    bench.line("retrying", available_at=bench.store.now + timedelta(hours=1), expires_at=past, attempts=1)
    bench.line("due", expires_at=past)
    bench.line("a")
    bench.line("between", expires_at=past)
    bench.line("b")
    bench.turns()
    assert bench.publisher.requests == [["a", "b"]]
    assert [bench.store.rows[id].available_at for id in ("due", "between")] == [NEVER, NEVER]


def test_a_failure_is_remembered_when_the_transaction_is_run_again(bench: Bench) -> None:
    """Nothing behind it goes out in the second run, though it was never tried."""
    bench.line("a", "b", "c")
    bench.publisher.failing = {"b": REFUSED}

    def abort_once_and_mend() -> None:
        if bench.publisher.failing:
            bench.publisher.failing = {}
            raise Abort

    bench.store.before_commit = abort_once_and_mend
    bench.turns()
    assert bench.publisher.ids() == ["a"]
    assert bench.store.rows["b"].available_at == NEVER
    assert bench.waits("c") == pytest.approx(3600, abs=1)


def test_what_there_was_no_time_for_stays_as_it_was(bench: Bench) -> None:
    """Neither failed nor parked: the next turn goes on there."""
    bench.line("a", "b", "c")
    bench.store.rows["b"].attempts = 1  # in a request of its own
    bench.publisher.out_of_time = {"b"}
    bench.relay.turn()
    bench.relay.turn()
    assert bench.publisher.ids() == ["a"]
    assert [bench.store.rows[id].available_at for id in "bc"] == [None, None]
    bench.publisher.out_of_time = set()
    bench.turns()
    assert bench.publisher.ids() == ["a", "b", "c"]


def test_a_doubtful_task_makes_its_key_wait(bench: Bench) -> None:
    """Its commit is in doubt: it is marked first, and only then is the next one sent."""
    bench.line("a", "b")
    bench.store.before_commit = times(1, lambda: StoreError("no"))
    bench.relay.turn()
    bench.relay.turn()
    assert bench.publisher.ids() == ["a", "b"]
    bench.line("c")
    bench.turns()
    assert bench.publisher.ids() == ["a", "b", "c"]
    assert bench.unsent() == []


def test_at_most_once_with_a_key_keeps_its_place(bench: Bench) -> None:
    """`register` refuses the two together; a row of another writer is marked first, alone, and then the next may go."""
    bench.line("a")
    bench.line("once", at_most_once=True)
    bench.line("b")
    bench.turns()
    assert bench.publisher.requests == [["a"], ["once"], ["b"]]
    assert bench.unsent() == []


def test_the_same_key_in_two_topics_is_two_keys(bench: Bench) -> None:
    """A topic that fails holds back its own half."""
    bench.line("o1", "o2")
    bench.line("i1", "i2", topic="invoices")  # the ids differ, the ordering key does not
    bench.publisher.failing = {"o1": UNKNOWN}
    bench.turns()
    assert bench.publisher.ids() == ["i1", "i2"]


def test_at_most_once_with_a_key_waits_for_what_failed_before_it(bench: Bench) -> None:
    """It has a group of its own, which must not begin."""
    bench.line("a")
    bench.line("once", at_most_once=True)
    bench.publisher.failing = {"a": UNKNOWN}
    bench.turns()
    assert bench.publisher.ids() == []
    bench.publisher.failing = {}
    bench.wait(2)
    bench.turns()
    assert bench.publisher.ids() == ["a", "once"]


@pytest.mark.parametrize("pass_dead", [False, True])
def test_many_tasks_that_hold_back_nothing_hide_no_other(pass_dead: bool) -> None:
    """The front is looked at as far as it takes to see one that may go, or that holds the key."""
    bench = Bench(pass_dead=pass_dead)
    past = bench.store.now - timedelta(seconds=1)
    bench.line(*(f"{n:02}" for n in range(60)), available_at=NEVER, expires_at=past, attempts=1)
    bench.line("dead", available_at=NEVER, attempts=1)
    bench.line("a")
    bench.turns()
    assert bench.publisher.ids() == (["a"] if pass_dead else [])
    bench.store.rows["dead"].expires_at = past
    bench.store.rows["a"].available_at = None
    bench.turns()
    assert bench.publisher.ids() == ["a"]


def test_a_head_that_always_meets_an_outage_stops_no_other_task_of_its_shard(bench: Bench) -> None:
    """Its long key is one candidate, and was a probe: the next ones look deeper, find another, and it is charged."""
    bench.line(*(f"h{n:03}" for n in range(150)))
    shard = bench.store.rows["h000"].shard
    others = [f"o{n}" for n in range(300)]
    bench.insert(*others, created_at=bench.store.now)
    for id in others:
        bench.store.rows[id].shard = shard
    bench.publisher.failing = {"h000": Failed("internal", "no")}
    for _ in range(60):
        bench.turns(100)
        bench.wait(10)
    assert sorted(bench.publisher.ids()) == sorted(others)
    assert bench.store.rows["h000"].attempts > 0


def test_under_skip_a_request_that_fails_kills_the_head_alone() -> None:
    """The failure is the request's: the others of the run are not charged for it."""
    bench = Bench(pass_dead=True, retries={"max_attempts": 1})
    bench.line("a", "b", "c")
    bench.publisher.failing = {"a": UNKNOWN}
    bench.relay.turn()
    bench.relay.turn()
    rows = bench.store.rows
    assert [rows[id].available_at == NEVER for id in "abc"] == [True, False, False]
    bench.turns()
    assert bench.publisher.ids() == ["b", "c"]


class Refusing(FakePublisher):
    """Refuses each task for what it is, as where its topic is not among the allowed ones."""

    def publish(
        self, topic: str, rows: Sequence[Row], seconds: float, singly: Collection[str] = frozenset()
    ) -> dict[str, Outcome]:
        """Refuse all."""
        return {row.id: Failed("topic_not_allowed", f"{topic} is not allowed") for row in rows}


@pytest.mark.parametrize(("pass_dead", "dead"), [(False, 1), (True, 4)])
def test_verdicts_of_their_own_are_charged_to_each_if_none_holds_back_the_others(pass_dead: bool, dead: int) -> None:
    """One turn for a run, not one for each of its tasks; in block mode the head alone is dead."""
    bench = Bench(publisher=Refusing("orders"), pass_dead=pass_dead)
    bench.line("a", "b", "c", "d")
    while not bench.count(m.DEAD):
        bench.relay.turn()
    assert bench.count(m.DEAD) == dead
