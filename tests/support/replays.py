"""Settings of replays for tests, and their records."""

from typing import Any

from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database

from outbox.program.settings import DatabaseSettings
from outbox.table.ddl import OPERATIONS
from outbox_pipeline.settings import ReplaySettings

COLUMNS = ("OperationId", "Operation", "StartedAt", "FinishedAt", "Principal", "Reason", "Selection", "Tasks")


def replay_settings(target: DatabaseSettings, **given: str) -> ReplaySettings:
    flags = {"project": target.project, "instance": target.instance, "database": target.database}
    return ReplaySettings.read(flags | given, {})


def noted(database: Database) -> list[dict[str, Any]]:
    with database.snapshot() as snapshot:
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in snapshot.read(OPERATIONS, COLUMNS, KeySet(all_=True))]
    return sorted(rows, key=lambda row: row["StartedAt"])
