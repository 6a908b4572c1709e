"""Marks before a publish, for tasks that are sent at most once, and marks that Spanner refuses."""

from collections.abc import Mapping
from datetime import timedelta
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest

from outbox.table.states import NEVER
from publishworker.spanner.write_errors import StoreError
from publishworker.telemetry import metrics as m
from publishworker.turn.in_flight import StuckBatch
from publishworker.types import Failed, RowChange
from tests.support.parts import Bench, SlowPublisher, claim_of
from tests.support.waiting import eventually

TOPIC = "projects/test-project/topics/orders"
LOST = Failed("deadline_exceeded", "no answer")
MISSING = Failed("not_found", "no topic")
NO_TOKEN = Failed("unavailable", "Getting metadata from plugin failed")  # as gRPC says it
INVALID = Failed("invalid_argument", "no")
NO_ANSWER = StoreError("deadline exceeded")


@pytest.mark.parametrize(
    ("commits", "landed", "failure", "published"),
    [
        # Whether the mark was committed is not known: if it was, the task is lost, and if not it is sent later.
        ([None, NO_ANSWER], True, None, []),
        ([None, NO_ANSWER], False, None, ["a", "b"]),
        # Pub/Sub has perhaps published it: it stays marked.
        ([], False, LOST, []),
    ],
)
def test_an_at_most_once_task_in_doubt_is_counted_and_not_published_again(
    bench: Bench, commits: list[Exception | None], landed: bool, failure: Failed | None, published: list[str]
) -> None:
    """The first commit belongs to the batch that detects the at-most-once tasks. No answer does not divide a batch."""
    bench.insert("a", "b", at_most_once=True)
    bench.store.failed_commits_land = landed
    bench.commits(*commits)
    bench.publisher.failing = dict.fromkeys("ab", failure) if failure else {}
    bench.turns(), bench.turns()
    assert bench.unsent() == []
    bench.publisher.failing.clear()
    bench.run_for(200, step=10)
    assert sorted(bench.publisher.ids()) == published
    assert bench.unsent() == []
    assert bench.store.claimed["a"] == (4 if published else 2)
    assert (bench.count(m.UNCONFIRMED), bench.count(m.UNCOMMITTED)) == (2, 0)


@pytest.mark.parametrize(("errors", "published"), [(1, ["a"]), (9, ["a"]), (10**6, [])])
def test_a_mark_that_cannot_be_undone_is_undone_later(bench: Bench, errors: int, published: list[str]) -> None:
    """Pub/Sub has refused the message. After 15 minutes the task is counted, because it stays marked."""
    bench.insert("a", at_most_once=True)
    bench.commits(None, None, *[NO_ANSWER] * errors)
    bench.publisher.failing = {"a": MISSING}
    bench.turns(), bench.turns()
    assert bench.unsent() == []
    bench.publisher.failing.clear()
    bench.run_for(1000, step=10)
    assert bench.publisher.ids() == published
    assert bench.unsent() == []
    assert bench.count(m.UNCONFIRMED) == (not published)


