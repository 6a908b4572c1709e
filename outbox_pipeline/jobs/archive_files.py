"""The archive: a Delta table with one folder for each time window. A finished window has a commit in the log.

    ARCHIVE/_delta_log/00000000000000000001.json
    ARCHIVE/window=20261120T000000Z_20261121T000000Z/run=5f0c.../SentDate=2026-11-20/part-....parquet

A run that ended early leaves a data folder that the log does not list. Every engine that reads Delta tables ignores it,
and may delete it. All folders are named like partitions whose names are not columns, because Spark reads several
windows as one table only if the whole path consists of partitions.

The log has one commit for each window, and two for its purge. The details of a window are in the commitInfo of its
commit, under the name `outbox`. Delta engines may delete old commits, but not if the table has
`delta.enableExpiredLogCleanup=false`.
"""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox.base.values import shown
from outbox.errors import OutboxError, SettingError
from outbox_pipeline import schemas
from outbox_pipeline.rows.texts import EPOCH, MICROSECOND
from outbox_pipeline.spark.files import Folder
from outbox_pipeline.spark.stack_traces import spark_errors

if TYPE_CHECKING:
    from deltalake import DeltaTable

#: The version of `ArchivedWindow` in commits.
FORMAT = 1
#: What the commits of this package are named by: their details, and the writer of all windows. Of two commits of the
#: same writer that were made from one version of the table, Delta refuses the second.
_NAME = "outbox"
_SETTINGS = {"delta.enableExpiredLogCleanup": "false", "delta.appendOnly": "true"}
#: Fields of `ArchivedWindow` that its commit does not have.
_OF_LOG = ("version", "operation", "purged")
_PREFIX, _RUN = "window=", "run="
#: Bytes of one read of a file: an object store answers each with a request.
_PIECE_BYTES = 8_000_000
#: Max files that the driver reads at once.
_THREADS = 8


@dataclass(frozen=True, slots=True)
class ArchivedWindow:
    """An archived window, which contains the tasks sent or cancelled from `since` on and before `until`.

    `data` is its folder, and `files` has the SHA-256 of each file. `version` is that of the log. `operation` is the ID
    of its purge, if one has begun: from then on, the files can be the only copy of the tasks.
    """

    database: str
    since: datetime
    until: datetime
    read_timestamp: datetime
    rows: int
    checksum: str | None
    data: str
    files: Mapping[str, str]
    format: int = FORMAT
    version: int = -1
    operation: str | None = None
    purged: bool = False

    @property
    def commit(self) -> str:
        """Return the path of its commit in the archive."""
        return commit_name(self.version)


