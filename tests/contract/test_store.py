"""The same scenarios on the fake store and on the Spanner emulator, so that the fake may be trusted elsewhere.

Expectations are written by hand: neither side can pass against itself.
"""

import base64
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.param_types import STRING

from publishworker.connection import open_database
from publishworker.store import SpannerStore, Store, Unsent
from publishworker.task import News, Outcome, Row, Sent, Taken
from tests.support.fakes import NEVER, FakeStore, serialized
from tests.support.parts import look
from tests.support.spanner import INSTANCE, PROJECT

PAST = datetime(2020, 1, 1, tzinfo=UTC)
NOW = datetime.now(UTC)
FUTURE = datetime(2090, 1, 1, tzinfo=UTC)


class Harness(Protocol):
    """A store, and the sight behind it."""

    store: Store

    def insert(self, id: str, topic: str = "orders", **columns: Any) -> None:
        """Add a row; columns by their names in Python."""

    def column(self, id: str, name: str) -> Any:
        """Return one column of a row."""

    def pause(self, topic: str) -> None:
        """Pause a topic."""

    def delete(self, id: str) -> None:
        """Delete a row."""

    def seen(self, worker: str, seconds: float) -> None:
        """Have a worker's last heartbeat be that old."""


class FakeHarness:
    """Behind the fake."""

    def __init__(self) -> None:
        """Begin empty."""
        self.store = self._fake = FakeStore()

    def insert(self, id: str, topic: str = "orders", **columns: Any) -> None:
        """See Harness."""
        self._fake.insert(id, topic, serialized(), **columns)

    def column(self, id: str, name: str) -> Any:
        """See Harness."""
        return getattr(self._fake.rows[id], name)

    def pause(self, topic: str) -> None:
        """See Harness."""
        self._fake.paused.add(topic)

    def delete(self, id: str) -> None:
        """See Harness."""
        del self._fake.rows[id]

    def seen(self, worker: str, seconds: float) -> None:
        """See Harness."""
        self._fake.workers[worker] = self._fake.now - timedelta(seconds=seconds)


class SpannerHarness:
    """Behind the emulator."""

    def __init__(self, database: Database) -> None:
        """Use a fresh database."""
        self._database = database
        self.store = SpannerStore(open_database(PROJECT, INSTANCE, database.database_id), shards=10)

    def insert(self, id: str, topic: str = "orders", **columns: Any) -> None:
        """See Harness."""
        row = {"priority": 50, "created_at": COMMIT_TIMESTAMP, **columns}
        names = [name.title().replace("_", "") for name in row]
        values = (id, topic, base64.b64encode(serialized()), *row.values())
        with self._database.batch() as batch:
            batch.insert("AsynchronousTasks", ("Id", "Topic", "Data", *names), [values])

    def column(self, id: str, name: str) -> Any:
        """See Harness."""
        with self._database.snapshot() as snapshot:
            column = name.title().replace("_", "")
            [[value]] = snapshot.execute_sql(
                f"SELECT {column} FROM AsynchronousTasks WHERE Id = @id",
                params={"id": id},
                param_types={"id": STRING},
            )
        return value

    def pause(self, topic: str) -> None:
        """See Harness."""
        with self._database.batch() as batch:
            batch.insert("AsynchronousTaskTopics", ("Topic", "Paused"), [(topic, True)])

    def delete(self, id: str) -> None:
        """See Harness."""
        with self._database.batch() as batch:
            batch.delete("AsynchronousTasks", KeySet(keys=[[id]]))

    def seen(self, worker: str, seconds: float) -> None:
        """See Harness."""
        seen_at = datetime.now(UTC) - timedelta(seconds=seconds)
        with self._database.batch() as batch:
            batch.insert("AsynchronousTaskWorkers", ("WorkerId", "StartedAt", "SeenAt"), [(worker, NOW, seen_at)])


@pytest.fixture(params=["fake", "spanner"])
def harness(request: pytest.FixtureRequest) -> Harness:
    """Each scenario runs on both."""
    return FakeHarness() if request.param == "fake" else SpannerHarness(request.getfixturevalue("database"))


def poll_ids(store: Store, *topics: str, **options: Any) -> list[str]:
    """Return the candidates' ids."""
    return [each.id for each in store.poll(look(*topics, **options)).candidates]


def news_of(store: Store, *known: str) -> News:
    """Return what a poll finds beside tasks."""
    news = store.poll(look(known=known)).news
    assert news is not None
    return news


def send_all(rows: Sequence[Row], _now: datetime) -> Mapping[str, Outcome]:
    """Say of each row that it was sent."""
    return {row.id: Sent("1") for row in rows}


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


