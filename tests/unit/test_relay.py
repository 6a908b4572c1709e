"""One turn on the fake store and publisher: what becomes of each task, and what is counted."""

import itertools
import threading
from datetime import timedelta
from typing import Any

import pytest

from outbox.message import TASK_ID_ATTRIBUTE
from publishworker.spanner.store import StoreError
from publishworker.task import Failed
from publishworker.telemetry import metrics as m
from publishworker.turn import flights
from publishworker.turn.flights import StuckGroup
from publishworker.turn.relay import Relay
from tests.support.fakes import Abort
from tests.support.relay_bench import Bench, SlowPublisher, overtake, run_at_once, times
from tests.support.waiting import eventually


def test_every_pending_task_is_published_once_and_marked(bench: Bench) -> None:
    """The plain case, over several groups and topics the worker did not know before."""
    bench.insert(*[f"o{n}" for n in range(35)])
    bench.insert(*[f"i{n}" for n in range(5)], topic="invoices")
    bench.turns()
    assert sorted(bench.publisher.ids()) == sorted(bench.store.rows)
    assert bench.unsent() == []
    assert bench.count(m.PUBLISHED) == 40
    assert bench.count(m.ALREADY_PUBLISHED) == bench.count(m.UNCOMMITTED) == bench.count(m.FAILED) == 0


def test_each_task_goes_to_its_own_topic_with_its_own_id(bench: Bench) -> None:
    """One table serves several topics; the subscriber knows the task by its attribute."""
    bench.insert("o")
    bench.insert("i", topic="projects/test-project/topics/invoices")
    bench.turns()
    sent = {id: (topic, message.attributes[TASK_ID_ATTRIBUTE]) for topic, id, message in bench.publisher.published}
    assert sent == {
        "o": ("projects/test-project/topics/orders", "o"),
        "i": ("projects/test-project/topics/invoices", "i"),
    }


def test_a_task_that_failed_stays_unsent_and_costs_its_group_nothing(bench: Bench) -> None:
    """The others of the group are sent; the failure is counted, and tried again until it works."""
    bench.insert("good", "bad")
    bench.publisher.failing["bad"] = Failed("data_loss", "no")
    bench.turns()
    assert bench.unsent() == ["bad"]
    assert bench.count(m.FAILED) == 1
    bench.publisher.failing.clear()
    bench.wait(1)
    bench.turns()
    assert bench.unsent() == []


def test_a_missing_topic_holds_no_other_topic(bench: Bench) -> None:
    """Tasks of the other topic go out in the same turn."""
    bench.insert(*[f"bad{n}" for n in range(50)], topic="missing", priority=100)
    bench.insert("good")
    bench.turns()
    assert "good" in bench.publisher.ids()
    assert len(bench.unsent()) == 50


def test_what_there_was_no_time_for_is_left_as_it_was(bench: Bench) -> None:
    """No outcome, no mark, no failure: the next turn takes it."""
    bench.insert("late", "early")
    bench.publisher.out_of_time.add("late")
    bench.turns()
    assert bench.unsent() == ["late"]
    assert bench.count(m.FAILED) == 0


def test_a_run_again_after_an_abort_publishes_nothing_twice(bench: Bench) -> None:
    """ABORTED at the commit, three times: published once, failed once, marked once, counted once."""
    bench.insert("a", "b", "bad")
    bench.publisher.failing["bad"] = Failed("invalid_argument", "no")
    bench.store.before_commit = times(3, Abort)
    turns = bench.turns()
    assert sorted(bench.publisher.ids()) == ["a", "b"]
    assert bench.unsent() == ["bad"]
    assert (bench.count(m.PUBLISHED), bench.count(m.FAILED)) == (2, 1 * sum(turn.failed for turn in turns))


def test_a_run_again_drops_what_another_worker_sent_meanwhile(bench: Bench) -> None:
    """Between abort and re-run another worker marks the task: it is not marked again, and both counters say so."""
    bench.insert("a")
    theirs = bench.store.now - timedelta(seconds=1)

    def abort_and_be_overtaken() -> None:
        bench.store.before_commit = lambda: None
        bench.store.rows["a"].sent_at = theirs
        raise Abort

    bench.store.before_commit = abort_and_be_overtaken
    bench.turns()
    assert bench.store.rows["a"].sent_at == theirs
    assert (bench.count(m.PUBLISHED), bench.count(m.ALREADY_PUBLISHED)) == (1, 1)


