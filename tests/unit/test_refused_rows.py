"""Rows that Spanner refuses to change: their tasks wait, and all others are sent. On the fakes."""

from collections.abc import Mapping
from itertools import pairwise

import pytest

from outbox.table.states import NEVER
from publishworker.spanner.write_errors import StoreError
from publishworker.telemetry import metrics as m
from publishworker.types import Failed, RowChange
from tests.support.relay_bench import Bench


def attempts(bench: Bench, id: str, seconds: int) -> list[float]:
    """Run for so long; return the times at which the task was claimed."""
    times, before = [], bench.store.claimed[id]
    for _ in range(seconds):
        bench.turns()
        if bench.store.claimed[id] > before:
            times.append(bench.seconds)
        before = bench.store.claimed[id]
        bench.wait(1)
    return times


@pytest.mark.parametrize("once", [False, True])
def test_a_refused_task_is_tried_less_and_less_often(
    bench: Bench, caplog: pytest.LogCaptureFixture, *, once: bool
) -> None:
    """It is published once at most, alone in its topic too, and sent when its row is repaired."""
    bench.insert("bad", topic="invoices", at_most_once=once)
    bench.store.refused.add("bad")
    times = attempts(bench, "bad", 400)
    pauses = [after - before for before, after in pairwise(times)]
    assert all(later >= earlier - 1 for earlier, later in pairwise(pauses))  # jitter
    assert pauses[-1] >= 29
    assert pauses[0] == 1 or once
    assert bench.publisher.ids() == ([] if once else ["bad"])
    assert "task bad of topic invoices cannot be changed: OUT_OF_RANGE" in caplog.text
    bench.store.refused.clear()
    bench.run_for(300, step=10)
    assert (bench.publisher.ids(), bench.unsent(), bench.count(m.UNCONFIRMED)) == (["bad"], [], 0)


def test_a_failure_beside_refused_rows_is_recorded_in_the_first_turn(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """The failure of a refused row is reported, too. Each refused row has a line."""
    bench.insert("bad", "failing", "both")
    bench.line("head", available_at=NEVER)
    bench.line("behind")
    bench.store.refused.update(["bad", "both", "behind"])
    bench.publisher.failing = dict.fromkeys(["failing", "both"], Failed("data_loss", "no"))
    assert sum(turn.recorded for turn in bench.turns()) == 2
    bench.wait(0.1)  # the batch marks again
    assert bench.store.rows["failing"].attempts == 1
    assert (bench.count(m.DEFERRED), len(bench.publisher.requests)) == (0, 1)
    bench.relay._in_flight.collect()
    assert [id for id in ("bad", "both", "behind") if f"The row of task {id} of" not in caplog.text] == []
    bench.store.refused.clear()
    bench.publisher.failing.clear()
    bench.run_for(120, step=10)
    assert bench.unsent() == ["head", "behind"]
    assert sorted(bench.publisher.ids()) == ["bad", "both", "failing"]


def test_a_row_whose_commits_never_answer_holds_back_no_other_mark(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While other transactions commit, the tasks of its batch are marked one by one. No message is sent twice."""

    def refuse(marks: Mapping[str, RowChange]) -> None:
        if "bad" in marks:
            raise StoreError("DEADLINE_EXCEEDED")

    monkeypatch.setattr(bench.store, "refuse", refuse)
    bench.insert("a", "bad", "z")
    for number in range(30):
        bench.insert(f"other {number}", topic="invoices")
        bench.turns()
        bench.wait(1)
    assert bench.unsent() == ["bad"]
    assert sorted(bench.publisher.ids())[-2:] == ["other 9", "z"]
    assert len(bench.publisher.ids()) == 33


@pytest.mark.parametrize("bad", ["a", "b", "c"])
@pytest.mark.parametrize("failure", [None, "data_loss", "invalid_argument"])
@pytest.mark.parametrize("once", [False, True])
def test_a_refused_row_does_not_change_the_order_of_its_key(
    bench: Bench, bad: str, failure: str | None, *, once: bool
) -> None:
    """Neither its own failure, nor those of others, nor a deferral that cannot be written."""
    bench.line("a", "b", "c", at_most_once=once)
    bench.insert("loose")
    bench.store.refused.add(bad)
    bench.publisher.failing = {} if failure is None else {"b": Failed(failure, "no")}
    bench.run_for(60)
    published = bench.publisher.ids()
    assert "loose" in published
    assert len(published) == len(set(published))
    bench.store.refused.clear()
    bench.run_for(60)
    bench.publisher.failing.clear()
    for id in "abc":
        if bench.store.rows[id].available_at == NEVER:
            bench.change(id, available_at=None, attempts=0)
    bench.run_for(4000, step=50)
    lost = bench.count(m.UNCONFIRMED)  # at most once, and Pub/Sub may have published it
    assert bench.published(*"abc") == [id for id in "abc" if not (lost and id == "b")]
    assert bench.unsent() == []


@pytest.mark.parametrize("once", [False, True])
def test_while_every_mark_is_refused_few_rows_are_tried_alone(*, once: bool) -> None:
    """Each task is sent once."""
    bench = Bench(size=100)
    bench.insert(*[str(number) for number in range(100)], at_most_once=once)
    bench.store.refused.update(bench.store.rows)
    bench.run_for(30)
    assert len(bench.publisher.ids()) == (0 if once else 100)
    assert sum(bench.store.claimed.values()) < 600
    bench.store.refused.clear()
    bench.run_for(120)
    assert sorted(bench.publisher.ids()) == sorted(bench.store.rows)


def test_a_refused_at_most_once_task_does_not_delay_a_shutdown() -> None:
    """It has no mark to undo, so the worker waits for nothing."""
    bench = Bench(shutdown_seconds=15)
    bench.insert("bad", at_most_once=True)
    bench.store.refused.add("bad")
    bench.turns()
    assert len(bench.relay._in_flight) == 1
    began = bench.seconds
    bench.relay.finish()
    assert bench.seconds - began < 1
