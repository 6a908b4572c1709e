"""The database of a test run on the Spanner emulator."""

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database

from outbox.devtools import resources
from outbox.errors import OutboxError
from outbox.shared.settings import DatabaseSettings
from outbox.storage import ddl

#: Each table, and a table that must have rows before it can have some: its parent, and those of its foreign keys.
_TABLES = """
SELECT t.TABLE_NAME, t.PARENT_TABLE_NAME, u.TABLE_NAME
FROM INFORMATION_SCHEMA.TABLES t
LEFT JOIN INFORMATION_SCHEMA.TABLE_CONSTRAINTS c ON c.TABLE_NAME = t.TABLE_NAME AND c.CONSTRAINT_TYPE = 'FOREIGN KEY'
LEFT JOIN INFORMATION_SCHEMA.REFERENTIAL_CONSTRAINTS r ON r.CONSTRAINT_NAME = c.CONSTRAINT_NAME
LEFT JOIN INFORMATION_SCHEMA.TABLE_CONSTRAINTS u ON u.CONSTRAINT_NAME = r.UNIQUE_CONSTRAINT_NAME
WHERE t.TABLE_SCHEMA = '' AND t.TABLE_TYPE = 'BASE TABLE'"""


@contextlib.contextmanager
def created(files: Sequence[Path]) -> Iterator[Database]:
    """Create a database in a project of its own, with the DDL in `files`, and drop it at the end.

    Processes that share an emulator have different projects. Raises OutboxError: the emulator refuses the DDL.
    """
    names = {"project": f"test-{uuid.uuid4().hex[:12]}", "instance": "test-instance", "database": "outbox"}
    statements = [each for file in files for each in ddl.cut(file.read_text(encoding="utf-8-sig"))]
    settings = DatabaseSettings.read(names)
    try:
        database: Any = resources.create(settings, statements)
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


def deletion_order(database: Database) -> list[str]:
    """Return the tables in an order in which they can be emptied."""
    needed: dict[str, set[str]] = {}
    with database.snapshot() as snapshot:
        for table, *others in snapshot.execute_sql(_TABLES):
            needed.setdefault(table, set()).update(each for each in others if each not in (None, "", table))
    return [*TopologicalSorter(needed).static_order()][::-1]


def empty(database: Database, tables: Sequence[str]) -> None:
    """Delete all rows of `tables`, in this order."""
    with database.batch(default_retry_delay=0.02) as batch:
        for table in tables:
            batch.delete(table, KeySet(all_=True))


def environment(database: Database) -> dict[str, str]:
    """Return the variables with which the commands of this project use a database."""
    _, project, _, instance, _, name = str(database.name).split("/")
    return {"OUTBOX_PROJECT": project, "OUTBOX_INSTANCE": instance, "OUTBOX_DATABASE": name}
