"""What a Spark task does with tasks to be purged: delete those that are still as they were archived."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
from google.cloud.spanner_v1 import KeySet

from outbox.admin.table import LOCK_SECONDS, Transaction
from outbox.registration import TABLE
from outbox.shared.settings import DatabaseSettings
from outbox_pipeline import schemas
from outbox_pipeline.spanner import Table, table_of

#: Tasks in one transaction.
CHUNK_ROWS = 200
_TAG = "outbox-pipeline-purge"


@dataclass(frozen=True)
class Purge:
    """Given to `mapInArrow`: takes rows of Id and SentAt, yields `schemas.PURGED`."""

    database: DatabaseSettings

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Delete them, chunk by chunk."""
        table = table_of(self.database)
        answer = schemas.arrow(schemas.PURGED)
        for batch in batches:
            # In UTC: Python takes no time in the hour that a zone has twice to be equal to one of another zone.
            times = batch["SentAt"].cast(pa.timestamp("us", tz="UTC"))
            rows = list(zip(batch["Id"].to_pylist(), times.to_pylist(), strict=True))
            chunks = (rows[start : start + CHUNK_ROWS] for start in range(0, len(rows), CHUNK_ROWS))
            yield pa.RecordBatch.from_pylist([purge(table, chunk) for chunk in chunks], answer)


def purge(table: Table, rows: Sequence[tuple[str, datetime]]) -> dict[str, int]:
    """Delete those of `rows` whose SentAt is still the same, in one transaction; return how many, by what happened.

    A task that was sent again, or is to be, is `changed` and stays; one that is gone is `missing`.
    """
    wanted = dict(rows)

    def work(transaction: Transaction) -> dict[str, int]:
        keys = KeySet(keys=[[id] for id in wanted])
        found = transaction.read(TABLE, ("Id", "SentAt"), keys, seconds=LOCK_SECONDS)
        same = [id for id, sent_at in found if sent_at == wanted[id]]
        if same:
            transaction.delete(TABLE, KeySet(keys=[[id] for id in same]))
        return {"deleted": len(same), "changed": len(found) - len(same), "missing": len(wanted) - len(found)}

    return table.transact(_TAG, work)
