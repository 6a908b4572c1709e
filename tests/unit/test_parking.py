"""Tasks behind a head that is not due, between fakes: put off, and woken when it has gone."""

import contextlib
from datetime import timedelta
from typing import Any

import pytest

from outbox.states import NEVER
from publishworker.spanner.store import StoreError
from publishworker.task import Failed, TopicLimit
from publishworker.telemetry import metrics as m
from tests.support.relay_bench import Bench, overtake, times

UNKNOWN = Failed("data_loss", "no")
REFUSED = Failed("invalid_argument", "no")
TIMEOUT = Failed("deadline_exceeded", "no answer")


@pytest.fixture
def bench() -> Bench:
    """A relay between fakes, two groups of ten."""
    return Bench()


@pytest.mark.parametrize("state", ["scheduled", "retrying", "dead"])
def test_a_head_that_is_not_due_holds_back_its_key_and_nothing_else(bench: Bench, state: str) -> None:
    """What stands behind it is put off to its time, at most an hour, and looks neither failed nor dead."""
    at = NEVER if state == "dead" else bench.store.now + timedelta(seconds=90)
    bench.line("head", "a", "b")
    bench.store.rows["head"].available_at = at
    bench.store.rows["head"].attempts = 0 if state == "scheduled" else 3
    bench.line("other", key="l")
    bench.insert("x")
    bench.turns()
    assert sorted(bench.publisher.ids()) == ["other", "x"]
    for id in ("a", "b"):
        row = bench.store.rows[id]
        assert bench.waits(id) == pytest.approx(3600 if state == "dead" else 90, abs=1)
        assert (row.attempts, row.last_error) == (0, "parked: waits for the task head of its ordering key")
    assert bench.count(m.PARKED) == 2
    assert bench.relay.turn().polled == 0


def parked_behind(bench: Bench, tasks: int) -> list[str]:
    """Park so many tasks behind a head that is then retried by hand; return all in their order."""
    ids = ["head", *(f"t{n:02}" for n in range(tasks))]
    bench.line(*ids)
    bench.store.rows["head"].available_at = NEVER
    bench.turns()
    bench.store.rows["head"].available_at = None
    return ids


def test_a_dead_head_blocks_until_an_operator_acts_then_all_goes_at_once(bench: Bench) -> None:
    """The parked tasks do not wait for their time, also if there are more of them than a run holds."""
    tail = [f"t{n:02}" for n in range(35)]
    bench.line("head", *tail)
    bench.publisher.failing = {"head": REFUSED}
    bench.turns()
    for _ in range(3):
        bench.wait(3600)
        bench.turns()
    assert bench.publisher.ids() == []
    assert bench.store.rows["head"].available_at == NEVER
    assert {bench.store.rows[id].attempts for id in tail} == {0}
    bench.publisher.failing = {}
    head = bench.store.rows["head"]
    head.available_at, head.attempts = None, 0
    bench.turns()
    assert bench.publisher.ids() == ["head", *tail]


def test_any_worker_goes_on_with_parked_tasks_whose_head_has_gone(bench: Bench) -> None:
    """The commit that marks a run makes the next parked task ready: whoever polls finds the key by it."""
    ids = parked_behind(bench, 35)
    bench.relay.turn()
    assert bench.publisher.ids() == ids[:10]
    assert [row.id for row in bench.store.rows.values() if row.sent_at is None and row.available_at is None] == ["t09"]
    assert (bench.store.rows["t09"].last_error, bench.store.rows["t09"].attempts) == (None, 0)
    bench.relay = bench.another()
    bench.turns()
    assert bench.publisher.ids() == ids


def test_a_commit_that_fails_delays_what_is_parked_by_a_turn(bench: Bench) -> None:
    """The poll has seen the head as unsent, then it is marked, and the front shows what follows."""
    ids = parked_behind(bench, 25)
    bench.store.before_commit = times(1, lambda: StoreError("no"))
    assert bench.relay.turn().uncommitted == 10
    bench.turns()
    assert bench.publisher.ids() == ids


