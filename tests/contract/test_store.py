"""Polls, heartbeats and counts, on the fake store and on the Spanner emulator.

Expectations are written by hand, so that neither side can pass against itself. Claims are in
test_claims.py, ordering keys in test_order.py.
"""

import uuid
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from outbox.storage.task_states import NEVER
from publishworker.spanner.store import Unsent
from publishworker.types import TopicControls, TopicLimit, Workers
from tests.support.fakes import serialized
from tests.support.parts import poll_request
from tests.support.store_harness import Harness, poll_ids

PAST = datetime(2020, 1, 1, tzinfo=UTC)
NOW = datetime.now(UTC)
FUTURE = datetime(2090, 1, 1, tzinfo=UTC)


ALL = range(10)


def test_empty_tables(harness: Harness) -> None:
    assert harness.store.poll(poll_request("orders", due=True, below=1)) == ()
    assert harness.store.discover(ALL, ()) == frozenset()
    assert harness.store.topic_controls() == TopicControls()
    assert harness.store.workers() == Workers()


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
    assert poll_ids(harness.store, "orders", due=True, below=1000) == ["a"]


def test_due_tasks_are_returned_on_request(harness: Harness) -> None:
    """A due task is returned by the due range only, longest due first."""
    harness.insert("due", available_at=PAST, ordering_key="same-shard")
    harness.insert("longer", available_at=PAST - timedelta(days=1), ordering_key="same-shard")
    assert poll_ids(harness.store, "orders") == []
    assert poll_ids(harness.store, "orders", due=True) == ["longer", "due"]
    assert poll_ids(harness.store, "orders", due=True, per_range=1) == ["longer"]


def test_poll_limits_each_range_and_prefers_priority(harness: Harness) -> None:
    """A range full of urgent tasks shows nothing else; the range of lower priorities begins below theirs."""
    for priority in (1, 9, 5, 9):  # the least urgent is the oldest
        harness.insert(f"p{priority}-{uuid.uuid4()}", priority=priority, ordering_key="same-shard")
    for found, options in (
        (["p9"], {"per_range": 1}),
        (["p5", "p9", "p9"], {"per_range": 3}),
        (["p5", "p9"], {"per_range": 1, "below": 9}),
        (["p9"], {"per_range": 1, "below": 1}),
        (["p1", "p5", "p9", "p9"], {"below": 9}),
    ):
        assert sorted(id[:2] for id in poll_ids(harness.store, "orders", **options)) == found


def test_poll_and_count_cover_only_the_requested_shards(harness: Harness) -> None:
    for n in range(20):
        harness.insert(str(n))
    by_shard = [poll_ids(harness.store, "orders", shards=[shard], per_range=20) for shard in range(10)]
    assert sorted(id for ids in by_shard for id in ids) == sorted(str(n) for n in range(20))
    assert harness.store.poll(poll_request("orders", shards=[])) == ()
    of_shard = Counter(each.shard for each in harness.store.poll(poll_request("orders", per_range=20)))
    assert [of_shard[shard] for shard in range(10)] == [len(ids) for ids in by_shard]
    for shard, number in of_shard.items():
        assert harness.store.unsent([shard]) == [Unsent("orders", "pending", number)]
    first, second, *_ = of_shard
    [both] = harness.store.unsent([first, second])
    assert both.count == of_shard[first] + of_shard[second]


@pytest.mark.parametrize("known", [[], ["m"], ["a", "m", "z"], ["b", "y"]])
def test_discovery_finds_topics_in_every_gap(harness: Harness, known: list[str]) -> None:
    """Before, between and after the known topics, again until all are known, but no topic whose tasks are all sent."""
    every = {"aa", "kk", "mm", "zz", *known}
    for topic in every:
        harness.insert(str(uuid.uuid4()), topic=topic)
    harness.insert("sent", topic="old", sent_at=PAST)
    found = set(known)
    while new := harness.store.discover(ALL, found):
        found |= new
    assert found == every


def test_discovery_reads_the_given_shards(harness: Harness) -> None:
    harness.insert("a")
    [candidate] = harness.store.poll(poll_request("orders"))
    assert harness.store.discover([candidate.shard], ()) == {"orders"}
    assert harness.store.discover([each for each in ALL if each != candidate.shard], ()) == frozenset()


def test_empty_topics_and_ids_are_found(harness: Harness) -> None:
    """Our functions refuse an empty topic or ID. Another writer may have inserted it."""
    harness.insert("", topic="")
    assert harness.store.discover(ALL, ()) == {""}
    assert harness.store.discover(ALL, {""}) == frozenset()
    assert poll_ids(harness.store, "") == [""]


def test_topic_controls(harness: Harness) -> None:
    """To the last digit; a value that is not set is None. A paused topic keeps its limits until it is resumed."""
    limits = {
        "all": TopicLimit(0.5, 20, 3),
        "third": TopicLimit(1 / 3, 1),
        "tiny": TopicLimit(1e-6, 1),
        "large": TopicLimit(1e15, 2**63 - 1, 2**63 - 1),
        "in_flight": TopicLimit(None, None, 7),
        "rate alone": TopicLimit(2.0, None),
        "burst alone": TopicLimit(None, 4),
        "wrong": TopicLimit(-1.0, 0, -5),
        "infinite": TopicLimit(float("inf"), 1),
    }
    for topic, limit in limits.items():
        harness.limit(topic, limit)
    assert harness.store.topic_controls() == TopicControls(frozenset(), limits)
    harness.limit("nothing", TopicLimit())
    harness.pause("all")
    harness.pause("invoices")
    assert harness.store.topic_controls() == TopicControls(frozenset({"all", "invoices"}), limits)
    harness.limit("no number", TopicLimit(float("nan"), 1))
    assert str(harness.store.topic_controls().limits["no number"].rate) == "nan"


def test_a_worker_is_live_until_it_leaves_or_its_heartbeat_is_too_old(harness: Harness) -> None:
    """By the database's clock. A worker that was silent for an hour may be deleted."""
    harness.store.heartbeat("here", NOW, [])
    harness.store.heartbeat("here", NOW, [])
    harness.store.heartbeat("leaving", NOW, [])
    for name, seconds in (("fresh", 5), ("silent", 20), ("gone", 7200)):
        harness.seen(name, seconds)
    assert harness.store.workers() == Workers(frozenset({"here", "leaving", "fresh"}), frozenset({"gone"}))
    harness.store.leave("leaving")
    harness.store.leave("never came")
    harness.store.heartbeat("here", NOW, ["gone", "not there"])
    assert harness.store.workers() == Workers(frozenset({"here", "fresh"}))


def test_unsent_counts_by_topic_and_state(harness: Harness) -> None:
    """Unsent tasks of a paused topic are paused, but its dead tasks stay dead."""
    late = NEVER - timedelta(microseconds=1)
    for id, available_at, attempts in (
        ("ready", None, 0), ("due", PAST, 2), ("scheduled", FUTURE, 0), ("late", late, 0), ("retrying", FUTURE, 1),
        ("late again", late, 3), ("dead", NEVER, 10), ("very dead", NEVER + timedelta(hours=23), 0),
    ):  # fmt: skip
        for topic in ("orders", "paused"):
            harness.insert(f"{topic} {id}", topic=topic, available_at=available_at, attempts=attempts)
    harness.insert("sent", sent_at=PAST)
    harness.pause("paused")
    assert harness.store.unsent() == [
        *(Unsent("orders", state, 2) for state in ("dead", "pending", "retrying", "scheduled")),
        Unsent("paused", "dead", 2),
        Unsent("paused", "paused", 6),
    ]
