"""Create what an application needs on the emulators: an instance, a database, topics and subscriptions."""

import contextlib
from collections.abc import Iterator, Sequence

from google.api_core.exceptions import AlreadyExists, GoogleAPIError
from google.auth.credentials import AnonymousCredentials
from google.cloud import pubsub_v1, spanner
from google.cloud.spanner_v1.database import Database

from outbox.errors import OutboxError
from outbox.storage import schema

#: Timeout of one call in seconds. The emulators take milliseconds.
SECONDS = 30.0


def create_database(project: str, instance_id: str, database_id: str, ddl: Sequence[str] = ()) -> Database:
    """Create the instance, and the database with `ddl` and the outbox's tables. Raises SchemaDiffers, OutboxError.

    What exists already is kept. In a database that exists, `ddl` is not executed. The emulator is the one that
    SPANNER_EMULATOR_HOST names.
    """
    client = spanner.Client(project=project, credentials=AnonymousCredentials(), disable_builtin_metrics=True)
    config = f"projects/{project}/instanceConfigs/emulator-config"
    with _errors(f"instance {instance_id}"), contextlib.suppress(AlreadyExists):
        client.instance(instance_id, configuration_name=config).create().result(timeout=SECONDS)
    database: Database = client.instance(instance_id).database(database_id, ddl_statements=ddl)
    with _errors(f"database {database_id}"), contextlib.suppress(AlreadyExists):
        database.create().result(timeout=SECONDS)
    schema.apply(database, schema.statements())
    return database


def create_topic(name: str) -> None:
    """Create the topic `projects/P/topics/T`, unless it exists. Raises OutboxError."""
    with _errors(f"topic {name}"), contextlib.suppress(AlreadyExists):
        pubsub_v1.PublisherClient().create_topic(name=name, timeout=SECONDS)


def create_subscription(name: str, topic: str) -> None:
    """Create a subscription with ordering keys, unless it exists. Raises OutboxError."""
    request = {"name": name, "topic": topic, "enable_message_ordering": True}
    with _errors(f"subscription {name}"), contextlib.suppress(AlreadyExists):
        pubsub_v1.SubscriberClient().create_subscription(request=request, timeout=SECONDS)


@contextlib.contextmanager
def _errors(name: str) -> Iterator[None]:
    try:
        yield
    except GoogleAPIError as error:
        raise OutboxError(f"could not create {name} on the emulator: {error}") from error
