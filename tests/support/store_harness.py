"""A store to test, and the sight behind it: the fake's, and that of Spanner on the emulator."""

import base64
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.param_types import STRING

from publishworker.connection import open_database
from publishworker.spanner.store import SpannerStore, Store
from publishworker.task import TopicLimit
from tests.support.fakes import FakeStore, serialized
from tests.support.parts import look
from tests.support.spanner import INSTANCE, PROJECT


class Harness(Protocol):
    """A store, and the sight behind it."""

    store: Store

    def insert(self, id: str, topic: str = "orders", **columns: Any) -> None:
        """Add a row; columns by their names in Python."""

    def column(self, id: str, name: str) -> Any:
        """Return one column of a row."""

    def pause(self, topic: str) -> None:
        """Pause a topic."""

    def limit(self, topic: str, limit: TopicLimit) -> None:
        """Limit a topic that has no row yet."""

    def delete(self, id: str) -> None:
        """Delete a row."""

    def seen(self, worker: str, seconds: float) -> None:
        """Have a worker's last heartbeat be that old."""


class FakeHarness:
    """Behind the fake."""

    def __init__(self) -> None:
        """Begin empty."""
        self._fake = FakeStore()
        self.store: Store = self._fake

    def insert(self, id: str, topic: str = "orders", **columns: Any) -> None:
        """See Harness."""
        self._fake.insert(id, topic, serialized(), **columns)

    def column(self, id: str, name: str) -> Any:
        """See Harness."""
        return getattr(self._fake.rows[id], name)

    def pause(self, topic: str) -> None:
        """See Harness."""
        self._fake.paused.add(topic)

    def limit(self, topic: str, limit: TopicLimit) -> None:
        """See Harness. A row that says nothing is none here."""
        if limit != TopicLimit():
            self._fake.limits[topic] = limit

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
        self.store: Store = SpannerStore(open_database(PROJECT, INSTANCE, database.database_id), shards=10)

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

        def work(transaction: Any) -> None:
            if not transaction.execute_update(
                f"UPDATE AsynchronousTaskTopics SET Paused = TRUE WHERE Topic = '{topic}'"
            ):
                transaction.insert("AsynchronousTaskTopics", ("Topic", "Paused"), [(topic, True)])

        self._database.run_in_transaction(work)

    def limit(self, topic: str, limit: TopicLimit) -> None:
        """See Harness."""
        with self._database.batch() as batch:
            batch.insert(
                "AsynchronousTaskTopics",
                ("Topic", "RatePerSecond", "Burst", "MaxInFlight"),
                [(topic, limit.rate, limit.burst, limit.in_flight)],
            )

    def delete(self, id: str) -> None:
        """See Harness."""
        with self._database.batch() as batch:
            batch.delete("AsynchronousTasks", KeySet(keys=[[id]]))

    def seen(self, worker: str, seconds: float) -> None:
        """See Harness."""
        seen_at = datetime.now(UTC) - timedelta(seconds=seconds)
        with self._database.batch() as batch:
            batch.insert("AsynchronousTaskWorkers", ("WorkerId", "StartedAt", "SeenAt"), [(worker, seen_at, seen_at)])


#: The kinds of harness, for a fixture's `params`.
KINDS = ("fake", "spanner")


def harness_of(request: pytest.FixtureRequest) -> Harness:
    """Return the harness of the kind that is the request's parameter."""
    return FakeHarness() if request.param == "fake" else SpannerHarness(request.getfixturevalue("database"))


def poll_ids(store: Store, *topics: str, **options: Any) -> list[str]:
    """Return the candidates' ids."""
    return [each.id for each in store.poll(look(*topics, **options)).candidates]
