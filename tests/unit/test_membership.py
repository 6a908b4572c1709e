"""How live workers divide the shards, write their heartbeats, and claim only tasks of their shards."""

import logging
from collections import Counter
from collections.abc import Collection
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.base.schedules import RECONNECT
from outbox.table.shared_sql import FORGET_WORKER_SECONDS
from publishworker.turn.membership import (
    HEARTBEAT_INTERVAL_SECONDS,
    Membership,
    divide,
)
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


class Watch(Membership):
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
    watch = Watch()
    assert watch.seconds_to_heartbeat == 0
    watch.heartbeat()
    assert set(watch.store.seen_at) == {"me"}
    assert watch.seconds_to_heartbeat == HEARTBEAT_INTERVAL_SECONDS
    watch.see(gone=["dead", "me"])  # as after an hour in which heartbeats were refused
    watch.seconds += HEARTBEAT_INTERVAL_SECONDS - 0.1
    watch.heartbeat()
    assert set(watch.store.seen_at) == {"dead", "me"}
    watch.seconds += 0.1
    watch.heartbeat()
    assert set(watch.store.seen_at) == {"me"}
    watch.seconds += HEARTBEAT_INTERVAL_SECONDS
    watch.store.away = True
    watch.heartbeat()
    assert watch.seconds_to_heartbeat == RECONNECT.first
    watch.store.away = False
    watch.delete_heartbeat()
    assert not watch.store.seen_at


def test_a_failed_heartbeat_is_logged_once_polls_succeed(caplog: pytest.LogCaptureFixture) -> None:
    """While Spanner is unavailable one line covers everything. A table that refuses the heartbeat gets its own line."""
    watch = Watch()
    watch.store.away = True
    with caplog.at_level(logging.WARNING, "publishworker"):
        watch.heartbeat()
        assert caplog.records == []
        watch.store.away = False
        watch.see("other")
        watch.store.away = True
        watch.delete_heartbeat()
    assert [record.__dict__["action"] for record in caplog.records] == ["heartbeat_failed"]
    assert "the fake store is away" in caplog.records[0].getMessage()


def test_a_heartbeat_says_which_shards_are_polled_once_they_are_assigned() -> None:
    """Until then the worker knows no topic, so shards that no other worker polls are not hidden."""
    watch = Watch()
    watch.info = lambda shards: {"shards": list(shards)}
    watch.heartbeat()
    assert watch.store.info == {"me": {"shards": []}}
    part = watch.see("me", "other")
    watch.seconds += HEARTBEAT_INTERVAL_SECONDS
    watch.heartbeat()
    assert watch.store.info == {"me": {"shards": list(part)}}
