"""What `outbox status` shows at each step of a change of the number of shards."""

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

STEPS = [
    "Record that Shard4 is added",
    "Add column Shard4 and its indexes; all tasks are written to them",
    "Let workers poll Shard4",
    "Waiting until w also polls Shard4",
    "Let workers stop polling Shard",
    "Waiting until w no longer polls Shard",
    "Drop the indexes of Shard and the column",
    "Remove Shard from AsynchronousTaskShards",
]
#: What the worker polls after it was waited for.
POLLS = {"Waiting until w also polls Shard4": "Shard,Shard4", "Waiting until w no longer polls Shard": "Shard4"}


def write_heartbeat(database: Database, polls: str) -> None:
    row = ("w", datetime.now(UTC), COMMIT_TIMESTAMP, polls)
    with database.batch() as batch:
        batch.insert_or_update("AsynchronousTaskWorkers", ("WorkerId", "StartedAt", "SeenAt", "Polls"), [row])


def status_of(database: Database, *, as_json: bool) -> str:
    table = TaskTable(database)
    return status._rendered(table, backlog.read(table), argparse.Namespace(json=as_json))


@pytest.mark.extended
def test_each_step_is_in_the_status(own_database: Database) -> None:
    """With the workers that it waits for, as text and as JSON. Without a change there is no such line."""
    database = open_database(place(own_database.database_id))
    resharding, steps, polls = Resharding(TaskTable(database)), list[str](), "Shard"
    write_heartbeat(database, polls)
    for step in resharding.run(resharding.target(4)):
        steps.append(step)
        shown: dict[str, Any] | None = json.loads(status_of(database, as_json=True))["reshard"]
        if step == STEPS[0]:
            assert shown is None
            continue
        assert shown is not None
        since = datetime.fromisoformat(shown.pop("since"))
        assert abs((datetime.now(UTC) - since).total_seconds()) < 600
        waits_for = ["w"] if step in POLLS else []
        assert shown == {"from": 10, "to": 4, "next_step": step, "waits_for": waits_for}
        assert status_of(database, as_json=False).endswith(f"Next: {step}")
        polls = POLLS.get(step, polls)
        write_heartbeat(database, polls)  # again at each step, because it counts for 28 s
    assert steps == STEPS
    assert json.loads(status_of(database, as_json=True))["reshard"] is None
