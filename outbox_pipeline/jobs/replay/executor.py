"""Replays tasks in a Spark task: locks each row and resets SentAt if the task was sent before the replay began.

Spark can run a Spark task again, and a replay can be resumed. A task that is already unsent, or was sent since the
replay began, is not changed, so no task is replayed twice.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from outbox.admin import statements
from outbox.admin.changes import RETRY_COLUMNS, retry_values
from outbox.admin.table import Transaction
from outbox.registration import COLUMNS, TABLE
from outbox.shared.settings import DatabaseSettings
from outbox.storage.sql import chunked
from outbox_pipeline import schemas
from outbox_pipeline.spanner import Table, open_table
from outbox_pipeline.spark.pacing import Pace

#: Max tasks, and max bytes of archived messages, in one transaction.
CHUNK_ROWS, CHUNK_BYTES = 200, 4_000_000
_TAG = "outbox-pipeline-replay"


@dataclass(frozen=True)
class Replay:
    """A function for `mapInArrow` that replays rows with Id, or `schemas.ARCHIVED_ROW`, and yields `schemas.REPLAYED`.

    `started_at` is the start of the replay by the database's clock. `rate` is rows per second of this Spark task, 0 is
    no limit.
    """

    database: DatabaseSettings
    started_at: datetime
    rate: float = 0.0

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Replay the rows in chunks."""
        table, pace = open_table(self.database), Pace(self.rate)
        answer = schemas.arrow(schemas.REPLAYED)
        for batch in batches:
            # Cast to UTC from the session's time zone.
            wanted = schemas.arrow(StructType([schemas.TABLE[name] for name in batch.schema.names]))
            counts = []
            rows = batch.cast(wanted).to_pylist()
            for chunk in chunked(rows, CHUNK_ROWS, CHUNK_BYTES, lambda row: len(row.get("Data", b""))):
                pace.wait(len(chunk))
                counts.append(replay(table, chunk, self.started_at))
            yield pa.RecordBatch.from_pylist(counts, answer)


def replay(table: Table, rows: Sequence[Mapping[str, Any]], started_at: datetime) -> dict[str, int]:
    """Reset SentAt of tasks that were sent before `started_at`, in one transaction. Return the number of each outcome.

    A row with Data comes from the archive and is inserted again if its ID is not in the table. An unsent task is
    `unsent`. A task that was sent since is `resent`.
    """
    wanted = {row["Id"]: row for row in rows}

    def work(transaction: Transaction) -> dict[str, int]:
        found = dict(map(tuple, transaction.query(statements.LOCK_SENT_AT, {"ids": sorted(wanted)})))
        before = [id for id, sent_at in found.items() if sent_at is not None and sent_at < started_at]
        gone = [row for id, row in wanted.items() if id not in found]
        again = [row for row in gone if "Data" in row]
        if before or again:
            # Read after locking: by this time, a worker with the task in doubt knows that it was reset after the
            # publish.
            [[now]] = transaction.query(statements.NOW, {})
            transaction.update(TABLE, RETRY_COLUMNS, [retry_values(id, now) for id in before])
            transaction.insert(TABLE, COLUMNS, [_inserted(row, now) for row in again])
        unsent = sum(sent_at is None for sent_at in found.values())
        return {
            "replayed": len(before),
            "registered": len(again),
            "unsent": unsent,
            "resent": len(found) - len(before) - unsent,
            "missing": len(gone) - len(again),
        }

    return table.transact(_TAG, work)


def _inserted(row: Mapping[str, Any], now: datetime) -> list[Any]:
    """Return an archived row in the state that `outbox retry` leaves. The other columns have their defaults.

    The row keeps its CreatedAt, and so its place in the order of its ordering key.
    """
    values = {**row, "Data": base64.b64encode(row["Data"]), "AvailableAt": now, "ExpiresAt": None}
    return [values[name] for name in COLUMNS]
