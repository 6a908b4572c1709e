"""The database of a command or a job, with a limit for each call: none waits for ever for a Spanner that is away."""

import functools

from google.cloud import spanner
from google.cloud.spanner_v1.database import Database

from outbox.admin.table import TaskTable
from outbox.shared.settings import DatabaseSettings
from outbox.storage.schema import limits, service_errors

#: Seconds for one call with its retries.
CALL_SECONDS = 5.0
#: The calls that the client makes by itself, without an argument for their limits: a Commit would be tried for an hour.
#: Reads and queries take `outbox.storage.schema.limits` where they are made.
UNLIMITED = ("create_session", "get_session", "delete_session", "begin_transaction", "commit", "rollback")


def open_database(settings: DatabaseSettings, seconds: float = CALL_SECONDS) -> Database:
    """Return the database; nothing is sent yet. SPANNER_EMULATOR_HOST is respected. Raises NotReached.

    `seconds` are for each call that the client makes by itself.
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
    """Return the table of tasks of that database. Raises NotReached, SchemaDiffers."""
    return TaskTable(open_database(settings))
