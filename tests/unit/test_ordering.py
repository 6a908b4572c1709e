"""The order of a key from the poll to the mark, between fakes: who goes, and what a run is."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from random import Random

import pytest

from publishworker.task import Key, Outcome, Row, Sent, TopicLimit
from publishworker.turn.ordering import MAX_FRONT_ROWS, Fronts, Ordering
from publishworker.turn.polling import Found
from publishworker.turn.sampling import Limits
from tests.support.fakes import FakePublisher, serialized
from tests.support.parts import look
from tests.support.relay_bench import Bench, SlowPublisher, overtake


@pytest.fixture
def bench() -> Bench:
    """A relay between fakes, two groups of ten."""
    return Bench()


def test_a_key_goes_out_in_its_order_in_one_request(bench: Bench) -> None:
    """Not in the order of ids or of priorities, and not one by one."""
    bench.line("e", "c", "a", "d", "b")
    bench.store.rows["b"].priority = 100
    bench.turns()
    assert bench.publisher.requests == [["e", "c", "a", "d", "b"]]
    assert bench.unsent() == []


def test_a_later_commit_goes_after_an_earlier_one(bench: Bench) -> None:
    """CreatedAt comes before Sequence, which counts inside one transaction only."""
    at = bench.store.now - timedelta(minutes=1)
    bench.insert("later", ordering_key="k", sequence=1, created_at=at + timedelta(microseconds=1))
    bench.insert("earlier", ordering_key="k", sequence=9, created_at=at)
    bench.turns()
    assert bench.publisher.ids() == ["earlier", "later"]


def test_a_key_longer_than_a_group_goes_in_runs(bench: Bench) -> None:
    """Each run after the one before it was marked, and as long as a group may be."""
    ids = [f"{n:02}" for n in Random(7).sample(range(100), 25)]
    bench.line(*ids)
    bench.turns()
    assert bench.publisher.ids() == ids
    assert [len(request) for request in bench.publisher.requests] == [10, 10, 5]


def test_a_run_is_cut_by_bytes(bench: Bench) -> None:
    """As a group is; a task that is too large for any group goes alone."""
    for sequence, size in enumerate((4_000, 5_000, 4_000, 20_000, 10)):
        bench.store.insert(str(sequence), "orders", serialized(bytes(size)), ordering_key="k", sequence=sequence)
    bench.turns()
    assert bench.publisher.requests == [["0", "1"], ["2"], ["3"], ["4"]]


def test_keys_share_a_group_with_each_other_and_with_tasks_without_a_key() -> None:
    """A transaction for each key would be slow; the runs in it stay whole, each in a request of its own."""
    bench = Bench(size=20)
    bench.line("a1", "a2", key="a")
    bench.line("b1", "b2", "b3", key="b")
    bench.insert("x", "y")
    bench.turns()
    assert bench.store.claimed.total() == 7
    assert sorted(map(tuple, bench.publisher.requests)) in (
        [("a1", "a2"), ("b1", "b2", "b3"), each] for each in (("x", "y"), ("y", "x"))
    )


def test_a_task_in_the_middle_that_is_not_due_ends_the_run(bench: Bench) -> None:
    """What stands before it goes; what stands behind waits for it, and goes with it."""
    bench.line("a", "b")
    bench.line("later", available_at=bench.store.now + timedelta(seconds=60))
    bench.line("c")
    bench.turns()
    assert bench.publisher.ids() == ["a", "b"]
    bench.wait(60)
    bench.turns()
    assert bench.publisher.requests == [["a", "b"], ["later", "c"]]


def test_what_another_worker_put_off_meanwhile_ends_the_run_under_the_lock(bench: Bench) -> None:
    """The snapshot showed it as ready; the row under the lock is the truth."""
    bench.line("a", "b", "c")
    later = bench.store.now + timedelta(seconds=30)
    bench.relay.turn()
    bench.line("d", "e", "f")
    overtake(bench, lambda: setattr(bench.store.rows["e"], "available_at", later))
    bench.relay.turn()
    assert bench.published(*"abcdef") == ["a", "b", "c", "d"]
    bench.turns()
    assert bench.waits("f") == pytest.approx(30, abs=1)


def test_what_another_worker_sent_or_somebody_deleted_is_passed_over(bench: Bench) -> None:
    """Under the lock, between the snapshot and now."""
    bench.line("a", "b", "c", "d")
    bench.turns()
    bench.publisher.published.clear()
    bench.line("e", "f", "g", "h")

    def act() -> None:
        bench.store.rows["e"].sent_at = bench.store.now
        del bench.store.rows["g"]

    overtake(bench, act)
    bench.relay.turn()
    assert bench.publisher.ids() == ["f", "h"]


def test_a_task_that_was_moved_to_another_key_is_not_sent_with_its_old_one(bench: Bench) -> None:
    """It goes with the next poll, in its new place."""
    bench.line("a", "b")
    bench.turns()
    bench.publisher.published.clear()
    bench.line("c", "d", "e")
    overtake(bench, lambda: setattr(bench.store.rows["d"], "ordering_key", "other"))
    bench.relay.turn()
    assert bench.publisher.ids() == ["c", "e"]
    bench.turns()
    assert bench.publisher.ids() == ["c", "e", "d"]


def test_a_key_in_flight_waits_for_its_answer() -> None:
    """One request of a key at a time; the other topic's tasks do not wait for it."""
    publisher = SlowPublisher("orders", "invoices")
    bench = Bench(publisher=publisher, groups=4)
    bench.publisher = publisher
    publisher.hanging = {"orders"}
    bench.line(*(f"{n:02}" for n in range(25)))
    bench.relay.turn()
    for _ in range(3):
        bench.relay.turn()
    assert bench.store.claimed.total() == 10
    bench.insert("i", topic="invoices")
    while "i" not in publisher.ids():
        bench.relay.turn()
    publisher.release.set()
    bench.turns()
    assert bench.published(*(f"{n:02}" for n in range(25))) == [f"{n:02}" for n in range(25)]


