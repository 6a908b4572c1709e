"""The files of the archive: one folder for each time window. A window is finished when its manifest exists.

    ARCHIVE/window=20261120T000000Z_20261121T000000Z/
        run=5f0c.../SentDate=2026-11-20/TopicFolder=orders/part-....parquet
        _manifest.json    written last, once: the data folder, the number of its tasks, and their checksum
        _purging.json     when the purge began: from then on, the files can be the only copy of the tasks
        _purged.json      when the purge ended, and its counts

A run that ended early leaves a data folder that no manifest names, and readers ignore it. All folders are named like
partitions whose names are not columns, because Spark reads several windows as one table only if the whole path consists
of partitions.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox.base.times import shown
from outbox.errors import OutboxError
from outbox_pipeline import schemas
from outbox_pipeline.spark.files import Folder
from outbox_pipeline.spark.stack_traces import spark_errors

MANIFEST, PURGING, PURGED = "_manifest.json", "_purging.json", "_purged.json"
_PREFIX, _RUN = "window=", "run="
#: The version of the manifest's format.
VERSION = 1
_DAY = 86_400_000_000
#: Topics that are used as folder names. A file system allows 255 bytes, and each / or % becomes three bytes.
_SHORT = r"^[A-Za-z][A-Za-z0-9._~+%/-]{0,71}$"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a finished window: the tasks sent or cancelled from `since` on and before `until`."""

    database: str
    since: datetime
    until: datetime
    read_timestamp: datetime
    rows: int
    checksum: str | None
    data: str
    written_at: datetime
    version: int = VERSION

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), indent=1, default=shown) + "\n"


def parsed(text: str, where: str) -> Manifest:
    """Parse a manifest. Raises OutboxError."""
    try:
        values: dict[str, Any] = json.loads(text)
        if values["version"] != VERSION:
            raise OutboxError(
                f"{where}/{MANIFEST} has version {values['version']}, but this package reads {VERSION}. "
                "Upgrade the package"
            )
        times = ("since", "until", "read_timestamp", "written_at")
        return Manifest(**{**values, **{name: datetime.fromisoformat(values[name]) for name in times}})
    except (ValueError, TypeError, KeyError) as error:
        raise OutboxError(
            f"{where}/{MANIFEST} is not a manifest: {type(error).__name__}: {error}. A killed run can leave an "
            f"incomplete one. If this is the last window and has no {PURGING}, delete its folder and run the job again"
        ) from error


@dataclass(frozen=True)
class ArchiveWindow:
    """A finished window."""

    folder: Folder
    manifest: Manifest

    @property
    def purged(self) -> bool:
        """Tell whether its tasks were purged."""
        return (self.folder / PURGED).exists()

    def note_purging(self, operation: str, at: datetime) -> str:
        """Write the file that says that its purge begins. Return the ID of the operation, or of the interrupted one."""
        self.folder.create(PURGING, json.dumps({"since": shown(at), "operation": operation}) + "\n")
        try:
            return str(json.loads(self.folder.read(PURGING) or "")["operation"])
        except (ValueError, TypeError, KeyError):  # a killed run can leave an incomplete file
            return operation

    def note_purged(self, counts: Mapping[str, int], at: datetime) -> None:
        """Write the file that says that its purge ended, with the counts."""
        self.folder.create(PURGED, json.dumps({**counts, "purged_at": shown(at)}, indent=1) + "\n")


