"""Turns and single batches on the fake store and publisher: the outcome of each task, marks, reports and counters."""

import gc
import logging
import time
import weakref
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outbox.message import RawPubsubMessage
from outbox.table.states import NEVER
from publishworker.delivery.delivery import Delivery
from publishworker.host import Threads
from publishworker.spanner.write_errors import StoreError
from publishworker.telemetry import metrics as m
from publishworker.turn import in_flight
from publishworker.turn.in_flight import StuckBatch
from publishworker.types import CLAIM, COMMIT, PUBLISH, Cancelled, Failed, Kind, Next, Published
from tests.support.fakes import Abort
from tests.support.parts import Bench, SlowPublisher, claim_of, overtake
from tests.support.waiting import eventually

ORDERS, INVOICES = "projects/test-project/topics/orders", "projects/test-project/topics/invoices"
NO_ANSWER = StoreError("deadline exceeded")
LATER = datetime(2026, 1, 1, 13, tzinfo=UTC)


@pytest.mark.parametrize(
    ("act", "published", "already"),
    [
        (lambda bench: bench.change("a", sent_at=bench.store.now), [("b", ORDERS)], 1),
        (lambda bench: bench.change("a", available_at=LATER), [("b", ORDERS)], 0),
        (lambda bench: bench.store.delete("a"), [("b", ORDERS)], 0),
        (lambda bench: bench.change("a", topic="invoices"), [("a", INVOICES), ("b", ORDERS)], 0),
    ],
    ids=["sent", "rescheduled", "deleted", "moved"],
)
def test_the_locked_row_decides(
    bench: Bench, act: Callable[[Bench], object], published: list[tuple[str, str]], already: int
) -> None:  # OUT-ORDER-2
    """Another worker or an operator changed the task between the poll and the lock: the poll's version is ignored."""
    bench.insert("a", "b")
    overtake(bench, lambda: act(bench))
    turns = bench.turns() + bench.turns()
    assert sorted((id, topic) for topic, id, _ in bench.publisher.published) == published
    assert bench.count(m.ALREADY_PUBLISHED) == sum(turn.already_sent for turn in turns) == already
    assert bench.count(m.FAILED) == 0
    waiting = [(row.attempts, row.available_at) for row in bench.store.rows.values() if row.sent_at is None]
    assert waiting in ([], [(0, LATER)])


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("landed", [False, True])
def test_a_failed_commit_is_marked_later_without_publishing_again(bench: Bench, landed: bool, stop: bool) -> None:
    """Whether or not the commit was applied: one publish, counted as uncommitted, marked by the next turn or a stop."""
    bench.insert("a")
    bench.store.failed_commits_land = landed
    bench.commits(NO_ANSWER)
    bench.relay.turn()
    assert not bench.relay.turn().made_progress
    assert bench.unsent() == ([] if landed else ["a"])
    bench.relay.finish() if stop else bench.wait(1)
    bench.turns()
    assert bench.publisher.ids() == ["a"]
    assert bench.unsent() == []
    assert (bench.count(m.UNCOMMITTED), bench.count(m.ALREADY_PUBLISHED)) == (1, 0)


def test_a_turn_is_unfinished_until_its_tasks_are_settled(bench: Bench) -> None:
    """No insert and no due time would report them after a long pause."""
    bench.insert("a")
    bench.commits(*[NO_ANSWER] * 100)
    for seconds in (0, 31, 31):  # published; then only marks and probes, which fail as well
        bench.wait(seconds)
        assert bench.relay.turn().next is not Next.LATER
    bench.commits()
    bench.wait(31)
    eventually(lambda: bench.turns()[-1].next is Next.LATER)  # when the thread of the batch has ended
    assert bench.unsent() == []
    bench.relay.in_flight.start(claim_of("orders", "a"))  # a batch that ends without a write between two turns
    eventually(lambda: not bench.relay.in_flight._reports.empty())
    assert bench.relay.turn().next is Next.SOON


def test_the_next_due_task_is_that_of_an_available_topic(bench: Bench) -> None:
    """The next poll then reads due tasks."""
    bench.insert("a")
    bench.turns()
    assert bench.relay.find_next_due() is None
    bench.insert("later", available_at=bench.store.now + timedelta(hours=1))
    assert bench.relay.find_next_due() == pytest.approx(3600)
    bench.turns()
    assert bench.store.polls[-1].due
    bench.store.control("orders", paused=True)
    bench.wait(60)
    bench.turns()
    assert bench.relay.find_next_due() is None


