"""`archive`: writes sent and cancelled tasks to Parquet, one window at a time.

`--purge` then deletes them from the table.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from google.cloud.spanner_v1 import KeySet
from pyspark.sql import Observation, SparkSession

from outbox.base.values import chunked, counted, shown, spoken
from outbox.errors import OutboxError, SettingError
from outbox.program.settings import DatabaseSettings, resolved
from outbox.rows.task_table import SCHEMA_OPTIONS, Transaction
from outbox.table import schema
from outbox.table.shared_sql import by_ids
from outbox.table.states import CANCELLED, MARKS_FINAL_AFTER, TASKS_TABLE
from outbox_admin import operation_sql, operations
from outbox_pipeline import schemas
from outbox_pipeline.job_settings import ArchiveSettings
from outbox_pipeline.jobs.archive_files import Archive, archivable, checksum_columns, rebalanced
from outbox_pipeline.jobs.archive_windows import ArchivedWindow, bounds, floor
from outbox_pipeline.source.datasource import read_tasks
from outbox_pipeline.source.parts import RowFilter
from outbox_pipeline.spanner import TIME_TO_READ, Table, open_table
from outbox_pipeline.spark.spark_tasks import Rows, inform, map_rows, totals
from outbox_pipeline.spark.stack_traces import spark_errors

#: Max tasks in one transaction of a purge.
PURGE_ROWS = 1_000
_COUNTS = schemas.counts("deleted", "resent", "missing")
_TAG = "outbox-pipeline-purge"
#: The columns that tell whether a task is still as archived.
_ENDED = ("SentAt", "CancelledBy")
_LOCK = by_ids(f"Id, {', '.join(_ENDED)}", lock=True)


def run(spark: SparkSession, settings: ArchiveSettings, *, purge: bool = False, late: bool = False) -> dict[str, Any]:
    """Archive all windows that ended since the last run. Raises SettingError, NotReached, OutboxError.

    Returns the counts of docs/pipeline/archive.md, and the end of the last window as `until`.
    """
    job = _Job(spark, settings, Archive(spark, settings.archive), open_table(settings))
    before = job.files.log.windows(job.table.name)
    new = [job.archive(since, until, late=late) for since, until in job.due(before)]
    windows = [*before, *new]
    purged = job.purge_all([window for window in windows if not window.purged]) if purge else Counter()
    return {
        "windows": len(new),
        "written": sum(window.rows for window in new),
        "until": windows[-1].until if windows else None,
        "purged_windows": purged["windows"],
        **{name: purged[name] for name in _COUNTS.names},
    }


@dataclass(frozen=True)
class _Job:
    spark: SparkSession
    settings: ArchiveSettings
    files: Archive
    table: Table

    def due(self, windows: list[ArchivedWindow]) -> list[tuple[datetime, datetime]]:
        """Return the bounds of the windows to archive now."""
        now = self.table.now()
        end = resolved(self.settings.until, now)
        if end > now - MARKS_FINAL_AFTER:
            raise SettingError(
                f"--until {shown(end)} is less than a minute ago. The database's time is {shown(now)}. An at-most-once "
                "task is marked before it is published, and a failed publish takes the mark back within a minute. Pass "
                "--until 1m or an earlier time"
            )
        length = timedelta(seconds=self.settings.window)
        if windows:
            begin = windows[-1].until
        else:
            since = self.settings.since
            first = self.table.first_ended() if since is None else resolved(since, now)
            if first is None:
                inform("archive", "No window is archived, because no task was sent or cancelled")
                return []
            if first > now:
                raise SettingError(f"--since {shown(first)} is in the future. The database's time is {shown(now)}")
            begin = floor(first, length)
        due = list(bounds(begin, end, self.settings.window))
        if not due:
            ends = floor(begin, length) + length
            inform("archive", f"No window has ended by {shown(end)}. The next one ends at {shown(ends)}")
        self._check_lengths(due)
        return due

    def _check_lengths(self, windows: list[tuple[datetime, datetime]]) -> None:
        """Raise OutboxError if Spanner may delete tasks of a window before it is read."""
        kept = schema.retention(self.table.database, request_options=SCHEMA_OPTIONS)
        for since, until in windows:
            if kept is not None and until + MARKS_FINAL_AFTER - since >= kept:
                raise OutboxError(
                    f"The window from {shown(since)} to {shown(until)} is too long: Spanner deletes sent or cancelled "
                    f"tasks after {counted(kept.days, 'day')}, and the window is read a minute after its end. Pass a "
                    "shorter --window"
                )

    def archive(self, since: datetime, until: datetime, *, late: bool) -> ArchivedWindow:
        at = self._read_timestamp(since, until, late=late)
        data = self.files.new_folder(since, until)
        observed = Observation(f"archive {data}")
        wanted = RowFilter((("State", "In", ("sent", CANCELLED)),), since, until)
        ended = read_tasks(self.spark, self.settings, schemas.STORED.fieldNames(), at, wanted)
        # Observe after the shuffle, because Spark can compute, and count, the rows before it more than once.
        tasks = rebalanced(archivable(ended)).observe(observed, *checksum_columns())
        self.files.write(data, tasks)
        window = self.files.finish(
            ArchivedWindow(self.table.name, since, until, at, data=data, files={}, **observed.get)
        )
        inform("archive", f"archived {window.rows:,} tasks sent or cancelled from {shown(since)} to {shown(until)}")
        return window

    def purge_all(self, windows: list[ArchivedWindow]) -> Counter[str]:
        """Delete the tasks of finished windows from the table, and count. A damaged window does not stop the others."""
        damaged, counts = [], Counter[str]()
        for window in windows:
            try:
                with spark_errors():
                    self.files.files_of(window)
            except OutboxError as error:
                damaged.append(str(error))
            else:
                counts.update(self.purge(window), windows=1)
        if damaged:
            raise OutboxError(
                f"{'; '.join(damaged)}. Their tasks were not purged, but the table's row deletion policy can delete "
                "them. Restore the files. If a later version of the package wrote them, upgrade this one"
            )
        return counts

    def purge(self, window: ArchivedWindow) -> dict[str, int]:
        selection = {"archive": self.files.path(window.data), "since": window.since, "until": window.until}
        # An interrupted purge is continued under its ID.
        id = window.operation or self.files.log.note_purging(window, operations.new_id())
        if operations.operation(self.table, id) is None:
            operations.begin(self.table, "purge", selection, OperationId=id, Tasks=0)
        tasks = self.files.read([window]).select("Id", *_ENDED).repartition("Id").sortWithinPartitions("Id")
        counts = totals(map_rows(tasks, _COUNTS, purge_rows, self.settings, id))
        operations.end(self.table, id)
        self.files.log.note_purged(window, counts)
        inform("archive", f"purged {counts['deleted']:,} tasks of {shown(window.since)} to {shown(window.until)}")
        return counts

    def _read_timestamp(self, since: datetime, until: datetime, *, late: bool) -> datetime:
        """Return the read timestamp of a window: when all its marks are final, or now if that is too old and `late`."""
        now = self.table.now()
        retention = self.table.retention()
        at = until + MARKS_FINAL_AFTER
        if at > now - retention + TIME_TO_READ and (not late or self.table.keeps(at)):
            return at
        if late:
            return now
        kept = spoken(retention.total_seconds())
        raise OutboxError(
            f"The window from {shown(since)} to {shown(until)} ended {spoken((now - until).total_seconds())} ago and "
            f"cannot be read as of its end, because Spanner keeps old versions of rows for {kept} "
            "(version_retention_period). Pass --read-late to read the window as of now, without tasks that were resent "
            "or deleted since. For later windows, archive more often or raise version_retention_period (at most 7 days)"
        )


def purge_rows(database: DatabaseSettings, operation: str, batches: Iterator[Rows]) -> Iterator[Rows]:
    """Purge rows with Id, SentAt and CancelledBy in a Spark task. Yield the counts of each chunk."""
    table = open_table(database)
    for rows in batches:
        for chunk in chunked(rows, PURGE_ROWS):
            yield [purge_chunk(table, {row["Id"]: tuple(row[name] for name in _ENDED) for row in chunk}, operation)]


def purge_chunk(table: Table, wanted: Mapping[str, tuple[Any, ...]], operation: str) -> dict[str, int]:
    """Delete the tasks that are still as archived, in one transaction. Return the number of each outcome.

    `wanted` has the archived SentAt and CancelledBy of each ID. The transaction also adds the number to the row of the
    operation, so that no attempt is missing there. A task with others was sent again, restored or cancelled since: it
    is `resent`, and stays in the table. A task that does not exist is `missing`.
    """

    def work(transaction: Transaction) -> dict[str, int]:
        found = transaction.query(_LOCK, {"ids": sorted(wanted)})
        same = [id for id, *ended in found if tuple(ended) == wanted[id]]
        if same:
            transaction.delete(TASKS_TABLE, KeySet(keys=[[id] for id in same]))
            # Last, because all Spark tasks wait for the lock of this row.
            [[deleted]] = transaction.query(operation_sql.LOCK_TASKS, {"id": operation})
            operations.update(transaction, operation, Tasks=deleted + len(same))
        return {"deleted": len(same), "resent": len(found) - len(same), "missing": len(wanted) - len(found)}

    return table.transact(_TAG, work)
