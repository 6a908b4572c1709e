"""The archive: a Delta table with one folder for each time window. A finished window has a commit in the log.

    ARCHIVE/_delta_log/00000000000000000001.json
    ARCHIVE/window=20261120T000000Z_20261121T000000Z/run=5f0c.../SentDate=2026-11-20/part-....parquet

A run that ended early leaves a data folder that the log does not list. Every engine that reads Delta tables ignores it,
and may delete it. All folders are named like partitions whose names are not columns, because Spark reads several
windows as one table only if the whole path consists of partitions.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox.errors import OutboxError
from outbox_pipeline import schemas
from outbox_pipeline.jobs.archive_windows import ArchivedWindow
from outbox_pipeline.spark.files import Folder
from outbox_pipeline.spark.stack_traces import spark_errors

_PREFIX, _RUN = "window=", "run="
#: Max files that the driver reads at once.
_THREADS = 8


class Archive:
    """The files of the windows in one folder, and their log."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self._spark = spark
        self._folder = Folder(spark, path)
        from outbox_pipeline.jobs.archive_log import Log  # noqa: PLC0415 - executors need not have deltalake

        self.log = Log(self._folder.qualified().removeprefix("file:"))

    def finished(self, database: str) -> list[ArchivedWindow]:
        """Return the windows by time. Raises OutboxError if there is none, or for the reasons of `Log.windows`."""
        if not (windows := self.log.windows(database)):
            raise OutboxError(f"--archive {self._folder} has no finished window. Check the path")
        return windows

    @staticmethod
    def new_folder(since: datetime, until: datetime) -> str:
        """Return a new data folder of a window, which has a unique name."""
        bounds = (time.astimezone(UTC).strftime("%Y%m%dT%H%M%S.%fZ").replace(".000000", "") for time in (since, until))
        return f"{_PREFIX}{'_'.join(bounds)}/{_RUN}{uuid4().hex[:12]}"

    def path(self, data: str) -> str:
        return str(self._folder / data)

    def write(self, data: str, tasks: DataFrame) -> None:
        """Write the tasks of a window. They are sorted, so a reader of one topic can skip parts of the files."""
        tasks.sortWithinPartitions("SentDate", "Topic").write.partitionBy("SentDate").parquet(self.path(data))

    def files_of(self, window: ArchivedWindow) -> list[dict[str, Any]]:
        """Read the files of a window back, and return facts of each. Raises OutboxError if they lack tasks of it."""
        found = []
        if window.rows:
            of_files = self._tasks([window]).groupBy(
                f.regexp_extract("_metadata.file_path", f".*/({_PREFIX}.+)", 1).alias("path"),
                f.col("_metadata.file_size").alias("size"),
                f.unix_millis("_metadata.file_modification_time").alias("modified_at"),
                f.col("SentDate").cast("string").alias("sent_date"),
            )
            found = [row.asDict() for row in of_files.agg(*checksum_columns()).collect()]
        rows, checksum = (sum(int(each[name]) for each in found) for name in ("rows", "checksum"))
        self._check(window, rows, str(checksum) if found else None)
        return found

    def _check(self, window: ArchivedWindow, rows: int, checksum: str | None) -> None:
        where = self.path(window.data)
        if rows != window.rows:
            raise OutboxError(f"{where} contains {rows:,} tasks, but its window has {window.rows:,}. Restore its files")
        if checksum != window.checksum:
            raise OutboxError(
                f"{where} contains tasks with checksum {checksum}, but its window has {window.checksum}. Restore its "
                "files"
            )

    def finish(self, window: ArchivedWindow) -> ArchivedWindow:
        """Commit a window after reading its files back. Return it with its files.

        Raises OutboxError if the files do not have its tasks, or if another run finished it first.
        """
        files = self.files_of(window)
        paths = [each["path"] for each in files]
        with ThreadPoolExecutor(_THREADS) as pool:
            window = replace(window, files=dict(zip(paths, pool.map(self.log.sha256, paths), strict=True)))
        if not self.log.append(window, files):
            raise OutboxError(
                f"Another run finished the window of {self.path(window.data)} first. Run only one archive job for each "
                "folder"
            )
        return window

    @spark_errors()
    def read(
        self, windows: Iterable[ArchivedWindow], since: datetime | None = None, until: datetime | None = None
    ) -> DataFrame:
        """Return the tasks of the windows that may have some between these times, with `schemas.ARCHIVED`.

        Raises OutboxError if a window does not have its number of tasks. Spark ignores a missing file, and one of 0
        bytes.
        """
        wanted = {
            each.data: each
            for each in windows
            if each.rows and (since is None or each.until > since) and (until is None or each.since < until)
        }
        if not wanted:
            return self._spark.createDataFrame([], schemas.ARCHIVED)
        tasks = self._tasks(wanted.values())
        # Reads only the ends of the files. Without any, Spark knows no columns of folders.
        name_of = f.regexp_extract("_metadata.file_path", f".*/({_PREFIX}.+?/{_RUN}[^/]+)/", 1)
        rows: dict[str, int] = dict(tasks.groupBy(name_of).count().collect())
        for name, window in wanted.items():
            self._check(window, rows.get(name, 0), window.checksum)
        return tasks.select(*schemas.ARCHIVED.fieldNames())

    def _tasks(self, windows: Iterable[ArchivedWindow]) -> DataFrame:
        reader = self._spark.read.schema(schemas.ARCHIVED).option("basePath", str(self._folder))
        return reader.parquet(*(self.path(each.data) for each in windows))


def read_archive(
    spark: SparkSession, path: str, *, since: datetime | None = None, until: datetime | None = None
) -> DataFrame:
    """Return the archived tasks that were sent or cancelled from `since` on and before `until`.

    Each (Id, SentAt) occurs once. A task with a CancelledBy was cancelled at SentAt. Only finished windows are read.
    The columns are `outbox_pipeline.schemas.ARCHIVED`. Raises OutboxError if the log is damaged, or a window does not
    have its number of tasks.
    """
    archive = Archive(spark, path)
    tasks = archive.read(archive.log.windows(), since, until)
    tasks = tasks if since is None else tasks.where(tasks.SentAt >= since)
    return tasks if until is None else tasks.where(tasks.SentAt < until)


def archivable(tasks: DataFrame) -> DataFrame:
    """Return sent and cancelled tasks with the columns of `schemas.ARCHIVED`."""
    # In UTC, whatever the session's time zone is.
    micros, day = f.unix_micros("SentAt"), f.lit(86_400_000_000)
    days = ((micros - f.pmod(micros, day)) / day).cast("int")
    return tasks.withColumn("SentDate", f.date_from_unix_date(days)).select(*schemas.ARCHIVED.fieldNames())


def rebalanced(tasks: DataFrame) -> DataFrame:
    """Return the tasks with each day in as few partitions as possible, so that the files are large."""
    return tasks.hint("rebalance", "SentDate")


def checksum_columns() -> tuple[Column, Column]:
    """Return the number of tasks and their checksum, which tell whether two sets of archived tasks are equal."""
    whole = f.xxhash64(*schemas.ARCHIVED.fieldNames())
    return f.count(f.lit(1)).alias("rows"), f.sum(whole.cast("decimal(20,0)")).cast("string").alias("checksum")
