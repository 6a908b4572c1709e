"""Tasks behind a head that is not due, between fakes: deferred, and ready again when the head has gone."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from outbox.table.states import NEVER
from publishworker.spanner.write_errors import StoreError
from publishworker.telemetry import metrics as m
from publishworker.types import Failed
from tests.support.relay_bench import Bench, overtake

UNKNOWN = Failed("data_loss", "no")
REFUSED = Failed("invalid_argument", "no")
HOUR = timedelta(hours=1)


def block(bench: Bench, tasks: int) -> list[str]:
    ids = [f"t{n:02}" for n in range(tasks)]
    bench.line("head", available_at=NEVER, attempts=1)
    bench.line(*ids)
    return ids


@pytest.mark.parametrize("state", ["scheduled", "retrying", "dead"])
def test_a_head_that_is_not_due_blocks_only_its_key(bench: Bench, state: str) -> None:
    """The tasks behind it are deferred to its time, and appear neither failed nor dead.

    The first and the last return after a minute, because the head may be deleted meanwhile, the others after an hour.
    """
    at = NEVER if state == "dead" else bench.store.now + timedelta(seconds=90)
    bench.line("head", available_at=at, attempts=0 if state == "scheduled" else 3)
    bench.line("a", "b", "c")
    bench.line("later", available_at=bench.store.now + 9 * HOUR)
    bench.line("other", key="l")
    bench.insert("x")
    bench.turns()
    assert sorted(bench.publisher.ids()) == ["other", "x"]
    for id, seconds in {"a": 60, "b": 3600 if state == "dead" else 90, "c": 60}.items():
        row = bench.store.rows[id]
        assert bench.waits(id) == pytest.approx(seconds, abs=1)
        assert (row.attempts, row.blocked_by) == (0, "head")
    assert bench.waits("later") == pytest.approx(9 * 3600, abs=1)
    assert bench.count(m.DEFERRED) == 3
    assert bench.relay.turn().polled == 0


def test_a_blocked_key_costs_one_transaction_a_minute(bench: Bench) -> None:
    """However many tasks are behind its head. It defers two of them."""
    block(bench, 200)
    bench.turns(40)
    deferred, claimed = bench.count(m.DEFERRED), bench.store.claimed["head"]
    bench.run_for(610, step=10)
    assert (bench.count(m.DEFERRED) - deferred, bench.store.claimed["head"] - claimed) == (20, 10)


@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_task_that_was_deferred_while_a_batch_had_lost_its_locks_is_released(bench: Bench, is_aborted: bool) -> None:
    """The batch has published the head, and its claim does not name the task, which was registered after the poll."""

    def defer() -> None:
        """Another worker has recorded a failed attempt of the head."""
        in_an_hour = bench.store.now + HOUR
        bench.change("head", attempts=1, available_at=in_an_hour)
        bench.line("next", available_at=in_an_hour, blocked_by="head")

    bench.line("head")
    if is_aborted:
        bench.abort_once(defer)
    else:
        bench.commits(StoreError("no answer"))
    bench.turns()
    if not is_aborted:
        defer()
    bench.run_for(2)
    assert bench.publisher.ids() == ["head", "next"]


def test_deferred_tasks_are_sent_when_their_head_expires(bench: Bench) -> None:
    """They wait neither for the rest of their hour nor for the head's backoff beyond its expiry."""
    in_a_minute = bench.store.now + timedelta(seconds=60)
    bench.line("dead", "a", key="k")
    bench.line("failing", "b", key="l")
    bench.line("seen later", key="m", expires_at=in_a_minute, available_at=NEVER, attempts=1)
    bench.line("c", key="m")
    for id in ("dead", "failing"):
        bench.change(id, expires_at=in_a_minute)
    bench.publisher.failing = {"dead": REFUSED, "failing": UNKNOWN}
    bench.relay = bench.another(retries={"initial": 900})
    bench.turns()
    assert bench.publisher.ids() == []
    bench.wait(61)
    bench.turns()
    assert sorted(bench.publisher.ids()) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("act", "wait", "sent"),
    [
        (lambda bench: bench.change("head", available_at=None), None, ["head", "a"]),  # retried
        (lambda bench: bench.change("head", available_at=None, at_most_once=True), None, ["head", "a"]),
        (lambda bench: bench.store.rows.pop("head"), None, ["a"]),
        (lambda bench: bench.change("head", available_at=NEVER), None, ["a"]),  # and dead tasks are skipped
        (lambda bench: bench.change("a", available_at=bench.store.now + 9 * HOUR), 9 * 3600, []),
    ],
)
def test_nothing_is_deferred_behind_a_head_that_has_changed(
    act: Callable[[Bench], object], wait: float | None, sent: list[str]
) -> None:
    """The locked rows decide: if the head is sendable or gone, or the task is due later, nothing is written."""
    bench = Bench(skip_dead=True)
    bench.line("head", "a")
    bench.change("head", available_at=bench.store.now + HOUR)
    overtake(bench, lambda: act(bench))
    bench.relay.turn()
    assert bench.count(m.DEFERRED) == 0
    assert bench.waits("a") == (wait and pytest.approx(wait, abs=1))
    bench.turns()
    assert bench.publisher.ids() == sent


@pytest.mark.parametrize(("batches", "max_turns"), [(1, 40), (2, 20), (8, 5)])
def test_an_endless_blocked_key_delays_no_other_task(batches: int, max_turns: int) -> None:
    """Deferring uses a part of the places, even if there is only one and the key gets new tasks."""
    bench = Bench(batches=batches)
    block(bench, 300)
    bench.insert("x", topic="invoices")
    turns = 0
    while "x" not in bench.publisher.ids():
        bench.relay.turn()
        bench.line(*(f"u{turns}-{n}" for n in range(10)))
        turns += 1
        assert turns < max_turns


def test_deferring_does_not_count_as_in_flight_for_a_topics_limit() -> None:
    """Deferring waits for a lock, so another task can be the one in flight."""
    bench = Bench(batches=8)
    bench.store.control("orders", max_in_flight=1)
    block(bench, 1)
    bench.relay.turn()
    with bench.store.locked("head"):
        bench.relay.turn()
        bench.insert("x")
        for _ in range(3):
            bench.relay.turn()
        assert bench.publisher.ids() == ["x"]
    bench.relay.finish()
    assert bench.count(m.DEFERRED) == 1
