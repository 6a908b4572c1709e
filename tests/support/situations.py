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

from outbox.admin import changes
from outbox.admin.operations import Author
from outbox.admin.selections import TaskSelection
from outbox.admin.table import TaskTable
from outbox.base.values import topic_name
from outbox.message import build
from outbox.table.ddl import OPERATIONS
from outbox.table.states import NEVER
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
    live_workers: int = 0
    infos: tuple[dict[str, Any], ...] = ()

    def topics(self, *ids: str) -> None:
        for id in ids:
            with contextlib.suppress(AlreadyExists):
                self.pubsub.publisher.create_topic(name=topic_name(id, self.project))

    def tasks(self, names: Sequence[str], topic: str, *, ago: timedelta = timedelta(0), **columns: Any) -> None:
        created = datetime.now(UTC) - ago if ago else COMMIT_TIMESTAMP
        rows = []
        for name in names:
            message = b'{"order": "%s", "cents": 1999}' % name.encode()
            data, _ = build(message, attributes={"kind": "placed"}, task_id=name, topic=topic, ordering_key="")
            rows.append(row(name, Topic=topic, Data=data, CreatedAt=created, **columns))
        insert(self.database, rows)

    def workers(self, count: int, *infos: dict[str, Any]) -> None:
        """Have live workers, which have just written their heartbeats; call it again to keep them live.

        `infos` are what the first ones say about themselves.
        """
        self.live_workers, self.infos = count, infos
        told = [JsonObject(info) for info in (*infos, *[None] * (count - len(infos)))]
        with self.database.batch() as batch:
            rows = [(f"publishworker-{n}", datetime.now(UTC), COMMIT_TIMESTAMP, told[n]) for n in range(count)]
            batch.insert_or_update("AsynchronousTaskWorkers", ("WorkerId", "StartedAt", "SeenAt", "Info"), rows)


def _ids(prefix: str, count: int) -> list[str]:
    return [f"{prefix}-{number}" for number in range(1, count + 1)]


MINUTES, HOURS, DAYS = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


def _now() -> datetime:
    return datetime.now(UTC)


def backlog_grows(place: Place) -> None:
    place.topics("orders", "invoices")
    place.tasks(_ids("order", 120), "orders", ago=10 * MINUTES)
    place.tasks(_ids("invoice", 3), "invoices", ago=4 * MINUTES)


def oldest_age(place: Place) -> None:
    place.topics("orders", "reports")
    place.workers(2)
    place.tasks(_ids("order", 40), "orders", ago=2 * HOURS)
    pause(place.database, "orders")
    place.tasks(["report-7"], "reports", ago=3 * HOURS, Priority=0)


def topic_deleted(place: Place) -> None:
    place.tasks(_ids("order", 9), "orders", ago=2 * DAYS, Attempts=4, AvailableAt=_now() + HOURS, LastError=NOT_FOUND)
    place.tasks(["order-10"], "orders", ago=2 * DAYS, Attempts=10, AvailableAt=NEVER, LastError=NOT_FOUND)


def info(number: int, first: int, last: int, **settings: Any) -> dict[str, Any]:
    """Return what a worker says about itself."""
    load = {"in_flight": 2, "utilization": 0.25}
    return {"host": f"node-{number}", "version": "1.2.3", "shards": [[first, last]], "settings": settings, **load}


def disagree(place: Place) -> None:
    place.workers(2, info(1, 0, 4, concurrency=16), info(2, 5, 9))


def circuit_open(place: Place) -> None:
    circuit = {"topic": "orders", "reason": "not_found", "error": "404 Topic not found"}
    circuits = [circuit | {"open_seconds": 25, "seconds_to_probe": 60}]
    place.workers(1, info(1, 0, 9) | {"circuits": circuits})
    failed = {"Attempts": 4, "AvailableAt": _now() - MINUTES, "LastError": NOT_FOUND}
    place.tasks(_ids("order", 20), "orders", ago=2 * MINUTES)
    place.tasks(_ids("probe", 10), "orders", ago=2 * MINUTES, **failed)


