"""Groups in flight: a slow one holds back no other, none is lost, a defect is raised; and the turns that leave some."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from publishworker import batching, in_flight
from publishworker import relay as relay_module
from publishworker.in_flight import LONGEST_STEP, STUCK_SECONDS, Flights, StuckGroup
from publishworker.types import Group, GroupResult, Outcome, Turn
from tests.support.fakes import FakePublisher, serialized
from tests.support.relay_bench import Bench, SlowPublisher
from tests.support.waiting import eventually


class Groups:
    """Groups that stay in flight until a test ends them."""

    def __init__(self) -> None:
        self.ends: dict[str, threading.Event] = {}
        self.seconds = 0.0
        self.beats = 0
        self.flights = Flights(self.deliver, lambda: self.seconds, self.beat)

    def beat(self) -> None:
        """Count a heartbeat; a second has passed."""
        self.beats += 1
        self.seconds += 1

    def start(self, *topics: str) -> list[threading.Thread]:
        for topic in topics:
            self.ends.setdefault(topic, threading.Event())
            self.flights.start(Group(topic, (f"task-of-{topic}",)))
        return [*self.flights._threads.values()]

    def deliver(self, group: Group) -> GroupResult:
        self.ends[group.topic].wait(30)
        if group.topic == "defect":
            raise ZeroDivisionError
        return GroupResult(group)

    def end(self, *topics: str) -> None:
        """Let these groups end."""
        for topic in topics:
            self.ends[topic].set()

    def landed(self, *arguments: Any, **options: Any) -> list[str]:
        return sorted(result.group.topic for result in self.flights.landed(*arguments, **options))


@pytest.fixture
def groups() -> Iterator[Groups]:
    """Nothing stays in flight after the test."""
    made = Groups()
    yield made
    made.end(*made.ends)


def test_every_group_has_a_thread_of_its_own(groups: Groups) -> None:
    """All run at once, also equal ones. A thread that the client has spoiled ends with its group."""
    threads = groups.start("a", "b", "c", "c")
    assert len(groups.flights) == len(set(threads)) == 4
    assert groups.flights.ids() == {"task-of-a", "task-of-b", "task-of-c"}
    assert groups.flights.by_topic() == {"a": 1, "b": 1, "c": 2}
    groups.end("a", "b", "c")
    assert groups.landed() == ["a", "b", "c", "c"]
    assert (len(groups.flights), groups.flights.ids()) == (0, frozenset())
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_straggler_is_left_and_collected_later(groups: Groups) -> None:
    """It does not hold back the others, and its result is not lost. A wait ends with its patience or its limit."""
    groups.start("a", "b", "c", "slow")
    groups.end("a", "b", "c")
    assert groups.landed(leave=1) == ["a", "b", "c"]
    assert groups.flights.ids() == {"task-of-slow"}
    assert groups.landed(leave=1) == []
    groups.end("slow")
    assert groups.landed() == ["slow"]
    begin = time.monotonic()
    groups.start("quick", "hangs", "hangs-too")
    assert groups.landed(leave=0, patience=20, longest=0.01) == []
    groups.end("quick")
    assert groups.landed(leave=0, patience=0.01, longest=20) == ["quick"]
    assert time.monotonic() - begin < 10
    assert len(groups.flights) == 2


@pytest.mark.parametrize("hangs", [False, True])
def test_a_defect_is_raised_after_the_others_have_ended(
    groups: Groups, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """Nothing is swallowed. One that hangs has some time to end, and then the process does."""
    monkeypatch.setattr(in_flight, "JOIN_SECONDS", 0.1 if hangs else 30)
    *others, _ = groups.start("a", "b", "defect")
    if not hangs:
        threading.Timer(0.05, lambda: groups.end("a", "b")).start()
    groups.end("defect")
    with pytest.raises(ZeroDivisionError):
        groups.flights.landed()
    assert [thread.is_alive() for thread in others] == [hangs, hangs]


def test_a_group_that_does_not_end_is_stuck_after_two_minutes(groups: Groups) -> None:
    """It is named, and given up: what it returns later is dropped."""
    slow, _ = groups.start("slow", "a")
    for _ in range(12):
        groups.seconds += 10
        groups.flights.check()
    groups.end("a")
    assert groups.landed(leave=1) == ["a"]
    groups.seconds += 1
    with pytest.raises(StuckGroup, match=r"a group of 1 tasks of slow is stuck for 121 s \(task-of-slow\)"):
        groups.flights.check()
    groups.flights.check()
    assert len(groups.flights) == 0
    groups.end("slow")
    slow.join(10)
    groups.start("b")
    groups.end("b")
    assert groups.landed() == ["b"]


def test_a_process_that_slept_has_no_stuck_groups(groups: Groups) -> None:
    """Its groups have slept as well: they get the time to notice. Nor is a group stuck that has ended."""
    [thread] = groups.start("a")
    groups.seconds += 3600
    groups.flights.check()
    groups.seconds += STUCK_SECONDS - LONGEST_STEP
    groups.flights.check()
    assert groups.flights.ids() == {"task-of-a"}
    groups.end("a")
    thread.join(10)
    for _ in range(100):  # no result is asked for in a long outage
        groups.seconds += 30
        groups.flights.check()
    assert groups.landed() == ["a"]


def test_who_waits_for_all_shows_signs_of_life_and_gives_up_a_stuck_group(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait without a limit is not without an end. Those that have ended can be collected before, one by one."""
    monkeypatch.setattr(in_flight, "WATCH_SECONDS", 0.001)
    [thread] = groups.start("a")
    groups.end("a")
    thread.join(10)
    groups.start("slow", "slow-too")
    assert groups.landed(len(groups.flights) - 1) == ["a"]
    with pytest.raises(StuckGroup, match=r"of slow is stuck .*, and 1 more") as caught:
        groups.flights.landed(len(groups.flights) - 1)
    assert [group.topic for group in caught.value.groups] == ["slow", "slow-too"]
    assert groups.beats > STUCK_SECONDS


