"""Large tables: many rows in a few seconds, past the outbox's own registration."""

import base64
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any
from uuid import uuid4

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
    rest = (topic or table.topic, data, 50, COMMIT_TIMESTAMP, *state)
    insert_rows(table.database, COLUMNS, ((str(uuid4()), *rest) for _ in range(count)))


def insert_rows(database: Any, columns: Sequence[str], rows: Iterator[Sequence[Any]]) -> None:
    while some := list(islice(rows, ROWS_A_COMMIT)):
        with database.batch() as batch:
            batch.insert("AsynchronousTasks", columns, some)