class Archive:
    """The windows in one folder."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self._spark = spark
        self._folder = Folder(spark, path)

    def windows(self, database: str | None = None) -> list[ArchiveWindow]:
        """Return the finished windows by time.

        Raises OutboxError if a manifest is damaged, windows do not adjoin, or a window belongs to another database than
        `database`.
        """
        found = [each for each in self._folder.folders() if each.name.startswith(_PREFIX)]
        texts = ((folder, folder.read(MANIFEST)) for folder in found)
        windows = [ArchiveWindow(folder, parsed(text, str(folder))) for folder, text in texts if text is not None]
        windows.sort(key=lambda window: window.manifest.since)
        for one, next in itertools.pairwise(windows):
            if one.manifest.until > next.manifest.since:
                raise OutboxError(
                    f"{one.folder} and {next.folder} overlap, because two jobs with different windows archived to this "
                    f"folder. Stop one job, and move away the shorter window, unless it has {PURGING}"
                )
            if one.manifest.until < next.manifest.since:
                raise OutboxError(
                    f"A window between {one.folder} and {next.folder} is missing, because its folder or manifest was "
                    "removed. Restore it, or use another folder for new windows"
                )
        for window in windows:
            if database not in (None, window.manifest.database):
                raise OutboxError(
                    f"{self._folder} is the archive of {window.manifest.database}, not of {database}. Use another "
                    "folder"
                )
        return windows

    @staticmethod
    def new_run() -> str:
        """Return a unique name for the data folder of a run."""
        return f"{_RUN}{uuid4().hex[:12]}"

    def folder_of(self, since: datetime, until: datetime) -> Folder:
        """Return the folder of a window."""
        return self._folder / f"{_PREFIX}{_compact(since)}_{_compact(until)}"

    def finish(self, folder: Folder, manifest: Manifest) -> None:
        """Write the manifest, which finishes the window. Raises OutboxError if another run finished it first."""
        # An existing manifest can be ours, because an object store can execute a retried request twice.
        if not folder.create(MANIFEST, manifest.text()) and folder.read(MANIFEST) != manifest.text():
            (folder / manifest.data).delete()
            raise OutboxError(f"Another run finished {folder} first. Run only one archive job for each folder")
        for other in folder.folders():
            if other.name.startswith(_RUN) and other.name != manifest.data:
                other.delete()

    @spark_errors()
    def read(
        self, windows: Iterable[ArchiveWindow], since: datetime | None = None, until: datetime | None = None
    ) -> DataFrame:
        """Return the tasks of the windows that may have some between these times, with `schemas.ARCHIVED`.

        Raises OutboxError if a window does not have the number of tasks in its manifest. Spark ignores a missing file,
        and one of 0 bytes.
        """
        wanted = {
            each.folder.name.removeprefix(_PREFIX): each
            for each in windows
            if each.manifest.rows
            and (since is None or each.manifest.until > since)
            and (until is None or each.manifest.since < until)
        }
        if not wanted:
            return self._spark.createDataFrame([], schemas.ARCHIVED)
        paths = [str(each.folder / each.manifest.data) for each in wanted.values()]
        # Without a schema, Spark would infer a number from a topic folder such as 2026.
        tasks = self._spark.read.schema(schemas.STORED).option("basePath", str(self._folder)).parquet(*paths)
        # Reads only the ends of the files. Without any, Spark knows no columns of folders.
        name_of = f.regexp_extract("_metadata.file_path", f".*/{_PREFIX}(.+)/{_RUN}", 1)
        rows: dict[str, int] = dict(tasks.groupBy(name_of).count().collect())
        for name, window in wanted.items():
            if (found := rows.get(name, 0)) != window.manifest.rows:
                raise OutboxError(
                    f"{window.folder} contains {found:,} tasks, but its manifest has {window.manifest.rows:,}. Restore "
                    "its files"
                )
        return tasks.select(*schemas.ARCHIVED.fieldNames())


def read_archive(
    spark: SparkSession, path: str, *, since: datetime | None = None, until: datetime | None = None
) -> DataFrame:
    """Return the archived tasks that were sent, or cancelled by operators, from `since` on and before `until`.

    Each (Id, SentAt, CancelledAt) occurs once. A sent task has no CancelledAt, and a cancelled task has no SentAt.
    Only finished windows are read. The columns are `outbox_pipeline.schemas.ARCHIVED`. Raises OutboxError if a manifest
    is damaged, a window is missing, or a window does not have the number of tasks in its manifest.
    """
    archive = Archive(spark, path)
    tasks = archive.read(archive.windows(), since, until)
    tasks = tasks if since is None else tasks.where(_ended() >= since)
    return tasks if until is None else tasks.where(_ended() < until)


def _ended() -> Column:
    """Return when the task was sent or cancelled."""
    return f.coalesce("SentAt", "CancelledAt")


def archivable(tasks: DataFrame) -> DataFrame:
    """Return sent and cancelled tasks with the columns of `schemas.STORED`."""
    # In UTC, whatever the session's time zone is.
    micros = f.unix_micros(_ended())
    days = ((micros - f.pmod(micros, f.lit(_DAY))) / _DAY).cast("int")
    plain = f.substring(f.regexp_replace("Topic", "[^A-Za-z0-9]", "-"), 1, 48)
    folder = f.when(f.col("Topic").rlike(_SHORT), f.col("Topic")).otherwise(
        f.concat(f.lit("~"), plain, f.lit("~"), f.hex(f.xxhash64("Topic")))
    )
    stored = tasks.withColumns({"SentDate": f.date_from_unix_date(days), "TopicFolder": folder})
    return stored.select(*schemas.STORED.fieldNames())


def rebalanced(tasks: DataFrame) -> DataFrame:
    """Return the tasks with each day and topic in as few partitions as possible, so that the files are large."""
    return tasks.hint("rebalance", *schemas.ARCHIVE_PARTITIONS)


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