def test_a_task_that_becomes_dead_after_the_report_of_its_batch_is_counted(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """The commit that records the failure has no answer at first."""
    bench.insert("a", at_most_once=True)
    bench.commits(None, None, NO_ANSWER)
    bench.publisher.failing = {"a": INVALID}
    bench.run_for(10)
    assert bench.store.rows["a"].available_at == NEVER
    assert (bench.count(m.FAILED), bench.count(m.DEAD)) == (1, 1)
    assert "The task is dead" in caplog.text


@pytest.mark.parametrize(("is_answered", "gives_up"), [(True, False), (True, True), (False, False)])
def test_a_marked_task_is_counted_if_the_worker_ends_before_its_batch(
    bench: Bench, is_answered: bool, gives_up: bool
) -> None:
    """Pub/Sub has refused the message, but the mark is not undone, or Pub/Sub has not answered yet.

    The batch may have given up before, but no turn has read its report.
    """
    publisher = SlowPublisher("orders")
    publisher.failing, publisher.hanging = {"a": MISSING}, set() if is_answered else {TOPIC, "orders"}
    bench.relay = bench.another(publisher=publisher)
    bench.insert("a", at_most_once=True)
    bench.commits(None, None, *[NO_ANSWER] * 100)
    in_flight = bench.relay.in_flight
    eventually(lambda: bool(bench.relay.turn() and not bench.unsent()) and bool(in_flight.unreported) != is_answered)
    assert bench.count(m.UNCONFIRMED) == 0
    if gives_up:
        bench.relay.stop()
        [entry] = in_flight._running
        eventually(lambda: not (bench.wait(1), entry.delivery.unmarked)[1])
        eventually(lambda: not in_flight._reports.empty())
    in_flight.report_in_doubt()
    assert bench.count(m.UNCONFIRMED) == 1
    publisher.release.set()


@pytest.mark.parametrize("end", [StuckBatch, ZeroDivisionError])
def test_a_marked_task_is_counted_if_its_batch_is_stuck_or_fails(bench: Bench, end: type[Exception]) -> None:
    publisher = SlowPublisher("orders")
    publisher.hanging = {"orders"}
    if end is ZeroDivisionError:
        publisher.publish = mock.Mock(side_effect=end("a defect"))  # type: ignore[method-assign]  # a defect
    bench.relay = bench.another(publisher=publisher)
    bench.insert("a", at_most_once=True)

    def run() -> None:
        eventually(lambda: bench.relay.turn() and not bench.unsent())
        for _ in range(4):
            bench.relay.turn()
            bench.wait(45)

    with pytest.raises(end):
        run()
    assert bench.count(m.UNCONFIRMED) == 1
    publisher.release.set()


#: Two batches in flight, probes after 1, 2, 4, 8, 10 s; a worker without credentials loses no task.
@pytest.mark.parametrize(("failure", "max_lost"), [(LOST, 2 * 10 + 8), (NO_TOKEN, 0)])
def test_an_outage_loses_few_at_most_once_tasks(bench: Bench, failure: Failed, max_lost: int) -> None:
    bench.insert(*[str(n) for n in range(60)], at_most_once=True)
    bench.publisher.failing[TOPIC] = failure
    bench.run_for(30)
    lost = bench.count(m.UNCONFIRMED)
    assert lost <= max_lost
    bench.publisher.failing.clear()
    bench.run_for(12)
    assert bench.unsent() == []
    assert len(set(bench.publisher.ids())) == len(bench.publisher.ids()) == 60 - lost


def test_a_refusal_does_not_overwrite_a_later_change(bench: Bench) -> None:
    """An operator has set SentAt to NULL, or another worker has sent the task again: their change stays."""
    bench.insert("a", at_most_once=True)
    bench.publisher.failing["a"] = MISSING
    claim, claims = bench.store.claim, []

    def claim_and_be_overtaken(*arguments: Any, **options: Any) -> object:
        claims.append(arguments)
        if len(claims) == 3:  # after the first batch and the mark: the return
            bench.change("a", sent_at=bench.store.now + timedelta(seconds=1))
        return claim(*arguments, **options)

    bench.store.claim = claim_and_be_overtaken
    bench.turns()
    assert len(claims) == 3
    assert bench.store.rows["a"].sent_at is not None
    assert bench.store.rows["a"].attempts == 0


def test_an_undecodable_or_expired_task_is_dead_without_a_mark(bench: Bench) -> None:
    """Nothing is lost. A task that Pub/Sub refuses was marked before. All dead tasks are counted."""
    bench.store.insert("bad", "orders", b"\xff\xff", at_most_once=True)
    bench.insert("late", at_most_once=True, expires_at=bench.store.now)
    bench.insert("refused", "good", at_most_once=True)
    bench.publisher.failing["refused"] = INVALID
    bench.turns()
    rows = bench.store.rows
    assert [rows[id].available_at == NEVER for id in ("bad", "late", "refused", "good")] == [True, True, True, False]
    assert rows["bad"].sent_at is rows["late"].sent_at is rows["refused"].sent_at is None
    assert bench.publisher.ids() == ["good"]
    assert bench.count(m.DEAD) == 3
    # Only a task that was marked is claimed a third time, to remove the mark.
    assert [bench.store.claimed[id] for id in ("bad", "late")] == [2, 2]


def test_no_task_is_marked_after_a_stop(bench: Bench) -> None:
    bench.insert("a", at_most_once=True)
    stop = iter([False, True])
    bench.relay.turn(lambda: next(stop, True))
    bench.relay.in_flight.start(claim_of("orders", "a"))  # a batch that finds the task during the stop
    bench.relay.finish()
    assert bench.unsent() == ["a"]


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
    bench.insert("bad")
    bench.line("failing", key="of failing")  # in a request of its own
    bench.line("both", key="of both")
    bench.line("head", available_at=NEVER)
    bench.line("behind")
    bench.store.refused.update(["bad", "both", "behind"])
    bench.publisher.failing = dict.fromkeys(["failing", "both"], Failed("data_loss", "no"))
    assert sum(turn.recorded for turn in bench.turns()) == 2
    bench.wait(0.1)  # the batch marks again
    assert bench.store.rows["failing"].attempts == 1
    assert (bench.count(m.DEFERRED), len(bench.publisher.requests)) == (0, 3)
    bench.relay.in_flight.collect()
    assert [id for id in ("bad", "both", "behind") if f"The row of task {id} of" not in caplog.text] == []
    del bench.publisher.failing["failing"]
    bench.run_for(10)
    assert bench.store.rows["failing"].sent_at is not None  # although its first batch still marks refused rows
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


def test_a_refused_at_most_once_task_does_not_delay_a_shutdown() -> None:
    """It has no mark to undo, so the worker waits for nothing."""
    bench = Bench(shutdown_seconds=15)
    bench.insert("bad", at_most_once=True)
    bench.store.refused.add("bad")
    bench.turns()
    assert len(bench.relay.in_flight) == 1
    began = bench.seconds
    bench.relay.finish()
    assert bench.seconds - began < 1


@pytest.mark.parametrize("once", [False, True])
def test_while_every_mark_is_refused_few_rows_are_tried_alone(caplog: pytest.LogCaptureFixture, *, once: bool) -> None:
    """Each task is sent once, and named once, also when other rows can be written again."""
    bench = Bench(size=50)
    bench.insert(*[str(number) for number in range(50)], at_most_once=once)
    bench.store.refused.update(bench.store.rows)
    bench.run_for(15)
    bench.insert("good", topic="invoices")
    bench.run_for(15)
    named = [message for message in caplog.messages if "cannot be changed" in message]
    assert len(named) == len(set(named)) == 50
    bench.run_for(150)
    assert sum(bench.store.claimed.values()) < 400
