"""Run a worker in a Spark task until its shards are drained.

The worker handles no signals, and its deadline is by the database's clock. If Spark retries the Spark task, the new
worker has the same ID, so it gets the same shards at once.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa

from outbox.admin.table import TaskTable
from outbox.errors import OutboxError
from outbox.shared import logs
from outbox_pipeline import schemas
from publishworker import exits
from publishworker.app import App, until_drained
from publishworker.settings import RelaySettings
from publishworker.telemetry import metrics as m
from publishworker.telemetry.clients import client
from publishworker.telemetry.metrics import Client, Metric, Metrics

#: The columns of `schemas.DRAINED`, and the relay's metric for each.
_COUNTED = {
    "published": m.PUBLISHED,
    "already_published": m.ALREADY_PUBLISHED,
    "uncommitted": m.UNCOMMITTED,
    "failed": m.FAILED,
    "became_dead": m.DEAD,
    "unconfirmed": m.UNCONFIRMED,
    "aborted": m.ABORTED,
}


class Tally(Metrics):
    """Adds up counts by metric, ignoring tags, and forwards all metrics to the client if there is one."""

    def __init__(self, client: Client | None = None) -> None:
        """Begin with nothing counted."""
        super().__init__(client)
        self.sums: Counter[Metric] = Counter()

    def count(self, metric: Metric, value: int, **tags: str) -> None:
        """See Metrics."""
        self.sums[metric] += value
        super().count(metric, value, **tags)


def warm_up(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the input. This starts the process and its imports before the first heartbeats are written."""
    yield from batches


@dataclass(frozen=True)
class Workers:
    """A function for `mapInArrow`: for each number, runs the worker with that number and yields `schemas.DRAINED`.

    `ids` are the worker IDs by number. The workers stop at `until`, by the database's clock; None is no deadline.
    """

    settings: RelaySettings
    ids: tuple[str, ...]
    until: datetime | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the workers one after the other. Raises NotReached, OutboxError."""
        logs.configure(self.settings.log_format, self.settings.log_level)
        answer = schemas.arrow(schemas.DRAINED)
        for batch in batches:
            counts = [self._relay(self.ids[number]) for number in batch["id"].to_pylist()]
            yield pa.RecordBatch.from_pylist(counts, answer)

    def _relay(self, id: str) -> dict[str, int]:
        tally = Tally(client(self.settings.metrics))
        try:
            worker = App(self.settings, id=id, metrics=tally)
            drained = until_drained(worker.store, lambda: worker.membership.shards, self.settings.poll_interval)
            with self._stop(worker) as stop:
                code = worker.until_stopped(stop, drained, late_exit_code=exits.WORK_LEFT)
        finally:
            tally.stop()
        if code == exits.FAILED:
            raise OutboxError(f"Worker {id} failed. See the log of its executor")
        return {name: tally.sums[metric] for name, metric in _COUNTED.items()}

    @contextlib.contextmanager
    def _stop(self, worker: App) -> Iterator[threading.Event]:
        """Yield an event that is set at the deadline."""
        stop = threading.Event()
        if self.until is None:
            yield stop
            return
        left = (self.until - TaskTable(worker.store.database).now()).total_seconds()
        timer = threading.Timer(left, stop.set)
        timer.daemon = True
        timer.start()
        try:
            yield stop
        finally:
            timer.cancel()  # Spark reuses the process for other Spark tasks
