"""Spanner for the jobs: on the driver, in the planner of the data source and on executors.

A client cannot be pickled and does not survive a fork, so executors get the `DatabaseSettings`, and `open_table` opens
one client in each process. All requests have LOW priority and a tag. Rows are read and written by key, so a job's cost
depends on the rows it touches.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from google.api_core.exceptions import AlreadyExists
from google.cloud.spanner_v1 import KeySet, RequestOptions

from outbox.base.schedules import ABORTED
from outbox.errors import NotReached, OutboxError
from outbox.program.settings import SECONDS, DatabaseSettings
from outbox.rows.task_table import TaskTable, kept
from outbox.table.connection import open_database
from outbox.table.shared_sql import by_ids
from outbox.table.states import TASKS_TABLE
from outbox.table.timeouts import retry_and_timeout
from outbox_admin.tasks.selections import ENDED
from outbox_admin.tasks.task_sql import first_ended

#: Timeouts in seconds: for a commit or another unary call, and for a streaming read of a range. Spark starts each of
#: the four attempts of a Spark task at once, so the timeouts decide after which outage a job fails.
CALL_SECONDS, TABLE_SECONDS = 30.0, 3600.0
#: Max bytes of messages in one commit.
COMMIT_BYTES = 4_000_000

#: The time reserved for a snapshot read. A snapshot that leaves the version retention period sooner is not started.
TIME_TO_READ = timedelta(minutes=5)

LOW = RequestOptions.Priority.PRIORITY_LOW
_RETENTION = """
SELECT option_value FROM information_schema.database_options WHERE option_name = 'version_retention_period'"""
#: Spanner's default version retention period: https://cloud.google.com/spanner/docs/pitr
DEFAULT_RETENTION = timedelta(hours=1)


class Table(TaskTable):
    """The table of tasks of one database, in this process."""

    def retention(self) -> timedelta:
        """Return the database's version retention period. No older timestamp can be read."""
        rows = self.query(_RETENTION, "outbox-retention")
        return timedelta(seconds=SECONDS.parse(rows[0][0])) if rows else DEFAULT_RETENTION

    def keeps(self, at: datetime) -> bool:
        """Tell whether the table can be read as of `at`, by a read of one row.

        After the retention period was raised, even a time within it can be too old, because Spanner does not bring back
        versions: https://cloud.google.com/spanner/docs/use-pitr
        """
        try:
            return all(True for _ in self.rows(("Id",), KeySet(all_=True), at, limit=1, seconds=CALL_SECONDS))
        except NotReached:
            raise
        except OutboxError:
            return False

    def first_ended(self) -> datetime | None:
        """Return the earliest SentAt, or None if no task is sent or cancelled."""
        rows = [self.query(first_ended(state), "outbox-pipeline-first", seconds=CALL_SECONDS) for state in ENDED]
        return min((sent_at for each in rows for (sent_at,) in each), default=None)

    def rows(
        self,
        columns: Sequence[str],
        keys: KeySet,
        at: datetime,
        *,
        index: str = "",
        limit: int = 0,
        seconds: float = TABLE_SECONDS,
    ) -> Iterator[list[Any]]:
        """Yield rows as of `at` while they arrive. Values are the client's undecoded protobuf values.

        Column `Shard` is that of the table's layout.
        """
        columns = [self.layout.sql(name) for name in columns]
        with self._errors(), kept(at), self.database.snapshot(read_timestamp=at) as snapshot:
            yield from snapshot.read(
                TASKS_TABLE, columns, keys, index=index, limit=limit, lazy_decode=True,
                request_options={"priority": LOW, "request_tag": "outbox-pipeline-read"},
                **retry_and_timeout(seconds),
            )  # fmt: skip

    def insert(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], tag: str) -> bool:
        """Insert all of `rows` in one commit. Return False, and insert none, if one of the IDs exists."""
        options = {"priority": LOW, "transaction_tag": tag}
        with self._errors():
            try:
                with self.database.batch(options, default_retry_delay=ABORTED.first) as batch:
                    batch.insert(TASKS_TABLE, columns, rows)
            except AlreadyExists:
                return False
        return True

    def read_ids(self, columns: Sequence[str], ids: Iterable[str], tag: str) -> list[list[Any]]:
        """Return the decoded rows of the `ids` that exist."""
        statement = by_ids(", ".join(columns))
        return self.query(statement, tag, {"ids": [*ids]}, seconds=CALL_SECONDS)


@lru_cache(maxsize=8)
def _table(settings: DatabaseSettings, _emulator: str | None, _process: int) -> Table:
    return Table(open_database(settings, CALL_SECONDS))


def open_table(settings: DatabaseSettings) -> Table:
    """Return this process's table of the database. Raises NotReached, SchemaDiffers."""
    return _table(settings, os.environ.get("SPANNER_EMULATOR_HOST"), os.getpid())
