"""Live workers and their shards: heartbeats, take-over, and how shards are divided."""

import logging
from collections import Counter
from collections.abc import Collection
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.base.schedules import RECONNECT
from outbox.table.shared_sql import FORGET_WORKER_SECONDS
from publishworker.log import LINE_SECONDS
from publishworker.spanner.store import LIVENESS_TIMEOUT_SECONDS
from publishworker.spanner.write_errors import StoreError
from publishworker.turn.membership import HEARTBEAT_INTERVAL_SECONDS, Membership, divide
from tests.support.fakes import FakeStore

names = st.sets(st.text(min_size=1, max_size=8), min_size=1, max_size=40)


@given(names, st.integers(1, 64), st.randoms())
def test_every_shard_has_a_worker_and_every_worker_a_shard(workers: set[str], shards: int, random: object) -> None:
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
    shuffled = list(workers)
    random.shuffle(shuffled)
    assert divide(shuffled, range(shards)) == parts


def test_a_worker_that_joins_moves_few_shards() -> None:
    before = divide([f"worker-{n}" for n in range(10)], range(100))
    after = divide([f"worker-{n}" for n in range(11)], range(100))
    owner = {shard: worker for worker, part in after.items() for shard in part}
    moved = sum(owner[shard] != worker for worker, part in before.items() for shard in part)
    assert len(after["worker-10"]) == 9
    assert moved <= 35


class Member(Membership):
    def __init__(self) -> None:
        self.store, self.seconds = FakeStore(), 100.0
        super().__init__(self.store, "me", clock=lambda: self.seconds)

    def see(self, *live: str, gone: Collection[str] = ()) -> tuple[int, ...]:
        old = timedelta(seconds=FORGET_WORKER_SECONDS + 1)
        self.store.seen_at = dict.fromkeys(live, self.store.now) | dict.fromkeys(gone, self.store.now - old)
        self.assign(self.store.workers())
        return self.shards


def test_the_heartbeat_is_written_at_an_interval_and_soon_after_a_failure() -> None:
    """Starting at once. It deletes the rows of workers that were silent for an hour, but never its own."""
    member = Member()
    assert member.seconds_to_heartbeat == 0
    member.heartbeat()
    assert set(member.store.seen_at) == {"me"}
    assert member.seconds_to_heartbeat == HEARTBEAT_INTERVAL_SECONDS
    member.see(gone=["dead", "me"])  # as after an hour in which heartbeats were refused
    member.seconds += HEARTBEAT_INTERVAL_SECONDS - 0.1
    member.heartbeat()
    assert set(member.store.seen_at) == {"dead", "me"}
    member.seconds += 0.1
    member.heartbeat()
    assert set(member.store.seen_at) == {"me"}
    member.seconds += HEARTBEAT_INTERVAL_SECONDS
    member.store.away = True
    member.heartbeat()
    assert member.seconds_to_heartbeat == RECONNECT.first
    member.store.away = False
    member.delete_heartbeat()
    assert not member.store.seen_at


#: What happens to "me", whose "other" is silent from the start, in seconds; and when "me" takes over.
SILENCES: dict[str, tuple[tuple[float, ...], tuple[float, ...], float]] = {
    # (when writes fail from and to), (when this worker's turns fail), the takeover
    "it can write": ((), (), 14.0),
    "its turns are slow": ((), (), 15.0),
    "writes fail when the other one times out": ((13.0, 40.0), (), 40.0 + LIVENESS_TIMEOUT_SECONDS),
    "writes fail for a moment": ((3.0, 9.0), (), 9.0 + LIVENESS_TIMEOUT_SECONDS),
    "all fails": ((), (3.0, 40.0), 40.0 + LIVENESS_TIMEOUT_SECONDS),
}


@pytest.mark.parametrize("case", SILENCES)
def test_a_worker_takes_over_from_a_silent_one_when_it_has_long_been_able_to_write(case: str) -> None:
    """Otherwise the heartbeats of the others may be old for the same reason as its own."""
    writes, turns, takeover = SILENCES[case]
    member = Member()
    began, start = member.seconds, member.store.now
    member.heartbeat()
    part = member.see("me", "other")
    while len(member.shards) == len(part) and member.seconds < began + 100:
        member.seconds += 15.0 if case == "its turns are slow" else 0.5
        passed = member.seconds - began
        member.store.now = start + timedelta(seconds=passed)
        if turns and turns[0] <= passed < turns[1]:
            member.turn_failed = True
            continue
        member.store.away = bool(writes) and writes[0] <= passed < writes[1]
        member.assign(member.store.workers())
        member.heartbeat()
    assert member.shards == tuple(range(10))
    assert takeover <= passed <= takeover + RECONNECT.first + 0.5
    assert member.seconds_to_heartbeat > 0


def test_a_worker_that_starts_while_writes_fail_polls_nothing_and_then_waits_for_the_others() -> None:
    member = Member()
    member.store.seen_at = {"other": member.store.now - timedelta(seconds=60)}
    member.store.away = True
    member.heartbeat()
    with pytest.raises(StoreError):
        member.assign(member.store.workers())
    member.store.away = False
    member.assign(member.store.workers())
    assert set(member.store.seen_at) == {"me", "other"}
    assert member.size == 2
    member.seconds += LIVENESS_TIMEOUT_SECONDS - 0.1
    member.heartbeat()
    member.assign(member.store.workers())
    assert member.size == 2
    member.seconds += 0.1
    member.assign(member.store.workers())
    assert member.size == 1


def test_a_failed_heartbeat_is_logged_once_polls_succeed(caplog: pytest.LogCaptureFixture) -> None:
    """While Spanner is unavailable one line covers everything. A table that refuses the heartbeat gets its own line."""
    member = Member()
    member.store.away = True
    with caplog.at_level(logging.WARNING, "publishworker"):
        member.heartbeat()
        assert caplog.records == []
        member.store.away = False
        member.see("other")
        member.store.away = True
        member.seconds += LINE_SECONDS
        member.delete_heartbeat()
    assert [record.__dict__["action"] for record in caplog.records] == ["heartbeat_failed"] * 2
    assert "Heartbeat failed: the fake store is away" in caplog.messages[0]
    assert "was not deleted; other workers take over" in caplog.messages[1]


def test_a_heartbeat_says_which_shards_are_polled_once_they_are_assigned() -> None:
    """Until then the worker knows no topic, so shards that no other worker polls are not hidden."""
    member = Member()
    member.info = lambda shards: {"shards": list(shards)}
    member.heartbeat()
    assert member.store.info == {"me": {"shards": []}}
    part = member.see("me", "other")
    member.seconds += HEARTBEAT_INTERVAL_SECONDS
    member.heartbeat()
    assert member.store.info == {"me": {"shards": list(part)}}
