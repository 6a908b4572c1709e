"""Groups in flight: a slow one holds back no other, none is lost, a defect is raised."""

import threading
import time
from collections.abc import Iterator

import pytest

from publishworker.task import Group, GroupResult
from publishworker.turn import flights
from publishworker.turn.flights import LONGEST_STEP, STUCK_SECONDS, Flights, StuckGroup


class Air:
    """Groups that stay up until they are let down."""

    def __init__(self) -> None:
        """Nothing is up."""
        self.released: dict[str, threading.Event] = {}
        self.threads: list[int] = []
        self.seconds = 0.0
        self.beats = 0
        self.flights = Flights(self.fly, lambda: self.seconds, self.beat)

    def beat(self) -> None:
        """Note a sign of life; a second has passed."""
        self.beats += 1
        self.seconds += 1

    def start(self, *topics: str) -> None:
        """Start a group of one task for each topic."""
        for topic in topics:
            self.released[topic] = threading.Event()
            self.flights.start(Group(topic, (f"task-of-{topic}",)))

    def fly(self, group: Group) -> GroupResult:
        """Wait for the release."""
        self.threads.append(threading.get_ident())
        self.released[group.topic].wait(30)
        if group.topic == "defect":
            raise ZeroDivisionError
        return GroupResult(group)

    def land(self, *topics: str) -> None:
        """Let these groups end."""
        for topic in topics:
            self.released[topic].set()


@pytest.fixture
def air() -> Iterator[Air]:
    """Nothing stays up after the test."""
    made = Air()
    yield made
    made.land(*made.released)


def topics(results: list[GroupResult]) -> list[str]:
    """Return the topics of the groups that have ended, sorted."""
    return sorted(result.group.topic for result in results)


def test_all_fly_at_once_and_all_are_waited_for(air: Air) -> None:
    """Each on a thread of its own."""
    air.start("a", "b", "c")
    assert (len(air.flights), air.flights.ids()) == (3, {"task-of-a", "task-of-b", "task-of-c"})
    assert air.flights.by_topic() == {"a": 1, "b": 1, "c": 1}
    air.land("a", "b", "c")
    assert topics(air.flights.landed()) == ["a", "b", "c"]
    assert (len(air.flights), air.flights.ids(), len(set(air.threads))) == (0, frozenset(), 3)
    assert threading.get_ident() not in air.threads


def test_a_straggler_is_left_and_collected_later(air: Air) -> None:
    """Three of four end: the fourth does not hold them back, and its result is not lost."""
    air.start("a", "b", "c", "slow")
    air.land("a", "b", "c")
    assert topics(air.flights.landed(leave=1)) == ["a", "b", "c"]
    assert air.flights.ids() == {"task-of-slow"}
    assert air.flights.landed(leave=1) == []
    air.land("slow")
    assert topics(air.flights.landed()) == ["slow"]


def test_patience_ends_once_one_has_ended(air: Air) -> None:
    """Two hang: after the first end the wait is as long as the patience."""
    air.start("a", "hangs", "hangs-too")
    air.land("a")
    begin = time.monotonic()
    assert topics(air.flights.landed(leave=0, patience=0.01, longest=20)) == ["a"]
    assert time.monotonic() - begin < 10


def test_nothing_is_waited_for_longer_than_the_longest(air: Air) -> None:
    """All hang: the loop gets its turn to beat."""
    air.start("hangs")
    assert air.flights.landed(leave=0, patience=20, longest=0.01) == []
    assert len(air.flights) == 1


def test_a_defect_is_raised_after_the_others_have_ended(air: Air) -> None:
    """Nothing is left running, nothing is swallowed."""
    air.start("a", "defect", "b")
    threading.Timer(0.05, lambda: air.land("a", "b")).start()
    air.land("defect")
    with pytest.raises(ZeroDivisionError):
        air.flights.landed()
    assert all(not thread.is_alive() for thread in air.flights._threads.values())


def test_groups_that_are_equal_are_two(air: Air) -> None:
    """One that has landed takes the other one out of nobody's sight."""
    air.start("a")
    air.flights.start(Group("a", ("task-of-a",)))
    assert len(air.flights) == 2
    air.land("a")
    assert topics(air.flights.landed()) == ["a", "a"]


def test_every_group_has_a_thread_of_its_own(air: Air) -> None:
    """A thread that the client has poisoned is never used again: it ends with its group."""
    for topic in ("a", "b"):
        air.start(topic)
        [thread] = air.flights._threads.values()
        air.land(topic)
        air.flights.landed()
        thread.join(10)
        assert not thread.is_alive()


def test_a_group_that_does_not_end_is_stuck_after_two_minutes(air: Air) -> None:
    """It is named, and given up: what it returns later is nobody's."""
    air.start("slow", "a")
    for _ in range(12):
        air.seconds += 10
        air.flights.check()
    air.land("a")
    assert topics(air.flights.landed(leave=1)) == ["a"]
    air.seconds += 1
    with pytest.raises(StuckGroup, match=r"a group of 1 tasks of slow is stuck for 121 s \(task-of-slow\)"):
        air.flights.check()
    air.flights.check()
    assert len(air.flights) == 0
    air.start("b")
    air.land("slow", "b")
    assert topics(air.flights.landed()) == ["b"]


def test_a_process_that_slept_has_no_stuck_groups(air: Air) -> None:
    """Its groups have slept as well: they get the time to notice."""
    air.start("a")
    air.seconds += 3600
    air.flights.check()
    air.seconds += STUCK_SECONDS - LONGEST_STEP
    air.flights.check()
    assert air.flights.ids() == {"task-of-a"}


def test_who_waits_for_all_shows_signs_of_life_and_gives_up_a_stuck_group(
    air: Air, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait without a limit is not without an end."""
    monkeypatch.setattr(flights, "WATCH_SECONDS", 0.001)
    air.start("slow")
    with pytest.raises(StuckGroup):
        air.flights.landed()
    assert air.beats > STUCK_SECONDS


def test_what_has_landed_can_be_taken_before_a_stuck_group_is_told(air: Air, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one; whoever asks for the last one is told."""
    monkeypatch.setattr(flights, "WATCH_SECONDS", 0.001)
    air.start("a")
    [thread] = air.flights._threads.values()
    air.land("a")
    thread.join(10)
    air.start("slow", "slow-too")
    assert topics(air.flights.landed(len(air.flights) - 1)) == ["a"]
    with pytest.raises(StuckGroup, match=r"of slow is stuck .*, and 1 more") as caught:
        air.flights.landed(len(air.flights) - 1)
    assert [group.topic for group in caught.value.groups] == ["slow", "slow-too"]


def test_a_group_that_has_ended_is_not_stuck_however_late_it_is_collected(air: Air) -> None:
    """In an outage nobody may ask for results for long."""
    air.start("a")
    [thread] = air.flights._threads.values()
    air.land("a")
    thread.join(10)
    for _ in range(100):
        air.seconds += 30
        air.flights.check()
    assert topics(air.flights.landed()) == ["a"]


def test_a_defect_is_raised_though_another_group_hangs(air: Air, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has some time to end, and then the process does."""
    monkeypatch.setattr(flights, "JOIN_SECONDS", 0.1)
    air.start("hangs", "defect")
    air.land("defect")
    with pytest.raises(ZeroDivisionError):
        air.flights.landed()
