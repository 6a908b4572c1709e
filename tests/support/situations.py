"""The situations of the runbook: the state of the database and of its surroundings in each of them."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from google.api_core.exceptions import AlreadyExists
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, JsonObject
from google.cloud.spanner_v1.database import Database

from outbox.base.values import topic_name
from outbox.message import build
from outbox.rows.task_table import TaskTable
from outbox.table.ddl import OPERATIONS
from outbox.table.states import NEVER
from outbox_admin.changes import execution
from outbox_admin.operations import Author
from outbox_admin.tasks.selections import TaskSelection
from tests.support.operations import insert, pause, row, update
from tests.support.pubsub import PubSub

NOT_FOUND = "not_found: 404 Topic not found"


@dataclasses.dataclass(slots=True)
class Place:
    """One database of its own project, the emulators' topics of that project, and variables for the commands."""

    project: str
    database: Database
    pubsub: PubSub
    directory: Path
    environment: dict[str, str]


Step = Callable[[Place], None]
MINUTES, HOURS, DAYS = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


def topics(*ids: str) -> Step:
    def create(place: Place) -> None:
        for id in ids:
            with contextlib.suppress(AlreadyExists):
                place.pubsub.publisher.create_topic(name=topic_name(id, place.project))

    return create


def tasks(ids: str, topic: str = "orders", *, ago: timedelta = timedelta(0), **columns: Any) -> Step:
    """Insert tasks, such as `order-1..9` or `order-1`, registered so long ago. A timedelta of a column is from now."""
    name, _, last = ids.partition("..")
    prefix, _, first = name.rpartition("-")
    names = [f"{prefix}-{number}" for number in range(int(first), int(last or first) + 1)]

    def register(place: Place) -> None:
        now = datetime.now(UTC)
        times = {column: now + value for column, value in columns.items() if isinstance(value, timedelta)}
        created, rows = now - ago if ago else COMMIT_TIMESTAMP, []
        for name in names:
            message = b'{"order": "%s", "cents": 1999}' % name.encode()
            data, _ = build(message, attributes={"kind": "placed"}, task_id=name, ordering_key="")
            rows.append(row(name, Topic=topic, Data=data, CreatedAt=created, **columns | times))
        insert(place.database, rows)

    return register


def workers(count: int, *infos: dict[str, Any]) -> Step:
    """Have workers that are live for an hour. `infos` are what the first ones say about themselves."""

    def register(place: Place) -> None:
        told = [JsonObject(info) for info in (*infos, *[None] * (count - len(infos)))]
        columns = ("WorkerId", "StartedAt", "SeenAt", "Info", "LivenessTimeoutSeconds")
        with place.database.batch() as batch:
            rows = [(f"publishworker-{n}", datetime.now(UTC), COMMIT_TIMESTAMP, told[n], 3600) for n in range(count)]
            batch.insert_or_update("AsynchronousTaskWorkers", columns, rows)

    return register


def info(number: int, first: int, last: int, **settings: Any) -> dict[str, Any]:
    """Return what a worker says about itself."""
    load = {"in_flight": 2, "utilization": 0.25}
    return {"host": f"node-{number}", "version": "1.2.3", "shards": [[first, last]], "settings": settings, **load}


def dead_workers(*minutes: int) -> Step:
    """Have workers that died so many minutes ago."""

    def register(place: Place) -> None:
        now = datetime.now(UTC)
        rows = [(f"publishworker-dead-{each}", now, now - each * MINUTES) for each in minutes]
        with place.database.batch() as batch:
            batch.insert("AsynchronousTaskWorkers", ("WorkerId", "StartedAt", "SeenAt"), rows)

    return register


def cancel(place: Place) -> None:
    list(execution.change(TaskTable(place.database), "cancel", TaskSelection(state="scheduled")))


