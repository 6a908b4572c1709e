"""The same scenarios on the fake store and on the Spanner emulator, so that the fake may be trusted elsewhere.

Expectations are written by hand: neither side can pass against itself. What a claim writes is in
test_claims.py.
"""

import uuid
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from outbox.states import NEVER
from publishworker.spanner.store import Store, Unsent
from publishworker.task import News, TopicLimit
from tests.support.fakes import serialized
from tests.support.parts import look
from tests.support.store_harness import KINDS, Harness, harness_of, poll_ids

PAST = datetime(2020, 1, 1, tzinfo=UTC)
NOW = datetime.now(UTC)
FUTURE = datetime(2090, 1, 1, tzinfo=UTC)


@pytest.fixture(params=KINDS)
def harness(request: pytest.FixtureRequest) -> Harness:
    """Each scenario runs on both."""
    return harness_of(request)


def news_of(store: Store, *known: str) -> News:
    """Return what a poll finds beside tasks."""
    news = store.poll(look(known=known)).news
    assert news is not None
    return news


def test_poll_of_an_empty_table_finds_nothing(harness: Harness) -> None:
    """An empty table is no error, and has no topics."""
    found = harness.store.poll(look(known=[], due=True))
    assert found.candidates == ()
    assert found.news == News(topics=frozenset(), paused=frozenset(), living=frozenset(), gone=frozenset())
    assert harness.store.poll(look()).news is None


def test_poll_returns_only_unsent_tasks_of_the_topics_asked_for(harness: Harness) -> None:
    """A sent task and another topic's task are no candidates."""
    harness.insert("unsent")
    harness.insert("sent", sent_at=PAST)
    harness.insert("other", topic="invoices")
    assert poll_ids(harness.store, "orders") == ["unsent"]


def test_poll_tells_what_sampling_needs(harness: Harness) -> None:
    """A candidate carries topic, shard, priority, times, ordering key and size, without the body."""
    harness.insert("a", priority=7, ordering_key="key")
    [candidate] = harness.store.poll(look("orders")).candidates
    assert (candidate.id, candidate.topic, candidate.priority) == ("a", "orders", 7)
    assert (candidate.ordering_key, candidate.available_at, candidate.bytes) == ("key", None, len(serialized()))
    assert candidate.shard in range(10)


def test_poll_limits_each_range_and_prefers_priority(harness: Harness) -> None:
    """Of one shard and topic the most urgent rows are read first, and no more than asked for."""
    for priority in (1, 3, 2):
        harness.insert(f"p{priority}", priority=priority, ordering_key="same-shard")
    assert sorted(poll_ids(harness.store, "orders", per_range=2)) == ["p2", "p3"]


def test_scheduled_and_dead_tasks_are_no_candidates(harness: Harness) -> None:
    """Neither a future time nor NEVER is polled, however far the poll looks."""
    harness.insert("scheduled", available_at=FUTURE)
    harness.insert("dead", available_at=NEVER)
    assert poll_ids(harness.store, "orders", due=True, below=1000) == []


def test_due_tasks_come_when_they_are_asked_for(harness: Harness) -> None:
    """A task whose time has come is found by the due range, longest due first, and only there."""
    harness.insert("due", available_at=PAST, ordering_key="same-shard")
    harness.insert("longer", available_at=PAST - timedelta(days=1), ordering_key="same-shard")
    assert poll_ids(harness.store, "orders") == []
    assert poll_ids(harness.store, "orders", due=True) == ["longer", "due"]
    assert poll_ids(harness.store, "orders", due=True, per_range=1) == ["longer"]


def test_lower_priorities_come_behind_a_full_range_when_they_are_asked_for(harness: Harness) -> None:
    """A range full of urgent tasks shows nothing else; below their priority the next lower ones begin."""
    for priority in (9, 9, 5, 1):
        harness.insert(f"p{priority}-{uuid.uuid4()}", priority=priority, ordering_key="same-shard")
    assert [id[:2] for id in poll_ids(harness.store, "orders", per_range=1)] == ["p9"]
    assert sorted(id[:2] for id in poll_ids(harness.store, "orders", per_range=1, below=9)) == ["p5", "p9"]
    assert sorted(id[:2] for id in poll_ids(harness.store, "orders", per_range=1, below=1)) == ["p9"]