@pytest.mark.parametrize("landed", [False, True])
def test_a_failed_commit_is_marked_later_without_publishing_again(bench: Bench, landed: bool) -> None:
    """Whether or not the lost commit landed: one publish, counted as uncommitted, marked by the next turn."""
    bench.insert("a")
    bench.store.failed_commits_land = landed
    bench.store.before_commit = times(1, lambda: StoreError("deadline exceeded"))
    bench.turns()
    bench.turns()
    assert bench.publisher.ids() == ["a"]
    assert bench.unsent() == []
    assert (bench.count(m.UNCOMMITTED), bench.count(m.ALREADY_PUBLISHED)) == (1, 0)


def test_a_doubt_that_grew_old_is_published_again(bench: Bench) -> None:
    """After 60 s in doubt a duplicate with the same id, never a loss."""
    bench.insert("a")
    bench.store.before_commit = times(1, lambda: StoreError("deadline exceeded"))
    bench.relay.turn(), bench.relay.turn()
    assert (bench.publisher.ids(), bench.unsent()) == (["a"], ["a"])
    bench.seconds += 61
    bench.turns()
    assert bench.publisher.ids() == ["a", "a"]
    assert bench.unsent() == []


def test_a_doubt_about_a_row_says_nothing_about_the_next_row_with_its_id(bench: Bench) -> None:
    """Published, commit failed, purged, and registered again under the same id: the new task is sent."""
    bench.insert("a")
    bench.store.before_commit = times(1, lambda: StoreError("deadline exceeded"))
    bench.relay.turn(), bench.relay.turn()
    assert bench.publisher.ids() == ["a"]
    bench.insert("a", created_at=bench.store.now)
    bench.turns(), bench.turns()
    assert bench.publisher.ids() == ["a", "a"]
    assert bench.unsent() == []


def test_a_retry_of_a_task_in_doubt_is_published(bench: Bench) -> None:
    """Published, the commit landed and its answer was lost, then `outbox retry`: it is asked for again, and sent."""
    bench.insert("a")
    bench.store.before_commit = times(1, lambda: StoreError("deadline exceeded"))
    bench.relay.turn(), bench.relay.turn()
    assert bench.publisher.ids() == ["a"]
    bench.wait(1)
    bench.store.rows["a"].available_at = bench.store.now
    bench.wait(1)
    bench.turns(), bench.turns()
    assert bench.publisher.ids() == ["a", "a"]
    assert bench.unsent() == []


def test_commits_that_are_refused_for_good_make_no_duplicates(bench: Bench) -> None:
    """While what is in doubt cannot be marked nothing is published, neither again nor anew; the turn is no success."""
    bench.insert("a")

    def refuse() -> None:
        raise StoreError("no permission to update")

    bench.store.before_commit = refuse
    assert not [turn for turn in (bench.relay.turn(), bench.relay.turn()) if turn.published and turn.made_progress]
    bench.insert("b")
    for _ in range(20):
        with pytest.raises(StoreError, match="no permission"):
            bench.relay.turn()
    assert bench.publisher.ids() == ["a"]
    bench.store.before_commit = lambda: None
    bench.turns()
    assert bench.publisher.ids() == ["a", "b"]
    assert bench.unsent() == []


def test_a_topic_that_was_corrected_after_the_poll_is_respected(bench: Bench) -> None:
    """The row under the lock is the truth: the task goes to its new topic, not to the one that the poll saw."""
    bench.insert("a", topic="invoices")
    overtake(bench, lambda: setattr(bench.store.rows["a"], "topic", "orders"))
    bench.turns()
    bench.turns()
    assert [topic for topic, _, _ in bench.publisher.published] == ["projects/test-project/topics/orders"]


def test_a_stop_during_the_poll_takes_nothing_more(bench: Bench) -> None:
    """What is not in flight yet stays for others."""
    bench.insert("a")
    bench.relay.turn()
    assert bench.relay.turn(lambda: True).published == 0
    assert bench.publisher.ids() == []


def test_a_topic_without_tasks_is_forgotten_and_found_again(bench: Bench) -> None:
    """Names that were used once do not cost every poll for ever."""
    bench.insert("o")
    bench.turns()
    assert bench.store.looks[-1].topics == {"orders"}
    bench.seconds += 601
    bench.relay.turn(), bench.relay.turn()
    assert bench.store.looks[-1].topics == set()
    bench.insert("o2")
    bench.turns()
    assert bench.publisher.ids() == ["o", "o2"]


