"""The requests of each poll: topic discovery and due tasks at intervals, lower priorities by their fair share."""

from datetime import timedelta

import pytest

from publishworker.host import Host
from publishworker.topics.availability import Topics
from publishworker.turn.membership import Membership
from publishworker.turn.poller import KEEP_POLLING_SECONDS, Polled, Wanted
from publishworker.types import FORGET_TOPIC_SECONDS, PollRequest
from tests.support.fakes import FakeStore
from tests.support.parts import reads_of


class Controlled(Topics):
    """Topics that are available as the test says."""

    unavailable = frozenset[str]()  # type: ignore[assignment]  # a property

    def __init__(self) -> None:
        super().__init__(Host())


class Watch:
    def __init__(self) -> None:
        self.store = FakeStore()
        self.seconds = 100.0
        self.membership = Membership(self.store, "me", clock=self.clock)
        self.topics = Controlled()
        self.poller, self.discoverer = reads_of(self.store, self.membership, self.topics, self.clock, 100)

    def clock(self) -> float:
        return self.seconds

    def poll(self) -> Polled:
        return self.poller.poll(Wanted(100))

    def turn(self) -> Polled:
        """Poll, and discover if it is time."""
        polled = self.poll()
        self.discovered = self.discoverer.end_turn(started_nothing=not polled.candidates)
        return polled

    def discovers(self) -> bool:
        """Return whether a turn finds unknown topics."""
        self.turn()
        return self.discovered

    def request(self) -> PollRequest:
        self.turn()
        return self.store.polls[-1]

    def find(self, **columns: object) -> None:
        self.store.insert("a", "orders", **columns)
        self.seconds += 1


@pytest.fixture
def watch() -> Watch:
    created = Watch()
    created.turn()
    return created


def test_topics_are_discovered_at_an_interval_and_again_until_none_is_unknown(watch: Watch) -> None:
    """Without known topics there is no poll."""
    assert watch.store.discoveries == [frozenset()]
    assert not watch.discovers()
    assert (len(watch.store.discoveries), watch.store.polls) == (1, [])
    watch.find()
    assert watch.discovers()  # the next turn follows at once, because there may be more
    assert [each.id for each in watch.turn().candidates] == ["a"]
    assert not watch.discovers()
    assert watch.store.discoveries == [frozenset(), frozenset(), {"orders"}]


def test_due_tasks_are_read_if_one_is_due_soon(watch: Watch) -> None:
    watch.find()
    watch.turn(), watch.turn()
    watch.poll()
    assert watch.poller.find_next_due() is None
    watch.poll()
    assert not watch.store.polls[-1].due
    watch.store.insert("later", "orders", available_at=watch.store.now + timedelta(hours=1))
    watch.topics.unavailable = frozenset({"orders"})
    assert watch.poller.find_next_due() is None
    watch.topics.unavailable = frozenset()
    assert watch.poller.find_next_due() == pytest.approx(3600)
    watch.poll()
    assert watch.store.polls[-1].due


def test_an_idle_topic_costs_nothing_and_is_found_again_by_the_next_poll(watch: Watch) -> None:
    """A poll reads only topics that have tasks, however many were used before. Metrics name it for longer."""
    watch.find()
    watch.turn()
    assert watch.poller.poll(Wanted(0)).candidates == ()  # because every place is in use
    assert watch.store.polls == []
    for _ in range(5):
        watch.seconds += KEEP_POLLING_SECONDS
        assert watch.request().topics == {"orders"}
    del watch.store.rows["a"]
    watch.seconds += KEEP_POLLING_SECONDS + 1
    watch.turn()
    polls = len(watch.store.polls)
    for _ in range(3):
        watch.seconds += 1
        watch.turn()
    assert (len(watch.store.polls), watch.store.discoveries[-1]) == (polls, frozenset())
    assert watch.discoverer.topics == {"orders"}
    watch.find()
    assert watch.discovers()
    assert [each.id for each in watch.turn().candidates] == ["a"]
    del watch.store.rows["a"]
    watch.seconds += FORGET_TOPIC_SECONDS + 1
    watch.turn()
    assert watch.discoverer.topics == frozenset()