def test_a_limited_topic_sends_the_beginning_of_a_run(bench: Bench) -> None:
    """Three at once are allowed: the first three of the key."""
    bench.store.limits["orders"] = TopicLimit(rate=0.001, burst=3)
    bench.line("e", "d", "c", "b", "a")
    bench.turns()
    assert bench.publisher.requests == [["e", "d", "c"]]


def test_an_urgent_task_makes_its_key_urgent(bench: Bench) -> None:
    """What stands before it goes first, ahead of other keys."""
    bench = Bench(size=2, groups=1)
    bench.line("x1", "x2", key="x", priority=50)
    bench.line("a", priority=0)
    bench.line("b", priority=100)
    bench.turns()
    assert bench.publisher.requests == [["a", "b"], ["x1", "x2"]]


class CountedFronts(Bench):
    """Keeps what the fronts were asked for."""

    def __init__(self) -> None:
        """Count."""
        super().__init__(size=100, groups=8)
        self.asked: list[tuple[int, int]] = []
        fronts = self.store.fronts

        def counted(keys: Collection[Key], per_key: int, *, pass_dead: bool) -> object:
            self.asked.append((len(keys), per_key))
            return fronts(keys, per_key, pass_dead=pass_dead)

        self.store.fronts = counted


def test_fronts_are_read_as_far_as_there_is_something_to_take() -> None:
    """A run, and one row more; never more than a bound over all keys."""
    bench = CountedFronts()
    for n in range(5):
        bench.line(f"k{n}", key=str(n))
    bench.line("a", "b", "c", key="long")
    bench.turns()
    assert bench.asked == [(6, 101)]
    many = MAX_FRONT_ROWS // 10
    bench = CountedFronts()
    for n in range(many):
        bench.line(f"k{n}", key=str(n))
    bench.line(*(f"l{n}" for n in range(100)), key="long")
    bench.turns(30)
    assert all(keys * (rows - 1) <= MAX_FRONT_ROWS for keys, rows in bench.asked)


def test_without_ordered_tasks_no_front_is_read() -> None:
    """Who needs no order pays nothing for it."""
    bench = CountedFronts()
    bench.insert("a", "b")
    bench.turns()
    assert bench.asked == []


class OneByOne(FakePublisher):
    """Fails if a key is published while another request of it is on its way."""

    def __init__(self, *topics: str) -> None:
        """Nothing is on its way."""
        super().__init__(*topics)
        self.flying: set[str | None] = set()

    def publish(
        self, topic: str, rows: Sequence[Row], seconds: float, singly: Collection[str] = frozenset()
    ) -> dict[str, Outcome]:
        """Note the keys, and publish."""
        keys = {row.ordering_key for row in rows} - {None}
        assert not keys & self.flying
        self.flying |= keys
        outcomes = super().publish(topic, rows, seconds, singly)
        assert all(isinstance(each, Sent) for each in outcomes.values())
        self.flying -= keys
        return outcomes


def test_many_keys_over_many_turns_each_in_its_order() -> None:
    """Interleaved registrations, groups in parallel: the order of each key is that of its registration."""
    publisher = OneByOne("orders", "invoices")
    bench = Bench(publisher=publisher, size=7, groups=4)
    bench.publisher = publisher
    random = Random(3)
    expected: dict[str, list[str]] = {}
    for n, id in enumerate(random.sample(range(10_000), 400)):
        key = f"key {random.randrange(12)}"
        bench.insert(str(id), ordering_key=key, sequence=n, priority=random.choice((0, 50, 100)))
        expected.setdefault(key, []).append(str(id))
        if n % 40 == 0:
            bench.relay.turn()
    bench.turns(200)
    assert bench.unsent() == []
    for ids in expected.values():
        assert bench.published(*ids) == ids


def test_a_run_is_one_candidate_as_urgent_as_the_most_urgent_that_was_seen(bench: Bench) -> None:
    """It has the size of all its tasks; of equally urgent ones the oldest says how long it has waited."""
    at = bench.store.now
    bench.line("a", priority=0, created_at=at)
    bench.line("b", priority=100, created_at=at + timedelta(seconds=1))
    bench.line("c", priority=100, created_at=at + timedelta(seconds=2))
    ordering = Ordering(bench.store, Limits(10, 10_000, 2), Random(1), pass_dead=False)
    seen = bench.store.poll(look("orders")).candidates
    fronts = ordering.fronts(Found(seen), frozenset(), frozenset())
    [run] = fronts.candidates
    assert not fronts.busy
    assert (run.id, run.behind, run.priority, run.created_at) == ("a", ("b", "c"), 100, at + timedelta(seconds=1))
    assert (run.tasks, run.bytes, run.wakes) == (3, 3 * len(serialized()), None)
    assert ordering.fronts(Found(seen), frozenset({Key("orders", "k")}), frozenset()) == Fronts([], busy=True)
    other = [replace(seen[0], id="other", ordering_key="other")]
    assert ordering.fronts(Found([*seen, *other]), frozenset({Key("orders", "k")}), frozenset()).busy
