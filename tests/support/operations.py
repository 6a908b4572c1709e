"""Rows of tasks for tests of the operators' commands, and a watch over their requests to Spanner."""

import base64
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from google.cloud.spanner_v1 import KeySet, RequestOptions, TransactionOptions
from google.cloud.spanner_v1.database import Database

from outbox.rows.task_table import TaskTable
from outbox.table.connection import open_database
from outbox.table.ddl import OPERATIONS
from outbox.table.states import NEVER
from outbox_admin.changes.execution import Outcome
from tests.support.fakes import serialized
from tests.support.spanner import place, query, record_requests

#: Every column that is not computed.
COLUMNS = (
    "Id", "Topic", "Data", "Priority", "OrderingKey", "Sequence", "CreatedAt", "AvailableAt", "ExpiresAt", "AtMostOnce",
    "Attempts", "LastError", "BlockedBy", "SentAt", "DueAt", "CancelledBy",
)  # fmt: skip
CREATED = datetime(2026, 1, 1, tzinfo=UTC)
PAST, FUTURE = datetime(2026, 2, 1, tzinfo=UTC), datetime(2090, 1, 1, tzinfo=UTC)
MICROSECOND, SECOND, DAY = timedelta(microseconds=1), timedelta(seconds=1), timedelta(days=1)
DEFERRED = {"AvailableAt": FUTURE, "OrderingKey": "k", "BlockedBy": "head"}
#: Columns of tasks, with the edges of each state; a deferred task is blocked whatever its attempts.
OF_STATES: dict[str, list[dict[str, Any]]] = {
    "pending": [{}, {"AvailableAt": PAST}, {"AvailableAt": PAST, "Attempts": 3, "LastError": "x"}],
    "retrying": [
        {"AvailableAt": FUTURE, "Attempts": 1},
        {"AvailableAt": FUTURE, "Attempts": 1, "OrderingKey": "k", "LastError": "unavailable: no"},
        {"AvailableAt": NEVER - MICROSECOND, "Attempts": 9, "LastError": "no"},
    ],
    "scheduled": [
        {"AvailableAt": FUTURE}, {"AvailableAt": NEVER - MICROSECOND}, {"AvailableAt": FUTURE, "LastError": "x"},
    ],
    "blocked": [DEFERRED, DEFERRED | {"Attempts": 2}],
    "dead": [{"AvailableAt": NEVER}, {"AvailableAt": NEVER + timedelta(hours=23), "Attempts": 1}],
    "sent": [{"SentAt": PAST}, {"SentAt": PAST, "AvailableAt": NEVER, "LastError": "x"}],
    "cancelled": [
        {"SentAt": PAST, "CancelledBy": "operation"},
        {"SentAt": PAST, "CancelledBy": "application", "AvailableAt": NEVER, "LastError": "x"},
    ],
}  # fmt: skip
#: The emulator does not like more in one commit.
BATCH = 100
#: The methods of requests about rows: a query, a read, or the end of a transaction.
CALLS = ("execute_sql", "execute_streaming_sql", "read", "streaming_read", "execute_batch_dml", "commit")


#: The values of a task by column.
Row = dict[str, Any]


def row(id: str, **columns: Any) -> Row:
    data = columns.pop("Data", serialized())
    usual = {"Topic": "orders", "Priority": 50, "CreatedAt": CREATED, "AtMostOnce": False, "Attempts": 0}
    return dict.fromkeys(COLUMNS) | usual | columns | {"Id": id, "Data": base64.b64encode(data)}


def line(key: str, *columns: dict[str, Any], topic: str = "orders") -> list[dict[str, Any]]:
    """Return the tasks of an ordering key, the oldest first. The ID of one of `a` is `a 0`, or with another topic."""
    name = key if topic == "orders" else f"{topic} {key}"
    return [
        row(f"{name} {n}", OrderingKey=key, Topic=topic, CreatedAt=PAST + n * SECOND, **each)
        for n, each in enumerate(columns)
    ]


def insert(database: Database, rows: Iterable[Mapping[str, Any]]) -> None:
    values = [[each[column] for column in COLUMNS] for each in rows]
    for start in range(0, len(values), BATCH):
        with database.batch() as batch:
            batch.insert("AsynchronousTasks", COLUMNS, values[start : start + BATCH])


def insert_cancelled(database: Database, rows: Iterable[Mapping[str, Any]], at: datetime) -> None:
    """Insert tasks that an operator cancelled at this time, a commit timestamp."""
    insert(database, [{**each, "SentAt": at, "CancelledBy": "an operation"} for each in rows])


def update(database: Database, id: str, **columns: Any) -> None:
    with database.batch() as batch:
        batch.update("AsynchronousTasks", ("Id", *columns), [(id, *columns.values())])


def update_operation(database: Database, id: str, **columns: Any) -> None:
    with database.batch() as batch:
        batch.update(OPERATIONS, ("OperationId", *columns), [(id, *columns.values())])


def control(database: Database, topic: str, **columns: Any) -> None:
    """Insert the row of a topic that has none."""
    with database.batch() as batch:
        batch.insert("AsynchronousTaskTopics", ("Topic", *columns), [(topic, *columns.values())])


def delete(database: Database, *ids: str) -> None:
    with database.batch() as batch:
        batch.delete("AsynchronousTasks", KeySet(keys=[[id] for id in ids]))


def limit(database: Database, topic: str, rate: float) -> None:
    with database.batch() as batch:
        columns = ("Topic", "Paused", "RatePerSecond", "Burst")
        batch.insert_or_update("AsynchronousTaskTopics", columns, [(topic, False, rate, 8)])


def pause(database: Database, *topics: str) -> None:
    with database.batch() as batch:
        batch.insert("AsynchronousTaskTopics", ("Topic", "Paused"), [(topic, True) for topic in topics])


def changed(outcomes: Iterable[Outcome]) -> list[str]:
    return sorted(id for outcome in outcomes for id in outcome.changed)


def rows_of(database: Database) -> dict[str, dict[str, Any]]:
    found = query(database, f"SELECT {', '.join(COLUMNS)} FROM AsynchronousTasks")
    return {values[0]: dict(zip(COLUMNS, values, strict=True)) for values in found}


def opened(database: Database) -> Any:
    return open_database(place(database.database_id))


#: The tags of requests that may take locks.
CHANGES = tuple(f"outbox-{name}" for name in ("retry", "resend", "purge", "cancel", "restore", "topics", "operations"))


class Watch:
    def __init__(self, database: Database) -> None:
        self.database = opened(database)
        self.requests = record_requests(self.database, *CALLS)
        self.table = TaskTable(self.database)

    def check(self) -> None:
        for name, request in self.requests:
            options = request.request_options
            assert options.priority == RequestOptions.Priority.PRIORITY_LOW, (name, request)
            if name == "commit":
                assert options.transaction_tag.startswith("outbox-"), (name, request)
                continue
            assert options.request_tag.startswith("outbox-"), (name, request)
            chosen = request.transaction
            if "single_use" in chosen:
                assert "read_only" in chosen.single_use, (name, request)
                continue
            assert options.request_tag in CHANGES, (name, request)
            assert options.transaction_tag == options.request_tag, (name, request)
            if "begin" in chosen:
                assert chosen.begin.isolation_level == TransactionOptions.IsolationLevel.SERIALIZABLE
                pessimistic = TransactionOptions.ReadWrite.ReadLockMode.PESSIMISTIC
                assert chosen.begin.read_write.read_lock_mode == pessimistic

    def tags(self) -> set[str]:
        tags = {request.request_options.request_tag for name, request in self.requests if name != "commit"}
        return tags - {"outbox-schema"}
