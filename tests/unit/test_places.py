"""One topic, key or priority must not delay another; on the fakes."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from publishworker.spanner.write_errors import StoreError, TimedOut
from publishworker.turn import in_flight, selection
from publishworker.turn.poller import MAX_POLL_ROWS
from publishworker.types import Next
from tests.support.fakes import serialized
from tests.support.parts import Bench, SlowPublisher
from tests.support.waiting import eventually

MANY = 1_000


@pytest.fixture
def large() -> Bench:
    return Bench(size=100, batches=8, batch_bytes=8_000_000)


@pytest.mark.parametrize("topics", [0, 1, 20])
def test_poison_delays_good_tasks_by_one_poll_after_its_first_attempt(large: Bench, topics: int) -> None:
    """The poison: urgent tasks of topics that do not exist, or tasks of the good topic with bad bodies."""
    for n in range(MANY):
        topic, data = (f"missing{n % topics}", serialized()) if topics else ("orders", b"\xff\xff")
        large.store.insert(f"bad{n}", topic, data, priority=100)
    of = {row.id: row.topic if topics else row.id for row in large.store.rows.values()}
    large.insert(*[f"good{n}" for n in range(100)], priority=0)

    def untried() -> set[str]:
        return set(of.values()) - {of.get(id, "") for id in large.store.claimed}

    for _ in range(40):
        if not untried():
            break
        large.relay.turn()
    assert not untried()
    large.relay.turn()
    assert sum(id.startswith("good") for id in large.publisher.ids()) == 100


def test_a_paused_topic_delays_no_other_and_is_not_polled(large: Bench) -> None:  # OUT-DELAY-3
    """A thousand urgent tasks of a paused topic cost the poll nothing."""
    large.insert(*[f"p{n}" for n in range(MANY)], topic="invoices", priority=100)
    large.store.control("invoices", paused=True)
    large.insert(*[f"good{n}" for n in range(100)], priority=0)
    turns = large.turns()
    assert len(large.publisher.ids()) == 100
    assert len(turns) <= 3
    assert all("invoices" not in request.topics for request in large.store.polls)
    assert max(turn.polled for turn in turns) == 100
    assert large.relay.discoverer.active_topics == {"orders"}  # for which metrics report that nothing is published
    large.store.controls.clear()
    large.relay.turn()  # reads the topic controls
    large.turns()
    assert large.unsent() == []


def test_the_next_poll_comes_when_a_limited_topic_may_send_again(bench: Bench) -> None:
    """Before that the poll does not ask for the topic. The same holds for a topic whose circuit is open."""
    bench.insert("a", "b")
    bench.store.control("orders", rate_per_second=4, burst=1)
    turns = bench.turns()
    assert turns[-1].seconds_to_change == pytest.approx(0.25)
    assert len(bench.publisher.ids()) == 1
    polls = len(bench.store.polls)
    bench.relay.turn()
    assert len(bench.store.polls) == polls  # no topic to poll
    bench.wait(0.25)
    bench.relay.turn()
    assert bench.store.polls[-1].topics == {"orders"}
    bench.turns()
    assert bench.unsent() == []
    bench.insert("c", topic="missing")
    assert bench.turns()[-1].seconds_to_change <= 1


def test_tasks_in_flight_stay_within_the_topics_limit(slow: SlowPublisher) -> None:
    """Together with those of lower priorities, which get their share."""
    bench = Bench(publisher=slow, size=2, batches=8, fair_share=0.5)
    for number in range(20):
        bench.insert(str(number), priority=number % 2)
    bench.store.control("orders", max_in_flight=3)
    bench.relay.turn()
    slow.hanging = {"orders"}
    for _ in range(3):
        bench.relay.turn()
        assert sum(len(claim.ids) for claim in bench.relay.in_flight.unreported) == 3
    slow.release.set()
    bench.turns()
    assert bench.unsent() == []


def test_a_poll_asks_for_few_rows_of_many_topics() -> None:
    """A row takes 2.8 kB of memory."""
    bench = Bench(size=1_000, batches=10)
    for number in range(100):
        bench.insert(str(number), topic=f"topic{number}")
    bench.relay.turn()
    assert max(poll.per_range * poll.ranges for poll in bench.store.polls) == MAX_POLL_ROWS


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("slow", ["pause", "poll", "discover"])
def test_a_turn_starts_nothing_with_old_topic_controls(slow: str, once: bool) -> None:
    """After a long pause, or reads that took long. Also the batch of the at-most-once tasks that a claim has found."""
    bench = Bench()
    bench.insert("first")
    bench.turns()
    reads, read = len(bench.store.discoveries), getattr(bench.store, slow, None)
    bench.insert("a", at_most_once=once)

    def pass_time() -> None:
        bench.store.control("orders", paused=True)
        bench.wait(4)

    def slow_read(*arguments: Any, **options: Any) -> object:
        setattr(bench.store, slow, read)
        found = read(*arguments, **options)
        pass_time()
        return found

    if slow == "pause":
        pass_time()
    else:
        bench.wait(4)
        setattr(bench.store, slow, slow_read)
    bench.relay.turn()
    assert len(bench.store.discoveries) - reads == (
        1 if slow == "pause" else 2
    )  # one at the beginning, one before a start
    assert len(bench.relay.in_flight) == 0
    bench.turns()
    assert bench.publisher.ids() == ["first"]
    bench.store.controls.clear()
    bench.run_for(5)
    assert bench.publisher.ids() == ["first", "a"]


def test_batches_in_flight_have_a_limited_size(slow: SlowPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all their bodies. Further tasks stay pending. A single batch may be larger."""
    monkeypatch.setattr(in_flight, "MAX_TURN_WAIT_SECONDS", 0.02)
    for limit, batches in ((30 * len(serialized()), 3), (1, 1)):
        for module in (in_flight, selection):
            monkeypatch.setattr(module, "MAX_IN_FLIGHT_BYTES", limit)
        slow.hanging = {"orders"}
        bench = Bench(publisher=slow, batches=8)
        bench.insert(*[str(n) for n in range(80)])
        for _ in range(5):
            bench.relay.turn()
        assert len(bench.relay.in_flight) == batches
        polls = len(bench.store.polls)
        bench.relay.turn()
        assert len(bench.store.polls) == polls  # there is no room for what it would read


