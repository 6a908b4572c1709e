"""Purges archived tasks in a Spark task: deletes each task whose SentAt has not changed since it was archived."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
from google.cloud.spanner_v1 import KeySet

from outbox.admin import statements
from outbox.admin.table import Transaction
from outbox.registration import TABLE
from outbox.shared.settings import DatabaseSettings
from outbox.storage.sql import chunked
from outbox_pipeline import schemas
from outbox_pipeline.spanner import Table, open_table

#: Max tasks in one transaction.
CHUNK_ROWS = 200
_TAG = "outbox-pipeline-purge"


@dataclass(frozen=True)
class Purge:
    """A function for `mapInArrow` that purges rows with Id and SentAt and yields `schemas.PURGED`."""

    database: DatabaseSettings

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Purge the rows in chunks."""
        table = open_table(self.database)
        answer = schemas.arrow(schemas.PURGED)
        for batch in batches:
            # In UTC, because in an hour that occurs twice Python never treats times of two time zones as equal.
            times = batch["SentAt"].cast(pa.timestamp("us", tz="UTC"))
            rows = list(zip(batch["Id"].to_pylist(), times.to_pylist(), strict=True))
            counts = [purge(table, chunk) for chunk in chunked(rows, CHUNK_ROWS)]
            yield pa.RecordBatch.from_pylist(counts, answer)


def purge(table: Table, rows: Sequence[tuple[str, datetime]]) -> dict[str, int]:
    """Delete the tasks whose SentAt is still the archived one, in one transaction. Return the number of each outcome.

    A task with another SentAt, or none, is `resent` and stays in the table. A task that does not exist is `missing`.
    """
    wanted = dict(rows)

    def work(transaction: Transaction) -> dict[str, int]:
        found = transaction.query(statements.LOCK_SENT_AT, {"ids": sorted(wanted)})
        same = [id for id, sent_at in found if sent_at == wanted[id]]
        if same:
            transaction.delete(TABLE, KeySet(keys=[[id] for id in same]))
        return {"deleted": len(same), "resent": len(found) - len(same), "missing": len(wanted) - len(found)}

    return table.transact(_TAG, work)
