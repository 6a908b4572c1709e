"""Check that a worker may read and mark tasks, before it publishes one that it could not mark."""

import contextlib
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from google.api_core.exceptions import NotFound, PermissionDenied
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet

from outbox.base.schedules import ABORTED
from outbox.errors import NotReached
from outbox.table.connection import LimitedDatabase
from outbox.table.schema import service_errors
from outbox.table.shared_sql import parameters
from outbox.table.states import TASKS_TABLE
from outbox.table.timeouts import retry_and_timeout
from publishworker.spanner.relay_sql import (
    CHECK_COLUMNS,
    DISCOVER_NO_TOPICS,
    HEARTBEAT_COLUMNS,
    MARK_COLUMNS,
    READ_COLUMNS,
    WORKERS_TABLE,
    mark_row,
)
from publishworker.spanner.store import LIVENESS_TIMEOUT_SECONDS

#: Seconds for a read of one row.
GRANT_SECONDS = 5.0
_TAG = {"transaction_tag": "outbox-check"}


def verify_grants(database: LimitedDatabase) -> None:
    """Do what a worker does, on rows that do not exist, so that nothing changes. Raises NotReached if it may not.

    The answer to an update is NOT_FOUND if the columns may be written. A commit that inserts a heartbeat and deletes it
    leaves no row. A role needs a grant for each column: https://cloud.google.com/spanner/docs/fgac-privileges
    """
    limited: Any = database  # its methods carry no types
    id = str(uuid.uuid4())
    heartbeat = (id, datetime.now(UTC), COMMIT_TIMESTAMP, LIVENESS_TIMEOUT_SECONDS, "", None)
    gone: Any = KeySet(keys=[[id]])
    small = f"AsynchronousTaskTopics, {WORKERS_TABLE} or AsynchronousTaskShards"
    for sql, values, table, columns in (
        (CHECK_COLUMNS, {"id": id}, TASKS_TABLE, (*MARK_COLUMNS, *READ_COLUMNS)),
        (DISCOVER_NO_TOPICS, {}, small, ("the columns",)),
    ):
        with _permission(database, "read", table, columns), limited.snapshot() as snapshot:
            list(snapshot.execute_sql(sql, **parameters(values), **retry_and_timeout(GRANT_SECONDS)))
    batch: Any
    with (
        _permission(database, "update", TASKS_TABLE, MARK_COLUMNS),
        contextlib.suppress(NotFound),
        limited.batch(_TAG, default_retry_delay=ABORTED.first) as batch,
    ):
        batch.update(TASKS_TABLE, MARK_COLUMNS, [mark_row(id, 1)])
    with (
        _permission(database, "insert, update and delete", WORKERS_TABLE, HEARTBEAT_COLUMNS),
        limited.batch(_TAG, default_retry_delay=ABORTED.first) as batch,
    ):
        batch.insert_or_update(WORKERS_TABLE, HEARTBEAT_COLUMNS, [heartbeat])
        batch.delete(WORKERS_TABLE, gone)


@contextlib.contextmanager
def _permission(database: LimitedDatabase, verb: str, table: str, columns: tuple[str, ...]) -> Iterator[None]:
    with service_errors(database.name):
        try:
            yield
        except PermissionDenied as error:
            role = f"role {database.database_role}" if database.database_role else "this account"
            raise NotReached(
                f"{database.name}: {role} may not {verb} {', '.join(columns)} of {table}. Grant "
                "roles/spanner.databaseUser, or the privileges in schema/roles.sql to the role of "
                f"--database-role. {error.message}"
            ) from error
