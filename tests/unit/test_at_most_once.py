"""Tasks that are marked before they are published: a loss rather than a duplicate, and only in one window."""

from datetime import timedelta
from typing import Any

import pytest

from outbox.table.states import NEVER
from publishworker.spanner.write_errors import StoreError
from publishworker.telemetry import metrics as m
from publishworker.turn.in_flight import StuckBatch
from publishworker.types import Failed
from tests.support.parts import claim_of
from tests.support.relay_bench import Bench, SlowPublisher
from tests.support.waiting import eventually

TOPIC = "projects/test-project/topics/orders"
LOST = Failed("deadline_exceeded", "no answer")
MISSING = Failed("not_found", "no topic")
INVALID = Failed("invalid_argument", "no")
NO_ANSWER = StoreError("deadline exceeded")


@pytest.mark.parametrize(
    ("commits", "landed", "failure", "published"),
    [
        # Whether the mark was committed is not known: if it was, the task is lost, and if not it is sent later.
        ([None, NO_ANSWER], True, None, []),
        ([None, NO_ANSWER], False, None, ["a"]),
        # Pub/Sub has perhaps published it: it stays marked.
        ([], False, LOST, []),
    ],
)
def test_an_at_most_once_task_in_doubt_is_counted_and_not_published_again(
    bench: Bench, commits: list[Exception | None], landed: bool, failure: Failed | None, published: list[str]
) -> None:
    """The first commit belongs to the batch that detects the at-most-once task."""
    bench.insert("a", at_most_once=True)
    bench.store.failed_commits_land = landed
    bench.commits(*commits)
    bench.publisher.failing = {"a": failure} if failure else {}
    bench.turns(), bench.turns()
    assert bench.unsent() == []
    bench.publisher.failing.clear()
    bench.run_for(200, step=10)
    assert bench.publisher.ids() == published
    assert bench.unsent() == []
    assert (bench.count(m.UNCONFIRMED), bench.count(m.UNCOMMITTED)) == (1, 0)


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
    in_flight = bench.relay._in_flight
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


def test_a_marked_task_is_counted_if_its_batch_is_stuck(bench: Bench) -> None:
    publisher = SlowPublisher("orders")
    publisher.hanging = {"orders"}
    bench.relay = bench.another(publisher=publisher)
    bench.insert("a", at_most_once=True)
    eventually(lambda: bench.relay.turn() and not bench.unsent())
    for _ in range(3):
        bench.relay.turn()
        bench.wait(45)
    with pytest.raises(StuckBatch):
        bench.relay.turn()
    assert bench.count(m.UNCONFIRMED) == 1
    publisher.release.set()


def test_a_task_not_tried_before_the_deadline_is_unsent_again(bench: Bench) -> None:
    bench.insert("late", "early", at_most_once=True)
    bench.publisher.out_of_time.add("late")
    bench.relay.turn(), bench.relay.turn(), bench.relay.turn()
    assert bench.publisher.ids() == ["early"]
    assert bench.unsent() == ["late"]
    assert (bench.store.rows["late"].attempts, bench.store.rows["late"].last_error) == (0, None)
    bench.publisher.out_of_time.clear()
    bench.turns()
    assert bench.unsent() == []
    assert bench.count(m.UNCONFIRMED) == 0


#: Two batches in flight, probes after 1, 2, 4, 8, 10 s; a worker without credentials loses no task.
@pytest.mark.parametrize(("failure", "max_lost"), [(LOST, 2 * 10 + 8), (Failed("credentials", "no token"), 0)])
def test_an_outage_loses_few_at_most_once_tasks(bench: Bench, failure: Failed, max_lost: int) -> None:
    bench.insert(*[str(n) for n in range(60)], at_most_once=True)
    bench.publisher.down[TOPIC] = failure
    bench.run_for(30)
    lost = bench.count(m.UNCONFIRMED)
    assert lost <= max_lost
    bench.publisher.down.clear()
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
    bench.relay._in_flight.start(claim_of("orders", "a"))  # a batch that finds the task during the stop
    bench.relay.finish()
    assert bench.unsent() == ["a"]