def test_probes_do_not_find_topics_without_unsent_tasks(harness: Harness) -> None:
    """A topic whose tasks are all sent costs nothing."""
    harness.insert("sent", topic="old", sent_at=PAST)
    assert news_of(harness.store).topics == frozenset()


def test_paused_topics_are_told(harness: Harness) -> None:
    """The worker learns of a pause by the poll that looks for news."""
    harness.pause("orders")
    assert news_of(harness.store).paused == {"orders"}


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


def test_claim_gives_the_rows_under_the_lock(harness: Harness) -> None:
    """Rows come with their bodies, sorted or not asked for in order; missing ones are left out."""
    harness.insert("b", ordering_key="key", available_at=PAST)
    harness.insert("a")
    seen: list[Row] = []

    def decide(rows: Sequence[Row], _now: datetime) -> Mapping[str, Outcome]:
        seen.extend(rows)
        return {}

    harness.store.claim(["b", "missing", "a"], decide)
    by_id = {row.id: row for row in seen}
    assert set(by_id) == {"a", "b"}
    assert by_id["b"].data == serialized()
    assert (by_id["b"].ordering_key, by_id["b"].available_at, by_id["b"].sent_at) == ("key", PAST, None)


def test_claim_marks_what_was_sent_and_leaves_the_row_clean(harness: Harness) -> None:
    """SentAt is set; the traces of earlier attempts are gone, so that nulling SentAt alone sends it again."""
    harness.insert("a", available_at=PAST, attempts=3, last_error="once")
    harness.store.claim(["a"], send_all)
    assert harness.column("a", "sent_at") > harness.column("a", "created_at")
    assert harness.column("a", "available_at") is None
    assert (harness.column("a", "attempts"), harness.column("a", "last_error")) == (0, None)


def test_claim_leaves_alone_what_was_not_sent(harness: Harness) -> None:
    """A task without an outcome, or taken by others, keeps its row as it was."""
    harness.insert("untried")
    harness.insert("taken")
    harness.store.claim(["untried", "taken"], lambda _rows, _now: {"taken": Taken("not_due")})
    assert harness.column("untried", "sent_at") is None
    assert harness.column("taken", "sent_at") is None


def test_claim_shows_a_row_that_another_worker_has_sent(harness: Harness) -> None:
    """The second claim sees SentAt, and reads no body that nobody needs."""
    harness.insert("a")
    harness.store.claim(["a"], send_all)
    seen: list[Row] = []
    harness.store.claim(["a"], lambda rows, _now: (seen.extend(rows), {})[1])
    assert seen[0].sent_at is not None
    assert seen[0].data == b""


def test_claim_of_rows_that_are_gone_is_no_error(harness: Harness) -> None:
    """A task that was deleted after the poll is passed over."""
    harness.insert("a")
    harness.delete("a")
    seen: list[object] = []
    harness.store.claim(["a"], lambda rows, _now: (seen.append(list(rows)), {})[1])
    assert seen == [[]]


def test_an_exception_under_the_lock_writes_nothing(harness: Harness) -> None:
    """A defect in the relay rolls the transaction back and is not hidden; the store goes on."""
    harness.insert("a")

    def break_down(_rows: Sequence[Row], _now: datetime) -> Mapping[str, Outcome]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        harness.store.claim(["a"], break_down)
    assert harness.column("a", "sent_at") is None
    harness.store.claim(["a"], send_all)
    assert harness.column("a", "sent_at") is not None


def test_oldest_age_is_of_all_ready_and_due_tasks_that_are_not_paused(harness: Harness) -> None:
    """Sent, scheduled, dead and paused tasks have no age; the oldest of the rest counts, of any priority."""
    assert harness.store.oldest_age() == 0
    harness.insert("sent", sent_at=PAST, created_at=PAST)
    harness.insert("scheduled", available_at=FUTURE, created_at=PAST)
    harness.insert("dead", available_at=NEVER, created_at=PAST)
    harness.insert("paused", topic="paused", created_at=PAST)
    harness.pause("paused")
    assert harness.store.oldest_age() == 0
    harness.insert("low", priority=-5, created_at=PAST)
    harness.insert("high", priority=500)
    years = timedelta(seconds=harness.store.oldest_age()) / timedelta(days=365)
    assert 5 < years < 50


def test_oldest_age_of_a_due_task_counts_from_when_it_became_due(harness: Harness) -> None:
    """A task scheduled long ago for yesterday is a day old."""
    harness.insert("due", created_at=PAST, available_at=PAST + timedelta(days=365))
    harness_age = harness.store.oldest_age()
    harness.insert("older", created_at=PAST)
    assert harness.store.oldest_age() - harness_age == pytest.approx(365 * 86400, abs=60)


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
