"""Large tables: many rows in a few seconds, past the outbox's own registration."""

import base64
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any
from uuid import uuid4

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP

from outbox.message import RawPubsubMessage
from tests.benchmarks.bench import MESSAGE, Table

#: Rows of a commit: the emulator's commit grows with the square of it.
ROWS_A_COMMIT = 100

COLUMNS = ("Id", "Topic", "Data", "Priority", "CreatedAt")


def insert(table: Table, count: int) -> None:
    """Insert so many pending tasks."""
    data = base64.b64encode(RawPubsubMessage(data=MESSAGE).SerializeToString()).decode()
    rest = (table.topic, data, 50, COMMIT_TIMESTAMP)
    insert_rows(table.database, COLUMNS, ((str(uuid4()), *rest) for _ in range(count)))


def insert_rows(database: Any, columns: Sequence[str], rows: Iterator[Sequence[Any]]) -> None:
    while some := list(islice(rows, ROWS_A_COMMIT)):
        with database.batch() as batch:
            batch.insert("AsynchronousTasks", columns, some)
