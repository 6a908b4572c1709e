"""What the jobs share: reads in parallel, the results of Spark tasks, their report, and a limit of rows per second."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from outbox.program.settings import Settings, metrics_setting
from outbox_pipeline import schemas
from outbox_pipeline.spark.files import is_connect
from publishworker.telemetry.clients import client
from publishworker.telemetry.metrics import PIPELINE_ROWS, Metrics

#: The rows of one Arrow batch, each with its values by column.
Rows = Sequence[Mapping[str, Any]]

_log = logging.getLogger("outbox_pipeline")


def read_parts(
    spark: SparkSession, read: Callable[[Any], Iterator[pa.RecordBatch]], parts: Sequence[Any], schema: StructType
) -> DataFrame:
    """Return the rows that `read` yields for the parts. Each part has a Spark task."""

    def read_numbers(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch["id"].to_pylist():
                yield from read(parts[number])

    return spark.range(0, len(parts), 1, len(parts)).mapInArrow(read_numbers, schema)


def map_batches(
    batches: DataFrame, answer: StructType, work: Callable[..., Iterator[Rows]], *arguments: Any
) -> DataFrame:
    """Return the rows that `work(*arguments, batches)` yields for the Arrow batches of each Spark task."""

    def mapped(given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        answers = schemas.arrow(answer)
        for found in work(*arguments, given):
            yield pa.RecordBatch.from_pylist(found, answers)

    return batches.mapInArrow(mapped, answer)


def map_rows(rows: DataFrame, answer: StructType, work: Callable[..., Iterator[Rows]], *arguments: Any) -> DataFrame:
    """Return the rows that `work(*arguments, batches)` yields in each Spark task. `answer` is their schema.

    `batches` has the rows of the Spark task, with their times in UTC: in the session's time zone, the last hours of
    9999 can be in the year 10000, and Python treats no time in an hour that occurs twice as equal to one in UTC.
    """
    given = rows.schema

    def mapped(batches: Iterator[pa.RecordBatch]) -> Iterator[Rows]:
        utc = schemas.arrow(given)
        return work(*arguments, (batch.cast(utc).to_pylist() for batch in batches))

    return map_batches(rows, answer, mapped)


def new_run() -> str:
    """Return a unique name for the folder of a run."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid4().hex[:8]}"


def placed(rows: DataFrame, partitions: int, *columns: str) -> DataFrame:
    """Return the rows with a column `_place`, the first of the `columns` that is not NULL.

    Rows with the same place are in one partition. There are as many `partitions`, or if 0, as many as Spark chooses.
    """
    rows = rows.withColumn("_place", f.coalesce(*columns))
    return rows.repartition(partitions, "_place") if partitions else rows.repartition("_place")


def totals(counts: DataFrame) -> dict[str, Any]:
    """Return the sum of each column, 0 if there are no rows."""
    [sums] = counts.select(*(f.coalesce(f.sum(name), f.lit(0)).alias(name) for name in counts.columns)).collect()
    return dict(sums.asDict())  # not as Arrow, which would hide the name of a damaged file from the error


def collected(rows: DataFrame) -> list[dict[str, Any]]:
    """Collect a few rows. Their times have a zone, unlike those of Spark's rows, whose zone is that of the driver."""
    found: list[dict[str, Any]] = rows.toArrow().to_pylist()
    return found


def inform(action: str, text: str) -> None:
    """Log what a job does, under a name of docs/reference/logs.md."""
    _log.info("%s", text, extra={"action": action})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reporting(Settings):
    """The setting of a write that no job makes."""

    metrics: str = metrics_setting()


def report(job: str, counts: Mapping[str, int], batch: int | None) -> None:
    """Log and count the outcomes of the rows of a write, or of a batch of a stream, where OUTBOX_METRICS says."""
    metrics = Metrics(client(_Reporting.read({}).metrics))
    fields = {**counts, "batch": batch}
    text = f"{job}: " + ", ".join(f"{number} {name}" for name, number in counts.items())
    _log.log(logging.WARNING if counts["rejected"] else logging.INFO, text, extra={"action": job, "fields": fields})
    for name, number in counts.items():
        if number:
            metrics.count(PIPELINE_ROWS, number, job=job, outcome=name)
    metrics.stop()


def parallelism(spark: SparkSession) -> int:
    """Return how many Spark tasks can run at once, on the executors that have registered.

    On a cluster, a job counts the partitions that Spark makes for them. It waits for the first executors, and is
    repeated while others have registered.
    """
    if not is_connect(spark) and str(spark.sparkContext.master).startswith("local"):
        return spark.sparkContext.defaultParallelism
    found, before = 1, 0
    while found > before:
        partitions = spark.range(100_000).select(f.spark_partition_id().alias("number"))
        found, before = partitions.distinct().count(), found
    return found


def read_partitions(spark: SparkSession) -> int:
    """Return into how many parts a job divides the table: four for each Spark task that can run at once.

    With dynamic allocation, Spark starts executors only for Spark tasks that wait, so at least as many as in a shuffle.
    """
    dynamic = spark.conf.get("spark.dynamicAllocation.enabled", "false") == "true"
    waiting = int(str(spark.conf.get("spark.sql.shuffle.partitions"))) if dynamic else 0
    return max(8, waiting, 4 * parallelism(spark))


def divided(spark: SparkSession, per_second: int) -> tuple[int, float]:
    """Divide a limit: return the number of Spark tasks and the rows per second of each, or 0 and 0 without a limit.

    The job must not run more Spark tasks than this at once.
    """
    parts = parallelism(spark) if per_second else 0
    return parts, per_second / parts if parts else 0.0


class Pace:
    """Limits the rows per second of one Spark task. 0 is no limit."""

    def __init__(self, rate: float = 0.0) -> None:
        self._rate, self._last_at = rate, time.monotonic()

    def chunk(self, most: int) -> int:
        """Return the max rows of a chunk: `most`, but not more than in a second."""
        return min(most, max(1, int(self._rate))) if self._rate else most

    def wait(self, rows: int) -> None:
        """Sleep until `rows` more rows may be written, also before the first ones: all Spark tasks begin at once."""
        if self._rate:
            time.sleep(max(0.0, self._last_at + rows / self._rate - time.monotonic()))
            self._last_at = time.monotonic()
