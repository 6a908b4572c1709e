"""A store for the contract tests, and access to its rows from outside: a fake, a simulated and an emulated Spanner."""

import base64
import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.param_types import STRING, Array

from outbox.table.connection import open_database
from outbox.table.controls import CONTROLS_COLUMNS, TopicControls
from outbox.table.ddl import Layout
from outbox_admin.schema.reshard import added_layout
from publishworker.spanner.store import SpannerStore
from publishworker.types import TopicKey
from tests.simulation.clockwork import Clockwork, Process
from tests.simulation.spanner import DEFAULT_LATENCIES, Connection, Spanner
from tests.simulation.table import Table
from tests.support import real
from tests.support.fakes import FakeStore, serialized
from tests.support.parts import poll_request
from tests.support.spanner import ADMIN_SECONDS, place


class FakeHarness:
    """The fake store; columns have their Python names."""

    def __init__(self) -> None:
        self._fake = FakeStore()
        self.store: Any = self._fake

    def insert(self, id: str, topic: str = "orders", **columns: Any) -> None:
        self._fake.insert(id, topic, serialized(), **columns)

    def with_shards(self, *keys: TopicKey) -> dict[TopicKey, int]:
        return {key: self._fake.shards_of(key.ordering_key)[0] for key in keys}

    def column(self, id: str, name: str) -> Any:
        return getattr(self._fake.rows[id], name)

    def control(self, topic: str, controls: TopicControls) -> None:
        self._fake.controls[topic] = controls

    def delete(self, id: str) -> None:
        self._fake.delete(id)

    def reshard(self, *layouts: Layout) -> None:
        """Add layouts to the first one, and record all."""
        self._fake.build(*self._fake.built, *layouts)
        self._fake.recorded = dict.fromkeys(self._fake.built, "polled")

    def seen(self, worker: str, seconds: float, liveness_timeout: int) -> None:
        self._fake.seen_at[worker] = self._fake.now - timedelta(seconds=seconds)
        self._fake.liveness_timeout[worker] = liveness_timeout


#: Virtual seconds within which each call must end.
LIMIT = 600.0


class SimulatedHarness(FakeHarness):
    """The simulated store; its rows are those of a fake store."""

    def __init__(self) -> None:
        self._clockwork = Clockwork(seed=1)
        spanner = Spanner(self._clockwork, 10, DEFAULT_LATENCIES)
        self._fake: Table = spanner.table
        self._process = Process("contract")
        connection: Any = Connection(spanner, self._process)
        self.store: SpannerStore = _Played(self._clockwork, self._process, connection)  # type: ignore[assignment]  # by name


class _Played:
    """Runs each method of a connection in a fiber, and the clock until the fiber has ended."""

    def __init__(self, clockwork: Clockwork, process: Process, connection: Connection) -> None:
        self._clockwork, self._process, self._connection = clockwork, process, connection

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._connection, name)
        return (lambda *a, **k: self._play(lambda: value(*a, **k))) if callable(value) else value

    def _play(self, call: Callable[[], Any]) -> Any:
        answers: list[tuple[Any, BaseException | None]] = []

        def run() -> None:
            try:
                answers.append((call(), None))
            except Exception as error:
                answers.append((None, error))

        self._clockwork.spawn(self._process, run)
        assert self._clockwork.run(self._clockwork.now + LIMIT, lambda: bool(answers))
        [(value, error)] = answers
        if error is not None:
            raise error
        return value


class SpannerHarness:
    """The same on a database of the emulator that has no rows yet."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.store = real.Store(open_database(place(database.database_id)), Layout(10))

    def insert(self, id: str, topic: str = "orders", **columns: Any) -> None:
        row = {"priority": 50, "created_at": COMMIT_TIMESTAMP, **columns}
        named = {name.title().replace("_", ""): value for name, value in row.items()}
        self._insert("AsynchronousTasks", Id=id, Topic=topic, Data=base64.b64encode(serialized()), **named)

    def with_shards(self, *keys: TopicKey) -> dict[TopicKey, int]:
        statement = (
            "SELECT ABS(MOD(FARM_FINGERPRINT(of_key), 10)) FROM UNNEST(@keys) AS of_key WITH OFFSET ORDER BY offset"
        )
        names = [key.ordering_key for key in keys]
        with self._database.snapshot() as snapshot:
            found = snapshot.execute_sql(statement, params={"keys": names}, param_types={"keys": Array(STRING)})
            return {key: shard for key, (shard,) in zip(keys, found, strict=True)}

    def column(self, id: str, name: str) -> Any:
        statement = f"SELECT {name.title().replace('_', '')} FROM AsynchronousTasks WHERE Id = @id"
        with self._database.snapshot() as snapshot:
            [[value]] = snapshot.execute_sql(statement, params={"id": id}, param_types={"id": STRING})
        return value

    def control(self, topic: str, controls: TopicControls) -> None:
        row = (topic, *dataclasses.astuple(controls))
        with self._database.batch() as batch:
            batch.insert_or_update("AsynchronousTaskTopics", CONTROLS_COLUMNS, [row])

    def delete(self, id: str) -> None:
        with self._database.batch() as batch:
            batch.delete("AsynchronousTasks", KeySet(keys=[[id]]))

    def reshard(self, *layouts: Layout) -> None:
        """Add layouts to the first one, and record all. The database is the test's own."""
        for layout in layouts:
            self._database.update_ddl(added_layout(layout)).result(ADMIN_SECONDS)
        for layout in (Layout(10), *layouts):
            self._insert("AsynchronousTaskShards", ColumnName=layout.column, Shards=layout.shards, State="polled")

    def seen(self, worker: str, seconds: float, liveness_timeout: int) -> None:
        seen_at = datetime.now(UTC) - timedelta(seconds=seconds)
        row = {"WorkerId": worker, "StartedAt": seen_at, "SeenAt": seen_at, "LivenessTimeoutSeconds": liveness_timeout}
        self._insert("AsynchronousTaskWorkers", **row)

    def _insert(self, table: str, **columns: Any) -> None:
        with self._database.batch() as batch:
            batch.insert(table, [*columns], [[*columns.values()]])


Harness = FakeHarness | SpannerHarness


def poll_ids(store: SpannerStore, *topics: str, **options: Any) -> list[str]:
    return [each.id for each in store.poll(poll_request(*topics, **options))]
