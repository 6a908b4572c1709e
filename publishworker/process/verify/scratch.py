"""The scratch database and topic of a verification: created, filled, and dropped."""

import base64
import contextlib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from google.api_core.exceptions import GoogleAPIError
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.pubsub_v1 import PublisherClient, PubsubMessage

import outbox
from outbox.errors import NotReached, OutboxError
from outbox.program.pubsub import open_pubsub
from outbox.program.terminal import complain
from outbox.table import schema
from outbox.table.connection import LimitedDatabase, open_database, uses_emulator
from publishworker.process.settings import WorkerSettings

#: Topics of the loaded tasks, of which nothing is published.
TOPICS = ("verify-a", "verify-b", "verify-c", "verify-d")
#: Tasks of one commit while loading: about 20,000 of the 80,000 mutations that it may have.
CHUNK = 1_000
#: Of the loaded tasks, one in this many is pending. The others are sent.
PENDING_EACH = 10
SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Scratch:
    """The database and the topic."""

    settings: WorkerSettings
    database: LimitedDatabase
    topics: PublisherClient
    #: Full name of the topic.
    topic: str
    rows: int

    @property
    def is_emulator(self) -> bool:
        """Tell whether the database is on the emulator, which shows no plans and has no roles."""
        return uses_emulator(self.settings)

    def register(self, topic: str, count: int) -> list[str]:
        """Register tasks in one transaction, and return their IDs."""
        with self._batch() as batch:
            return outbox.register_many(batch, [outbox.Task(topic, b"x" * 300) for _ in range(count)])

    def load(self) -> None:
        """Insert `rows` tasks: one in PENDING_EACH is pending, the others were sent within the last hour."""
        now = datetime.now(UTC)
        data = base64.b64encode(PubsubMessage.serialize(PubsubMessage(data=b"x" * 300)))
        for start in range(0, self.rows, CHUNK):
            with self._batch() as batch:
                rows = [
                    (
                        str(uuid.uuid4()), TOPICS[number % len(TOPICS)], data, 50, COMMIT_TIMESTAMP,
                        f"key-{number % 1000}" if number % 5 == 0 else None,
                        None if number % PENDING_EACH == 0 else now - timedelta(seconds=number % 3600),
                    )
                    for number in range(start, min(start + CHUNK, self.rows))
                ]  # fmt: skip
                columns = ("Id", "Topic", "Data", "Priority", "CreatedAt", "OrderingKey", "SentAt")
                batch.insert("AsynchronousTasks", columns, rows)

    def _batch(self) -> Any:
        database: Any = self.database  # its methods carry no types
        return database.batch(request_options={"transaction_tag": "outbox-verify"})


@contextlib.contextmanager
def scratch(settings: WorkerSettings, rows: int, *, keep: bool) -> Iterator[Scratch]:
    """Create the database and the topic, and drop them at the end unless `keep`. Raises OutboxError, NotReached.

    A database that exists is never touched. What could not be dropped is named on stderr.
    """
    database: Any = open_database(settings)  # its methods carry no types
    topics = PublisherClient(transport=open_pubsub(settings))
    topic = f"projects/{settings.project}/topics/{settings.database}"
    with schema.service_errors(f"instance {settings.instance}"):
        if database.exists():
            raise OutboxError(f"database {settings.database} exists. `verify` creates a new one: omit --database")
    with contextlib.ExitStack() as stack:
        with schema.service_errors(f"instance {settings.instance}"):
            stack.callback(_drop, f"database {settings.database}", database.drop, keep=keep)
            database.create().result(timeout=SECONDS)
        try:
            topics.create_topic(name=topic, timeout=30)
        except GoogleAPIError as error:
            raise NotReached(f"topic {topic} cannot be created: {error}. verify needs pubsub.topics.create") from error
        stack.callback(_drop, f"topic {topic}", lambda: topics.delete_topic(topic=topic, timeout=30), keep=keep)
        yield Scratch(settings, database, topics, topic, rows)


def _drop(name: str, drop: Callable[[], object], *, keep: bool) -> None:
    if keep:
        complain("publishworker", f"{name} was kept")
        return
    try:
        drop()
    except Exception as error:  # whatever happens, the user must know what is left
        complain("publishworker", f"{name} could not be dropped. Drop it yourself: {error}")