class Log:
    """The log of the archive in a folder, a local path or a URL that the package deltalake supports. Needs no Spark.

    Functions import deltalake, because executors need not have it.
    """

    def __init__(self, folder: str) -> None:
        if found := set("#%") & set(folder):
            raise SettingError(f"{folder}: the folder of an archive must not contain {found.pop()}. Rename it")
        self._folder = folder
        self._table: DeltaTable | None = None
        #: The details of each commit, empty if it is none of this package.
        self._details: list[Mapping[str, Any]] = []

    def windows(self, database: str | None = None) -> list[ArchivedWindow]:
        """Return the windows by time, as of now. Reads only commits that are new since the last call.

        Raises OutboxError if the log is damaged, windows do not adjoin, another program has changed the table, or a
        window belongs to another database than `database`.
        """
        with self._errors():
            if (table := self._refreshed()) is None:
                return []
            paths = table.get_add_actions().column("path").to_pylist()
        purges = {each["purging"]: each.get("operation") for each in reversed(self._details) if "purging" in each}
        purged = {each["purged"] for each in self._details if "purged" in each}
        windows = [
            self._window(version, each, operation=purges.get(each["since"]), purged=each["since"] in purged)
            for version, each in enumerate(self._details)
            if "since" in each
        ]
        for one, next in itertools.pairwise(windows):
            if one.until != next.since:
                raise OutboxError(
                    f"{self._folder}/{next.commit} is a window from {shown(next.since)}, but the one before it ends at "
                    f"{shown(one.until)}. The log was edited. Restore it"
                )
        for window in windows:
            if database not in (None, window.database):
                raise OutboxError(
                    f"{self._folder} is the archive of {window.database}, not of {database}. Use another folder"
                )
        if changed := set(paths) ^ {path for window in windows for path in window.files}:
            raise OutboxError(
                f"Another program changed the Delta table {self._folder}, for example the file {min(changed)}. Only "
                "the archive job may write to it. Restore its log"
            )
        return windows

    def append(self, window: ArchivedWindow, files: Sequence[Mapping[str, Any]]) -> bool:
        """Commit a window with `files_of` it. Return False if another run has committed it or a later one first."""
        from deltalake import Transaction  # noqa: PLC0415 - see above
        from deltalake.exceptions import CommitFailedError  # noqa: PLC0415 - see above
        from deltalake.transaction import AddAction  # noqa: PLC0415 - see above

        actions = [
            AddAction(
                each["path"], each["size"], {"SentDate": each["sent_date"]}, each["modified_at"], True,
                json.dumps({"numRecords": each["rows"]}),
            )
            for each in files
        ]  # fmt: skip
        details = {name: value for name, value in asdict(window).items() if name not in _OF_LOG}
        try:
            self._create()
            before = self.windows()
            if before and before[-1].until != window.since:
                return False
            # Delta refuses the commit if another window was committed after the version with these windows.
            self._commit(details, actions, [Transaction(_NAME, (window.until - EPOCH) // MICROSECOND)])
        except CommitFailedError:
            # The commit can be ours, because an object store can execute a retried request twice.
            return any(each.data == window.data for each in self.windows())
        return True

    def note_purging(self, window: ArchivedWindow, operation: str) -> str:
        """Note that the purge of a window begins. Return the ID of its operation, or of the interrupted one."""
        self._commit({"purging": window.since, "operation": operation})
        return next(str(each.operation) for each in self.windows() if each.since == window.since)

    def note_purged(self, window: ArchivedWindow, counts: Mapping[str, int]) -> None:
        """Note that the purge of a window ended, with its counts."""
        self._commit({"purged": window.since, **counts})

    def sha256(self, path: str) -> str:
        """Return the SHA-256 of a file of the archive, such as the commit of a window, which has that of its files."""
        from deltalake.exceptions import DeltaError  # noqa: PLC0415 - see above
        from deltalake.fs import DeltaStorageHandler  # noqa: PLC0415 - see above

        found = hashlib.sha256()
        try:
            with DeltaStorageHandler(self._folder).open_input_file(path) as file:
                while piece := file.read(_PIECE_BYTES):
                    found.update(piece)
        except (DeltaError, OSError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise OutboxError(f"{path} of the archive {self._folder} cannot be read: {reason}. Restore it") from error
        return found.hexdigest()

    def _refreshed(self) -> "DeltaTable | None":
        """Read the commits that are new. Return the table, or None if there is no log."""
        from deltalake import DeltaTable  # noqa: PLC0415 - see above

        if self._table is None:
            if not DeltaTable.is_deltatable(self._folder):
                return None
            self._table = DeltaTable(self._folder)
        version = -1
        while (now := self._table.version()) != version:  # otherwise the history has later commits, with wrong versions
            version = now
            new = self._table.history(version + 1 - len(self._details)) if version >= len(self._details) else []
            self._table.update_incremental()
        for commit in reversed(new):
            if commit["version"] != len(self._details):
                break
            found = commit.get(_NAME)
            self._details.append(found if isinstance(found, dict) else {})
        if len(self._details) <= version:
            raise OutboxError(f"A commit in {self._folder}/_delta_log is empty. Restore it")
        return self._table

    def _window(self, version: int, details: Mapping[str, Any], **of_log: Any) -> ArchivedWindow:
        """Parse the details of a window. Raises OutboxError."""
        path = f"{self._folder}/{commit_name(version)}"
        if details.get("format") != FORMAT:
            raise OutboxError(
                f"{path} has format {details.get('format')}, but this package reads {FORMAT}. Upgrade the package"
            )
        try:
            times = [field.name for field in fields(ArchivedWindow) if field.type is datetime]
            parsed = {name: datetime.fromisoformat(details[name]) for name in times}
            return ArchivedWindow(**{**details, **parsed}, version=version, **of_log)
        except (ValueError, TypeError, KeyError) as error:
            raise OutboxError(
                f"{path} is not the commit of a window: {type(error).__name__}: {error}. Restore it"
            ) from error

    def _create(self) -> None:
        """Create the table if there is none. Add the columns that an earlier version of this package did not have."""
        from deltalake import DeltaTable, Schema  # noqa: PLC0415 - see above

        schema = Schema.from_arrow(pa.schema(each.with_nullable(True) for each in schemas.arrow(schemas.ARCHIVED)))
        with self._errors():
            if (table := self._refreshed()) is None:
                DeltaTable.create(self._folder, schema, "ignore", ["SentDate"], configuration=_SETTINGS)
                return
            has = {field.name for field in table.schema().fields}
            if new := [field for field in schema.fields if field.name not in has]:
                table.alter.add_columns(new)

    def _commit(
        self, details: Mapping[str, Any], actions: Sequence[Any] = (), transactions: Sequence[Any] = ()
    ) -> None:
        """Commit on top of the version of the table that was read last."""
        from deltalake import CommitProperties  # noqa: PLC0415 - see above

        details = json.loads(json.dumps(details, default=shown))
        properties = CommitProperties({_NAME: details}, app_transactions=list(transactions))
        table = cast("DeltaTable", self._table)
        with self._errors():
            table.create_write_transaction(
                list(actions), "append", table.schema(), ["SentDate"], commit_properties=properties
            )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of deltalake into OutboxErrors, except that another writer was first."""
        from deltalake.exceptions import CommitFailedError, DeltaError  # noqa: PLC0415 - see above

        try:
            yield
        except CommitFailedError:
            raise
        except (DeltaError, OSError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise OutboxError(
                f"The Delta log of {self._folder} cannot be read or written: {reason}. Check the permission of the "
                "driver, or restore the folder _delta_log"
            ) from error


def commit_name(version: int) -> str:
    """Return the path of a commit in the archive."""
    return f"_delta_log/{version:020}.json"


class Archive:
    """The files of the windows in one folder, and their log."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self._spark = spark
        self._folder = Folder(spark, path)
        self.log = Log(self._folder.qualified().removeprefix("file:"))

    @staticmethod
    def new_folder(since: datetime, until: datetime) -> str:
        """Return a new data folder of a window, which has a unique name."""
        bounds = (time.astimezone(UTC).strftime("%Y%m%dT%H%M%S.%fZ").replace(".000000", "") for time in (since, until))
        return f"{_PREFIX}{'_'.join(bounds)}/{_RUN}{uuid4().hex[:12]}"

    def path(self, data: str) -> str:
        """Return the path of a data folder."""
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


def bounds(begin: datetime, end: datetime, seconds: float) -> Iterator[tuple[datetime, datetime]]:
    """Yield the windows from `begin` that end by `end`. Each window ends at a multiple of `seconds`."""
    length = timedelta(seconds=seconds)
    since = begin
    while (until := floor(since, length) + length) <= end:
        yield since, until
        since = until


def floor(time: datetime, length: timedelta) -> datetime:
    """Return the last multiple of `length`, counted in UTC from 1970, that is not after `time`."""
    return time - (time - EPOCH) % length
