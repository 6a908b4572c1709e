"""Create the instance, database, customers, topics and subscriptions of the order service on the emulators.

python -m prepare

It keeps existing objects, so the restart of a worker changes nothing. `outbox schema apply` runs after it.
"""  # noqa: INP001 - a script in a ConfigMap

import contextlib
import os
import sys
import time

from google.api_core.exceptions import AlreadyExists
from google.auth.credentials import AnonymousCredentials
from google.cloud import pubsub_v1, spanner
from orders import service, shop

from outbox.devtools.child_process import answers

#: Seconds until the emulators must answer, after their image was pulled.
WAIT_SECONDS = 60.0
#: Seconds for a call that creates an object. The emulators need milliseconds.
CALL_SECONDS = 30.0


def main() -> int:
    """Create all objects; return 0, or 1 with an error if an emulator does not answer."""
    for variable in ("SPANNER_EMULATOR_HOST", "PUBSUB_EMULATOR_HOST"):
        if not _answers(os.environ[variable]):
            print(f"{variable}: {os.environ[variable]} does not answer", file=sys.stderr)
            return 1
    project = os.environ["OUTBOX_PROJECT"]
    _make_database(project, os.environ["OUTBOX_INSTANCE"], os.environ["OUTBOX_DATABASE"])
    _make_topics(project)
    print(f"{project}: there is a database, and the topics {', '.join(service.TOPICS)}")
    return 0


def _answers(host: str) -> bool:
    deadline = time.monotonic() + WAIT_SECONDS
    while not answers(host):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def _make_database(project: str, instance_id: str, database_id: str) -> None:
    client = spanner.Client(project=project, credentials=AnonymousCredentials(), disable_builtin_metrics=True)
    configuration = f"projects/{project}/instanceConfigs/emulator-config"
    instance = client.instance(instance_id, configuration_name=configuration)
    with contextlib.suppress(AlreadyExists):
        instance.create().result(timeout=CALL_SECONDS)
    database = instance.database(database_id, ddl_statements=service.DDL)
    with contextlib.suppress(AlreadyExists):
        database.create().result(timeout=CALL_SECONDS)
    with database.batch() as batch:
        rows = [(customer, shop.CREDIT_CENTS) for customer in shop.CUSTOMERS]
        batch.insert_or_update("Customers", ("CustomerId", "CreditCents"), rows)


def _make_topics(project: str) -> None:
    publisher, subscriber = pubsub_v1.PublisherClient(), pubsub_v1.SubscriberClient()
    for topic in service.TOPICS:
        name = f"projects/{project}/topics/{topic}"
        with contextlib.suppress(AlreadyExists):
            publisher.create_topic(name=name, timeout=CALL_SECONDS)
        with contextlib.suppress(AlreadyExists):
            subscriber.create_subscription(
                name=f"projects/{project}/subscriptions/{topic}", topic=name, timeout=CALL_SECONDS
            )


if __name__ == "__main__":
    sys.exit(main())
