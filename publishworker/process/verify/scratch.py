"""The scratch database of a verification: created, filled, and dropped."""

import base64
import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.pubsub_v1 import PubsubMessage

import outbox
from outbox.admin.table import TaskTable
from outbox.errors import OutboxError
from outbox.program.terminal import complain
from outbox.table import schema
from outbox.table.connection import LimitedDatabase, open_database
from publishworker.process.worker_settings import WorkerSettings

#: Topics of the loaded tasks, of which nothing is published.
TOPICS = ("verify-a", "verify-b", "verify-c", "verify-d")
#: Tasks of one commit while loading: about 20,000 of the 80,000 mutations that it may have.
LOAD_ROWS = 1_000
#: Of the loaded tasks, one in this many is pending. The others are sent.
PENDING_EACH = 10
CREATE_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Scratch:
    """The database, into which a check can load `rows` tasks."""

    settings: WorkerSettings
    database: LimitedDatabase
    rows: int

    def register(self, topic: str, count: int) -> list[str]:
        """Register tasks in one transaction, and return their IDs."""
        with self._batch() as batch:
            return outbox.register_many(batch, [outbox.Task(topic, b"x" * 300) for _ in range(count)])

    def load(self) -> None:
        """Insert `rows` tasks: one in PENDING_EACH is pending, the others were sent within the last hour."""
        now = TaskTable(self.database).now()  # Spanner refuses a SentAt in the future
        data = base64.b64encode(PubsubMessage.serialize(PubsubMessage(data=b"x" * 300)))
        for start in range(0, self.rows, LOAD_ROWS):
            with self._batch() as batch:
                rows = [
                    (
                        str(uuid.uuid4()), TOPICS[number % len(TOPICS)], data, 50, COMMIT_TIMESTAMP,
                        f"key-{number % 1000}" if number % 5 == 0 else None,
                        None if number % PENDING_EACH == 0 else now - timedelta(seconds=number % 3600),
                    )
                    for number in range(start, min(start + LOAD_ROWS, self.rows))
                ]  # fmt: skip
                columns = ("Id", "Topic", "Data", "Priority", "CreatedAt", "OrderingKey", "SentAt")
                batch.insert("AsynchronousTasks", columns, rows)

    def _batch(self) -> Any:
        database: Any = self.database  # its methods carry no types
        return database.batch(request_options={"transaction_tag": "outbox-verify"})


@contextlib.contextmanager
def scratch(settings: WorkerSettings, rows: int, *, keep: bool) -> Iterator[Scratch]:
    """Create the database, never one that exists, and drop it unless `keep`. Raises OutboxError, NotReached."""
    database: Any = open_database(settings)  # its methods carry no types
    with schema.service_errors(f"instance {settings.instance}"):
        if database.exists():
            raise OutboxError(f"database {settings.database} exists. `verify` creates a new one: omit --database")
    try:
        with schema.service_errors(f"instance {settings.instance}"):
            database.create().result(timeout=CREATE_SECONDS)
        yield Scratch(settings, database, rows)
    finally:
        if keep:
            complain("publishworker", f"database {settings.database} was kept")
        else:
            _drop(database, settings.database)


def _drop(database: Any, name: str) -> None:
    try:
        database.drop()
    except Exception as error:  # whatever happens, the user must know what is left
        complain("publishworker", f"database {name} could not be dropped. Drop it yourself: {error}")
