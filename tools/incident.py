"""An hour with an incident, in compressed time, for the pictures of the console.

The workers and the emulators are real. Only the clock of the workers' histories is quick, and at the end the times in
the tables are stretched by the same factor.
"""

import base64
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from unittest import mock

from datadog.dogstatsd.base import DogStatsd
from google.api_core.exceptions import Aborted
from google.cloud import pubsub_v1
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet
from google.cloud.spanner_v1.database import Database
from orders import stage

import outbox
import outbox_admin as admin
from outbox.base.values import chunked
from outbox.rows.task_table import TaskTable
from outbox_admin.operations import Author
from outbox_admin.tasks.selections import TaskSelection
from publishworker.hosted import HostedRelay
from publishworker.process import app, gauges
from publishworker.process.worker_settings import WorkerSettings
from publishworker.telemetry.history import WorkerHistory
from publishworker.telemetry.metrics import Metrics
from publishworker.turn import membership

#: How many times as long the hour seems.
SPEED = 15
MINUTES = 60
#: The minute in which one more worker starts.
DEPLOYED = 30
ANN, BOB = (
    Author("ann@example.com", "the payment service asks us to wait, ticket 4711"),
    Author("bob@example.com", "the order service sends correct messages again, ticket 4712"),
)
#: The key and the times of all rows.
_STRETCHED = {
    "AsynchronousTasks": ("Id", "CreatedAt", "SentAt", "DueAt"),
    "AsynchronousTaskOperations": ("OperationId", "StartedAt", "FinishedAt", "SeenAt"),
}


class Quick(WorkerHistory):
    """A history whose hour ends at `end`, and then goes on as usual."""

    end = 0.0

    def __init__(self) -> None:
        """See WorkerHistory."""
        super().__init__(lambda: self.end - SPEED * max(0.0, self.end - time.time()))

    def add_ages(self, ages: Mapping[str, float], oldest: float) -> None:
        """See WorkerHistory."""
        super().add_ages({topic: SPEED * age for topic, age in ages.items()}, SPEED * oldest)


@contextlib.contextmanager
def played(made: stage.Stage, register: Callable[[Database, int], None]) -> Iterator[None]:
    """Play the hour, and keep its workers for the block."""
    with (
        mock.patch.object(app, "WorkerHistory", Quick),
        mock.patch.object(gauges, "REPORT_SECONDS", 1.0),
        mock.patch.object(membership, "HEARTBEAT_INTERVAL_SECONDS", 2.0),
        mock.patch.object(gauges, "COUNT", SimpleNamespace(first=0.5, after=lambda _seconds: 0.0)),
        mock.patch.object(admin.rows.backlog, "STALENESS", admin.rows.backlog.STALENESS / SPEED),
        contextlib.ExitStack() as workers,
    ):
        for _ in range(2):
            workers.enter_context(_worker(made, 2 * MINUTES))
        Quick.end = time.time() + 60 * MINUTES / SPEED
        steps = _steps(made, lambda: workers.enter_context(_worker(made, MINUTES - DEPLOYED)))
        for minute in range(MINUTES):
            steps.get(minute, lambda: None)()
            with contextlib.suppress(Aborted):  # the emulator knows one transaction at a time
                register(made.database, 30 if 20 < minute < 30 else 15)
            time.sleep(max(0.0, Quick.end - 60 * (MINUTES - 1 - minute) / SPEED - time.time()))
        _stretch(made.database)
        yield


def _steps(made: stage.Stage, deploy: Callable[[], object]) -> dict[int, Callable[[], object]]:
    """Return what happens in which minute."""
    table, publisher = TaskTable(made.database), pubsub_v1.PublisherClient()
    invoices = f"projects/{made.project}/topics/invoices"
    return {
        14: lambda: publisher.delete_topic(topic=invoices),
        DEPLOYED: deploy,
        36: lambda: publisher.create_topic(name=invoices),
        40: lambda: _break(made.database),
        46: lambda: admin.editing.change(table, "pause", ["payments"], {"paused": True}, ANN),
        52: lambda: list(admin.execution.change(table, "retry", TaskSelection(state="dead", topic="orders"), BOB)),
    }


@contextlib.contextmanager
def _worker(made: stage.Stage, minutes: float) -> Iterator[None]:
    """Run a worker that says that it started this long before the end."""
    instance = made.database.name.split("/")[3]
    place = {"project": made.project, "instance": instance, "database": made.database.database_id}
    with HostedRelay(WorkerSettings.read(place, {}), metrics=Metrics(DogStatsd(port=9))) as relay:
        ends = Quick.end or time.time() + 60 * MINUTES / SPEED
        relay._app.membership._started_at = datetime.fromtimestamp(ends - 60 * minutes, UTC)
        yield


def _break(database: Database) -> None:
    """Insert tasks that are dead when a worker reads them, one of them the head of a key, and tasks behind it."""
    with database.batch() as batch:
        columns = ("Id", "Topic", "Data", "Priority", "OrderingKey", "CreatedAt")
        broken = [(f"broken-{number}", None) for number in range(23)] + [("order-31-head", "order-31")]
        rows = [(id, "orders", base64.b64encode(b"\xff"), 50, key, COMMIT_TIMESTAMP) for id, key in broken]
        batch.insert("AsynchronousTasks", columns, rows)
    with database.batch() as batch:
        for letter in "abc":
            outbox.register(batch, "orders", b'{"order": 31}', ordering_key="order-31", task_id=f"order-31-{letter}")


def _stretch(database: Database) -> None:
    now = datetime.fromtimestamp(Quick.end, UTC)
    for table, (id, *columns) in _STRETCHED.items():
        with database.snapshot() as snapshot:
            rows = list(snapshot.read(table, (id, *columns), KeySet(all_=True)))
        for chunk in chunked(rows, 50):
            times = ([_stretched(now, at) for at in found] for _, *found in chunk)
            _update(database, table, (id, *columns), [(row[0], *each) for row, each in zip(chunk, times, strict=True)])


def _stretched(now: datetime, at: datetime | None) -> datetime | None:
    """Return a time of the quick hour. A scheduled task stays due in the future."""
    return at if at is None or at > now else now - SPEED * (now - at)


def _update(database: Database, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Write the rows, whatever the workers do meanwhile."""
    while True:
        with contextlib.suppress(Aborted), database.batch() as batch:
            batch.update(table, columns, rows)
        if batch.committed:
            return
