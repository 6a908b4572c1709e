"""The requests of each poll: topic discovery and due tasks at intervals, lower priorities by their fair share."""

from datetime import timedelta

import pytest

from publishworker.membership import Membership
from publishworker.poller import Poller, PollSize
from publishworker.topics.discovery import FORGET_TOPIC_SECONDS
from publishworker.types import PollRequest
from tests.support.fakes import FakeStore


class Watch:
    def __init__(self) -> None:
        self.store = FakeStore()
        self.seconds = 100.0
        self.membership = Membership(self.store, "me", self.store.shards, clock=lambda: self.seconds)
        self.poller = Poller(
            self.store, self.membership, target_rows=100, discovery_seconds=1.0, clock=lambda: self.seconds
        )

    def poll(self, below: int | None = None) -> PollRequest:
        self.poller.poll(below, ())
        return self.store.polls[-1]

    def find(self, **columns: object) -> None:
        self.store.insert("a", "orders", **columns)
        self.seconds += 1


@pytest.fixture
def watch() -> Watch:
    created = Watch()
    created.poller.poll(None, ())
    return created


def test_topics_are_discovered_at_an_interval_and_again_until_none_is_unknown(watch: Watch) -> None:
    """Without known topics there is no poll."""
    assert watch.store.discoveries == [frozenset()]
    assert not watch.poller.poll(None, ()).discovered
    assert (len(watch.store.discoveries), watch.store.polls) == (1, [])
    watch.find()
    assert watch.poller.poll(None, ()).discovered
    assert [each.id for each in watch.poller.poll(None, ()).candidates] == ["a"]
    assert not watch.poller.poll(None, ()).discovered
    watch.poll()
    assert watch.store.discoveries == [frozenset(), frozenset(), {"orders"}]


def test_other_shards_are_searched_for_topics_at_once(watch: Watch) -> None:
    watch.membership.shards = (1, 2)
    watch.poller.poll(None, ())
    watch.poller.poll(None, ())
    assert len(watch.store.discoveries) == 2


def test_due_tasks_are_read_with_each_discovery_and_as_long_as_there_are_any(watch: Watch) -> None:
    """Half of each turn is theirs only if each poll sees them."""
    watch.find(available_at=watch.store.now - timedelta(hours=1))
    watch.poller.poll(None, ()), watch.poll()
    assert [watch.poll().due, watch.poll().due] == [True, True]
    watch.store.rows["a"].available_at = None
    watch.poll()
    assert not watch.poll().due


def test_a_topic_that_always_has_tasks_is_never_forgotten(watch: Watch) -> None:
    watch.find()
    watch.poller.poll(None, ())
    for _ in range(5):
        watch.seconds += FORGET_TOPIC_SECONDS / 2
        watch.poll()
        assert watch.poll().topics == {"orders"}
    del watch.store.rows["a"]
    watch.seconds += FORGET_TOPIC_SECONDS + 1
    watch.poller.poll(None, ())
    assert watch.poller.topics == frozenset()


@pytest.mark.parametrize("ranges", [1, 3, 10, 100, 1000])
def test_a_poll_stays_near_its_target_however_the_backlog_is_spread(ranges: int) -> None:
    """One hot range or a thousand: a poll brings enough to work on, and never much more than twice that."""
    window = PollSize(target=400, shards=10)
    totals = []
    for _ in range(20):
        totals.append(ranges * window.per_range)
        window.adapt(dict.fromkeys(map(str, range(ranges)), window.per_range))
    assert all(200 <= total <= max(800, 2 * ranges) for total in totals[-5:])


def test_only_ranges_that_are_cut_off_widen_the_window() -> None:
    """A range that returned twice its rows, ready and lower ones, is only full. A small backlog says nothing."""
    window = PollSize(target=100, shards=10)
    window.adapt({str(n): 3 for n in range(10)})
    assert (window.per_range, window.cut_off) == (10, frozenset())
    window.adapt(dict.fromkeys([("orders", shard, True) for shard in range(10)], 2 * window.per_range))
    assert (window.per_range, window.cut_off) == (10, {"orders"})
    one = ("orders", 0, True)
    window.adapt({one: 10, ("invoices", 0, False): 9})
    assert (window.per_range, window.cut_off) == (20, {"orders"})
    for _ in range(9):
        window.adapt({one: 1000})
    assert window.per_range == 100  # never more than the target
