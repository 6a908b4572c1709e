"""What a failure does to the tasks behind it in their key, between fakes."""

from datetime import timedelta

import pytest

from outbox.storage.task_states import NEVER
from publishworker.telemetry import metrics as m
from publishworker.types import Failed
from tests.support.relay_bench import Bench

UNKNOWN = Failed("data_loss", "no")
REFUSED = Failed("invalid_argument", "no")
OUTAGE = Failed("unavailable", "no")


def attempts(bench: Bench) -> dict[str, int]:
    return {id: row.attempts for id, row in bench.store.rows.items()}


def dead(bench: Bench) -> list[str]:
    return [id for id, row in bench.store.rows.items() if row.available_at == NEVER]


def test_a_failing_head_gets_the_failure_and_the_others_its_time(bench: Bench) -> None:
    """The head pays one attempt; then it goes alone, and the others when it has gone."""
    bench.line("a", "b", "c")
    bench.publisher.failing = {"a": UNKNOWN}
    bench.turns()
    assert bench.publisher.ids() == []
    rows = bench.store.rows
    assert attempts(bench) == {"a": 1, "b": 0, "c": 0}
    assert rows["a"].available_at == rows["b"].available_at == rows["c"].available_at
    assert (rows["a"].last_error, rows["c"].blocked_by) == ("data_loss: no", "a")
    bench.publisher.failing = {}
    bench.wait(2)
    bench.turns()
    assert bench.publisher.requests == [["a", "b", "c"], ["a"], ["b", "c"]]
    assert rows["c"].last_error is None


@pytest.mark.parametrize("aborted", [False, True])
def test_what_follows_a_refused_task_is_deferred(bench: Bench, aborted: bool) -> None:
    """What stands before it is sent. A transaction attempt after an abort remembers the failure."""
    bench.line(*"abcd")
    bench.publisher.failing = {"b": REFUSED}
    if aborted:
        bench.abort_once(bench.publisher.failing.clear)
    bench.turns()
    assert [bench.relay.turn().polled for _ in range(3)] == [0, 0, 0]
    assert bench.publisher.ids() == ["a"]
    assert dead(bench) == ["b"]
    assert attempts(bench) == {"a": 0, "b": 1, "c": 0, "d": 0}
    for id in "cd":
        assert bench.waits(id) == pytest.approx(3600, abs=1)
        assert bench.store.rows[id].blocked_by == "b"


def test_an_outage_defers_nothing(bench: Bench) -> None:
    bench.line("c", "b", "a")
    bench.publisher.down = {"projects/test-project/topics/orders": OUTAGE}
    bench.turns()
    bench.publisher.requests.clear()
    for _ in range(4):
        bench.wait(10)
        bench.turns()
    assert bench.publisher.requests == [["c"]] * 4
    assert {(row.available_at, row.attempts, row.last_error) for row in bench.store.rows.values()} == {(None, 0, None)}
    assert bench.count(m.DEFERRED) == 0
    bench.publisher.down = {}
    bench.run_for(30, step=10)
    assert bench.publisher.ids() == ["c", "b", "a"]


def test_a_dead_head_is_passed_over_if_so_wished() -> None:
    bench = Bench(skip_dead=True)
    bench.line("dead", "a", "bad", "b", "worse", "c")
    bench.store.rows["dead"].available_at = NEVER
    bench.publisher.failing = {"bad": REFUSED, "worse": REFUSED}
    bench.turns()
    assert bench.publisher.ids() == ["a", "b", "c"]
    assert (bench.count(m.DEFERRED), bench.count(m.DEAD)) == (0, 2)


def test_a_failing_head_is_not_passed_over_before_it_is_dead() -> None:
    """Its key waits as long as it may still be sent; the others in its last request do not die with it."""
    bench = Bench(skip_dead=True, retries={"max_attempts": 2})
    bench.line("a", "b", "c")
    bench.publisher.failing = {"a": UNKNOWN}
    for dead_tasks in ([], ["a"]):
        assert bench.publisher.ids() == []
        bench.turns()
        assert dead(bench) == dead_tasks
        bench.wait(2)
    bench.turns()
    assert bench.publisher.ids() == ["b", "c"]
    bench = Bench(skip_dead=True, retries={"max_attempts": 1})
    bench.line("a", "b", "c")
    bench.publisher.failing = {"a": UNKNOWN}
    bench.turns()
    assert (dead(bench), bench.publisher.ids()) == (["a"], ["b", "c"])


