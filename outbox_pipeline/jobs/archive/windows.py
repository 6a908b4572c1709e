"""The archive on disk: a folder for each window of time, complete as soon as its manifest is there.

    ARCHIVE/window=20261120T000000Z_20261121T000000Z/
        run=5f0c.../SentDate=2026-11-20/TopicFolder=orders/part-....parquet
        _manifest.json    written last, once: names the data folder, how many tasks it holds, and their checksum
        _purging.json     from when on they were deleted from the table: what is in the files may be nowhere else
        _purged.json      when that was done, and how many

A run that ended early leaves a data folder that no manifest names; readers do not see it. All folders are named like
partitions, by names that no column has: Spark reads several windows as one table only if all of the path is that.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession

from outbox.errors import OutboxError
from outbox.shared.times import shown
from outbox_pipeline import schemas
from outbox_pipeline.spark.files import Folder

MANIFEST, PURGING, PURGED = "_manifest.json", "_purging.json", "_purged.json"
_PREFIX, _RUN = "window=", "run="
#: Of the manifest's form.
VERSION = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a finished window says of itself. It holds what was sent from `since` on and before `until`."""

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
        values = {name: shown(value) if isinstance(value, datetime) else value for name, value in asdict(self).items()}
        return json.dumps(values, indent=1) + "\n"


def parsed(text: str, where: str) -> Manifest:
    """Return the manifest of a text. Raises OutboxError."""
    try:
        values: dict[str, Any] = json.loads(text)
        if values["version"] != VERSION:
            raise OutboxError(
                f"{where}/{MANIFEST} is of version {values['version']}, this package reads {VERSION}: upgrade"
            )
        times = ("since", "until", "read_timestamp", "written_at")
        return Manifest(**{**values, **{name: datetime.fromisoformat(values[name]) for name in times}})
    except (ValueError, TypeError, KeyError) as error:
        raise OutboxError(
            f"{where}/{MANIFEST} is no manifest: {type(error).__name__}: {error}. A run that is killed may leave half "
            f"of one: if this is the last window, and there is no {PURGING} in it, delete its folder and start again"
        ) from error


@dataclass(frozen=True)
class ArchiveWindow:
    """A finished window."""

    folder: Folder
    manifest: Manifest

    @property
    def data(self) -> str:
        """Return the folder of its files."""
        return str(self.folder / self.manifest.data)

    @property
    def purged(self) -> bool:
        """Tell whether its tasks were deleted from the table."""
        return self.folder.read(PURGED) is not None

    def note_purging(self, at: datetime) -> None:
        """Note that its tasks are about to be deleted from the table."""
        self.folder.create(PURGING, json.dumps({"since": shown(at)}) + "\n")

    def note_purged(self, counts: Mapping[str, int], at: datetime) -> None:
        """Note that its tasks were deleted from the table, and how many."""
        self.folder.create(PURGED, json.dumps({**counts, "purged_at": shown(at)}, indent=1) + "\n")


class Archive:
    """All windows below one folder."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        """Name it; it need not exist."""
        self._spark = spark
        self._folder = Folder(spark, path)

    def __str__(self) -> str:
        """Return the path."""
        return str(self._folder)

    def windows(self) -> list[ArchiveWindow]:
        """Return the finished windows by time. Raises OutboxError for a manifest that cannot be read."""
        found = [each for each in self._folder.folders() if each.name.startswith(_PREFIX)]
        texts = ((folder, folder.read(MANIFEST)) for folder in found)
        windows = [ArchiveWindow(folder, parsed(text, str(folder))) for folder, text in texts if text is not None]
        windows.sort(key=lambda window: window.manifest.since)
        for one, next in itertools.pairwise(windows):
            if one.manifest.until > next.manifest.since:
                raise OutboxError(
                    f"{one.folder} and {next.folder} hold the same time: two jobs with different windows have archived "
                    f"here at once. Stop one job, and move the window away that has no {PURGING} and holds less"
                )
            if one.manifest.until < next.manifest.since:
                raise OutboxError(
                    f"no window holds the time between {one.folder} and {next.folder}: the folder of one, or its "
                    "manifest, was taken away. Bring it back, or give another folder for what comes"
                )
        return windows

    def windows_of(self, database: str) -> list[ArchiveWindow]:
        """Return the same. Raises OutboxError too if they are of another database than that of the full name."""
        windows = self.windows()
        for window in windows:
            if window.manifest.database != database:
                raise OutboxError(
                    f"{self} is the archive of {window.manifest.database}, not of {database}: give another folder"
                )
        return windows

    @staticmethod
    def new_run() -> str:
        """Return a name for the files of a window that no other run takes."""
        return f"{_RUN}{uuid4().hex[:12]}"

    def folder_of(self, since: datetime, until: datetime) -> Folder:
        """Return the folder of a window."""
        return self._folder / f"{_PREFIX}{_compact(since)}_{_compact(until)}"

    def finish(self, folder: Folder, manifest: Manifest) -> None:
        """Write the manifest: from now on the window is there. Raises OutboxError if another run was faster."""
        # The file may be ours all the same: a store may carry out twice what it answered once.
        if not folder.create(MANIFEST, manifest.text()) and folder.read(MANIFEST) != manifest.text():
            (folder / manifest.data).delete()
            raise OutboxError(f"{folder} was finished by another run meanwhile: do two jobs archive to one folder?")
        for other in folder.folders():
            if other.name.startswith(_RUN) and other.name != manifest.data:
                other.delete()

    def read(self, windows: list[ArchiveWindow]) -> DataFrame:
        """Return the tasks of windows, with the columns of `schemas.ARCHIVED`."""
        paths = [window.data for window in windows if window.manifest.rows]
        if not paths:
            return self._spark.createDataFrame([], schemas.ARCHIVED)
        # The schema is given, so that no folder of a topic is taken for a number.
        tasks = self._spark.read.schema(schemas.STORED).option("basePath", str(self)).parquet(*paths)
        return tasks.select(*schemas.ARCHIVED.fieldNames())


def read_archive(
    spark: SparkSession, path: str, *, since: datetime | None = None, until: datetime | None = None
) -> DataFrame:
    """Return the archived tasks that were sent from `since` on and before `until`, each (Id, SentAt) once.

    Only finished windows are read. The columns are those of `outbox_pipeline.schemas.ARCHIVED`. Raises OutboxError.
    """
    archive = Archive(spark, path)
    windows = [
        window
        for window in archive.windows()
        if (since is None or window.manifest.until > since) and (until is None or window.manifest.since < until)
    ]
    tasks = archive.read(windows)
    tasks = tasks if since is None else tasks.where(tasks.SentAt >= since)
    return tasks if until is None else tasks.where(tasks.SentAt < until)


def bounds(begin: datetime, end: datetime, seconds: float) -> Iterator[tuple[datetime, datetime]]:
    """Yield the windows from `begin` that end by `end`: each ends at a multiple of `seconds`."""
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