def test_refused_commits_cause_no_stream_of_duplicates(bench: Bench) -> None:
    """Each of the two batches keeps its place and publishes nothing new. The turns go on, so that heartbeats do."""
    bench.insert("a", "b", "c")
    refused = StoreError("no permission to update")

    def refuse() -> None:
        raise refused

    bench.store.before_commit = refuse
    bench.turns()
    assert sorted(bench.publisher.ids()) == ["a", "b", "c"]
    bench.insert(*[f"later{n}" for n in range(30)])
    for _ in range(61):
        bench.relay.turn()
        bench.wait(1)
    assert len(bench.publisher.ids()) == 3 + 10
    assert bench.relay.turn().next is Next.SOON  # no busy loop
    bench.store.before_commit = lambda: None
    bench.run_for(10)
    assert bench.unsent() == []
    assert sorted(bench.publisher.ids()) == sorted(bench.store.rows)


def test_a_stop_during_the_poll_claims_no_task(bench: Bench) -> None:
    bench.insert("a")
    assert bench.relay.turn(lambda: True).polled == 1
    assert bench.publisher.ids() == []


@pytest.mark.parametrize("stop", [False, True])
def test_a_batch_that_does_not_end_ends_the_worker(
    slow: SlowPublisher, monkeypatch: pytest.MonkeyPatch, stop: bool
) -> None:
    """A turn or a stop raises an error about it; the other batches of the process still end, and are counted."""
    monkeypatch.setattr(in_flight, "WATCH_SECONDS", 0.001)
    slow.hanging = {"invoices"}
    bench = Bench(publisher=slow, progress=lambda: bench.wait(10))
    bench.insert("stuck", topic="invoices")
    bench.insert("good")
    while len(bench.relay.in_flight) < 2 and not bench.count(m.PUBLISHED):
        bench.relay.turn()
    assert bench.relay.in_flight.utilization in (0.5, 1)
    with pytest.raises(StuckBatch, match="Batch of 1 task of topic invoices has begun no transaction"):
        bench.relay.finish() if stop else [(bench.relay.turn(), bench.wait(10)) for _ in range(20)]
    assert bench.unsent() == ["stuck"]
    assert bench.relay.finish().in_flight == 0
    assert bench.count(m.PUBLISHED) == 1


def test_a_process_that_was_paused_has_no_stuck_batch(slow: SlowPublisher) -> None:
    """Its batch was paused as well, so it gets time to end. A batch that ends after the last turn is counted."""
    slow.hanging = {"orders"}
    bench = Bench(publisher=slow)
    bench.insert("a")
    for seconds in (0, 0, 0, 3600):
        bench.wait(seconds)
        bench.relay.turn()
    slow.release.set()
    assert bench.relay.finish().published == bench.count(m.PUBLISHED) == 1


@pytest.mark.parametrize("seconds", [0.0, 0.15])
def test_a_defect_is_raised_and_the_other_batches_end(slow: SlowPublisher, seconds: float) -> None:
    """And are counted, whether they end before or after the defect."""
    publish = slow.publish

    def fail(topic: str, *arguments: Any) -> Any:
        if topic.endswith("invoices"):
            time.sleep(seconds)
            raise ZeroDivisionError
        return publish(topic, *arguments)

    slow.seconds, slow.publish = 0.05, fail  # type: ignore[method-assign]  # a defect
    bench = Bench(publisher=slow)
    bench.insert("a", topic="invoices")
    bench.insert("b")
    with pytest.raises(ZeroDivisionError):
        bench.turns()
    bench.relay.finish()
    assert (bench.unsent(), bench.count(m.PUBLISHED), bench.count(m.UNCONFIRMED)) == (["a"], 1, 0)


