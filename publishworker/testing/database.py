"""The database of a test run on the Spanner emulator."""

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database

from outbox.devtools import resources
from outbox.errors import OutboxError
from outbox.program.settings import DatabaseSettings
from outbox.table import ddl

#: Each table, and its parent or NULL. Names of a named schema begin with it.
_TABLES = """
SELECT IF(TABLE_SCHEMA = '', '', CONCAT(TABLE_SCHEMA, '.')) AS Path, TABLE_NAME, PARENT_TABLE_NAME
FROM INFORMATION_SCHEMA.TABLES WHERE TABLE_TYPE = 'BASE TABLE'"""


@contextlib.contextmanager
def created(
    files: Sequence[Path], migrate: Callable[[Database], object] | None, set_variable: Callable[[str, str], object]
) -> Iterator[Database]:
    """Create a database in its own project, with the DDL in `files`, migrate it, and drop it at the end.

    Raises OutboxError, and what `migrate` raises.
    """
    names = {"project": f"test-{uuid.uuid4().hex[:12]}", "instance": "test-instance", "database": "outbox"}
    for name, value in names.items():
        set_variable(f"OUTBOX_{name.upper()}", value)
    settings = DatabaseSettings.read(names)
    try:
        statements = [each for file in files for each in ddl.cut(file.read_text(encoding="utf-8-sig"))]
        database: Any = resources.create(settings, statements, migrate=migrate)
    except OSError as error:
        raise OutboxError(
            f"the setting outbox_ddl names {error.filename}, which cannot be read: {error.strerror}"
        ) from error
    except OutboxError as error:
        if not files:
            raise
        raise type(error)(f"with the setting outbox_ddl ({', '.join(map(str, files))}): {error}") from error
    try:
        yield database
    finally:
        instance = database._instance  # noqa: SLF001 - the client has no other way
        for each in instance.list_databases():
            instance.database(each.name.rpartition("/")[2]).drop()
        instance.delete()


def empty(database: Database) -> None:
    """Delete all rows, children before parents, and forget what an earlier test has left in the client."""
    # A transaction that got no session leaves it set, and then all later ones of this thread are refused:
    # https://github.com/googleapis/google-cloud-python/issues/18375
    database._local.transaction_running = False  # noqa: SLF001 - nothing public resets it
    with database.snapshot() as snapshot:
        parents = {
            path + table: {path + parent} if parent else () for path, table, parent in snapshot.execute_sql(_TABLES)
        }
    with database.batch(default_retry_delay=0.02) as batch:
        for table in [*TopologicalSorter(parents).static_order()][::-1]:
            batch.delete(table, KeySet(all_=True))


def environment(database: Database) -> dict[str, str]:
    """Return the variables with which the commands of this project use a database."""
    _, project, _, instance, _, name = str(database.name).split("/")
    return {"OUTBOX_PROJECT": project, "OUTBOX_INSTANCE": instance, "OUTBOX_DATABASE": name}
