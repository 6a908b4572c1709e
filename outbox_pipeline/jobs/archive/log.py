"""The log of the archive, a Delta table: one commit for each window, and two for its purge. Needs no Spark.

Every engine that reads Delta tables reads the files that the log lists, so no file of an unfinished run. The details of
a window are in the commitInfo of its commit, under the name `outbox`. Delta engines may delete old commits, but not if
the table has `delta.enableExpiredLogCleanup=false`.
"""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from outbox.base.values import shown
from outbox.errors import OutboxError, SettingError
from outbox_pipeline import schemas

if TYPE_CHECKING:
    from deltalake import DeltaTable

#: The version of `Window` in commits.
FORMAT = 1
#: What the commits of this package are named by: their details, and the writer of all windows. Of two commits of the
#: same writer that were made from one version of the table, Delta refuses the second.
_NAME = "outbox"
_SETTINGS = {"delta.enableExpiredLogCleanup": "false", "delta.appendOnly": "true"}
#: Fields of `Window` that its commit does not have.
_OF_LOG = ("version", "operation", "purged")


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of a window: its path in the archive, and its facts."""

    path: str
    size: int
    modified_at: datetime
    sent_date: str
    rows: int
    checksum: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Window:
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
    written_at: datetime
    format: int = FORMAT
    version: int = -1
    operation: str | None = None
    purged: bool = False

    @property
    def commit(self) -> str:
        """Return the path of its commit in the archive."""
        return commit_name(self.version)


class Log:
    """The log of the archive in a folder, a local path or a URL that the package deltalake supports."""

    def __init__(self, folder: str) -> None:
        if found := set("#%") & set(folder):
            raise SettingError(f"{folder}: the folder of an archive must not contain {found.pop()}. Rename it")
        self._folder = folder
        self._table: DeltaTable | None = None
        #: The details of each commit, empty if it is none of this package.
        self._details: list[Mapping[str, Any]] = []

    def windows(self, database: str | None = None) -> list[Window]:
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
                    f"{self._path(next.version)} is a window from {shown(next.since)}, but the one before it ends at "
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

    def append(self, window: Window, files: Sequence[DataFile]) -> bool:
        """Commit a window. Return False if another run has committed this window or a later one first."""
        from deltalake import Transaction  # noqa: PLC0415 - executors need not have the package
        from deltalake.exceptions import CommitFailedError  # noqa: PLC0415 - the same
        from deltalake.transaction import AddAction  # noqa: PLC0415 - the same

        # No bounds of values: if only some columns had bounds, deltalake would skip files by the other columns, too.
        actions = [
            AddAction(
                each.path, each.size, {"SentDate": each.sent_date}, _micros(each.modified_at) // 1000, True,
                json.dumps({"numRecords": each.rows}),
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
            self._commit(details, actions, [Transaction(_NAME, _micros(window.until))])
        except CommitFailedError:
            # The commit can be ours, because an object store can execute a retried request twice.
            return any(each.data == window.data for each in self.windows())
        return True

    def note_purging(self, window: Window, operation: str, at: datetime) -> str:
        """Note that the purge of a window begins. Return the ID of its operation, or of the interrupted one."""
        self._commit({"purging": window.since, "operation": operation, "at": at})
        return next(str(each.operation) for each in self.windows() if each.since == window.since)

    def note_purged(self, window: Window, counts: Mapping[str, int], at: datetime) -> None:
        """Note that the purge of a window ended, with its counts."""
        self._commit({"purged": window.since, **counts, "at": at})

    def digest(self, window: Window) -> str:
        """Return the SHA-256 of the commit of a window, which has the SHA-256 of each of its files."""
        from deltalake.fs import DeltaStorageHandler  # noqa: PLC0415 - see above

        with self._errors(), DeltaStorageHandler(self._folder).open_input_file(window.commit) as file:
            return hashlib.sha256(file.read()).hexdigest()

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

    def _window(self, version: int, details: Mapping[str, Any], **of_log: Any) -> Window:
        """Parse the details of a window. Raises OutboxError."""
        if details.get("format") != FORMAT:
            raise OutboxError(
                f"{self._path(version)} has format {details.get('format')}, but this package reads {FORMAT}. Upgrade "
                "the package"
            )
        try:
            times = {name: datetime.fromisoformat(details[name]) for name in _TIMES}
            return Window(**{**details, **times}, version=version, **of_log)
        except (ValueError, TypeError, KeyError) as error:
            raise OutboxError(
                f"{self._path(version)} is not the commit of a window: {type(error).__name__}: {error}. Restore it"
            ) from error

    def _path(self, version: int) -> str:
        return f"{self._folder}/{commit_name(version)}"

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


_TIMES = [field.name for field in fields(Window) if field.type is datetime]


def _micros(time: datetime) -> int:
    return (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
