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
from publishworker.task import Outcome, Row, Sent, Taken
from tests.support.fakes import NEVER, FakeStore, serialized
from tests.support.spanner import INSTANCE, PROJECT

PAST = datetime(2020, 1, 1, tzinfo=UTC)
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


@pytest.fixture(params=["fake", "spanner"])
def harness(request: pytest.FixtureRequest) -> Harness:
    """Each scenario runs on both."""
    return FakeHarness() if request.param == "fake" else SpannerHarness(request.getfixturevalue("database"))


def poll_ids(store: Store, *topics: str, per_range: int = 100, look_further: bool = False) -> list[str]:
    """Return the candidates' ids."""
    found = store.poll(topics, topics, per_range, look_further=look_further)
    return [each.id for each in found.candidates]


def send_all(rows: Sequence[Row], _now: datetime) -> Mapping[str, Outcome]:
    """Say of each row that it was sent."""
    return {row.id: Sent("1") for row in rows}


def test_poll_of_an_empty_table_finds_nothing(harness: Harness) -> None:
    """An empty table is no error, and has no topics."""
    found = harness.store.poll([], [], 10, look_further=True)
    assert (found.candidates, found.new_topics, found.paused) == ((), frozenset(), frozenset())


def test_poll_returns_only_unsent_tasks_of_the_topics_asked_for(harness: Harness) -> None:
    """A sent task and another topic's task are no candidates."""
    harness.insert("unsent")
    harness.insert("sent", sent_at=PAST)
    harness.insert("other", topic="invoices")
    assert poll_ids(harness.store, "orders") == ["unsent"]


def test_poll_tells_what_sampling_needs(harness: Harness) -> None:
    """A candidate carries topic, shard, priority, times, ordering key and size, without the body."""
    harness.insert("a", priority=7, ordering_key="key")
    [candidate] = harness.store.poll(["orders"], [], 10, look_further=False).candidates
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
    assert poll_ids(harness.store, "orders", look_further=True) == []


def test_due_tasks_come_when_the_poll_looks_further(harness: Harness) -> None:
    """A task whose time has come is found by the due range, and only there."""
    harness.insert("due", available_at=PAST)
    assert poll_ids(harness.store, "orders", look_further=False) == []
    assert poll_ids(harness.store, "orders", look_further=True) == ["due"]


@pytest.mark.parametrize("known", [[], ["m"], ["a", "m", "z"], ["b", "y"]])
def test_probes_find_topics_in_every_gap(harness: Harness, known: list[str]) -> None:
    """Before, between and after the known topics; again and again until all are known."""
    every = {"aa", "kk", "mm", "zz", *known}
    for topic in every:
        harness.insert(str(uuid.uuid4()), topic=topic)
    found = set(known)
    while new := harness.store.poll([], found, 10, look_further=True).new_topics:
        found |= new
    assert found == every


def test_probes_do_not_find_topics_without_unsent_tasks(harness: Harness) -> None:
    """A topic whose tasks are all sent costs nothing."""
    harness.insert("sent", topic="old", sent_at=PAST)
    assert harness.store.poll([], [], 10, look_further=True).new_topics == frozenset()


def test_paused_topics_are_told(harness: Harness) -> None:
    """The worker learns of a pause by the poll that looks further."""
    harness.pause("orders")
    assert harness.store.poll([], [], 10, look_further=True).paused == {"orders"}
    assert harness.store.poll([], [], 10, look_further=False).paused is None


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
