"""Which batches start: deferrals and sendable tasks, leftover tasks, limits of bytes and of topics."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from random import Random

import pytest

from outbox.table.controls import TopicControls
from publishworker.delivery.claim import Claim, Delivered, Kind, Unmarked
from publishworker.host import Host
from publishworker.topics.availability import Topics
from publishworker.turn.in_flight import MAX_IN_FLIGHT_BYTES, Limits
from publishworker.turn.ordering import ResolvedKeys
from publishworker.turn.poller import Polled
from publishworker.turn.selection import Selection, Selector
from publishworker.types import Candidate, Skipped
from tests.support.parts import claim_of, in_flight_of

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Idle:
    """A batch that never reports."""

    unmarked, needs_place, transactions = frozenset[str](), True, 0

    def __init__(self, claim: Claim) -> None:
        self.claim = claim

    def run(self) -> Delivered:
        threading.Event().wait(0.2)
        return Delivered(self.claim)

    def mark_again(self) -> Iterator[Unmarked]:
        return iter(())


class Bench:
    """A selector whose batches in flight never end."""

    def __init__(self, batches: int = 8, size: int = 10, fair_share: float = 0.0) -> None:
        self.random = Random(1)
        self.topics = Topics(Host(random=self.random, clock=lambda: 0.0))
        limits = Limits(size, MAX_IN_FLIGHT_BYTES // 4, batches, fair_share=fair_share)
        self.in_flight = in_flight_of(Idle, limits)
        self.selector = Selector(self.in_flight, self.topics, self.random)

    def start(self, *batches: Claim) -> None:
        for batch in batches:
            self.in_flight.start(batch)

    def select(self, candidates: Sequence[Candidate], blocked: int = 0) -> Sequence[Claim]:
        return self.choose(candidates, blocked).claims

    def choose(
        self, candidates: Sequence[Candidate], blocked: int = 0, cut_off: frozenset[str] = frozenset()
    ) -> Selection:
        deferrals = [claim_of("orders", "head", str(n), keys=("k", "k"), kind=Kind.DEFER) for n in range(blocked)]
        return self.selector.select(ResolvedKeys(candidates, deferrals), Polled((), cut_off))


def tasks(count: int, topic: str = "orders", bytes: int = 1, **columns: int) -> list[Candidate]:
    return [
        Candidate(f"{topic}-{n}", topic, 0, columns.get("priority", 50), NOON + timedelta(seconds=n), None, None, bytes)
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("places", "in_flight", "candidates", "deferrals"),
    [(8, 0, 5, 2), (8, 0, 0, 4), (20, 0, 5, 5), (8, 1, 5, 1), (8, 2, 5, 0), (2, 0, 0, 1), (1, 0, 0, 1)],
)
def test_deferrals_get_a_quarter_of_the_places_or_half_if_none_is_sendable(
    places: int, in_flight: int, candidates: int, deferrals: int
) -> None:
    """Those in flight count. Of one or two places they get one while no task is sendable."""
    bench = Bench(places)
    bench.start(*[claim_of("orders", "head", "a", kind=Kind.DEFER)] * in_flight)
    batches = bench.select(tasks(candidates), blocked=20)
    assert sum(batch.kind is Kind.DEFER for batch in batches) == deferrals


def test_too_many_bytes_in_flight_leave_tasks_pending() -> None:
    """The limit is that of four batches. A single batch may be larger."""
    bench = Bench(batches=8)
    assert bench.selector.wanted().room == 8 * 10
    assert len(bench.select(tasks(40, bytes=MAX_IN_FLIGHT_BYTES // 20))) == 4
    bench.start(claim_of("invoices", "a", bytes=MAX_IN_FLIGHT_BYTES - 1))
    assert bench.choose(tasks(1, bytes=2)) == Selection([], waits=True)
    bench.start(claim_of("invoices", "b", bytes=1))
    assert bench.choose(()) == Selection(waits=True)
    assert bench.selector.wanted().room == 0  # so no poll reads anything
    assert len(Bench().select(tasks(1, bytes=2 * MAX_IN_FLIGHT_BYTES))) == 1


def test_one_topic_leaves_bytes_to_a_less_urgent_one() -> None:
    """A place is of no use without bytes. Here one of four large batches has just ended."""
    for fair_share, expected in ((0.1, ["invoices"]), (0.0, ["orders"])):
        bench = Bench(batches=8, fair_share=fair_share)
        quarter = MAX_IN_FLIGHT_BYTES // 4
        bench.start(*(claim_of("orders", id, bytes=quarter) for id in "abc"))
        large = tasks(8, bytes=quarter, priority=100)
        assert [claim.topic for claim in bench.select([*large, *tasks(10, "invoices")])] == expected


@pytest.mark.parametrize("fair_share", [0.0, 0.1])
@pytest.mark.parametrize(
    ("places", "in_flight", "expected"),
    [(8, 0, (4, 4)), (5, 0, (3, 2)), (8, 3, (1, 4)), (8, 6, (0, 2)), (2, 1, (0, 1))],
)
def test_a_topic_gets_half_of_the_places_while_another_one_of_its_priority_waits(
    places: int, in_flight: int, expected: tuple[int, int], fair_share: float
) -> None:
    """Those in flight count. Both have tasks for all places, and either may be the topic that comes first by chance."""
    for seed in range(20):
        bench = Bench(places, fair_share=fair_share)
        bench.random.seed(seed)
        bench.start(*(claim_of("orders", f"in flight {n}") for n in range(in_flight)))
        counts = Counter(batch.topic for batch in bench.select([*tasks(200), *tasks(200, "invoices")]))
        of_topic = counts["orders"], counts["invoices"]
        assert (of_topic if in_flight else tuple(sorted(of_topic, reverse=True))) == expected
    for topics in ([tasks(200)], [tasks(200), tasks(200, "invoices", priority=0)]):  # the other one does not wait
        batches = Bench(places).select([each for of_topic in topics for each in of_topic])
        assert [batch.topic for batch in batches] == ["orders"] * places


def test_deferrals_and_at_most_once_tasks_get_no_more_than_the_free_places() -> None:
    """A batch that has found at-most-once tasks keeps its place if its commit failed."""
    bench = Bench(batches=4, fair_share=0.5)
    bench.start(*[claim_of("orders", "a")] * 3)
    bench.selector._fair_share.count(2, 0, highest=100)
    for candidates in (tasks(1, priority=0), []):
        assert len(bench.select(candidates, blocked=20)) == 1
    found = [Delivered(claim_of("orders", id), skipped={id: Skipped("at_most_once")}) for id in "ab"]
    assert [claim.ids for claim in bench.selector.follow_ups(found)] == [("a",)]


def test_the_fair_share_counts_towards_the_limit_of_its_topic() -> None:
    bench = Bench(batches=4, fair_share=0.5)
    bench.topics._limits.apply({"orders": TopicControls(False, 5, 5)}, 1)
    bench.selector._fair_share.count(2, 0, highest=100)
    low = [each._replace(id=f"low-{each.id}") for each in tasks(3, priority=0)]
    batches = bench.select([*tasks(20, priority=100), *low])
    chosen = [id for batch in batches for id in batch.ids]
    assert len(chosen) == 5
    assert {each.id for each in low} <= set(chosen)