def test_a_task_that_two_ranges_hold_comes_once(harness: Harness) -> None:
    """The range of lower priorities overlaps the whole one while that is not full."""
    harness.insert("high", priority=9)
    harness.insert("low", priority=1)
    assert sorted(poll_ids(harness.store, "orders", below=9)) == ["high", "low"]


def test_poll_reads_the_shards_asked_for(harness: Harness) -> None:
    """The shards divide the tasks: each is in one, and a worker without the shard does not see it."""
    for n in range(20):
        harness.insert(str(n))
    by_shard = [poll_ids(harness.store, "orders", shards=[shard]) for shard in range(10)]
    assert sorted(id for ids in by_shard for id in ids) == sorted(str(n) for n in range(20))
    assert harness.store.poll(look("orders", shards=[])).candidates == ()


@pytest.mark.parametrize("known", [[], ["m"], ["a", "m", "z"], ["b", "y"]])
def test_probes_find_topics_in_every_gap(harness: Harness, known: list[str]) -> None:
    """Before, between and after the known topics; again and again until all are known."""
    every = {"aa", "kk", "mm", "zz", *known}
    for topic in every:
        harness.insert(str(uuid.uuid4()), topic=topic)
    found = set(known)
    while new := news_of(harness.store, *found).topics:
        found |= new
    assert found == every


def test_empty_names_are_names(harness: Harness) -> None:
    """Our functions refuse them, another writer may have inserted them: who does not see them says nothing of them."""
    harness.insert("", topic="")
    assert news_of(harness.store).topics == {""}
    assert news_of(harness.store, "").topics == frozenset()
    assert poll_ids(harness.store, "") == [""]


def test_probes_do_not_find_topics_without_unsent_tasks(harness: Harness) -> None:
    """A topic whose tasks are all sent costs nothing."""
    harness.insert("sent", topic="old", sent_at=PAST)
    assert news_of(harness.store).topics == frozenset()


def test_paused_topics_are_told(harness: Harness) -> None:
    """The worker learns of a pause by the poll that looks for news."""
    harness.pause("orders")
    assert news_of(harness.store).paused == {"orders"}


def test_limits_are_told(harness: Harness) -> None:
    """As they stand in the table, to the last digit; what is not set is None."""
    limits = {
        "all": TopicLimit(0.5, 20, 3),
        "third": TopicLimit(1 / 3, 1),
        "tiny": TopicLimit(1e-6, 1),
        "large": TopicLimit(1e15, 2**63 - 1, 2**63 - 1),
        "flying": TopicLimit(None, None, 7),
        "rate alone": TopicLimit(2.0, None),
        "burst alone": TopicLimit(None, 4),
        "wrong": TopicLimit(-1.0, 0, -5),
        "infinite": TopicLimit(float("inf"), 1),
    }
    for topic, limit in limits.items():
        harness.limit(topic, limit)
    news = news_of(harness.store)
    assert news.limits == limits
    assert (news.paused, news.topics, news.living, news.gone) == (frozenset(), frozenset(), frozenset(), frozenset())
    harness.limit("no number", TopicLimit(float("nan"), 1))
    assert str(news_of(harness.store).limits["no number"].rate) == "nan"


def test_a_paused_topic_is_paused_whatever_its_limits(harness: Harness) -> None:
    """It keeps them until it is resumed; a row that says nothing is no news."""
    harness.limit("orders", TopicLimit(1.0, 1, 1))
    harness.pause("orders")
    harness.limit("nothing", TopicLimit())
    harness.pause("invoices")
    news = news_of(harness.store)
    assert (news.paused, news.limits) == ({"orders", "invoices"}, {"orders": TopicLimit(1.0, 1, 1)})
    assert news.topics == frozenset()