def begin_a_retry(place: Place) -> None:
    """Let the process of a retry have ended ten minutes ago, before its first chunk."""
    table, id = TaskTable(place.database), "4f0c6a52-90d3-4ad5-8ee4-0c12ad9e6f01"
    selection = TaskSelection(state="dead", topic="orders", until=table.now())
    execution.begin(table, "retry", selection, Author("jane", "topic created"), id=id, selected=20)
    with place.database.batch() as batch:
        batch.update(OPERATIONS, ("OperationId", "SeenAt"), [(id, datetime.now(UTC) - 10 * MINUTES)])


def age_the_heartbeat(place: Place) -> None:
    heartbeat = place.directory / "heartbeat"
    heartbeat.touch()
    old = datetime.now(UTC).timestamp() - 300
    os.utime(heartbeat, (old, old))


def drop_an_index(place: Place) -> None:
    place.database.update_ddl(["DROP INDEX AsynchronousTasksInOrder"]).result(timeout=30)


def control_invoices(place: Place) -> None:
    with place.database.batch() as batch:
        batch.insert("AsynchronousTaskTopics", ("Topic", "Paused"), [("invoices", False)])


#: Columns of tasks.
MISSING: dict[str, Any] = {"Attempts": 4, "AvailableAt": HOURS, "LastError": NOT_FOUND}
DEAD: dict[str, Any] = {"Attempts": 10, "AvailableAt": NEVER, "LastError": NOT_FOUND}
REFUSED = DEAD | {
    "Attempts": 1, "LastError": "invalid_argument: 400 The value for message.data is refused by the schema of the topic"
}  # fmt: skip
RETRYING: dict[str, Any] = {"Attempts": 2, "AvailableAt": HOURS, "LastError": "unavailable: 503 no answer"}
BLOCKED: dict[str, Any] = {"OrderingKey": "account-42", "AvailableAt": HOURS, "BlockedBy": "payment-1"}
CIRCUIT = {
    "topic": "orders", "reason": "not_found", "error": "404 Topic not found", "open_seconds": 25,
    "seconds_to_probe": 3_600,  # a slow machine runs the commands long after this was written
}  # fmt: skip
#: Thirty tasks were sent an hour ago; one waits for its next attempt, two are dead.
SENT_AND_DEAD = (
    topics("orders"),
    tasks("order-1..30", ago=HOURS, SentAt=-HOURS),
    tasks("order-31", ago=10 * MINUTES, **RETRYING),
    tasks("order-32", ago=10 * MINUTES, **DEAD | {"LastError": "internal: 500"}),
    tasks("order-33", ago=10 * MINUTES, **DEAD),
)
A_DAY = (
    topics("orders", "invoices", "mails"),
    workers(2),
    tasks("order-1..30", ago=10 * MINUTES),
    tasks("urgent-1..4", ago=4 * MINUTES, Priority=100),
    tasks("order-31..32", ago=10 * MINUTES, **RETRYING),
    tasks("order-33", ago=10 * MINUTES, **DEAD),
    tasks("invoice-1..6", "invoices", ago=HOURS, AvailableAt=DAYS),
    tasks("mail-1..2", "mails", ago=9 * MINUTES, SentAt=-5 * MINUTES),
)
#: Registered before the time on the page.
RESTORED = datetime.now(UTC) - datetime(2026, 11, 20, 12, tzinfo=UTC)
#: By the page, and by its headings that show commands.
SITUATIONS: dict[str, dict[str, Sequence[Step]]] = {
    "commands.md": {
        "Status": A_DAY,
        "Workers": [workers(2, info(1, 0, 4, concurrency=16), info(2, 5, 9))],
        "List, show, tail": A_DAY,
        "Retry tasks": SENT_AND_DEAD,
        "Retry many tasks": SENT_AND_DEAD,
        "Resend to another topic": [*SENT_AND_DEAD, topics("orders-billing")],
        "Retry by SQL": SENT_AND_DEAD,
        "Purge and cancel": A_DAY,
        "Operations": A_DAY,
    },
    "topics.md": {
        "Move a topic": [topics("orders", "orders-v2"), tasks("order-1..12")],
        "Set a retry policy": [topics("orders", "orders-v2"), tasks("order-1..12")],
        "Keep the controls in a file": [tasks("order-1"), control_invoices],
    },
    "runbook.md": {
        "The backlog grows": [
            topics("orders", "invoices"),
            tasks("order-1..120", ago=10 * MINUTES),
            tasks("invoice-1..3", "invoices", ago=4 * MINUTES),
        ],
        "The oldest age alarms": [
            topics("orders", "reports"),
            workers(2),
            tasks("order-1..40", ago=2 * HOURS),
            lambda place: pause(place.database, "orders"),
            tasks("report-7", "reports", ago=3 * HOURS, Priority=0),
        ],
        "A topic is paused": [
            topics("orders"),
            workers(2),
            tasks("order-1..40", ago=2 * HOURS),
            lambda place: pause(place.database, "orders"),
        ],
        "Workers die again and again": [workers(1, info(1, 0, 9)), dead_workers(5, 20, 40)],
        "A circuit is open": [
            workers(1, info(1, 0, 9) | {"circuits": [CIRCUIT]}),
            tasks("order-1..20", ago=2 * MINUTES),
            tasks("probe-1..10", ago=2 * MINUTES, **MISSING | {"AvailableAt": -MINUTES}),
        ],
        "A topic was deleted": [tasks("order-1..9", ago=2 * DAYS, **MISSING), tasks("order-10", ago=2 * DAYS, **DEAD)],
        "A poison message": [
            topics("orders"),
            tasks("order-17", ago=HOURS, **REFUSED),
            tasks("order-18", ago=HOURS, OrderingKey="ann", **REFUSED),
        ],
        "A cancel was a mistake": [topics("orders"), tasks("order-1..3", ago=HOURS, AvailableAt=HOURS), cancel],
        "A blocked ordering key": [
            topics("payments"),
            tasks("payment-1", "payments", ago=20 * MINUTES, **BLOCKED | {"AvailableAt": DAYS, "BlockedBy": None}),
            *(tasks(f"payment-{number}", "payments", ago=(20 - number) * MINUTES, **BLOCKED) for number in (2, 3, 4)),
        ],
        "Pub/Sub is unavailable": [
            tasks("order-1..25", ago=3 * MINUTES),
            lambda place: place.environment.update(OUTBOX_PUBSUB_ENDPOINT="http://127.0.0.1:9"),
        ],
        "Spanner is unavailable": [lambda place: place.environment.update(SPANNER_EMULATOR_HOST="127.0.0.1:9")],
        "A storm of duplicates": [
            topics("orders"),
            workers(2),
            tasks("order-1..3", ago=3 * DAYS, SentAt=-MINUTES),
            lambda place: update(place.database, "order-1", TimesSent=2),
            tasks("order-new-1", ago=2 * MINUTES, SentAt=-2 * MINUTES),
        ],
        "The table is too large": [
            tasks("old-1..300", ago=20 * DAYS, SentAt=-20 * DAYS),
            tasks("young-1..20", ago=DAYS, SentAt=-DAYS),
            tasks("dead-1", ago=40 * DAYS, **DEAD),
            tasks("pending-1", ago=40 * DAYS),
        ],
        "A worker hangs": [workers(1), tasks("order-1..60", ago=MINUTES), age_the_heartbeat],
        "No worker sends metrics": [workers(2)],
        "An at-most-once task may be lost": [
            topics("passwords"),
            tasks("otp-1", "passwords", ago=MINUTES, SentAt=-MINUTES),
        ],
        "A deploy goes wrong": [topics("orders"), tasks("order-1..8", ago=3 * MINUTES), drop_an_index],
        "A subscriber acknowledged by mistake": SENT_AND_DEAD,
        "An operation was interrupted": [topics("orders"), tasks("order-1..20", ago=HOURS, **DEAD), begin_a_retry],
        "The database was restored or cloned": [
            topics("orders", "invoices"),
            tasks("order-1..12", ago=RESTORED),
            tasks("invoice-1..2", "invoices", ago=RESTORED),
        ],
    },
}
