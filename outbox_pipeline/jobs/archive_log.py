"""The log of the archive, which is a Delta table: one commit for each window, and two for its purge.

The details of a window are in the commitInfo of its commit, under the name `outbox`. Delta engines may delete old
commits, but not if the table has `delta.enableExpiredLogCleanup=false`. Executors need not have deltalake.
"""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import datetime
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction

from outbox.base.values import shown
from outbox.errors import OutboxError, SettingError
from outbox_pipeline import schemas
from outbox_pipeline.jobs.archive_windows import FORMAT, ArchivedWindow, commit_name
from outbox_pipeline.rows.texts import EPOCH, MICROSECOND

#: The key of our details in commitInfo, and our application ID. Of two commits with it on one version, Delta accepts
#: one.
_NAME = "outbox"
_SETTINGS = {"delta.enableExpiredLogCleanup": "false", "delta.appendOnly": "true"}
#: Fields of `ArchivedWindow` that its commit does not have.
_OF_LOG = ("version", "operation", "purged")
#: Bytes of one read of a file: an object store answers each with a request.
_PIECE_BYTES = 8_000_000


class _Overtaken(OutboxError):
    """Another writer was first."""


class Log:
    """The log of the archive in a folder, a local path or a URL that the package deltalake supports. Needs no Spark."""

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
        except _Overtaken:
            # The commit can be ours, because an object store can execute a retried request twice.
            return any(each.data == window.data for each in self.windows())
        return True

    def note_purging(self, window: ArchivedWindow, operation: str) -> str:
        """Note that the purge of a window begins. Return the ID of its operation, or of the interrupted one."""
        self._commit({"purging": window.since, "operation": operation})
        return next(str(each.operation) for each in self.windows() if each.since == window.since)

    def note_purged(self, window: ArchivedWindow, counts: Mapping[str, int]) -> None:
        self._commit({"purged": window.since, **counts})

    def sha256(self, path: str) -> str:
        """Return the SHA-256 of a file of the archive, such as the commit of a window, which has that of its files."""
        found = hashlib.sha256()
        with self._errors(path), DeltaStorageHandler(self._folder).open_input_file(path) as file:
            while piece := file.read(_PIECE_BYTES):
                found.update(piece)
        return found.hexdigest()

    def _refreshed(self) -> DeltaTable | None:
        """Read the commits that are new. Return the table, or None if there is no log."""
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
        details = json.loads(json.dumps(details, default=shown))
        properties = CommitProperties({_NAME: details}, app_transactions=list(transactions))
        table: Any = self._table
        with self._errors():
            table.create_write_transaction(
                list(actions), "append", table.schema(), ["SentDate"], commit_properties=properties
            )

    @contextlib.contextmanager
    def _errors(self, path: str = "_delta_log") -> Iterator[None]:
        """Turn errors of deltalake into OutboxErrors."""
        try:
            yield
        except (DeltaError, OSError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            if isinstance(error, CommitFailedError):
                raise _Overtaken(
                    f"Another run changed the Delta log of {self._folder}: {reason}. Run the job again"
                ) from error
            raise OutboxError(
                f"{path} of the archive {self._folder} cannot be read or written: {reason}. Check the permission of "
                "the driver, or restore it"
            ) from error
