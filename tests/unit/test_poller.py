"""What each poll asks for: news and due tasks now and then, lower priorities when they are owed, and no more."""

from datetime import timedelta

import pytest

from publishworker.membership import Membership
from publishworker.poller import Poller, PollSize
from publishworker.topics.discovery import FORGET_TOPIC_SECONDS
from publishworker.topics.rate_limit import RateLimits
from publishworker.types import PollRequest
from tests.support.fakes import FakeStore


class Watch:
    def __init__(self) -> None:
        self.store = FakeStore()
        self.seconds = 100.0
        self.poller = Poller(
            self.store,
            Membership(self.store, "me", self.store.shards, clock=lambda: self.seconds),
            RateLimits(lambda: self.seconds),
            target_rows=100,
            discovery_seconds=1.0,
            clock=lambda: self.seconds,
        )

    def poll(self, below: int | None = None) -> PollRequest:
        self.poller.poll(below, ())
        return self.store.looks[-1]

    def find(self, **columns: object) -> None:
        self.store.insert("a", "orders", **columns)
        self.seconds += 1


@pytest.fixture
def watch() -> Watch:
    made = Watch()
    made.poll()
    return made


def test_news_are_looked_for_once_in_a_while_and_again_at_once_after_a_discovery(watch: Watch) -> None:
    """The first poll does; then none for a second. Only a new topic is a discovery: it asks again for others."""
    assert watch.store.looks[0].known is not None
    assert watch.poll().known is None
    watch.find()
    assert watch.poller.poll(None, ()).discovered
    assert watch.poll().known == {"orders"}
    assert watch.poll().known is None
    news = watch.store._news
    watch.store._news = lambda topics: news(topics | {"orders"})
    watch.seconds += 1
    assert not watch.poller.poll(None, ()).discovered
    assert watch.poll().known is None


def test_due_tasks_are_read_with_the_news_and_as_long_as_there_are_any(watch: Watch) -> None:
    """Half of each turn is theirs only if each poll sees them."""
    assert not watch.poll().due
    watch.find(available_at=watch.store.now - timedelta(hours=1))
    watch.poll(), watch.poll()
    assert [watch.poll().due, watch.poll().due] == [True, True]
    del watch.store.rows["a"]
    watch.poll()
    assert not watch.poll().due


def test_a_topic_that_always_has_tasks_is_never_forgotten(watch: Watch) -> None:
    watch.find()
    watch.poll()
    for _ in range(5):
        watch.seconds += FORGET_TOPIC_SECONDS / 2
        watch.poll()
        assert watch.poll().topics == {"orders"}
    del watch.store.rows["a"]
    watch.seconds += FORGET_TOPIC_SECONDS + 1
    watch.poll()
    assert watch.poll().topics == frozenset()


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
    """One that gave twice its rows, ready ones and lower ones, is full and no more; a small backlog says nothing."""
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
