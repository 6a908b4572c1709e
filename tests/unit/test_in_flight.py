"""In-flight batches: a slow one delays no other, none is lost, a defect is raised, turns leave stragglers."""

import threading
import time
from collections.abc import Iterator
from typing import Any, cast
from unittest import mock

import pytest

from publishworker.delivery.claim import Claim, Delivered, Unmarked
from publishworker.host import Host
from publishworker.telemetry import metrics as m
from publishworker.turn import in_flight
from publishworker.turn.in_flight import MAX_COUNTED_SECONDS, STUCK_SECONDS, Limits, StuckBatch
from publishworker.types import Next, TopicKey
from tests.support.parts import claim_of, in_flight_of
from tests.support.relay_bench import Bench, SlowPublisher
from tests.support.waiting import eventually


class Gated:
    """A batch that reports, and then ends, when the test says so."""

    def __init__(self, batches: "Batches", claim: Claim) -> None:
        self.batches, self.claim = batches, claim
        self.unmarked, self.needs_place, self.give_up, self.transactions = frozenset[str](), True, list, 0

    def run(self) -> Delivered:
        topic = self.claim.topic
        self.batches.ends[topic].wait(30)
        if topic == "defect":
            raise ZeroDivisionError
        self.unmarked = frozenset(self.claim.ids[:1]) if topic in self.batches.marks else frozenset()
        return Delivered(self.claim, unmarked=self.unmarked)

    def mark_again(self) -> Iterator[Unmarked]:
        if self.unmarked:
            self.batches.marks[self.claim.topic].wait(30)
            self.unmarked = frozenset()
            yield Unmarked(self.claim, "no", "published")


class Batches:
    def __init__(self) -> None:
        self.ends: dict[str, threading.Event] = {}
        self.marks: dict[str, threading.Event] = {}  # of topics whose batches cannot mark their tasks at first
        self.seconds = 0.0
        self.beats = 0
        host = Host(clock=lambda: self.seconds, progress=self.beat)
        self.in_flight_batches = in_flight_of(lambda claim: Gated(self, claim), Limits(10, 1000, 8), host)

    def beat(self) -> None:
        self.beats += 1
        self.seconds += 1

    def start(self, *topics: str) -> list[threading.Thread]:
        for topic in topics:
            self.ends.setdefault(topic, threading.Event())
            self.in_flight_batches.start(claim_of(topic, f"task-of-{topic}"))
        return [*self.in_flight_batches._running.values()]

    def end(self, *topics: str) -> None:
        for topic in topics:
            self.ends[topic].set()

    def wait(self) -> list[str]:
        return sorted(result.claim.topic for result in self.in_flight_batches.wait())


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Batches]:
    monkeypatch.setattr(in_flight, "MAX_TURN_WAIT_SECONDS", 30)
    created = Batches()
    yield created
    created.end(*created.ends)


def test_every_batch_has_a_thread_of_its_own(batches: Batches) -> None:
    """All run at once, also equal ones. A thread that the client has spoiled ends with its batch."""
    threads = batches.start("a", "b", "c", "c")
    assert len(batches.in_flight_batches) == len(set(threads)) == 4
    assert batches.in_flight_batches.ids() == {"task-of-a", "task-of-b", "task-of-c"}
    assert batches.in_flight_batches.places_by_topic() == {"a": 1, "b": 1, "c": 2}
    batches.end("a", "b", "c")
    assert batches.wait() == ["a", "b", "c", "c"]
    assert (len(batches.in_flight_batches), batches.in_flight_batches.ids()) == (0, frozenset())
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_there_is_no_room_while_every_place_is_in_use(batches: Batches) -> None:
    batches.start(*"abcdefg")
    assert batches.in_flight_batches.has_room
    batches.start("h")
    assert not batches.in_flight_batches.has_room


