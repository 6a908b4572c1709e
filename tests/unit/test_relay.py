"""One turn on the fake store and publisher: what becomes of each task, and what is counted."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

from outbox.message import TASK_ID_ATTRIBUTE
from publishworker import metrics as m
from publishworker import relay as relay_module
from publishworker import sql
from publishworker.fleet import divide
from publishworker.relay import Relay
from publishworker.store import StoreError
from publishworker.task import Failed, Outcome, Row, Turn
from tests.support.fakes import Abort, Counted, FakePublisher, FakeStore, serialized
from tests.support.parts import relay_of


class Bench:
    """A relay between fakes, with a clock that stands still until told."""

    def __init__(self, **options: Any) -> None:
        """Use small groups."""
        self.store = FakeStore()
        self.publisher = FakePublisher("orders", "invoices")
        self.counted = Counted()
        self.seconds = 0.0
        self.relay = self.another(**options)

    def another(self, **options: Any) -> Relay:
        """Return a second worker on the same store and publisher."""
        options = {"clock": lambda: self.seconds, "group_bytes": 10_000, **options}
        return relay_of(self.store, self.publisher, self.counted, **options)

    def insert(self, *ids: str, topic: str = "orders", **columns: Any) -> None:
        """Add tasks with a good body."""
        for id in ids:
            self.store.insert(id, topic, serialized(), **columns)

    def turns(self, most: int = 20) -> list[Turn]:
        """Turn until one makes no progress."""
        done = []
        for _ in range(most):
            done.append(self.relay.turn())
            if not done[-1].made_progress:
                return done
        pytest.fail(f"no end after {most} turns: {done}")

    def unsent(self) -> list[str]:
        """Return the ids without SentAt."""
        return [row.id for row in self.store.rows.values() if row.sent_at is None]

    def count(self, metric: m.Metric) -> float:
        """Return a counter."""
        return self.counted.counts.get(metric.name, 0)


@pytest.fixture
def bench() -> Bench:
    """A fresh bench."""
    return Bench()


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
    bench.publisher.failing["bad"] = Failed("invalid_argument", "no")
    bench.turns()
    assert bench.unsent() == ["bad"]
    assert bench.count(m.FAILED) >= 1
    bench.publisher.failing.clear()
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

    bench.publisher.publish = break_down  # type: ignore[method-assign]
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


def test_priorities_go_first_over_all_shards() -> None:
    """Ten urgent tasks go out in the turn that first sees them, before 490 others that are as old."""
    bench = Bench(size=50, groups=2)
    bench.insert(*[f"low{n}" for n in range(490)], priority=0)
    bench.insert(*[f"high{n}" for n in range(10)], priority=100)
    assert bench.relay.turn().discovered
    bench.relay.turn()
    assert {f"high{n}" for n in range(10)} <= set(bench.publisher.ids())
    assert len(bench.publisher.ids()) <= 100


def test_a_high_priority_task_goes_before_ten_thousand_low_ones() -> None:
    """Only the groups that are in flight when it comes go before it."""
    bench = Bench(size=50, groups=2)
    bench.insert(*[f"low{n}" for n in range(10_000)], priority=0)
    bench.relay.turn(), bench.relay.turn()
    before = len(bench.publisher.ids())
    bench.insert("high", priority=100)
    bench.relay.turn()
    assert "high" in bench.publisher.ids()[before : before + 100]


def endless(bench: Bench, relay: Relay, sent: int, most: int) -> Counter[str]:
    """Turn with an endless stream of urgent tasks and many of two lower priorities; count what is sent."""
    bench.insert(*[f"mid{n}" for n in range(sent)], priority=50)
    bench.insert(*[f"low{n}" for n in range(sent)], priority=0)
    urgent = 0
    for _ in range(most):
        missing = 1200 - sum(row.sent_at is None and row.priority == 100 for row in list(bench.store.rows.values()))
        bench.insert(*[f"high{urgent + n}" for n in range(missing)], priority=100)
        urgent += missing
        relay.turn()
        if len(bench.publisher.ids()) >= sent:
            break
    return Counter(id.rstrip("0123456789") for id in bench.publisher.ids()[:sent])


@pytest.mark.parametrize(("groups", "share"), [(1, 0.1), (2, 0.1), (4, 0.1), (8, 0.1), (32, 0.1), (8, 0.25), (8, 0.5)])
def test_an_endless_stream_of_urgent_tasks_leaves_lower_ones_their_share(groups: int, share: float) -> None:
    """For each lower priority in turn, although every range is full of urgent tasks."""
    bench = Bench(size=5, groups=groups, fair_share=share)
    kinds = endless(bench, bench.relay, 1500, 1000)
    assert kinds.total() == 1500
    lower = (kinds["mid"] + kinds["low"]) / 1500
    assert share * 0.8 <= lower <= share * 1.2
    assert min(kinds["mid"], kinds["low"]) >= (kinds["mid"] + kinds["low"]) / 4
    assert set(bench.store.claimed.values()) == {1}


def test_lower_priorities_keep_their_share_while_groups_are_slow() -> None:
    """Turns in which every place is taken, and nothing was polled, say nothing about who waits."""
    bench = Bench()
    publisher = bench.publisher = SlowPublisher("orders")
    publisher.seconds = 0.3  # longer than a turn waits
    kinds = endless(bench, bench.another(size=5, groups=2, fair_share=0.25), 100, 200)
    assert kinds["mid"] + kinds["low"] >= 15


def test_a_task_that_goes_by_the_share_does_not_go_with_the_others_as_well() -> None:
    """The urgent tasks are suddenly few, and the rest of the places take what there is: each task is claimed once."""
    bench = Bench(size=10, groups=4, fair_share=0.5)
    bench.insert(*[f"high{n}" for n in range(200)], priority=100)
    bench.insert(*[f"low{n}" for n in range(5)], priority=0)
    bench.relay.turn(), bench.relay.turn()
    few = [id for id in bench.unsent() if id.startswith("high")][:3]
    bench.store.rows = {id: row for id, row in bench.store.rows.items() if id.startswith("low") or id in few}
    bench.relay.turn()
    assert bench.unsent() == []
    assert set(bench.store.claimed.values()) == {1}


def test_without_a_share_priority_is_strict() -> None:
    """`--fair-share 0`."""
    bench = Bench(size=10, groups=2, fair_share=0)
    bench.insert(*[f"high{n}" for n in range(500)], priority=100)
    bench.insert("low", priority=0)
    for _ in range(20):
        bench.relay.turn()
    assert "low" not in bench.publisher.ids()
    assert all(look.below is None for look in bench.store.looks)


def test_an_idle_worker_does_not_look_for_lower_priorities(bench: Bench) -> None:
    """What a poll reads whole has no tail: the share costs nothing while nothing waits."""
    bench.insert(*[str(n) for n in range(60)], priority=100)
    bench.turns()
    bench.store.looks.clear()
    for _ in range(5):
        bench.relay.turn()
    assert all(look.below is None for look in bench.store.looks)


def test_a_large_replay_does_not_starve_new_tasks() -> None:
    """A thousand due tasks, and new ones that come all the while: each get half of a turn until the last is sent."""
    bench = Bench(size=10, groups=4)
    past = bench.store.now - timedelta(hours=1)
    bench.insert(*[f"due{n}" for n in range(1000)], available_at=past, priority=100)
    bench.insert(*[f"new{n}" for n in range(1000)])
    bench.relay.turn(), bench.relay.turn()
    bench.publisher.published.clear()
    bench.relay._poller._look_further_seconds = 1e9  # no more news
    for _ in range(10):
        bench.relay.turn()
    kinds = Counter(id.rstrip("0123456789") for id in bench.publisher.ids())
    assert sum(kinds.values()) >= 390
    assert kinds["new"] == pytest.approx(kinds["due"], abs=20)


class SlowPublisher(FakePublisher):
    """Some topics hang until they are released."""

    def __init__(self, *topics: str) -> None:
        """Nothing hangs yet."""
        super().__init__(*topics)
        self.hanging: set[str] = set()
        self.release = threading.Event()
        self.seconds = 0.0

    def publish(self, topic: str, rows: Sequence[Row], seconds: float) -> dict[str, Outcome]:
        """Hang, or publish."""
        self.release.wait(30 if topic in self.hanging else self.seconds)
        return super().publish(topic, rows, seconds)


def test_a_slow_group_does_not_hold_the_others_back() -> None:
    """One topic hangs: the other's tasks go out turn after turn, and no task in flight is taken twice."""
    bench = Bench()
    publisher = bench.publisher = SlowPublisher("orders", "invoices")
    relay = bench.another(groups=4, stragglers=1, patience=0.01)
    bench.insert(*[f"o{n}" for n in range(200)])
    bench.insert("slow", topic="invoices", priority=100)
    publisher.hanging = {"invoices"}
    turns = [relay.turn() for _ in range(40)]
    assert {f"o{n}" for n in range(200)} == set(publisher.ids())
    assert turns[-1].in_flight == 1
    publisher.release.set()
    assert relay.finish().published == 1
    assert publisher.ids().count("slow") == 1
    assert bench.unsent() == []
    assert set(bench.store.claimed.values()) == {1}