def test_parked_tasks_that_nobody_wakes_go_when_their_time_comes(bench: Bench) -> None:
    """Or with the next task of their key."""
    first, second = parked_behind(bench, 25)[1:], ["u1", "u2"]
    del bench.store.rows["head"]
    bench.turns()
    assert bench.publisher.ids() == []
    bench.wait(3600)
    bench.turns()
    assert bench.publisher.ids() == first
    bench.line("head", *second, key="l")
    bench.store.rows["head"].available_at = NEVER
    bench.turns()
    del bench.store.rows["head"]
    bench.line("u3", key="l")
    bench.turns()
    assert bench.publisher.ids() == [*first, "u1", "u2", "u3"]


def test_nothing_is_woken_behind_a_failure(bench: Bench) -> None:
    """Nor behind an outage: the next task stays parked until its head has gone."""
    ids = parked_behind(bench, 15)
    for failure in (UNKNOWN, TIMEOUT):
        bench.publisher.failing = {"head": failure}
        bench.turns()
        assert bench.waits(ids[-1]) == pytest.approx(3600, abs=10)
        bench.wait(4)
    assert bench.publisher.ids() == []


def test_a_run_that_had_no_time_wakes_its_own_rest(bench: Bench) -> None:
    """Parked tasks of the run that were not tried any more would be seen by nobody."""
    ids = parked_behind(bench, 5)
    bench.store.rows["t02"].attempts = 1  # in a request of its own
    bench.publisher.out_of_time = {"t02"}
    bench.relay.turn()
    assert bench.publisher.ids() == ids[:3]
    assert [bench.waits(id) is None for id in ids[3:]] == [True, False, False]
    bench.publisher.out_of_time = set()
    bench.turns()
    assert bench.publisher.ids() == ids


def test_a_limited_run_wakes_the_task_behind_it(bench: Bench) -> None:
    """The topic's rate lets three go at a time: the fourth must be seen by the next poll."""
    bench.store.limits["orders"] = TopicLimit(rate=0.5, burst=3)
    ids = parked_behind(bench, 9)
    for _ in range(5):
        bench.turns()
        bench.wait(6)
    assert [len(request) for request in bench.publisher.requests[:3]] == [3, 3, 3]
    assert bench.publisher.ids() == ids


def test_parked_tasks_wait_while_their_topic_is_paused(bench: Bench) -> None:
    """And go on when it is resumed."""
    ids = parked_behind(bench, 25)
    bench.relay.turn()
    bench.store.paused.add("orders")
    bench.turns()
    assert bench.publisher.ids() == ids[:10]
    bench.store.paused.clear()
    bench.relay.turn()
    bench.turns()
    assert bench.publisher.ids() == ids


def test_a_head_is_put_off_behind_nothing(bench: Bench) -> None:
    """It was retried between the poll and the lock: the tasks behind it stay ready."""
    bench.line("head", "a")
    bench.store.rows["head"].available_at = bench.store.now + timedelta(hours=1)
    bench.relay.turn()
    overtake(bench, lambda: setattr(bench.store.rows["head"], "available_at", None))
    bench.relay.turn()
    assert bench.store.rows["a"].available_at is None
    bench.turns()
    assert bench.publisher.ids() == ["head", "a"]


def test_behind_a_head_that_is_gone_nothing_is_put_off(bench: Bench) -> None:
    """Its row was deleted between the poll and the lock."""
    bench.line("head", "a")
    bench.store.rows["head"].available_at = bench.store.now + timedelta(hours=1)
    bench.relay.turn()
    overtake(bench, lambda: bench.store.rows.pop("head"))
    bench.relay.turn()
    assert bench.store.rows["a"].available_at is None
    bench.turns()
    assert bench.publisher.ids() == ["a"]