def test_a_wait_ends_at_its_limit(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    batches.start("hangs", "hangs-too")
    with monkeypatch.context() as patch:
        patch.setattr(in_flight, "MAX_TURN_WAIT_SECONDS", 0.01)
        assert batches.wait() == []
    batches.start("quick")
    batches.end("quick")
    assert batches.wait() == ["quick"]
    assert len(batches.in_flight_batches) == 2


def test_a_batch_that_marks_its_tasks_again_keeps_its_place_until_it_is_aside(
    batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has reported, so no turn waits for it. Tasks without a mark stay in flight. It can be stuck like others."""
    monkeypatch.setattr(in_flight, "MAX_ASIDE", 1)
    running = batches.in_flight_batches
    for topic in "ab":
        batches.marks[topic], batches.ends[topic] = threading.Event(), threading.Event()
        running.start(claim_of(topic, f"task-of-{topic}", "skipped", keys=("k", "l"), bytes=9))
    assert running.bytes_in_flight() == 18
    batches.end("a", "b")
    assert batches.wait() == ["a", "b"]
    assert (len(running), running.unreported, running.free, running.bytes_in_flight()) == (2, [], 6, 0)
    assert running.ids() == {"task-of-a", "task-of-b"}
    assert running.busy_keys() == {TopicKey("a", "k"), TopicKey("b", "k")}
    for entry in running._running:
        entry.delivery.needs_place = False
    assert running.free == 7
    batches.marks["a"].set()
    eventually(lambda: (running.collect(), len(running) == 1)[1])
    assert running.ids() == {"task-of-b"}
    for _ in range(12):
        batches.seconds += 10
        running.raise_if_stuck()
    batches.seconds += 1
    with pytest.raises(StuckBatch, match="of topic b has begun no transaction"):
        running.raise_if_stuck()
    batches.marks["b"].set()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_defect_is_raised_after_the_others_have_ended(
    batches: Batches, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """Nothing is swallowed. One that hangs has some time to end, and then the process does."""
    monkeypatch.setattr(in_flight, "JOIN_SECONDS", 0.1 if hangs else 30)
    *others, _ = batches.start("a", "b", "defect")
    if not hangs:
        threading.Timer(0.05, lambda: batches.end("a", "b")).start()
    batches.end("defect")
    with pytest.raises(ZeroDivisionError):
        batches.wait()
    assert [thread.is_alive() for thread in others] == [hangs, hangs]


def test_the_reports_before_a_defect_are_counted(batches: Batches) -> None:
    """Some of their at-most-once tasks may be lost, and nothing else names them."""
    for topic, thread in zip(("a", "defect"), batches.start("a", "defect"), strict=True):
        batches.end(topic)
        thread.join(10)
    with pytest.raises(ZeroDivisionError):
        batches.wait()
    reported = cast(mock.Mock, batches.in_flight_batches._reporter).report_batch.call_args_list
    assert [call.args[0].claim.topic for call in reported] == ["a"]


def test_a_batch_that_does_not_end_is_stuck_after_two_minutes(batches: Batches) -> None:
    """The error names it, and its later result is dropped."""
    slow, _ = batches.start("slow", "a")
    for _ in range(12):
        batches.seconds += 10
        batches.in_flight_batches.raise_if_stuck()
    batches.end("a")
    assert [each.claim.topic for each in batches.in_flight_batches.wait_for_one()] == ["a"]
    batches.seconds += 1
    with pytest.raises(StuckBatch, match="topic slow has begun no transaction for 121 s: task-of-slow"):
        batches.in_flight_batches.raise_if_stuck()
    batches.in_flight_batches.raise_if_stuck()
    assert len(batches.in_flight_batches) == 0
    batches.end("slow")
    slow.join(10)
    batches.start("b")
    batches.end("b")
    assert batches.wait() == ["b"]


def test_a_process_that_was_paused_has_no_stuck_batches(batches: Batches) -> None:
    """Its batches were paused as well, so they get time to end. A batch that has ended is not stuck."""
    [thread] = batches.start("a")
    batches.seconds += 3600
    batches.in_flight_batches.raise_if_stuck()
    batches.seconds += STUCK_SECONDS - MAX_COUNTED_SECONDS
    batches.in_flight_batches.raise_if_stuck()
    assert batches.in_flight_batches.ids() == {"task-of-a"}
    batches.end("a")
    thread.join(10)
    for _ in range(100):  # no result is asked for in a long outage
        batches.seconds += 30
        batches.in_flight_batches.raise_if_stuck()
    assert batches.wait() == ["a"]


def test_waiting_for_all_batches_keeps_the_heartbeat_and_gives_up_stuck_ones(
    batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait without a limit ends nevertheless. Results can be collected before, one by one."""
    monkeypatch.setattr(in_flight, "WATCH_SECONDS", 0.001)
    [thread] = batches.start("a")
    batches.end("a")
    thread.join(10)
    batches.start("slow", "slow-too")
    assert [result.claim.topic for result in batches.in_flight_batches.wait_for_one()] == ["a"]
    with pytest.raises(
        StuckBatch, match=r"of topic slow has begun no transaction .* \(the first of 2 stuck batches\)"
    ) as caught:
        batches.in_flight_batches.wait_for_one()
    assert [batch.topic for batch in caught.value.claims] == ["slow", "slow-too"]
    assert batches.beats > STUCK_SECONDS


def bench_of(publisher: SlowPublisher, orders: int, invoices: int = 0, **options: Any) -> Bench:
    bench = Bench(publisher=publisher, **options)
    bench.publisher = publisher
    bench.insert(*[f"o{n}" for n in range(orders)])
    bench.insert(*[f"i{n}" for n in range(invoices)], topic="invoices")
    return bench


def test_a_slow_batch_does_not_delay_the_others(slow: SlowPublisher) -> None:  # OUT-DELAY-2
    begin = time.monotonic()
    bench = bench_of(slow, 200, 1, batches=4)
    slow.hanging = {"invoices"}
    turns = [bench.relay.turn() for _ in range(40)]
    assert time.monotonic() - begin < 20
    assert {f"o{n}" for n in range(200)} == set(slow.ids())
    assert (sum(turn.published for turn in turns), turns[-1].in_flight) == (200, 1)
    slow.release.set()
    eventually(lambda: not bench.relay._in_flight._reports.empty())
    turn = bench.relay.turn()
    assert (turn.published, turn.next) == (1, Next.AT_ONCE)
    assert slow.ids().count("i0") == 1
    assert bench.unsent() == []
    assert set(bench.store.claimed.values()) == {1}


def test_a_batch_that_ends_after_the_last_turn_is_counted(slow: SlowPublisher) -> None:
    slow.hanging = {"orders"}
    bench = bench_of(slow, 1)
    bench.relay.turn(), bench.relay.turn()
    slow.release.set()
    assert bench.relay.finish().published == bench.count(m.PUBLISHED) == 1
