"""`audit --inbox CONSUMER`: compares the records of a subscriber's inbox with tasks and messages."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from outbox.base.values import chunked
from outbox.errors import OutboxError
from outbox.inbox.once import TABLE, table_errors
from outbox.program.settings import DatabaseSettings
from outbox.table.connection import open_database
from outbox.table.transactions import retry_and_timeout
from outbox_pipeline import schemas
from outbox_pipeline.job_settings import AuditSettings
from outbox_pipeline.jobs.audit.transforms import STATES, Rules
from outbox_pipeline.source.columns import column, times
from outbox_pipeline.source.parts import ARROW_ROWS, KeyPart, key_parts
from outbox_pipeline.spanner import CALL_SECONDS, LOW, TABLE_SECONDS
from outbox_pipeline.spark.spark_tasks import read_partitions, read_parts

#: A record, without its consumer.
RECORD = StructType([schemas.FOUND["task_id"], schemas.FOUND["processed_at"]])
#: Each record or received task is in at most one of these classes.
APPLIED, NOT_APPLIED, APPLIED_LATE, UNREGISTERED = CLASSES = ("applied", "not_applied", "applied_late", "unregistered")


def records(spark: SparkSession, settings: AuditSettings) -> DataFrame:
    """Return the records of the consumer. Raises NotReached, or OutboxError if there is none."""
    *path, name = (settings.inbox_database or settings.database).split("/")
    named: dict[str, Any] = dict(zip(("project", "instance"), path[1::2], strict=False))
    database = dataclasses.replace(settings, database=name, **named)
    if not any(True for _ in inbox_rows(database, settings.inbox, KeyPart("", ""), limit=1)):
        raise OutboxError(
            f"Consumer {settings.inbox!r} has no record in {TABLE} of {name}. Check --inbox and --inbox-database"
        )

    def read(part: KeyPart) -> Iterator[pa.RecordBatch]:
        for rows in chunked(inbox_rows(database, settings.inbox, part), ARROW_ROWS):
            ids, at = zip(*rows, strict=True)
            texts = pa.array([value.string_value for value in at], pa.string())
            yield pa.RecordBatch.from_arrays([column("Id", ids), times(texts)], schema=schemas.arrow(RECORD))

    return read_parts(spark, read, key_parts(read_partitions(spark)), RECORD)


def inbox_rows(settings: DatabaseSettings, consumer: str, part: KeyPart, limit: int = 0) -> Iterator[list[Any]]:
    """Yield TaskId and ProcessedAt of a range of task IDs, undecoded. Raises NotReached if the table is missing."""
    database: Any = open_database(settings, CALL_SECONDS)
    with table_errors(), database.snapshot() as snapshot:
        yield from snapshot.read(
            TABLE, ("TaskId", "ProcessedAt"), part.keys(consumer), limit=limit, lazy_decode=True,
            request_options={"priority": LOW, "request_tag": "outbox-pipeline-inbox"},
            **retry_and_timeout(TABLE_SECONDS),
        )  # fmt: skip


def effects(rows: DataFrame, inbox: DataFrame, rules: Rules) -> DataFrame:
    """Return `schemas.FOUND`: a row for each class that a task of `transforms.judged`, or a record, is in.

    A task is judged by all of its sendings together. A record of a message ID belongs to no task.
    """
    earliest = [f.min(name).alias(name) for name in ("topic", "state", "sent_at", "cancelled_at", "first_at")]
    tasks = rows.groupBy("task_id", "created_at").agg(
        *earliest, f.sum("messages").alias("messages"), f.lit(True).alias("judged")
    )
    of_tasks = inbox.where(~f.col("task_id").rlike("^[0-9a-f]{8}-message-"))
    at, received = f.col("processed_at"), f.col("first_at")
    applied = f.col("state").isin(*STATES) & at.isNotNull()
    due = f.col("state").isin(*STATES) & (received < f.lit(rules.horizon - rules.grace))
    # Earlier records can belong to tasks that were not read.
    alone = f.col("judged").isNull()
    if rules.since is not None:
        alone &= at >= f.lit(rules.since + rules.grace)
    found = (
        f.when(applied & (at > received + f.lit(rules.grace)), APPLIED_LATE)
        .when(applied, APPLIED)
        .when(due & at.isNull(), NOT_APPLIED)
        .when((at < f.lit(rules.known_until)) & (alone | (f.col("state") == "unknown")), UNREGISTERED)
    )
    joined = tasks.join(of_tasks, "task_id", "full_outer").withColumns({"class": found, "overtaken_at": f.lit(None)})
    return joined.where("class IS NOT NULL").select(
        *(f.col(field.name).cast(field.dataType) for field in schemas.FOUND)
    )
