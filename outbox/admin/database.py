"""The database of a command or a job. Every call has a timeout, so an outage of Spanner does not block it forever."""

import functools

from google.cloud import spanner
from google.cloud.spanner_v1.database import Database

from outbox.admin.table import TaskTable
from outbox.shared.settings import DatabaseSettings
from outbox.storage.schema import limits, service_errors

#: Timeout of one call with its retries.
CALL_SECONDS = 5.0
#: Calls that the client makes internally, without a timeout argument. It would retry a Commit for an hour.
#: Reads and queries pass `outbox.storage.schema.limits` themselves.
UNLIMITED = ("create_session", "get_session", "delete_session", "begin_transaction", "commit", "rollback")


def open_database(settings: DatabaseSettings, seconds: float = CALL_SECONDS) -> Database:
    """Return the database without sending a request. Respects SPANNER_EMULATOR_HOST. Raises NotReached.

    `seconds` is the timeout of each call that the client makes internally.
    """
    with service_errors(f"database {settings.database}"):
        client = spanner.Client(project=settings.project, disable_builtin_metrics=True)
    role = settings.database_role or None
    database: Database = client.instance(settings.instance).database(settings.database, database_role=role)
    api = database.spanner_api
    for name in UNLIMITED:
        setattr(api, name, functools.partial(getattr(api, name), **limits(seconds)))
    return database


def open_table(settings: DatabaseSettings) -> TaskTable:
    """Return the database's table of tasks. Raises NotReached, SchemaDiffers."""
    return TaskTable(open_database(settings))