def poison(place: Place) -> None:
    place.topics("orders")
    error = "invalid_argument: 400 The value for message.data is refused by the schema of the topic"
    place.tasks(["order-17"], "orders", ago=HOURS, Attempts=1, AvailableAt=NEVER, LastError=error)
    place.tasks(["order-18"], "orders", ago=HOURS, Attempts=1, AvailableAt=NEVER, LastError=error, OrderingKey="ann")


def cancelled_by_mistake(place: Place) -> None:
    place.topics("orders")
    ids = _ids("order", 3)
    place.tasks(ids, "orders", ago=HOURS, AvailableAt=_now() + HOURS)
    list(changes.change(TaskTable(place.database), "cancel", TaskSelection(state="scheduled")))


def blocked_key(place: Place) -> None:
    """The head of a key is scheduled for tomorrow, and three tasks wait behind it."""
    place.topics("payments")
    key = {"OrderingKey": "account-42"}
    place.tasks(["payment-1"], "payments", ago=20 * MINUTES, AvailableAt=_now() + DAYS, **key)
    for number in range(2, 5):
        blocked = key | {"AvailableAt": _now() + HOURS, "BlockedBy": "payment-1"}
        place.tasks([f"payment-{number}"], "payments", ago=(20 - number) * MINUTES, **blocked)


def routed(place: Place) -> None:
    place.topics("orders", "orders-v2")
    place.tasks(_ids("order", 12), "orders")


def in_a_file(place: Place) -> None:
    place.tasks(["order-1"], "orders")
    with place.database.batch() as batch:
        batch.insert("AsynchronousTaskTopics", ("Topic", "Paused"), [("invoices", False)])


def pubsub_away(place: Place) -> None:
    place.tasks(_ids("order", 25), "orders", ago=3 * MINUTES)
    place.environment["OUTBOX_PUBSUB_ENDPOINT"] = "http://127.0.0.1:9"


def spanner_unavailable(place: Place) -> None:
    place.environment["SPANNER_EMULATOR_HOST"] = "127.0.0.1:9"


def duplicates(place: Place) -> None:
    place.topics("orders")
    place.workers(2)
    place.tasks(_ids("order", 3), "orders", ago=3 * DAYS, SentAt=_now() - MINUTES)
    update(place.database, "order-1", TimesSent=2)
    place.tasks(_ids("order-new", 1), "orders", ago=2 * MINUTES, SentAt=_now() - 2 * MINUTES)


def too_large(place: Place) -> None:
    place.tasks(_ids("old", 300), "orders", ago=20 * DAYS, SentAt=_now() - 20 * DAYS)
    place.tasks(_ids("young", 20), "orders", ago=DAYS, SentAt=_now() - DAYS)
    place.tasks(["dead-1"], "orders", ago=40 * DAYS, AvailableAt=NEVER, Attempts=10, LastError=NOT_FOUND)
    place.tasks(["pending-1"], "orders", ago=40 * DAYS)


def worker_hangs(place: Place) -> None:
    place.workers(1)
    place.tasks(_ids("order", 60), "orders", ago=MINUTES)
    heartbeat = place.directory / "heartbeat"
    heartbeat.touch()
    old = _now().timestamp() - 300
    os.utime(heartbeat, (old, old))
    place.environment["OUTBOX_HEARTBEAT_FILE"] = str(heartbeat)


def unheard(place: Place) -> None:
    place.workers(2)


def in_doubt(place: Place) -> None:
    place.topics("passwords")
    place.tasks(["otp-1"], "passwords", ago=MINUTES, SentAt=_now() - MINUTES)


def bad_deploy(place: Place) -> None:
    place.topics("orders")
    place.tasks(_ids("order", 8), "orders", ago=3 * MINUTES)
    place.database.update_ddl(["DROP INDEX AsynchronousTasksInOrder"]).result(timeout=30)


def restored(place: Place) -> None:
    place.topics("orders", "invoices")
    # Registered before the time on the page.
    ago = _now() - datetime(2026, 11, 20, 12, tzinfo=UTC)
    place.tasks(_ids("order", 12), "orders", ago=ago)
    place.tasks(_ids("invoice", 2), "invoices", ago=ago)


