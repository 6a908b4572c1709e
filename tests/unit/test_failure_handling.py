"""Tasks that fail: retried, dead, or held back with their topic. And the tasks behind them in their ordering key."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outbox.table.states import NEVER
from publishworker.spanner.write_errors import Refused, StoreError
from publishworker.telemetry import metrics as m
from publishworker.types import Failed
from tests.support.relay_bench import Bench

TOPIC = "projects/test-project/topics/orders"
MISSING = "projects/test-project/topics/missing"
AWAY = Failed("unavailable", "connection refused")
ODD = Failed("data_loss", "what was that")
REFUSED = Failed("invalid_argument", "no")
#: When the fake store begins.
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
LATER = NOON + timedelta(hours=1)


def states(bench: Bench) -> dict[str, str]:
    found = {}
    for row in bench.store.rows.values():
        if row.sent_at is not None:
            found[row.id] = "sent"
        elif row.available_at is None:
            found[row.id] = "ready"
        else:
            found[row.id] = "dead" if row.available_at >= NEVER else "retrying"
    return found


def attempts(bench: Bench) -> int:
    return sum(row.attempts for row in bench.store.rows.values())


def test_a_failure_is_written_in_the_same_commit_as_its_batches_successes(bench: Bench) -> None:
    bench.insert("good", "bad")
    bench.publisher.failing["bad"] = ODD
    assert [turn.recorded for turn in bench.turns()] == [1, 0]
    assert bench.store.claimed == {"good": 1, "bad": 1}
    good, bad = bench.store.rows["good"], bench.store.rows["bad"]
    assert good.sent_at is not None
    assert (bad.sent_at, bad.attempts, bad.last_error) == (None, 1, "data_loss: what was that")
    assert bad.available_at is not None
    assert 0.49 <= (bad.available_at - good.sent_at).total_seconds() <= 1
    assert bench.count(m.FAILED) == 1
    bench.publisher.failing.clear()
    bench.wait(1)
    bench.turns()
    assert bench.unsent() == []


def test_an_error_that_no_retry_can_fix_is_dead_at_once(bench: Bench) -> None:
    refused = ("invalid_argument", "too_large", "topic_not_allowed")
    bench.insert("good", *refused)
    bench.publisher.failing = {reason: Failed(reason, "no") for reason in refused}
    bench.store.insert("bad", "orders", b"\xff\xff secret")
    bench.store.insert("crowded", "orders", b"\x12\x06\x0a\x04abcd" * 201)
    bench.turns()
    undecodable = "undecodable: Data is not a serialized google.pubsub.v1.PubsubMessage"
    errors = {reason: f"{reason}: no" for reason in refused}
    errors |= {"bad": undecodable, "crowded": f"{undecodable}, or has more than 200 fields"}
    assert states(bench) == {"good": "sent", **dict.fromkeys(errors, "dead")}
    assert {row.id: row.last_error for row in bench.store.rows.values() if row.sent_at is None} == errors
    assert (attempts(bench), bench.count(m.DEAD)) == (5, 5)


def test_an_outage_records_no_attempt_and_affects_no_other_topic(bench: Bench) -> None:  # OUT-LOSS-4
    bench.insert(*[f"o{n}" for n in range(50)])
    bench.insert("i0", topic="invoices")
    bench.publisher.down[TOPIC] = AWAY
    for second in range(1, 60):
        bench.turns()
        assert states(bench)[f"i{second - 1}"] == "sent"
        assert bench.store.rows["o0"].available_at is None
        bench.insert(f"i{second}", topic="invoices")
        bench.wait(1)
    assert attempts(bench) == 0
    probes = [len(ids) for ids in bench.publisher.requests if ids[0].startswith("o")]
    assert 5 <= probes.count(1) <= 12
    assert len(probes) - probes.count(1) <= 2
    del bench.publisher.down[TOPIC]
    bench.run_for(11)
    assert bench.unsent() == []
    assert len(bench.publisher.ids()) == len(set(bench.publisher.ids()))
    assert bench.count(m.DEAD) == 0


def test_a_topic_that_is_back_within_an_hour_loses_no_task(bench: Bench) -> None:
    """However often its tasks failed, none is dead before it is a day old. Then all are sent and clean."""
    bench.insert(*[str(n) for n in range(30)], topic="missing", created_at=bench.store.now)
    bench.run_for(3600, step=5)
    assert max(row.attempts for row in bench.store.rows.values()) >= 2
    assert "dead" not in states(bench).values()
    bench.publisher.topics.add(MISSING)
    bench.run_for(2 * 3600, step=60)
    assert set(states(bench).values()) == {"sent"}
    assert attempts(bench) == 0
    assert sorted(bench.publisher.ids()) == sorted(bench.store.rows)


def test_a_failed_commit_records_no_attempt(bench: Bench) -> None:
    bench.insert("bad")
    bench.publisher.failing["bad"] = REFUSED
    bench.commits(StoreError("deadline exceeded"))
    assert bench.relay.turn().failed == 1
    assert (states(bench), bench.count(m.DEAD)) == ({"bad": "ready"}, 0)
    bench.turns()
    assert (states(bench), bench.count(m.DEAD)) == ({"bad": "dead"}, 1)


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize(
    ("failure", "before", "written", "counted"),
    [
        # Another worker recorded a failed attempt: it stands, and ours is not added.
        (ODD, {}, {"attempts": 4, "available_at": LATER}, (0, 0)),
        # Another worker sent the task: it is not dead.
        (REFUSED, {}, {"sent_at": NOON}, (0, 1)),
        # An operator gave the task more time: it is not dead, and is sent.
        (None, {"expires_at": NOON}, {"expires_at": None}, (1, 0)),
        # Another worker sent the task, too: both counters say so.
        (None, {}, {"sent_at": NOON - timedelta(seconds=1)}, (1, 1)),
        # Another worker sent it, an operator wants it sent again, and it failed since: it is published again.
        (None, {}, {"attempts": 1, "available_at": LATER, "times_sent": 1}, (1, 0)),
    ],
)
def test_a_change_between_two_transaction_attempts_is_kept(
    bench: Bench,
    failure: Failed | None,
    before: dict[str, Any],
    written: dict[str, Any],
    counted: tuple[int, int],
    *,
    refused: bool,
) -> None:
    """The outcome of the aborted or refused attempt says nothing about a row that another writer has changed since.

    The failed attempt of a refused commit is reported, but not written.
    """
    bench.insert("a", **before)
    if failure:
        bench.publisher.failing["a"] = failure

    def change() -> None:
        bench.change("a", **written)
        if refused:
            raise Refused("OUT_OF_RANGE")

    bench.abort_once(change)
    turns = bench.turns()
    bench.wait(0.1 if refused else 0)  # the batch marks again
    turns += bench.turns()
    later = "available_at" in written
    assert states(bench) == {"a": "retrying" if later else "sent"}
    assert {name: getattr(bench.store.rows["a"], name) for name in written} == written
    assert (bench.count(m.PUBLISHED), bench.count(m.ALREADY_PUBLISHED)) == (counted[0], 0 if refused else counted[1])
    assert sum(turn.recorded for turn in turns) == (refused and (failure is not None or "expires_at" in before))
    assert len(bench.publisher.ids()) == counted[0]
    assert len(bench.publisher.requests) == counted[0] + (failure is not None)
    bench.publisher.failing.clear()
    bench.wait(3600)
    bench.turns()
    assert states(bench) == {"a": "sent"}
    assert len(bench.publisher.ids()) == counted[0] + later


def test_a_failing_head_records_the_failure_and_defers_the_others(bench: Bench) -> None:
    """The head records one attempt. Then it goes alone, and the others follow when it is sent."""
    bench.line("a", "b", "c")
    bench.publisher.failing = {"a": ODD}
    bench.turns()
    assert bench.publisher.ids() == []
    rows = bench.store.rows
    assert [rows[id].attempts for id in "abc"] == [1, 0, 0]
    assert bench.store.claimed == {"a": 1, "b": 1, "c": 1}  # in one commit
    assert rows["a"].available_at == rows["b"].available_at == rows["c"].available_at
    assert (rows["a"].last_error, rows["c"].blocked_by) == ("data_loss: what was that", "a")
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
    assert states(bench) == {"a": "sent", "b": "dead", **dict.fromkeys("cde", "retrying")}
    assert [bench.store.rows[id].attempts for id in "abcde"] == [0, 1, 0, 0, 0]
    for id, seconds in {"c": 60, "d": 60, "e": 3600}.items():
        assert bench.waits(id) == pytest.approx(seconds, abs=1)
        assert bench.store.rows[id].blocked_by == "b"


def test_an_outage_defers_nothing(bench: Bench) -> None:
    bench.line("c", "b", "a")
    bench.publisher.down = {TOPIC: AWAY}
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
