"""Polls and heartbeats, on the fake store and on the Spanner emulator.

Expectations are written by hand, so that neither side can pass against itself. Claims are in
test_claims.py, ordering keys in test_order.py.
"""

import uuid
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from outbox.table.controls import TopicControls
from outbox.table.layouts import Layout
from outbox.table.states import NEVER
from publishworker.types import Discovery, TopicKey, Workers
from tests.support.fakes import serialized
from tests.support.parts import poll_request
from tests.support.store_harness import Harness, poll_ids

PAST = datetime(2020, 1, 1, tzinfo=UTC)
NOW = datetime.now(UTC)
FUTURE = datetime(2090, 1, 1, tzinfo=UTC)


ALL = range(10)


def discovered(harness: Harness) -> Discovery:
    return harness.store.discover(ALL, ())


def test_poll_returns_only_unsent_tasks_of_the_requested_topics(harness: Harness) -> None:
    """A candidate has topic, shard, priority, times, key and size. Sent, scheduled and dead tasks are none."""
    harness.insert("a", priority=7, ordering_key="key")
    harness.insert("sent", sent_at=PAST)
    harness.insert("other", topic="invoices")
    harness.insert("scheduled", available_at=FUTURE)
    harness.insert("dead", available_at=NEVER)
    [candidate] = harness.store.poll(poll_request("orders"))
    assert (candidate.id, candidate.topic, candidate.priority) == ("a", "orders", 7)
    assert (candidate.ordering_key, candidate.available_at, candidate.bytes) == ("key", None, len(serialized()))
    assert candidate.shard in range(10)
    assert poll_ids(harness.store, "orders", due=True, below_priority=1000) == ["a"]


def test_due_tasks_are_returned_on_request(harness: Harness) -> None:
    """A due task is returned by the due range only, longest due first."""
    harness.insert("due", available_at=PAST, ordering_key="same-shard")
    harness.insert("longer", available_at=PAST - timedelta(days=1), ordering_key="same-shard")
    assert poll_ids(harness.store, "orders") == []
    assert poll_ids(harness.store, "orders", due=True) == ["longer", "due"]
    assert poll_ids(harness.store, "orders", due=True, per_range=1) == ["longer"]


def test_the_next_due_time_is_that_of_the_first_task_that_is_not_ready(harness: Harness) -> None:
    """Also of one that is due already, because a poll may just have missed it."""
    assert harness.store.seconds_until_due(ALL, ["orders"]) is None
    harness.insert("ready")
    harness.insert("dead", available_at=NEVER)
    harness.insert("other", topic="invoices", available_at=FUTURE - timedelta(days=1))
    harness.insert("sent", available_at=FUTURE - timedelta(days=1), sent_at=PAST)
    assert harness.store.seconds_until_due(ALL, ["orders"]) is None
    harness.insert("later", available_at=FUTURE + timedelta(days=1))
    harness.insert("scheduled", available_at=FUTURE)
    seconds = harness.store.seconds_until_due(ALL, ["orders", "refunds"])
    assert seconds == pytest.approx((FUTURE - NOW).total_seconds(), abs=365 * 86_400)  # the fake has a clock of its own
    assert harness.store.seconds_until_due([], ["orders"]) is None
    harness.insert("due", available_at=PAST)
    assert harness.store.seconds_until_due(ALL, ["orders", "refunds"]) == 0


def test_poll_limits_each_range_and_prefers_priority(harness: Harness) -> None:
    """A range full of urgent tasks shows nothing else; the range of lower priorities begins below theirs."""
    for priority in (1, 9, 5, 9):  # the least urgent is the oldest
        harness.insert(f"p{priority}-{uuid.uuid4()}", priority=priority, ordering_key="same-shard")
    for found, options in (
        (["p9"], {"per_range": 1}),
        (["p5", "p9", "p9"], {"per_range": 3}),
        (["p5", "p9"], {"per_range": 1, "below_priority": 9}),
        (["p9"], {"per_range": 1, "below_priority": 1}),
        (["p1", "p5", "p9", "p9"], {"below_priority": 9}),
    ):
        assert sorted(id[:2] for id in poll_ids(harness.store, "orders", **options)) == found


def test_poll_covers_only_the_requested_shards(harness: Harness) -> None:
    for n in range(20):
        harness.insert(str(n))
    by_shard = [poll_ids(harness.store, "orders", shards=[shard], per_range=20) for shard in range(10)]
    assert sorted(id for ids in by_shard for id in ids) == sorted(str(n) for n in range(20))
    assert harness.store.poll(poll_request("orders", shards=[])) == ()
    of_shard = Counter(each.shard for each in harness.store.poll(poll_request("orders", per_range=20)))
    assert [of_shard[shard] for shard in range(10)] == [len(ids) for ids in by_shard]


