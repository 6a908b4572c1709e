"""The small tables, which any program with a role may write: no value stops the commands or the workers."""

import argparse
import json
import math
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database

from outbox.admin import backlog, operations, reshard
from outbox.admin.table import TaskTable
from outbox.cli import status_command
from outbox.devtools.emulators import Emulators
from outbox.table.connection import open_database
from outbox.table.ddl import Layout
from outbox.table.shared_sql import FORGET_WORKER_SECONDS
from publishworker.spanner.store import SpannerStore
from publishworker.topics.availability import RateLimits, split_valid
from tests.support.commands import Commands
from tests.support.spanner import place

LOWEST, HIGHEST = -(2**63), 2**63 - 1
INTEGERS = (LOWEST, -1, 0, 1, 2**62, HIGHEST)
FLOATS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 5e-324, 1e308)
LONG_AGO = datetime(1, 1, 1, tzinfo=UTC)
STRUCTURES = (
    "",
    "{",
    "[" * 100_000,
    "9" * 5_000,
    "NaN",
    '{"from": 1e999}',
    "7",
    '"x"',
    "null",
    '{"from": "a", "to": 3}',
)


def insert(database: Database, table: str, columns: str, *rows: tuple[Any, ...]) -> None:
    with database.batch() as batch:
        batch.insert(f"AsynchronousTask{table}", columns.split(), rows)


@pytest.fixture
def store(database: Database) -> SpannerStore:
    return SpannerStore(open_database(place(database.database_id)), Layout(10))


def shown(table: TaskTable) -> dict[str, Any]:
    text: dict[str, Any] = json.loads(
        status_command._rendered(table, backlog.read(table), argparse.Namespace(json=True))
    )
    return text


def test_no_heartbeat_stops_the_commands_or_lives_for_ever(database: Database, store: SpannerStore) -> None:
    """The longest liveness timeout is the age at which the row is deleted."""
    rows = [
        (f"{age} {seconds}", LONG_AGO, seen, seconds)
        for seconds in INTEGERS
        for age, seen in (("new", COMMIT_TIMESTAMP), ("old", LONG_AGO))
    ]
    insert(database, "Workers", "WorkerId StartedAt SeenAt LivenessTimeoutSeconds", *rows)
    table = TaskTable(database)
    assert shown(table)["workers"] in (2, 3)  # the timeout of one second may have passed
    assert {*reshard.Resharding(table).snapshot().polled_by} >= {"new 4611686018427387904", f"new {HIGHEST}"}
    workers = store.discover((), ()).workers
    assert {*workers.live} >= {"new 4611686018427387904", f"new {HIGHEST}"}
    assert max(workers.live.values()) <= FORGET_WORKER_SECONDS
    assert workers.gone == {f"old {seconds}" for seconds in INTEGERS}


def test_no_limit_of_a_topic_stops_the_commands_or_the_workers(
    emulators: Emulators, database: Database, store: SpannerStore
) -> None:
    rows = [
        *((f"rate {rate}", False, rate, 1, None) for rate in FLOATS),
        *((f"burst {number}", False, 10.0, number, None) for number in INTEGERS),
        *((f"in flight {number}", False, None, None, number) for number in INTEGERS),
    ]
    insert(database, "Topics", "Topic Paused RatePerSecond Burst MaxInFlight", *rows)
    limits = RateLimits(time.monotonic)
    limits.apply(split_valid(store.discover(range(10), ()).controls)[0], 3)
    assert set(limits.allowances({})) == {"rate 1e+308", "burst 1", "in flight 1"}
    limits.seconds_to_next()
    outbox = Commands(emulators, database)
    for words in (["topics"], ["pause", "--yes", *(topic for topic, *_ in rows)]):
        assert outbox.here(*words).code == 0
    listed = outbox.here("topics", "--json").stdout
    found = json.loads(listed, parse_constant=pytest.fail)["topics"]
    assert {each["topic"]: each["paused"] for each in found} == {topic: True for topic, *_ in rows}
    assert TaskTable(database).controls()["rate inf"].rate_per_second == math.inf


def test_no_recorded_layout_stops_the_commands_or_the_workers(database: Database, store: SpannerStore) -> None:
    """A row that names no layout is ignored."""
    names = ("", "Sharp", "shard", "ShardX", "Shard-1", "Shard32", "Shard 3", "Shard\0", "Shard٣", "Shard03")
    rows = [*((name, 3) for name in names), *((f"Shard{number}"[:16], number) for number in (0, 1_001, HIGHEST))]
    insert(database, "Shards", "ColumnName Shards State", *((*row, "polled") for row in rows))
    assert store.discover((), ()).workers.layouts == ()
    assert reshard.Resharding(TaskTable(database)).snapshot().recorded == {}
    insert(database, "Shards", "ColumnName Shards State", ("Shard", 10, "polled"))
    assert store.discover((), ()).workers.layouts == (Layout(10),)


def test_no_recorded_operation_stops_the_commands(emulators: Emulators, database: Database) -> None:
    """Those that are no selection are shown as they are, and the last valid change of the shards counts."""
    columns = "OperationId Operation StartedAt FinishedAt Selection Tasks"
    rows = [
        (str(number), "reshard", LONG_AGO, LONG_AGO, text, (LOWEST, HIGHEST)[number % 2])
        for number, text in enumerate(STRUCTURES)
    ]
    insert(database, "Operations", columns, *rows)
    insert(database, "Operations", columns, ("x", "reshard", COMMIT_TIMESTAMP, None, "[", None))
    insert(database, "Shards", "ColumnName Shards State", ("Shard", 10, "polled"), ("Shard32", 32, "building"))
    table = TaskTable(database)
    assert (shown(table)["reshard"], len(list(reshard.Resharding(table).report()))) == (None, 2)
    outbox = Commands(emulators, database)
    assert outbox.here("operations").code == 0
    lines = outbox.here("operations", "--json").stdout.splitlines()
    listed = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert {each["id"]: each["selection"] for each in listed if each["id"] in "0169"} == {
        "0": "", "1": "{", "6": 7, "9": {"from": "a", "to": 3},
    }  # fmt: skip
    assert len(operations.latest(table, 100)) == len(listed) == len(STRUCTURES) + 1