def test_a_slow_batch_does_not_delay_the_others(slow: SlowPublisher) -> None:  # OUT-DELAY-2
    begin = time.monotonic()
    bench = Bench(publisher=slow, batches=4)
    bench.insert(*[f"o{n}" for n in range(200)])
    bench.insert("i0", topic="invoices")
    slow.hanging = {"invoices"}
    turns = [bench.relay.turn() for _ in range(40)]
    assert time.monotonic() - begin < 20
    assert {f"o{n}" for n in range(200)} == set(slow.ids())
    assert (sum(turn.published for turn in turns), turns[-1].in_flight) == (200, 1)
    slow.release.set()
    eventually(lambda: not bench.relay.in_flight._reports.empty())
    turn = bench.relay.turn()
    assert (turn.published, turn.next) == (1, Next.AT_ONCE)
    assert slow.ids().count("i0") == 1
    assert bench.unsent() == []
    assert set(bench.store.claimed.values()) == {1}


#: How many index ranges each read of the store has.
RANGES: dict[str, Callable[..., int]] = {
    "poll": lambda request: request.ranges,
    "discover": lambda shards, known, **_: len(shards) * (len(known) + 1),
    "seconds_until_due": lambda shards, topics: len(shards) * len(topics),
    "key_heads": lambda keys, *_, **__: len(keys),
}


class SlowSpanner(Bench):
    """Each index range of a read takes `seconds`; a read that takes more than 30 s fails after 30 s."""

    def __init__(self, seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self.seconds_of_range = seconds
        self.asked: list[int] = []
        self.timeouts = 0
        for name in RANGES:
            setattr(self.store, name, self.slow(name, getattr(self.store, name)))

    def slow(self, name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any, **keywords: Any) -> Any:
            self.asked.append(RANGES[name](*arguments, **keywords))
            seconds = self.asked[-1] * self.seconds_of_range
            self.wait(min(seconds, 30.0))
            if seconds > 30.0:
                self.timeouts += 1
                raise TimedOut("DEADLINE_EXCEEDED")
            return read(*arguments, **keywords)

        return slow

    def send_all(self, turns: int) -> int:
        """Run turns until everything is sent; return how many."""
        for number in range(turns):
            if not self.unsent():
                return number
            try:
                self.relay.turn()
                self.relay.finish()
                self.wait(0.1)
                self.relay.find_next_due()
            except StoreError:
                self.wait(1)
        return turns


@pytest.mark.parametrize(("topics", "keys"), [(16, 0), (1, 0), (1, 400), (40, 400)])
def test_reads_that_time_out_become_smaller_until_all_is_sent(topics: int, keys: int) -> None:
    """As on a large table in the emulator, which scans it for each range: polls, discoveries, key heads, due times."""
    bench = SlowSpanner(0.6, size=20, batches=4)
    for number in range(400):
        bench.insert(f"id{number}", topic="orders" if number % 2 else f"topic{number % topics}",
                     ordering_key=f"k{number}" if keys else None)  # fmt: skip
    bench.publisher.topics |= {f"projects/test-project/topics/topic{number}" for number in range(topics)}
    assert bench.send_all(800) < 800
    assert bench.timeouts <= 20
    assert min(bench.asked) * bench.seconds_of_range <= 30