def test_places_in_flight_count_for_a_topics_half() -> None:
    """Two groups of a topic hang: while another topic waits it gets no third place of four."""
    bench = Bench()
    publisher = bench.publisher = SlowPublisher("orders", "invoices")
    relay = bench.another(size=1, groups=4, stragglers=4, patience=0.01)
    publisher.hanging = {"orders"}
    bench.insert(*[f"o{n}" for n in range(20)])
    bench.insert(*[f"i{n}" for n in range(20)], topic="invoices")
    for _ in range(8):
        relay.turn()
        assert relay._flights.by_topic()["orders"] <= 2
    assert len(publisher.ids()) >= 4
    publisher.release.set()
    relay.finish()


def test_a_poll_that_left_nothing_behind_waits_for_its_groups() -> None:
    """Where nothing waits there is no hurry: the turn reports all that it started, stragglers or not."""
    bench = Bench()
    publisher = bench.publisher = SlowPublisher("orders")
    publisher.seconds = 0.02
    relay = bench.another(size=5, groups=4, stragglers=3, patience=0.0)
    bench.insert(*[f"o{n}" for n in range(40)])
    by_shard = {row.shard: row for row in bench.store.rows.values()}
    bench.store.rows = {row.id: row for row in by_shard.values()}  # one of each: no range of the window is full
    relay.turn()
    assert len(by_shard) == relay.turn().published == 10