def test_a_task_sent_by_another_worker_after_the_poll_is_counted_and_not_published(bench: Bench) -> None:
    """The check under the lock is what keeps two workers apart."""
    bench.insert("a")
    overtake(bench, lambda: setattr(bench.store.rows["a"], "sent_at", bench.store.now))
    bench.turns()
    assert bench.publisher.ids() == []
    assert bench.count(m.ALREADY_PUBLISHED) == 1


def test_a_row_deleted_after_the_poll_is_passed_over(bench: Bench) -> None:
    """Gone is no error, and nobody else's work."""
    bench.insert("a", "b")
    overtake(bench, lambda: bench.store.rows.pop("a"))
    bench.turns()
    assert bench.publisher.ids() == ["b"]
    assert bench.count(m.ALREADY_PUBLISHED) == bench.count(m.FAILED) == 0


def test_a_task_put_off_after_the_poll_is_not_sent(bench: Bench) -> None:
    """Due is decided under the lock, by the database's time."""
    bench.insert("a")
    overtake(bench, lambda: setattr(bench.store.rows["a"], "available_at", bench.store.now + timedelta(hours=1)))
    bench.turns()
    assert bench.publisher.ids() == []


def test_a_sent_task_is_sent_again_when_sent_at_is_set_to_null(bench: Bench) -> None:
    """Replay by plain DML: the same id, the same bytes."""
    bench.insert("a")
    bench.turns()
    bench.store.rows["a"].sent_at = None
    bench.turns()
    assert bench.publisher.ids() == ["a", "a"]
    assert bench.publisher.published[0] == bench.publisher.published[1]


def test_a_paused_topic_waits_and_holds_no_other(bench: Bench) -> None:
    """Its tasks are neither claimed nor polled until it is resumed."""
    bench.insert("o")
    bench.insert("i", topic="invoices")
    bench.store.paused = {"invoices"}
    bench.turns()
    assert bench.publisher.ids() == ["o"]
    bench.store.paused = set()
    bench.relay.turn()  # learns of it
    bench.turns()
    assert bench.publisher.ids() == ["o", "i"]


def test_a_pause_holds_from_the_poll_that_tells_of_it(bench: Bench) -> None:
    """Nothing that this poll found is claimed any more, and the next one does not ask for the topic."""
    bench.insert("before", topic="invoices")
    bench.turns()
    bench.insert("after", topic="invoices")
    bench.store.paused = {"invoices"}
    bench.relay.turn()
    assert bench.store.looks[-1].topics == {"invoices"}
    assert bench.publisher.ids() == ["before"]
    bench.relay.turn()
    assert bench.store.looks[-1].topics == set()


def test_a_store_that_does_not_answer_is_the_loops_matter(bench: Bench) -> None:
    """The turn takes nothing and says so."""
    bench.insert("a")
    bench.store.away = True
    with pytest.raises(StoreError):
        bench.relay.turn()
    assert bench.publisher.ids() == []


def test_a_defect_in_the_publisher_is_not_swallowed(bench: Bench) -> None:
    """A half-working worker is worse than a dead one."""
    bench.insert("a")

    def break_down(*_arguments: object) -> dict[str, Any]:
        raise ZeroDivisionError

    bench.publisher.publish = break_down
    with pytest.raises(ZeroDivisionError):
        bench.turns()


def test_two_workers_on_one_backlog_send_every_task_once() -> None:
    """Threads in lock-step on one store: every row marked once, nothing published twice, collisions counted."""
    bench = Bench(groups=1)
    bench.insert(*[str(n) for n in range(200)])
    workers = [bench.relay, bench.another(groups=1)]

    def work(relay: Relay) -> None:
        while bench.unsent():
            relay.turn()

    run_at_once([lambda relay=relay: work(relay) for relay in workers])
    assert sorted(bench.publisher.ids()) == sorted(bench.store.rows)
    assert bench.count(m.PUBLISHED) == 200


def test_a_group_that_was_aborted_is_counted_once_for_each_abort(bench: Bench) -> None:
    """What ran at once is no abort."""
    bench.insert("a")
    bench.turns()
    assert bench.count(m.ABORTED) == 0
    bench.insert("b")
    bench.store.before_commit = times(3, Abort)
    bench.turns()
    assert bench.count(m.ABORTED) == 3


