"""The effect of a failure on the tasks behind it in their key, between fakes."""

import pytest

from outbox.table.states import NEVER
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


def test_a_failing_head_records_the_failure_and_defers_the_others(bench: Bench) -> None:
    """The head records one attempt. Then it goes alone, and the others follow when it is sent."""
    bench.line("a", "b", "c")
    bench.publisher.failing = {"a": UNKNOWN}
    bench.turns()
    assert bench.publisher.ids() == []
    rows = bench.store.rows
    assert attempts(bench) == {"a": 1, "b": 0, "c": 0}
    assert bench.store.claimed == {"a": 1, "b": 1, "c": 1}  # in one commit
    assert rows["a"].available_at == rows["b"].available_at == rows["c"].available_at
    assert (rows["a"].last_error, rows["c"].blocked_by) == ("data_loss: no", "a")
    bench.publisher.failing = {}
    bench.wait(2)
    bench.turns()
    assert bench.publisher.requests == [["a", "b", "c"], ["a"], ["b", "c"]]
    assert rows["c"].last_error is None


@pytest.mark.parametrize("aborted", [False, True])
def test_tasks_behind_a_refused_task_are_deferred(bench: Bench, aborted: bool) -> None:
    """Tasks before it are sent. A transaction attempt after an abort remembers the failure."""
    bench.line(*"abcde")
    bench.publisher.failing = {"b": REFUSED}
    if aborted:
        bench.abort_once(bench.publisher.failing.clear)
    bench.turns()
    assert [bench.relay.turn().polled for _ in range(3)] == [0, 0, 0]
    assert bench.publisher.ids() == ["a"]
    assert dead(bench) == ["b"]
    assert attempts(bench) == {"a": 0, "b": 1, "c": 0, "d": 0, "e": 0}
    for id, seconds in {"c": 60, "d": 60, "e": 3600}.items():
        assert bench.waits(id) == pytest.approx(seconds, abs=1)
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


def test_a_failing_head_is_not_skipped_before_it_is_dead() -> None:
    """Its key is blocked while it may still be sent. The other tasks of its last request do not die with it."""
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
def test_own_failures_of_a_key_are_recorded_together_in_skip_mode(skip_dead: bool, dead_tasks: int) -> None:
    """One turn records all of a key, not one turn for each task. In block mode only the head is dead."""
    bench = Bench(skip_dead=skip_dead)
    refusal = Failed("topic_not_allowed", "orders is not allowed")
    bench.publisher.publish = lambda _topic, rows, *_: dict.fromkeys((row.id for row in rows), refusal)
    bench.line("a", "b", "c", "d")
    while not bench.count(m.DEAD):
        bench.relay.turn()
    assert bench.count(m.DEAD) == dead_tasks


def test_a_head_that_always_times_out_delays_no_other_task_of_its_shard(bench: Bench) -> None:
    """Its long key is one candidate, and was probed: the next polls read deeper and find another task."""
    bench.line(*(f"h{n:03}" for n in range(150)))
    others = [f"o{n}" for n in range(300)]
    bench.insert(*others, created_at=bench.store.now)
    for id in others:
        bench.store.rows[id].shards = bench.store.rows["h000"].shards
    bench.publisher.failing = {"h000": Failed("internal", "no")}
    for _ in range(60):
        bench.turns(100)
        bench.wait(10)
    assert sorted(bench.publisher.ids()) == sorted(others)
    assert bench.store.rows["h000"].attempts > 0