def sent_and_dead(place: Place) -> None:
    """Thirty tasks were sent an hour ago; one waits for its next attempt, one is dead."""
    place.topics("orders")
    place.tasks(_ids("order", 30), "orders", ago=HOURS, SentAt=_now() - HOURS)
    retrying = {"Attempts": 2, "AvailableAt": _now() + HOURS, "LastError": "unavailable: 503 no answer"}
    place.tasks(["order-31"], "orders", ago=10 * MINUTES, **retrying)
    place.tasks(["order-32"], "orders", ago=10 * MINUTES, Attempts=10, AvailableAt=NEVER, LastError="internal: 500")
    place.tasks(["order-33"], "orders", ago=10 * MINUTES, Attempts=10, AvailableAt=NEVER, LastError=NOT_FOUND)


def interrupted(place: Place) -> None:
    """The process of a retry ended ten minutes ago, before its first chunk."""
    place.topics("orders")
    place.tasks(_ids("order", 20), "orders", ago=HOURS, Attempts=10, AvailableAt=NEVER, LastError=NOT_FOUND)
    table, id = TaskTable(place.database), "4f0c6a52-90d3-4ad5-8ee4-0c12ad9e6f01"
    selection = TaskSelection(state="dead", topic="orders", until=table.now())
    changes.begin(table, "retry", selection, Author("jane", "topic created"), id=id, selected=20)
    with place.database.batch() as batch:
        batch.update(OPERATIONS, ("OperationId", "SeenAt"), [(id, _now() - 10 * MINUTES)])


def resendable(place: Place) -> None:
    sent_and_dead(place)
    place.topics("orders-billing")


def a_day(place: Place) -> None:
    place.topics("orders", "invoices", "mails")
    place.workers(2)
    place.tasks(_ids("order", 30), "orders", ago=10 * MINUTES)
    place.tasks(_ids("urgent", 4), "orders", ago=4 * MINUTES, Priority=100)
    retrying = {"Attempts": 2, "AvailableAt": _now() + HOURS, "LastError": "unavailable: 503 no answer"}
    place.tasks(["order-31", "order-32"], "orders", ago=10 * MINUTES, **retrying)
    place.tasks(["order-33"], "orders", ago=10 * MINUTES, Attempts=10, AvailableAt=NEVER, LastError=NOT_FOUND)
    place.tasks(_ids("invoice", 6), "invoices", ago=HOURS, AvailableAt=_now() + DAYS)
    place.tasks(_ids("mail", 2), "mails", ago=9 * MINUTES, SentAt=_now() - 5 * MINUTES)


#: By the page, and by its headings that show commands.
SITUATIONS: dict[str, dict[str, Callable[[Place], None]]] = {
    "commands.md": {
        "Status": a_day,
        "Workers": disagree,
        "List, show, tail": a_day,
        "Retry tasks": sent_and_dead,
        "Retry many tasks": sent_and_dead,
        "Resend to another topic": resendable,
        "Retry by SQL": sent_and_dead,
        "Purge and cancel": a_day,
        "Restore": a_day,
        "Operations": a_day,
    },
    "topics.md": {"Move a topic": routed, "Set a retry policy": routed, "Keep the controls in a file": in_a_file},
    "runbook.md": {
        "The backlog grows": backlog_grows,
        "The oldest age alarms": oldest_age,
        "A circuit is open": circuit_open,
        "A topic was deleted": topic_deleted,
        "A poison message": poison,
        "A cancel was a mistake": cancelled_by_mistake,
        "A blocked ordering key": blocked_key,
        "Pub/Sub is unavailable": pubsub_away,
        "Spanner is unavailable": spanner_unavailable,
        "A storm of duplicates": duplicates,
        "The table is too large": too_large,
        "A worker hangs": worker_hangs,
        "No worker sends metrics": unheard,
        "An at-most-once task may be lost": in_doubt,
        "A deploy goes wrong": bad_deploy,
        "A subscriber acknowledged by mistake": sent_and_dead,
        "An operation was interrupted": interrupted,
        "The database was restored or cloned": restored,
    },
}