def test_finished_batches_are_counted_though_polls_fail(
    bench: Bench, slow: SlowPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise an outage of minutes would lose the outcome, and the batch would seem stuck."""
    caplog.set_level(logging.INFO, "publishworker")
    bench.insert("a", "b", topic="invoices")
    slow.hanging = {"invoices"}
    relay = bench.another(publisher=slow)
    eventually(lambda: (relay.turn(), len(relay.in_flight))[1])
    slow.release.set()
    eventually(lambda: not bench.unsent())
    bench.store.away = True
    for _ in range(20):
        bench.wait(30)
        with pytest.raises(StoreError):
            relay.turn()
    assert len(relay.in_flight) == 0
    assert bench.count(m.PUBLISHED) == 2
    bench.store.away = False
    relay.turn()
    [summary] = [each for each in caplog.messages if each.startswith("In the last")]
    assert summary.endswith(": 2 tasks published")
    bench.insert("c")
    relay.turn(), relay.turn(), relay.finish()
    assert caplog.messages[-1].endswith(": 1 task published")


@pytest.mark.parametrize(
    "act",
    [
        lambda bench: (bench.commits(*[NO_ANSWER] * 99), bench.wait(901), bench.commits()),  # 15 minutes later
        lambda bench: bench.insert("a", created_at=bench.store.now),  # purged, and registered again
        lambda bench: bench.change("a", times_sent=1),  # marked by another worker, and reset by `outbox retry`
    ],
    ids=["old", "registered again", "reset"],
)
def test_an_old_or_changed_row_in_doubt_is_published_again(
    bench: Bench, act: Callable[[Bench], None]
) -> None:  # OUT-LOSS-3
    """It could not be marked for too long, or is no longer what was published: a duplicate, never a loss."""
    bench.insert("a")
    bench.commits(NO_ANSWER)
    bench.relay.turn(), bench.relay.turn()
    assert (bench.publisher.ids(), bench.unsent()) == (["a"], ["a"])
    act(bench)
    bench.run_for(10)
    assert bench.publisher.ids() == ["a", "a"]
    assert bench.unsent() == []


HOUR = timedelta(hours=1)


def batch_of(bench: Bench, *ids: str, **claim: Any) -> Delivery:
    return bench.relay.in_flight._delivery_of(claim_of("orders", *ids, **claim))


def test_a_batch_reports_its_phases_and_how_long_its_tasks_waited(bench: Bench) -> None:
    """By Spanner's clock up to the lock, then by the worker's. An aborted attempt counts towards the claim."""
    now, aborts, publish = bench.store.now, [Abort()], bench.publisher.publish

    def commit() -> None:
        bench.seconds += 3
        if aborts:
            raise aborts.pop()

    def slow_publish(*arguments: Any) -> Any:
        bench.seconds += 2
        return publish(*arguments)

    bench.store.before_commit, bench.publisher.publish = commit, slow_publish
    bench.insert("ready", created_at=now - HOUR)
    bench.insert("due", created_at=now - 9 * HOUR, available_at=now - 2 * HOUR)
    bench.insert("fresh", created_at=now - timedelta(seconds=0.25))
    bench.insert("early", created_at=now + HOUR)  # no task has waited for less than no time
    retried = {"available_at": now, "due_at": now - 3 * HOUR, "attempts": 8}
    bench.insert("retried", created_at=now - 9 * HOUR, **retried)
    result = batch_of(bench, "ready", "due", "fresh", "early", "retried").deliver()
    assert result.aborted == 1
    assert result.phases == {CLAIM: 3, PUBLISH: 2, COMMIT: 3}
    assert result.latencies == {"ready": 3602, "due": 7202, "fresh": 2.25, "early": 0, "retried": 10802}
    bench.insert("once", created_at=bench.store.now - HOUR, at_most_once=True)
    assert batch_of(bench, "once", kind=Kind.MARK_FIRST).deliver().latencies == {"once": 3605}
    bench.store.away = True
    result = batch_of(bench, "a").deliver()
    assert result.error is not None
    assert result.phases.keys() == {CLAIM}


@pytest.mark.parametrize("errors", [[Abort()], [StoreError("no answer")], [Abort(), StoreError("no answer")]])
def test_a_task_that_is_cancelled_after_its_publish_is_reported_once(errors: list[Exception]) -> None:
    """With its message ID, by the next run of the transaction or when it is marked again, also if the ID is reused.

    A cancelled row that is still there is marked. A restored one is in doubt like any other, and is not reported.
    """
    bench = Bench(threads=Threads())
    bench.insert("gone", "again", "cancelled", "reset", "restored", "stays")
    bench.insert("never sent", available_at=bench.store.now + HOUR)

    def commit() -> None:
        if errors:
            for id in {"gone", "again", "never sent"} & bench.store.rows.keys():
                bench.store.delete(id)
            bench.insert("again", created_at=bench.store.now)
            bench.change("cancelled", sent_at=bench.store.now, cancelled_by="an operation")
            bench.change("reset", cancelled_by="application")
            raise errors.pop(0)

    bench.store.before_commit = commit
    batch = batch_of(bench, "gone", "again", "cancelled", "reset", "restored", "stays", "never sent")
    delivered = batch.deliver()
    later = [each for each in batch.mark_again() if isinstance(each, Cancelled)]
    found = [item for each in (delivered.cancelled, *(each.tasks for each in later)) for item in each.items()]
    messages = {id: answer.message_id for id, answer in delivered.answers.items() if isinstance(answer, Published)}
    who = {"gone": None, "again": None, "cancelled": "an operation", "reset": "application"}
    assert sorted(found) == sorted((id, (messages[id], by)) for id, by in who.items())
    assert set(delivered.uncommitted()) == (set(messages) if later else set())
    for id in ("cancelled", "reset", "restored", "stays"):
        row = bench.store.rows[id]
        assert (row.sent_at is not None, row.cancelled_by, row.times_sent) == (True, None, 1)
    assert bench.store.rows["again"].sent_at is None


def test_a_cancelled_task_that_is_made_unsent_is_ended_and_not_published() -> None:  # OUT-CANCEL-1
    """Whatever its kind, and also before later tasks of its key, which it does not block."""
    bench = Bench(threads=Threads())
    bench.insert("a", cancelled_by="an operation", last_error="an error")
    bench.insert("once", cancelled_by="an operation", at_most_once=True)
    bench.insert("dead", ordering_key="k", cancelled_by="application", available_at=NEVER)
    bench.insert("next", ordering_key="k", created_at=bench.store.now)
    bench.turns()
    assert bench.publisher.ids() == ["next"]
    assert not bench.store.unsent_rows()
    assert {row.times_sent for row in bench.store.rows.values() if row.cancelled_by} == {0}
    assert bench.store.rows["a"].last_error == "an error"


def test_a_cancelled_task_is_named_whatever_other_rows_wait_for() -> None:
    """Spanner refuses the mark of another row of its batch."""
    bench = Bench(threads=Threads())
    bench.insert("refused", "cancelled")
    bench.store.refused.add("refused")

    def commit() -> None:
        bench.change("cancelled", sent_at=bench.store.now, cancelled_by="an operation")
        bench.store.before_commit = lambda: None
        raise StoreError("no answer")

    bench.store.before_commit = commit
    batch = batch_of(bench, "refused", "cancelled")
    assert batch.deliver().uncommitted() == ["cancelled", "refused"]
    first = next(each for each in batch.mark_again() if isinstance(each, Cancelled))
    assert [*first.tasks] == ["cancelled"]
    assert bench.store.rows["refused"].sent_at is None


def test_a_cancelled_task_is_named_if_its_mark_was_not_answered_and_it_was_reset_since() -> None:
    bench = Bench(threads=Threads())
    bench.insert("a")
    changes: list[dict[str, Any]] = [
        {"sent_at": bench.store.now, "cancelled_by": "an operation"},
        {"cancelled_by": None, "times_sent": 1, "sent_at": None},
    ]

    def commit() -> None:
        if changes:
            bench.change("a", **changes.pop(0))
            raise StoreError("no answer")

    bench.store.before_commit = commit
    batch = batch_of(bench, "a")
    batch.deliver()
    [found] = [each for each in batch.mark_again() if isinstance(each, Cancelled)]
    assert found.tasks["a"].by == "an operation"
    assert bench.store.rows["a"].sent_at is None  # it is published again


@pytest.mark.parametrize("bad", ["bad", "last"])
def test_a_divided_batch_writes_each_part(bad: str) -> None:
    """A part also locks the task behind it, and writes its change. The next part keeps this change."""
    bench = Bench(threads=Threads())
    bench.publisher.failing = {"head": Failed("data_loss", "no")}
    for key, ids in {"k": ("old", "older", "bad"), "l": ("head", "behind", "last")}.items():
        for id in ids:
            bench.insert(id, ordering_key=key, expires_at=bench.store.now if "old" in id else None)
    bench.store.refused.add(bad)
    batch = batch_of(bench, "old", "older", "bad", "head", "behind", "last", keys="kkklll")
    result = batch.deliver()
    assert result.recorded.keys() >= {"old", "older", "head"}
    again = batch.mark_again()
    assert next(again).claim.ids == (bad,)
    assert batch.unmarked == {bad}
    assert {id for id, row in bench.store.rows.items() if row.blocked_by == "head"} == {"behind", "last"} - {bad}


def test_only_recorded_failures_report_their_traces(bench: Bench) -> None:
    expired = {"expires_at": bench.store.now - HOUR}
    for number, (id, columns) in enumerate({"expired": expired, "failing": {}, "good": {}}.items(), 1):
        message = RawPubsubMessage(attributes={"googclient_traceparent": f"00-{number:032x}-{1:016x}-01"})
        bench.store.insert(id, "orders", message.SerializeToString(), at_most_once=True, **columns)
    bench.publisher.failing = {"failing": Failed("invalid_argument", "no")}
    result = batch_of(bench, "expired", "failing", "good", kind=Kind.MARK_FIRST).deliver()
    traces = {id: mark.trace_id for id, mark in result.recorded.items()}
    assert traces == {"expired": f"{1:032x}", "failing": f"{2:032x}"}
    assert result.aborted == 0  # the second transaction, which undoes a mark, is no run of the first


def test_a_batch_leaves_the_memory_at_its_end(bench: Bench) -> None:
    """The garbage collector, which runs rarely, is not needed."""
    bench.insert("a")
    batch = batch_of(bench, "a")
    batch.deliver()
    gc.disable()
    try:
        left = weakref.ref(batch)
        del batch
        assert left() is None
    finally:
        gc.enable()
