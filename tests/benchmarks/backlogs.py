"""Large tables: many rows in a few seconds, past the outbox's own registration."""

import base64
import uuid
from datetime import UTC, datetime
from typing import Any

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP

from outbox.message import RawPubsubMessage
from tests.benchmarks.bench import MESSAGE, Table

#: Rows of a commit: the emulator's commit grows with the square of it.
ROWS_A_COMMIT = 100

COLUMNS = ("Id", "Topic", "Data", "Priority", "CreatedAt", "SentAt", "AvailableAt")
LATER = datetime(9000, 1, 1, tzinfo=UTC)


def insert(table: Table, count: int, *, sent: bool = False, scheduled: bool = False, topic: str = "") -> None:
    """Insert so many tasks: pending, sent, or scheduled for much later."""
    data = base64.b64encode(RawPubsubMessage(data=MESSAGE).SerializeToString()).decode()
    state = (COMMIT_TIMESTAMP if sent else None, LATER if scheduled else None)
    database: Any = table.database
    for begin in range(0, count, ROWS_A_COMMIT):
        rows = range(min(ROWS_A_COMMIT, count - begin))
        with database.batch() as batch:
            batch.insert(
                "AsynchronousTasks",
                COLUMNS,
                [(str(uuid.uuid4()), topic or table.topic, data, 50, COMMIT_TIMESTAMP, *state) for _ in rows],
            )
