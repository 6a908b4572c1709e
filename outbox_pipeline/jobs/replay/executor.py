"""What a Spark task does with tasks to be replayed: make each unsent that is as it was, under its lock.

A task may run again, and so may the whole replay: what is unsent already, or was sent since the replay began, is left
alone, so that nothing is sent twice.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa
from google.cloud.spanner_v1 import KeySet
from pyspark.sql.types import StructType

from outbox.admin import statements
from outbox.admin.changes import RETRIED, retried
from outbox.admin.table import LOCK_SECONDS, Transaction
from outbox.registration import COLUMNS, TABLE
from outbox.shared.settings import DatabaseSettings
from outbox_pipeline import schemas
from outbox_pipeline.spanner import Table, table_of
from outbox_pipeline.spark.pacing import Pace

#: Tasks, and bytes of archived messages, in one transaction.
CHUNK_ROWS, CHUNK_BYTES = 200, 4_000_000
_TAG = "outbox-pipeline-replay"


@dataclass(frozen=True)
class Replay:
    """Given to `mapInArrow`: takes rows of Id, or of `schemas.ARCHIVED_ROW`, yields `schemas.REPLAYED`.

    `started_at` is when the replay began, in the database's time; `rate` of this Spark task, 0 is none.
    """

    database: DatabaseSettings
    started_at: datetime
    rate: float = 0.0

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Replay them, chunk by chunk."""
        table, pace = table_of(self.database), Pace(self.rate)
        answer = schemas.arrow(schemas.REPLAYED)
        for batch in batches:
            # In UTC whatever the session's zone is.
            wanted = schemas.arrow(StructType([schemas.TABLE[name] for name in batch.schema.names]))
            counts = []
            for chunk in _chunks(batch.cast(wanted).to_pylist()):
                pace.wait(len(chunk))
                counts.append(replay(table, chunk, self.started_at))
            yield pa.RecordBatch.from_pylist(counts, answer)


def replay(table: Table, rows: Sequence[Mapping[str, Any]], started_at: datetime) -> dict[str, int]:
    """Make those of `rows` unsent that were sent before `started_at`, in one transaction; return how many, by outcome.

    A row of more than its id comes from the archive, and is inserted if its id is not in the table: the same as if it
    had never been deleted. A task that is unsent is `waiting`, one that was sent since is `changed`.
    """
    wanted = {row["Id"]: row for row in rows}

    def work(transaction: Transaction) -> dict[str, int]:
        keys = KeySet(keys=[[id] for id in wanted])
        found = dict(map(tuple, transaction.read(TABLE, ("Id", "SentAt"), keys, seconds=LOCK_SECONDS)))
        before = [id for id, sent_at in found.items() if sent_at is not None and sent_at < started_at]
        gone = [row for id, row in wanted.items() if id not in found]
        again = [row for row in gone if "Data" in row]
        if before or again:
            # Behind the locks: a worker tells by it that a task was made due after it had published it.
            [[now]] = transaction.query(statements.NOW, {})
            transaction.update(TABLE, RETRIED, [retried(id, now) for id in before])
            transaction.insert(TABLE, COLUMNS, [_inserted(row, now) for row in again])
        waiting = sum(sent_at is None for sent_at in found.values())
        return {
            "replayed": len(before),
            "registered": len(again),
            "waiting": waiting,
            "changed": len(found) - len(before) - waiting,
            "missing": len(gone) - len(again),
        }

    return table.transact(_TAG, work)


def _inserted(row: Mapping[str, Any], now: datetime) -> list[Any]:
    """Return an archived row as `outbox retry` would have left it; the other columns have their defaults.

    It keeps its CreatedAt, which is its place in the order of its key among tasks that were not deleted.
    """
    values = {**row, "Data": base64.b64encode(row["Data"]), "AvailableAt": now, "ExpiresAt": None}
    return [values[name] for name in COLUMNS]


def _chunks(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    chunk: list[Mapping[str, Any]] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += len(row.get("Data", b""))
        if len(chunk) >= CHUNK_ROWS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
