"""The database of a test run on the Spanner emulator."""

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, Self

from google.api_core.exceptions import GoogleAPIError
from google.auth.credentials import AnonymousCredentials
from google.cloud import spanner
from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database

from outbox.errors import OutboxError
from outbox.storage import ddl, schema

INSTANCE, DATABASE = "test-instance", "outbox"
#: Timeout of one call in seconds. The emulator takes milliseconds.
SECONDS = 30.0
#: Each table, and a table that must have rows before it can have some: its parent, and those of its foreign keys.
_TABLES = """
SELECT t.TABLE_NAME, t.PARENT_TABLE_NAME, u.TABLE_NAME
FROM INFORMATION_SCHEMA.TABLES t
LEFT JOIN INFORMATION_SCHEMA.TABLE_CONSTRAINTS c ON c.TABLE_NAME = t.TABLE_NAME AND c.CONSTRAINT_TYPE = 'FOREIGN KEY'
LEFT JOIN INFORMATION_SCHEMA.REFERENTIAL_CONSTRAINTS r ON r.CONSTRAINT_NAME = c.CONSTRAINT_NAME
LEFT JOIN INFORMATION_SCHEMA.TABLE_CONSTRAINTS u ON u.CONSTRAINT_NAME = r.UNIQUE_CONSTRAINT_NAME
WHERE t.TABLE_SCHEMA = '' AND t.TABLE_TYPE = 'BASE TABLE'"""


class TestDatabase:
    """A database in a project of its own, so that processes share an emulator and no names."""

    __test__ = False  # pytest would look for tests in it

    def __init__(self, database: Database) -> None:
        """Look up in which order tables can be emptied."""
        self.database: Any = database
        with self.database.snapshot() as snapshot:
            needed: dict[str, set[str]] = {}
            for table, *others in snapshot.execute_sql(_TABLES):
                needed.setdefault(table, set()).update(each for each in others if each not in (None, "", table))
        self._tables = [*TopologicalSorter(needed).static_order()][::-1]

    @classmethod
    @contextlib.contextmanager
    def created(cls, host: str, files: Sequence[Path]) -> Iterator[Self]:
        """Create the database on the emulator at `host`, with the DDL in `files`, and drop it at the end.

        Raises OutboxError: the emulator refuses the DDL.
        """
        client = spanner.Client(
            project=f"test-{uuid.uuid4().hex[:12]}",
            credentials=AnonymousCredentials(),
            client_options={"api_endpoint": host},
            disable_builtin_metrics=True,
        )
        config = f"projects/{client.project}/instanceConfigs/emulator-config"
        instance: Any = client.instance(INSTANCE, configuration_name=config)
        instance.create().result(timeout=SECONDS)
        try:
            statements = [each for file in files for each in ddl.cut(file.read_text(encoding="utf-8"))]
            database = instance.database(DATABASE, ddl_statements=[*schema.statements(), *statements])
            try:
                database.create().result(timeout=SECONDS)
            except GoogleAPIError as error:
                names = ", ".join(map(str, files))
                raise OutboxError(
                    f"the emulator refuses the DDL of the setting outbox_ddl ({names}): {error}"
                ) from error
            yield cls(database)
        finally:
            for each in instance.list_databases():
                instance.database(each.name.rpartition("/")[2]).drop()
            instance.delete()

    def empty(self) -> None:
        """Delete all rows of all tables."""
        with self.database.batch(default_retry_delay=0.02) as batch:
            for table in self._tables:
                batch.delete(table, KeySet(all_=True))


def environment(database: Database) -> dict[str, str]:
    """Return the variables with which the commands of this project use a database."""
    _, project, _, instance, _, name = str(database.name).split("/")
    return {"OUTBOX_PROJECT": project, "OUTBOX_INSTANCE": instance, "OUTBOX_DATABASE": name}