@pytest.mark.parametrize("known", [[], ["m"], ["a", "m", "z"], ["b", "y"]])
def test_discovery_finds_topics_in_every_gap(harness: Harness, known: list[str]) -> None:
    """Before, between and after the known topics, again until all are known, but no topic whose tasks are all sent."""
    every = {"aa", "kk", "mm", "zz", *known}
    for topic in every:
        harness.insert(str(uuid.uuid4()), topic=topic)
    harness.insert("sent", topic="old", sent_at=PAST)
    found = set(known)
    while new := harness.store.discover(ALL, found).topics:
        found |= new
    assert found == every


def test_discovery_reads_the_given_shards(harness: Harness) -> None:
    harness.insert("a")
    [candidate] = harness.store.poll(poll_request("orders"))
    assert harness.store.discover([candidate.shard], ()).topics == {"orders"}
    assert harness.store.discover([each for each in ALL if each != candidate.shard], ()).topics == frozenset()


def test_empty_topics_and_ids_are_found(harness: Harness) -> None:
    """Our functions refuse an empty topic or ID. Another writer may have inserted it."""
    harness.insert("", topic="")
    assert harness.store.discover(ALL, ()).topics == {""}
    assert harness.store.discover(ALL, {""}).topics == frozenset()
    assert poll_ids(harness.store, "") == [""]


def test_every_task_is_in_every_layout(own_harness: Harness) -> None:
    """Tasks from before and after a layout is added. A poll of two layouts returns each task once."""
    harness, first, new = own_harness, Layout(10), Layout(4, "4")
    for id in "abc":
        harness.insert(id)
    harness.reshard(new)
    harness.insert("d", ordering_key="key", available_at=PAST)
    harness.insert("e", available_at=FUTURE)
    assert harness.store.layouts == (first,)
    assert discovered(harness).workers.layouts == (first, new) == tuple(harness.store.layouts)
    for shards in (first.ids, new.ids, [*first.ids, *new.ids]):
        found = harness.store.poll(poll_request("orders", shards=shards, due=True, below_priority=1000))
        assert sorted(each.id for each in found) == ["a", "b", "c", "d"]
        assert {each.shard for each in found} <= set(shards)
        assert harness.store.discover(tuple(shards), ()).topics == {"orders"}
        assert harness.store.seconds_until_due(tuple(shards), ["orders"]) == 0
        [head] = [each for each in found if each.ordering_key]
        key = TopicKey("orders", "key")
        assert [each.id for each in harness.store.key_heads({key: head.shard}, 5, skip_dead=False)[key]] == ["d"]


def test_topic_controls(harness: Harness) -> None:
    """To the last digit; a value that is not set is None. Values that are not allowed are read, too."""
    controls = {
        "paused": TopicControls(paused=True),
        "all": TopicControls(True, 0.5, 20, 3, "all-v2", 3, 0.5, 60.0, 0.0),
        "third": TopicControls(rate_per_second=1 / 3, burst=1, backoff_max_seconds=1 / 3),
        "tiny": TopicControls(rate_per_second=1e-6, burst=1),
        "large": TopicControls(False, 1e15, 2**63 - 1, 2**63 - 1),
        "rate alone": TopicControls(rate_per_second=2.0),
        "wrong": TopicControls(False, -1.0, 0, -5, "no topic"),
        "infinite": TopicControls(rate_per_second=float("inf"), burst=1),
        "nothing": TopicControls(),
    }
    assert discovered(harness).controls == {}
    for topic, row in controls.items():
        harness.control(topic, row)
    assert discovered(harness).controls == controls
    harness.control("no number", TopicControls(rate_per_second=float("nan")))
    assert str(discovered(harness).controls["no number"].rate_per_second) == "nan"


def test_a_worker_is_live_until_it_leaves_or_its_heartbeat_is_too_old(harness: Harness) -> None:
    """By the database's clock and the seconds that the heartbeat names.

    A worker that was silent for an hour may be deleted.
    """
    harness.store.heartbeat("here", NOW, ())
    harness.store.heartbeat("here", NOW, ())
    harness.store.heartbeat("quiet", NOW, (), liveness_timeout=29)
    harness.store.heartbeat("leaving", NOW, ())
    for name, seconds, liveness_timeout in (("fresh", 5, 14), ("silent", 20, 14), ("late", 20, 50), ("gone", 7200, 14)):
        harness.seen(name, seconds, liveness_timeout)
    workers = discovered(harness).workers
    assert workers == Workers(workers.live, frozenset({"gone"}))
    expected = {"here": 14, "quiet": 29, "leaving": 14, "fresh": 9, "late": 30}
    assert workers.live == {name: pytest.approx(seconds, abs=4) for name, seconds in expected.items()}
    harness.store.delete_heartbeat("leaving")
    harness.store.delete_heartbeat("never came")
    harness.store.heartbeat("here", NOW, (), remove=["gone", "not there"])
    assert discovered(harness).workers.live.keys() == {"here", "quiet", "fresh", "late"}