def test_what_is_in_doubt_at_the_end_is_tried_once_more(bench: Bench) -> None:
    """A stop in the middle of a brown-out makes no duplicate that it can avoid."""
    bench.insert("a")
    bench.relay.turn()
    bench.store.before_commit = times(1, lambda: StoreError("deadline exceeded"))
    bench.relay.turn()
    bench.relay.finish()
    assert (bench.publisher.ids(), bench.unsent()) == (["a"], [])


def test_a_group_that_does_not_end_ends_the_turns() -> None:
    """Whoever asks for one is told; the other groups of the process still land."""
    publisher = SlowPublisher("orders", "invoices")
    publisher.hanging = {"invoices"}
    bench = Bench(publisher=publisher, stragglers=1, patience=0)
    bench.insert("stuck", topic="invoices")
    bench.insert("good")

    def turn_for_minutes() -> None:
        for _ in range(20):
            bench.relay.turn()
            bench.wait(10)

    try:
        with pytest.raises(StuckGroup, match="a group of 1 tasks of invoices is stuck"):
            turn_for_minutes()
        assert bench.unsent() == ["stuck"]
        assert bench.relay.finish().in_flight == 0
    finally:
        publisher.release.set()


def test_a_relay_says_what_it_is_busy_with(bench: Bench) -> None:
    """Groups in flight, topics that it asks for, those that rest, and how long its polls take."""
    bench.insert("a")
    bench.insert("b", topic="missing")
    assert (bench.relay.in_flight, bench.relay.topics, dict(bench.relay.resting())) == (0, frozenset(), {})
    bench.turns()
    assert bench.relay.in_flight == 0
    assert bench.relay.topics == {"orders", "missing"}
    assert bench.relay.resting() == {"missing": True}
    assert bench.count(m.PHASE_DURATION) >= 1 + 3
    assert bench.count(m.LATENCY) == 1
    bench.wait(2)
    assert bench.relay.resting() == {"missing": False}


def test_what_landed_is_told_though_polls_fail(bench: Bench) -> None:
    """Else an outage of minutes would lose its outcome, and take it for stuck."""
    bench.insert("a")
    bench.insert("b")
    publisher = SlowPublisher("orders")
    publisher.hanging = {"orders"}
    relay = bench.another(publisher=publisher, patience=0)
    eventually(lambda: (relay.turn(), relay.in_flight)[1])
    publisher.release.set()
    eventually(lambda: not bench.unsent())
    bench.store.away = True
    for _ in range(20):
        bench.wait(30)
        with pytest.raises(StoreError):
            relay.turn()
    assert relay.in_flight == 0
    assert bench.count(m.PUBLISHED) == 2


def test_a_stop_tells_what_landed_though_another_group_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counts are sent even if the process then gives up, and the stuck group ends it."""
    monkeypatch.setattr(flights, "WATCH_SECONDS", 0.01)
    publisher = SlowPublisher("orders", "invoices")
    publisher.hanging = {"invoices"}
    bench = Bench(publisher=publisher, beat=lambda: bench.wait(10))
    bench.insert("stuck", topic="invoices")
    bench.insert("good")
    try:
        while bench.relay.in_flight < 2 and not bench.count(m.PUBLISHED):
            bench.relay.turn()
        with pytest.raises(StuckGroup):
            bench.relay.finish()
        assert bench.count(m.PUBLISHED) == 1
    finally:
        publisher.release.set()


def test_doubts_that_cannot_be_marked_in_time_end_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is marked, the other one hangs: what is marked is no doubt any more, and the loop is not held for ever."""
    monkeypatch.setattr(flights, "WATCH_SECONDS", 0.01)
    bench = Bench(size=1, groups=2, beat=lambda: bench.wait(5))
    bench.insert("a")
    bench.insert("b")
    failing = [StoreError("lost"), StoreError("lost")]

    def commit() -> None:
        if failing:
            raise failing.pop()

    bench.store.before_commit = commit
    while bench.count(m.UNCOMMITTED) < 2:
        bench.relay.turn()
    let_go, commits = threading.Event(), itertools.count()

    def hang() -> None:
        if next(commits) == 0:
            let_go.wait(30)

    bench.store.before_commit = hang
    try:
        with pytest.raises(StuckGroup):
            bench.relay.turn()
        assert len(bench.unsent()) == 1
    finally:
        let_go.set()