@pytest.mark.parametrize(("skip_dead", "dead_tasks"), [(False, 1), (True, 4)])
def test_verdicts_of_their_own_are_charged_to_each_if_none_holds_back_the_others(
    skip_dead: bool, dead_tasks: int
) -> None:
    """One turn for all of a key, not one for each of its tasks; in block mode the head alone is dead."""
    bench = Bench(skip_dead=skip_dead)
    refusal = Failed("topic_not_allowed", "orders is not allowed")
    bench.publisher.publish = lambda _topic, rows, *_: dict.fromkeys((row.id for row in rows), refusal)
    bench.line("a", "b", "c", "d")
    while not bench.count(m.DEAD):
        bench.relay.turn()
    assert bench.count(m.DEAD) == dead_tasks


@pytest.mark.parametrize("skip_dead", [False, True])
def test_an_expired_head_never_blocks(skip_dead: bool) -> None:
    bench = Bench(skip_dead=skip_dead)
    past = bench.store.now - timedelta(seconds=1)
    bench.line("dead", available_at=NEVER, expires_at=past, attempts=1)
    bench.line("retrying", available_at=bench.store.now + timedelta(hours=1), expires_at=past, attempts=1)
    bench.line("due", expires_at=past)
    bench.line("a")
    bench.line("between", expires_at=past)
    bench.line("b")
    bench.turns()
    assert bench.publisher.requests == [["a", "b"]]
    assert dead(bench) == ["dead", "due", "between"]


@pytest.mark.parametrize("skip_dead", [False, True])
def test_many_tasks_that_hold_back_nothing_hide_no_other(skip_dead: bool) -> None:
    """The key is read as far as it takes to see a task that may go, or that blocks it."""
    bench = Bench(skip_dead=skip_dead)
    past = bench.store.now - timedelta(seconds=1)
    bench.line(*(f"{n:02}" for n in range(60)), available_at=NEVER, expires_at=past, attempts=1)
    bench.line("dead", available_at=NEVER, attempts=1)
    bench.line("a")
    bench.turns()
    assert bench.publisher.ids() == (["a"] if skip_dead else [])
    bench.change("dead", expires_at=past)
    bench.change("a", available_at=None)
    bench.turns()
    assert bench.publisher.ids() == ["a"]


@pytest.mark.parametrize("failing", [False, True])
def test_at_most_once_with_a_key_keeps_its_place(bench: Bench, failing: bool) -> None:
    """`register` refuses the two together, another writer may not. While the task before it fails, it is unmarked."""
    bench.line("a")
    bench.line("once", at_most_once=True)
    bench.line("b")
    bench.publisher.failing = {"a": UNKNOWN} if failing else {}
    bench.turns()
    if failing:
        assert bench.publisher.ids() == []
        assert bench.store.rows["once"].sent_at is None
        bench.publisher.failing = {}
        bench.wait(2)
        bench.turns()
    assert bench.publisher.requests[-3:] == [["a"], ["once"], ["b"]]
    assert bench.unsent() == []


def test_a_head_that_always_meets_an_outage_stops_no_other_task_of_its_shard(bench: Bench) -> None:
    """Its long key is one candidate, and was a probe: the next ones read deeper, find another, and it is recorded."""
    bench.line(*(f"h{n:03}" for n in range(150)))
    others = [f"o{n}" for n in range(300)]
    bench.insert(*others, created_at=bench.store.now)
    for id in others:
        bench.store.rows[id].shard = bench.store.rows["h000"].shard
    bench.publisher.failing = {"h000": Failed("internal", "no")}
    for _ in range(60):
        bench.turns(100)
        bench.wait(10)
    assert sorted(bench.publisher.ids()) == sorted(others)
    assert bench.store.rows["h000"].attempts > 0