def test_a_scheduled_task_behind_a_head_keeps_its_own_time(bench: Bench) -> None:
    """Parking never makes a task due earlier than it asked for."""
    bench.line("head", "a")
    bench.line("later", available_at=bench.store.now + timedelta(hours=9))
    bench.store.rows["head"].available_at = bench.store.now + timedelta(seconds=9)
    bench.turns()
    assert bench.waits("later") == pytest.approx(9 * 3600, abs=1)


def test_a_parking_that_fails_is_told_and_tried_again(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was parked, and nothing was sent out of order."""
    bench.line("head", "a", "b")
    bench.store.rows["head"].available_at = bench.store.now + timedelta(hours=1)
    bench.store.before_commit = times(1, lambda: StoreError("not now"))
    bench.turns()
    assert "was not committed (0 were published): not now" in caplog.text
    bench.turns()
    assert bench.publisher.ids() == []
    assert bench.count(m.PARKED) == 2


def test_parked_tasks_go_when_their_head_expires(bench: Bench) -> None:
    """It holds them no longer then: they do not wait out their hour. So where it backs off beyond its expiry."""
    in_a_minute = bench.store.now + timedelta(seconds=60)
    bench.line("dead", "a", key="k", expires_at=None)
    bench.line("failing", "b", key="l")
    bench.line("seen later", key="m", expires_at=in_a_minute, available_at=NEVER, attempts=1)
    bench.line("c", key="m")
    for id in ("dead", "failing"):
        bench.store.rows[id].expires_at = in_a_minute
    bench.publisher.failing = {"dead": REFUSED, "failing": UNKNOWN}
    bench.relay = bench.another(retries={"initial": 900})
    bench.turns()
    assert bench.publisher.ids() == []
    bench.wait(61)
    bench.turns()
    assert sorted(bench.publisher.ids()) == ["a", "b", "c"]


def test_a_head_that_is_lost_to_an_outage_wakes_itself(bench: Bench) -> None:
    """It was parked, the visible one before it has gone: nobody else would bring the key to the poll."""
    parked_behind(bench, 5)
    bench.store.rows["head"].attempts = 1  # so it goes alone
    bench.publisher.failing = {"t00": Failed("unavailable", "no")}
    bench.turns()
    assert bench.publisher.ids() == ["head"]
    bench.publisher.failing = {}
    for _ in range(5):
        bench.wait(5)
        bench.turns()
    assert bench.publisher.ids() == ["head", "t00", "t01", "t02", "t03", "t04"]


@pytest.mark.parametrize("pass_dead", [False, True])
def test_a_head_that_is_passed_over_wakes_the_next(pass_dead: bool) -> None:
    """It expired, or died under `skip`, alone in its run: what is parked behind it is at the front now."""
    bench = Bench(size=1, pass_dead=pass_dead)
    ids = parked_behind(bench, 3)
    if pass_dead:
        bench.store.rows["head"].available_at = NEVER
        bench.turns()
        bench.store.rows["head"].available_at = None
        bench.publisher.failing = {"head": REFUSED}
    else:
        bench.store.rows["head"].expires_at = bench.store.now
    bench.turns()
    assert bench.publisher.ids() == ids[1:]


@pytest.mark.parametrize(("groups", "most"), [(1, 40), (2, 20), (8, 5)])
def test_a_blocked_key_without_end_keeps_nobody_waiting(groups: int, most: int) -> None:
    """Parking has a part of the places only, also where there is one place, and where its key gets new tasks."""
    bench = Bench(groups=groups)
    bench.line("head", available_at=NEVER, attempts=1)
    bench.line(*(f"t{n}" for n in range(300)))
    bench.insert("x", topic="invoices")
    turns = 0
    while "x" not in bench.publisher.ids():
        bench.relay.turn()
        bench.line(*(f"u{turns}-{n}" for n in range(10)))
        turns += 1
        assert turns < most


def test_parking_that_waits_for_locks_leaves_half_of_the_places() -> None:
    """Somebody holds the heads in open transactions: tasks of others are sent meanwhile."""
    bench = Bench(groups=8)
    heads = [f"head{n}" for n in range(10)]
    for n, head in enumerate(heads):
        bench.line(head, key=f"k{n}", available_at=NEVER, attempts=1)
        bench.line(f"t{n}", key=f"k{n}")
    bench.relay.turn()
    with contextlib.ExitStack() as transactions:
        for head in heads:
            transactions.enter_context(bench.store.locked(head))
        assert max(bench.relay.turn().in_flight for _ in range(6)) == 4
        bench.insert("x", topic="invoices")
        while "x" not in bench.publisher.ids():
            bench.relay.turn()
    bench.turns(100)
    assert bench.publisher.ids() == ["x"]
    assert bench.count(m.PARKED) == 10


def test_with_nothing_to_send_parking_has_half_of_the_places() -> None:
    """A long tail is out of the way soon; the other half is for what comes meanwhile."""
    bench = Bench(groups=8)
    bench.line("head", available_at=NEVER, attempts=1)
    bench.line(*(f"t{n}" for n in range(200)))
    assert max(turn.parked for turn in bench.turns(30)) > 20


@pytest.mark.parametrize("first", ["parking", "sending", "both"])
def test_parking_takes_nothing_of_a_topics_rate(first: str) -> None:
    """Nor does it give back what it did not take."""
    bench = Bench(groups=8)
    bench.store.limits["orders"] = TopicLimit(rate=0.001, burst=5)
    if first == "sending":
        bench.insert("x")
        bench.turns()
    bench.line("head", available_at=NEVER, attempts=1)
    bench.line(*(f"t{n}" for n in range(9)))
    if first == "parking":
        bench.turns()
        assert bench.count(m.PARKED) == 9
    bench.insert(*(f"x{n}" for n in range(9)), priority=100)
    bench.turns()
    assert len(bench.publisher.ids()) == 5


def test_parking_does_not_count_as_in_flight_for_a_topics_limit() -> None:
    """It waits for a lock; the one task that may be in flight is another one."""
    bench = Bench(groups=8)
    bench.store.limits["orders"] = TopicLimit(in_flight=1)
    bench.line("head", available_at=NEVER, attempts=1)
    bench.line("t")
    bench.relay.turn()
    with bench.store.locked("head"):
        bench.relay.turn()
        bench.insert("x")
        for _ in range(3):
            bench.relay.turn()
        assert bench.publisher.ids() == ["x"]
    bench.relay.finish()
    assert bench.count(m.PARKED) == 1


@pytest.mark.parametrize(("id", "columns"), [("a", {}), ("head", {"available_at": NEVER})])
def test_what_has_changed_since_the_snapshot_is_not_put_off(id: str, columns: dict[str, Any]) -> None:
    """A task that was scheduled for later keeps its time; behind a head that died, and is passed over, none waits."""
    bench = Bench(pass_dead=True)
    soon, late = bench.store.now + timedelta(seconds=9), bench.store.now + timedelta(hours=9)
    bench.line("head", available_at=soon, attempts=1)
    bench.line("a")
    bench.relay.turn()
    columns = columns or {"available_at": late}

    def act() -> None:
        for name, value in columns.items():
            setattr(bench.store.rows[id], name, value)

    overtake(bench, act)
    bench.relay.turn()
    assert bench.count(m.PARKED) == 0
    assert bench.store.rows["a"].available_at == (late if id == "a" else None)


def test_waking_changes_nothing_but_the_time(bench: Bench) -> None:
    """The attempts of the task and its expiry are its own."""
    ids = parked_behind(bench, 15)
    expiry = bench.store.now + timedelta(days=1)
    row = bench.store.rows[ids[10]]
    row.attempts, row.expires_at = 3, expiry
    bench.relay.turn()
    assert bench.publisher.ids() == ids[:10]
    assert (row.available_at, row.attempts, row.expires_at, row.last_error) == (None, 3, expiry, None)