def test_stragglers_are_left_behind_while_tasks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn ends when the wanted number has ended, or when patience has: the rest is reported later."""
    monkeypatch.setattr(relay_module, "LONGEST_TURN_WAIT", 25.0)
    begin = time.monotonic()
    for stragglers, patience in ((3, None), (0, 0.0)):
        bench = Bench()
        publisher = bench.publisher = SlowPublisher("orders", "invoices")
        publisher.hanging = {"invoices"}
        relay = bench.another(groups=4, stragglers=stragglers, patience=patience)
        bench.insert(*[f"o{n}" for n in range(200)])
        bench.insert(*[f"i{n}" for n in range(200)], topic="invoices")
        relay.turn()
        turn = relay.turn()
        assert 2 <= turn.in_flight <= 3
        assert turn.published + turn.in_flight * 10 == 40
        publisher.release.set()
        relay.finish()
    assert time.monotonic() - begin < 20


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


def test_while_every_place_is_taken_the_relay_waits_without_polls() -> None:
    """All groups hang: no poll, no busy loop, and a turn ends now and then so that the loop can beat."""
    bench = Bench()
    publisher = bench.publisher = SlowPublisher("orders")
    relay = bench.another(groups=2, stragglers=0, patience=0.01)
    bench.insert(*[f"o{n}" for n in range(40)])
    publisher.hanging = {"orders"}
    relay.turn(), relay.turn()
    polls = len(bench.store.looks)
    assert relay.turn() == Turn(in_flight=2, waits=True)
    assert len(bench.store.looks) == polls
    publisher.release.set()
    while bench.unsent():
        relay.turn()
    assert sorted(publisher.ids()) == sorted(bench.store.rows)


def test_a_worker_takes_tasks_of_its_own_shards_only(bench: Bench) -> None:
    """From the poll that tells of another worker on, also of what that poll itself found."""
    bench.insert("known")
    bench.turns()
    bench.publisher.published.clear()
    bench.store.workers |= {"worker": bench.store.now, "other": bench.store.now}
    bench.insert(*[str(n) for n in range(200)])
    mine = set(divide({"worker", "other"}, range(10))["worker"])
    bench.turns(50)
    sent = {bench.store.rows[id].shard for id in bench.publisher.ids()}
    assert sent == mine
    assert set(bench.store.looks[-1].shards) == mine


def test_a_worker_that_falls_silent_is_replaced(bench: Bench) -> None:
    """Its shards are polled again at once when its lease has ended; nothing is lost, whoever was right."""
    bench.store.workers |= {"worker": bench.store.now, "other": bench.store.now}
    bench.insert(*[str(n) for n in range(200)])
    bench.turns(50)
    assert bench.unsent()
    bench.store.now += timedelta(seconds=sql.SILENT_SECONDS)
    bench.store.workers["worker"] = bench.store.now
    assert bench.relay.turn().discovered
    bench.turns(50)
    assert bench.unsent() == []
    assert sorted(bench.publisher.ids()) == sorted(bench.store.rows)


def test_a_wrong_division_costs_collisions_and_loses_nothing() -> None:
    """Two workers that both believe to be alone, with the same seed: each task is sent once."""
    bench = Bench(groups=1)
    bench.insert(*[str(n) for n in range(200)])
    others = bench.another(groups=1)
    run_at_once([lambda relay=relay: [relay.turn() for _ in range(60)] for relay in (bench.relay, others)])
    assert sorted(bench.publisher.ids()) == sorted(bench.store.rows)
    assert bench.unsent() == []


def overtake(bench: Bench, act: Callable[[], object]) -> None:
    """Let `act` happen between the poll and the lock."""
    claim = bench.store.claim

    def claim_too_late(*arguments: Any) -> None:
        bench.store.claim = claim  # type: ignore[method-assign]
        act()
        claim(*arguments)

    bench.store.claim = claim_too_late  # type: ignore[method-assign]


def times(count: int, make: Callable[[], Exception]) -> Callable[[], None]:
    """Return a function that raises `count` times."""
    left = [None] * count

    def act() -> None:
        if left:
            left.pop()
            raise make()

    return act


def run_at_once(functions: Sequence[Callable[[], None]]) -> None:
    """Run each on a thread and wait for all."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
