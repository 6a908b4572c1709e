"""What `outbox status` shows while the number of shards is changed."""

import argparse
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database

from outbox.admin import backlog
from outbox.admin.reshard import Resharding
from outbox.admin.table import TaskTable
from outbox.cli import status
from outbox.table.connection import open_database
from tests.support.spanner import place


def status_of(database: Database, *, as_json: bool) -> str:
    table = TaskTable(database)
    return status._rendered(table, backlog.read(table), argparse.Namespace(json=as_json))


@pytest.mark.extended
def test_the_next_step_is_in_the_status(own_database: Database) -> None:
    """With the worker that it waits for, as text and as JSON."""
    database = open_database(place(own_database.database_id))
    with database.batch() as batch:
        row = ("w", datetime.now(UTC), COMMIT_TIMESTAMP, "Shard")
        batch.insert("AsynchronousTaskWorkers", ("WorkerId", "StartedAt", "SeenAt", "Polls"), [row])
    resharding = Resharding(TaskTable(database))
    step = next(each for each in resharding.run(resharding.target(4)) if each.startswith("Waiting"))
    shown: dict[str, Any] = json.loads(status_of(database, as_json=True))["reshard"]
    since = datetime.fromisoformat(shown.pop("since"))
    assert abs((datetime.now(UTC) - since).total_seconds()) < 600
    assert step == "Waiting until w also polls Shard4"
    assert shown == {"from": 10, "to": 4, "next_step": step, "waits_for": ["w"]}
    assert status_of(database, as_json=False).endswith(f"Next: {step}")
