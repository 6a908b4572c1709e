"""The files of the archive: one folder for each time window. A window is finished when the log has a commit of it.

    ARCHIVE/_delta_log/00000000000000000001.json
    ARCHIVE/window=20261120T000000Z_20261121T000000Z/run=5f0c.../SentDate=2026-11-20/part-....parquet

A run that ended early leaves a data folder that the log does not list. Readers ignore it, and a Delta engine may delete
it. All folders are named like partitions whose names are not columns, because Spark reads several windows as one table
only if the whole path consists of partitions.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import uuid4

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox.errors import OutboxError
from outbox_pipeline import schemas
from outbox_pipeline.jobs.archive.log import DataFile, Log, Window
from outbox_pipeline.spark.files import Folder
from outbox_pipeline.spark.spark_tasks import collected
from outbox_pipeline.spark.stack_traces import spark_errors

_PREFIX, _RUN = "window=", "run="
_DAY = 86_400_000_000
#: Max files that the driver reads at once.
_THREADS = 8


class Archive:
    """The windows in one folder."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self._spark = spark
        self._folder = Folder(spark, path)
        self.log = Log(self._folder.qualified().removeprefix("file:"))

    def windows(self, database: str | None = None) -> list[Window]:
        """Return the finished windows by time. Raises the errors of `Log.windows`."""
        return self.log.windows(database)

    @staticmethod
    def new_folder(since: datetime, until: datetime) -> str:
        """Return a new data folder of a window, which has a unique name."""
        return f"{_PREFIX}{_compact(since)}_{_compact(until)}/{_RUN}{uuid4().hex[:12]}"

    def path(self, data: str) -> str:
        """Return the path of a data folder."""
        return str(self._folder / data)

    def files_of(self, window: Window) -> list[DataFile]:
        """Read the files of a window back. Raises OutboxError if they do not have the tasks of the window."""
        if not window.rows:
            return []
        of_files = self._tasks([window]).groupBy(
            f.regexp_extract("_metadata.file_path", f".*/({_PREFIX}.+)", 1).alias("path"),
            f.col("_metadata.file_size").alias("size"),
            f.col("_metadata.file_modification_time").alias("modified_at"),
            f.col("SentDate").cast("string").alias("sent_date"),
        )
        found = collected(of_files.agg(*checksum_columns()))
        rows, checksum = (sum(int(each[name]) for each in found) for name in ("rows", "checksum"))
        self._check(window, rows, str(checksum))
        with ThreadPoolExecutor(_THREADS) as pool:
            digests = list(pool.map(lambda each: (self._folder / each["path"]).sha256(), found))
        return [DataFile(**each, sha256=digest) for each, digest in zip(found, digests, strict=True)]

    def prove(self, window: Window) -> None:
        """Check that the files of a window have its tasks. Raises OutboxError."""
        [found] = collected(self.read([window]).select(*checksum_columns()))
        self._check(window, **found)

    def _check(self, window: Window, rows: int, checksum: str | None) -> None:
        where = self.path(window.data)
        if rows != window.rows:
            raise OutboxError(f"{where} contains {rows:,} tasks, but its window has {window.rows:,}. Restore its files")
        if checksum != window.checksum:
            raise OutboxError(
                f"{where} contains tasks with checksum {checksum}, but its window has {window.checksum}. Restore its "
                "files"
            )

    def finish(self, window: Window) -> Window:
        """Commit a window after reading its files back. Return it with its files.

        Raises OutboxError if the files do not have its tasks, or if another run finished it first.
        """
        files = self.files_of(window)
        window = replace(window, files={each.path: each.sha256 for each in files})
        if not self.log.append(window, files):
            raise OutboxError(
                f"Another run finished the window of {self.path(window.data)} first. Run only one archive job for each "
                "folder"
            )
        return window

    @spark_errors()
    def read(
        self, windows: Iterable[Window], since: datetime | None = None, until: datetime | None = None
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

    def _tasks(self, windows: Iterable[Window]) -> DataFrame:
        reader = self._spark.read.schema(schemas.ARCHIVED).option("basePath", str(self._folder))
        return reader.parquet(*(self.path(each.data) for each in windows))


def read_archive(
    spark: SparkSession, path: str, *, since: datetime | None = None, until: datetime | None = None
) -> DataFrame:
    """Return the archived tasks that were sent, or cancelled by operators, from `since` on and before `until`.

    Each (Id, SentAt, CancelledAt) occurs once. A sent task has no CancelledAt, and a cancelled task has no SentAt.
    Only finished windows are read. The columns are `outbox_pipeline.schemas.ARCHIVED`. Raises OutboxError if the log is
    damaged, or a window does not have its number of tasks.
    """
    archive = Archive(spark, path)
    tasks = archive.read(archive.windows(), since, until)
    tasks = tasks if since is None else tasks.where(_ended() >= since)
    return tasks if until is None else tasks.where(_ended() < until)


def _ended() -> Column:
    """Return when the task was sent or cancelled."""
    return f.coalesce("SentAt", "CancelledAt")


def archivable(tasks: DataFrame) -> DataFrame:
    """Return sent and cancelled tasks with the columns of `schemas.ARCHIVED`."""
    # In UTC, whatever the session's time zone is.
    micros = f.unix_micros(_ended())
    days = ((micros - f.pmod(micros, f.lit(_DAY))) / _DAY).cast("int")
    return tasks.withColumn("SentDate", f.date_from_unix_date(days)).select(*schemas.ARCHIVED.fieldNames())


def rebalanced(tasks: DataFrame) -> DataFrame:
    """Return the tasks with each day in as few partitions as possible, so that the files are large."""
    return tasks.hint("rebalance", "SentDate")


def checksum_columns() -> tuple[Column, Column]:
    """Return the number of tasks and their checksum, which tell whether two sets of archived tasks are equal."""
    whole = f.xxhash64(*schemas.ARCHIVED.fieldNames())
    return f.count(f.lit(1)).alias("rows"), f.sum(whole.cast("decimal(20,0)")).cast("string").alias("checksum")


def bounds(begin: datetime, end: datetime, seconds: float) -> Iterator[tuple[datetime, datetime]]:
    """Yield the windows from `begin` that end by `end`. Each window ends at a multiple of `seconds`."""
    length = timedelta(seconds=seconds)
    since = begin
    while (until := floor(since, length) + length) <= end:
        yield since, until
        since = until


def floor(time: datetime, length: timedelta) -> datetime:
    """Return the last multiple of `length`, counted in UTC from 1970, that is not after `time`."""
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    return time - (time - epoch) % length


def _compact(time: datetime) -> str:
    text = time.astimezone(UTC).strftime("%Y%m%dT%H%M%S")
    return text + (f".{time.microsecond:06d}" if time.microsecond else "") + "Z"