def bench_of(publisher: SlowPublisher, orders: int, invoices: int = 0, **options: Any) -> Bench:
    """Return a bench with so many tasks."""
    bench = Bench(publisher=publisher, **options)
    bench.publisher = publisher
    bench.insert(*[f"o{n}" for n in range(orders)])
    bench.insert(*[f"i{n}" for n in range(invoices)], topic="invoices", priority=100)
    return bench


def test_a_slow_group_does_not_hold_the_others_back(slow: SlowPublisher) -> None:
    """One topic hangs: the other's tasks go out turn after turn, and no task in flight is taken twice."""
    bench = bench_of(slow, 200, 1, groups=4, stragglers=1, patience=0.01)
    slow.hanging = {"invoices"}
    turns = [bench.relay.turn() for _ in range(40)]
    assert {f"o{n}" for n in range(200)} == set(slow.ids())
    assert turns[-1].in_flight == 1
    slow.release.set()
    assert bench.relay.finish().published == 1
    assert slow.ids().count("i0") == 1
    assert bench.unsent() == []
    assert set(bench.store.claimed.values()) == {1}


def test_places_in_flight_count_for_a_topics_half(slow: SlowPublisher) -> None:
    """Two groups of a topic hang: while another topic waits it gets no third place of four."""
    bench = bench_of(slow, 20, 20, size=1, groups=4, stragglers=4, patience=0.01)
    slow.hanging = {"invoices"}
    for _ in range(8):
        bench.relay.turn()
        assert bench.relay._flights.by_topic()["invoices"] <= 2
    assert len(slow.ids()) >= 4


def test_a_poll_that_left_nothing_behind_waits_for_its_groups(slow: SlowPublisher) -> None:
    """Where no task waits there is no hurry: the turn reports all that it started, stragglers or not."""
    slow.seconds = 0.02
    bench = bench_of(slow, 40, size=5, groups=4, stragglers=3, patience=0.0)
    by_shard = {row.shard: row for row in bench.store.rows.values()}
    bench.store.rows = {row.id: row for row in by_shard.values()}  # one of each: no range of the window is full
    bench.relay.turn()
    assert len(by_shard) == bench.relay.turn().published == 10


@pytest.mark.parametrize(("stragglers", "patience"), [(3, None), (0, 0.0)])
def test_stragglers_are_left_behind_while_tasks_wait(
    slow: SlowPublisher, monkeypatch: pytest.MonkeyPatch, stragglers: int, patience: float | None
) -> None:
    """The turn ends when the wanted number has ended, or when patience has: the rest is reported later."""
    monkeypatch.setattr(relay_module, "LONGEST_TURN_WAIT", 25.0)
    begin = time.monotonic()
    slow.hanging = {"invoices"}
    bench = bench_of(slow, 200, 200, groups=4, stragglers=stragglers, patience=patience)
    bench.relay.turn()
    turn = bench.relay.turn()
    assert 2 <= turn.in_flight <= 3
    assert turn.published + turn.in_flight * 10 == 40
    assert time.monotonic() - begin < 20


def test_while_every_place_is_taken_the_relay_waits_without_polls(slow: SlowPublisher) -> None:
    """All groups hang: no poll, no busy loop, and a turn ends now and then so that the loop can beat."""
    slow.hanging = {"orders"}
    bench = bench_of(slow, 40, groups=2, stragglers=0, patience=0.01)
    bench.relay.turn(), bench.relay.turn()
    polls = len(bench.store.looks)
    assert bench.relay.turn() == Turn(in_flight=2, waits=True)
    assert len(bench.store.looks) == polls
    slow.release.set()
    while bench.unsent():
        bench.relay.turn()
    assert sorted(slow.ids()) == sorted(bench.store.rows)


def test_large_messages_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three at once where there is room for three; a turn that can start none waits for one to end."""
    monkeypatch.setattr(batching, "LEAST_BYTES", 0)
    most = [0]
    publishing: list[str] = []

    class Watched(FakePublisher):
        def publish(self, topic: str, rows: Any, *arguments: Any, **keywords: Any) -> dict[str, Outcome]:
            publishing.extend(row.id for row in rows)
            most[0] = max(most[0], len(publishing))
            eventually(lambda: most[0] >= 3)
            answer = super().publish(topic, rows, *arguments, **keywords)
            for row in rows:
                publishing.remove(row.id)
            return answer

    bench = Bench(publisher=Watched("orders"), size=1, groups=8, group_bytes=100, stragglers=2, patience=0)
    for number in range(20):
        bench.store.insert(f"{number}", "orders", serialized(b"x" * 120))
    bench.turns(60)
    assert bench.unsent() == []
    assert most[0] == 3
