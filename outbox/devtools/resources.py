"""Create what an application needs on the emulators: an instance, a database, topics and subscriptions."""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from google.api_core.exceptions import AlreadyExists, GoogleAPIError
from google.auth.credentials import AnonymousCredentials
from google.cloud import pubsub_v1, spanner
from google.cloud.spanner_v1.database import Database

from outbox.errors import OutboxError
from outbox.program.settings import DatabaseSettings
from outbox.table import applying
from outbox.table.ddl import statements

#: Timeout of one call in seconds. The emulators take milliseconds.
EMULATOR_SECONDS = 30.0
_CREATES_TASKS = re.compile(r"CREATE\s+TABLE\s+(IF\s+NOT\s+EXISTS\s+)?`?AsynchronousTasks\b", re.IGNORECASE)


def create(
    target: DatabaseSettings,
    ddl: Sequence[str],
    pubsub: Iterable[tuple[str, str]] = (),
    *,
    migrate: Callable[[Database], object] | None = None,
    empty: bool = False,
    exists: Callable[[], object] = lambda: None,
) -> Database:
    """Create the database with the outbox's tables and `ddl`, and topics and subscriptions. Return the database.

    If `ddl` creates the outbox's tables itself, those that it leaves out are added. `migrate` gets the database with
    `ddl` alone. If it does not create the outbox's tables, they are added, but never if `empty`.

    `pubsub` has pairs such as ("topic", "orders") and ("subscription", "billing"). A subscription belongs to the topic
    before it and keeps the order of ordering keys. What exists already is kept. A database that exists does not get
    `ddl`, and `exists` is called. The emulators are those that the environment names.
    Raises SchemaDiffers, OutboxError.
    """
    client = spanner.Client(project=target.project, credentials=AnonymousCredentials(), disable_builtin_metrics=True)
    config = f"projects/{target.project}/instanceConfigs/emulator-config"
    instance = client.instance(target.instance, configuration_name=config)
    own = [] if empty or migrate or any(map(_CREATES_TASKS.match, ddl)) else statements()
    database: Database = instance.database(target.database, ddl_statements=[*own, *ddl])
    what, topic = f"instance {target.instance}", ""
    try:
        with suppress(AlreadyExists):
            instance.create().result(timeout=EMULATOR_SECONDS)
        what = f"database {target.database}"
        try:
            database.create().result(timeout=EMULATOR_SECONDS)
        except AlreadyExists:
            exists()
        for kind, id in pubsub:
            what, name = f"{kind} {id}", f"projects/{target.project}/{kind}s/{id}"
            topic = name if kind == "topic" else topic
            with suppress(AlreadyExists):
                if kind == "topic":
                    pubsub_v1.PublisherClient().create_topic(name=name, timeout=EMULATOR_SECONDS)
                else:
                    request = {"name": name, "topic": topic, "enable_message_ordering": True}
                    pubsub_v1.SubscriberClient().create_subscription(request=request, timeout=EMULATOR_SECONDS)
    except GoogleAPIError as error:
        raise OutboxError(f"could not create {what} on the emulator: {error}") from error
    if migrate:
        migrate(database)
        empty = any(table.table_id == "AsynchronousTasks" for table in database.list_tables())
    if not empty:
        applying.apply(database, statements())
    return database
