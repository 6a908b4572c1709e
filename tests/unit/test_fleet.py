"""How the living divide the shards, and what a worker does about its own heartbeat."""

import logging
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from publishworker.turn.fleet import HEARTBEAT_SECONDS, Fleet, divide
from tests.support.fakes import FakeStore

names = st.sets(st.text(min_size=1, max_size=8), min_size=1, max_size=40)


@given(names, st.integers(1, 64))
def test_every_shard_and_every_worker_has_its_part(workers: set[str], shards: int) -> None:
    """No shard without a worker, no worker without a shard, and nobody has two more than another."""
    parts = divide(workers, range(shards))
    assert set(parts) == workers
    assert {shard for part in parts.values() for shard in part} == set(range(shards))
    sizes = [len(part) for part in parts.values()]
    of_shard = Counter(shard for part in parts.values() for shard in part)
    assert max(sizes) - min(sizes) <= 1
    assert max(of_shard.values()) - min(of_shard.values()) <= 1
    if shards >= len(workers):
        assert max(of_shard.values()) == 1  # divided
    else:
        assert max(sizes) == 1  # shared


@given(names, st.integers(1, 64), st.randoms())
def test_all_workers_come_to_the_same_division(workers: set[str], shards: int, random: object) -> None:
    """No leader: the order in which the rows are read does not matter."""
    shuffled = list(workers)
    random.shuffle(shuffled)
    assert divide(workers, range(shards)) == divide(shuffled, range(shards))


def test_a_worker_that_joins_moves_few_shards() -> None:
    """Of 100 shards of ten workers the eleventh takes its nine, and few others move."""
    before = divide([f"worker-{n}" for n in range(10)], range(100))
    after = divide([f"worker-{n}" for n in range(11)], range(100))
    owner = {shard: worker for worker, part in after.items() for shard in part}
    moved = sum(owner[shard] != worker for worker, part in before.items() for shard in part)
    assert len(after["worker-10"]) == 9
    assert moved <= 35


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        """At zero."""
        self.seconds = 100.0

    def __call__(self) -> float:
        """Tell."""
        return self.seconds


def test_alone_a_worker_has_all_shards_and_with_others_its_part() -> None:
    """It counts itself as alive, whatever the rows say."""
    fleet = Fleet(FakeStore(), "me", range(10))
    assert fleet.shards == tuple(range(10))
    assert fleet.learn({"other", "me"}, set())
    assert fleet.shards == divide({"me", "other"}, range(10))["me"]
    assert not fleet.learn({"other", "me"}, set())
    assert fleet.learn({"me"}, set())
    assert fleet.shards == tuple(range(10))


def test_after_an_outage_nobody_believes_to_be_alone() -> None:
    """All heartbeats are old then, one's own as well: the division stays until the others had time to beat."""
    clock = Clock()
    fleet = Fleet(FakeStore(), "me", range(10), clock=clock)
    fleet.learn({"me", "other"}, set())
    mine = fleet.shards
    clock.seconds += 60
    assert not fleet.learn(set(), set())
    assert not fleet.learn({"me"}, set())
    assert fleet.shards == mine
    clock.seconds += HEARTBEAT_SECONDS
    assert fleet.learn({"me"}, set())
    assert fleet.shards == tuple(range(10))


def test_its_own_row_is_never_deleted_as_one_that_is_gone() -> None:
    """Heartbeats that were refused for an hour, and are allowed again."""
    store, clock = FakeStore(), Clock()
    fleet = Fleet(store, "me", range(10), clock=clock)
    fleet.learn(set(), {"me", "dead"})
    store.workers["dead"] = store.now
    fleet.beat()
    assert set(store.workers) == {"me"}


def test_a_division_is_told_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    """One line for each change, none for each look; a heartbeat that works again is not complained of."""
    store, clock = FakeStore(), Clock()
    fleet = Fleet(store, "me", range(10), clock=clock)
    store.away = True
    fleet.beat()
    store.away = False
    clock.seconds += HEARTBEAT_SECONDS
    fleet.beat()
    with caplog.at_level(logging.INFO, "publishworker"):
        for _ in range(3):
            fleet.learn({"me", "other"}, set())
    assert [record.__dict__["action"] for record in caplog.records] == ["assigned"]
    assert caplog.records[0].getMessage().startswith("2 workers live; this one polls shards ")


def test_shared_a_worker_has_all_shards_and_still_says_that_it_lives() -> None:
    """For comparison, and for single workers."""
    store = FakeStore()
    fleet = Fleet(store, "me", range(10), shared=True)
    fleet.beat()
    assert not fleet.learn({"other", "me"}, set())
    assert fleet.shards == tuple(range(10))
    assert set(store.workers) == {"me"}


def test_the_heartbeat_is_written_every_five_seconds() -> None:
    """At once at the start, then when it is time; long gone rows go with it."""
    store, clock = FakeStore(), Clock()
    fleet = Fleet(store, "me", range(10), clock=clock)
    assert fleet.seconds_to_beat == 0
    fleet.beat()
    assert set(store.workers) == {"me"}
    assert fleet.seconds_to_beat == HEARTBEAT_SECONDS
    store.workers["dead"] = store.workers.pop("me")
    fleet.learn({"me"}, {"dead"})
    clock.seconds += HEARTBEAT_SECONDS - 0.1
    fleet.beat()
    assert set(store.workers) == {"dead"}
    clock.seconds += 0.1
    fleet.beat()
    assert set(store.workers) == {"me"}
    fleet.leave()
    assert not store.workers


def test_a_heartbeat_that_fails_stops_nothing_and_is_said_when_polls_succeed(caplog: pytest.LogCaptureFixture) -> None:
    """While Spanner is away there is one line for all; a table that refuses the heartbeat has one of its own."""
    store = FakeStore()
    fleet = Fleet(store, "me", range(10))
    store.away = True
    with caplog.at_level(logging.WARNING, "publishworker"):
        fleet.beat()
        assert caplog.records == []
        fleet.learn({"other"}, set())
        fleet.leave()
    assert [record.__dict__["action"] for record in caplog.records] == ["fleet"]
    assert "the fake store is away" in caplog.records[0].getMessage()