def test_limits_are_no_candidates(harness: Harness) -> None:
    """Rows of news and rows of tasks come in one answer and are told apart."""
    harness.insert("a")
    harness.limit("orders", TopicLimit(1.0, 2, 3))
    found = harness.store.poll(look("orders", known=["orders"], due=True))
    assert [each.id for each in found.candidates] == ["a"]
    assert found.news is not None
    assert found.news.limits == {"orders": TopicLimit(1.0, 2, 3)}


def test_a_heartbeat_makes_a_worker_live_until_it_leaves_or_falls_silent(harness: Harness) -> None:
    """By the database's clock: what is silent is passed over, what has been for an hour may be deleted."""
    harness.store.heartbeat("here", NOW, [])
    harness.store.heartbeat("here", NOW, [])
    harness.store.heartbeat("leaving", NOW, [])
    for name, seconds in (("fresh", 5), ("silent", 20), ("gone", 7200)):
        harness.seen(name, seconds)
    news = news_of(harness.store)
    assert (news.living, news.gone) == ({"here", "leaving", "fresh"}, {"gone"})
    harness.store.leave("leaving")
    harness.store.leave("never came")
    harness.store.heartbeat("here", NOW, ["gone", "not there"])
    news = news_of(harness.store)
    assert (news.living, news.gone) == ({"here", "fresh"}, frozenset())


def test_claim_of_rows_that_are_gone_is_no_error(harness: Harness) -> None:
    """A task that was deleted after the poll is passed over."""
    harness.insert("a")
    harness.delete("a")
    seen: list[object] = []
    harness.store.claim(["a"], lambda rows, _now: (seen.append(list(rows)), {})[1])
    assert seen == [[]]


def test_unsent_counts_by_topic_and_state(harness: Harness) -> None:
    """Pending is ready or due; retrying and scheduled differ by attempts; a paused topic's dead tasks stay dead."""
    harness.insert("ready")
    harness.insert("due", available_at=PAST, attempts=2)
    harness.insert("scheduled", available_at=FUTURE)
    harness.insert("retrying", available_at=FUTURE, attempts=1)
    harness.insert("dead", available_at=NEVER, attempts=10)
    harness.insert("sent", sent_at=PAST)
    harness.insert("paused", topic="paused")
    harness.insert("paused-dead", topic="paused", available_at=NEVER)
    harness.pause("paused")
    assert harness.store.unsent() == [
        Unsent("orders", "dead", 1),
        Unsent("orders", "pending", 2),
        Unsent("orders", "retrying", 1),
        Unsent("orders", "scheduled", 1),
        Unsent("paused", "dead", 1),
        Unsent("paused", "paused", 1),
    ]


def test_unsent_counts_the_shards_that_are_asked_for(harness: Harness) -> None:
    """Those that the poll finds a shard's tasks in, and no others."""
    for number in range(20):
        harness.insert(f"task {number}")
    of_shard = Counter(each.shard for each in harness.store.poll(look("orders", per_range=20)).candidates)
    assert of_shard.total() == 20
    for shard, number in of_shard.items():
        assert harness.store.unsent([shard]) == [Unsent("orders", "pending", number)]
    first, second, *_ = of_shard
    [both] = harness.store.unsent([first, second])
    assert both.count == of_shard[first] + of_shard[second]


def test_unsent_tells_dead_from_late_and_paused_from_waiting(harness: Harness) -> None:
    """Dead begins at NEVER and not before; what waits in a paused topic is paused, whatever it waits for."""
    harness.insert("late", available_at=NEVER - timedelta(microseconds=1))
    harness.insert("late again", available_at=NEVER - timedelta(microseconds=1), attempts=3)
    harness.insert("dead", available_at=NEVER)
    harness.insert("very dead", available_at=NEVER + timedelta(hours=23))
    for id, available_at, attempts in (("due", PAST, 1), ("scheduled", FUTURE, 0), ("retrying", FUTURE, 1)):
        harness.insert(id, topic="paused", available_at=available_at, attempts=attempts)
    harness.pause("paused")
    assert harness.store.unsent() == [
        Unsent("orders", "dead", 2),
        Unsent("orders", "retrying", 1),
        Unsent("orders", "scheduled", 1),
        Unsent("paused", "paused", 3),
    ]
