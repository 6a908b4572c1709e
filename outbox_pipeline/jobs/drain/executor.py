"""What a Spark task does in a drain: as a member of the fleet it relays like a worker, until its shards are empty.

It takes no signals and trusts no clock of its machine: it stops by the database's time. A task that Spark tries again
is the same member again, and has the same shards at once.
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
from publishworker.telemetry import datadog
from publishworker.telemetry import metrics as m
from publishworker.telemetry.metrics import Client, Metric, Metrics

#: What a member answers: the columns of `schemas.DRAINED`, and what the relay counts in each.
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
    """Adds up counts by their metric, whatever their tags, and sends all metrics on if there is a client."""

    def __init__(self, client: Client | None = None) -> None:
        """Begin with nothing counted."""
        super().__init__(client)
        self.sums: Counter[Metric] = Counter()

    def count(self, metric: Metric, value: int, **tags: str) -> None:
        """See Metrics."""
        self.sums[metric] += value
        super().count(metric, value, **tags)


def awake(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield what is given: the process and what it imports are there then, and need no time when members begin."""
    yield from batches


@dataclass(frozen=True)
class Members:
    """Given to `mapInArrow`: takes rows of a number, runs the member of that number, yields `schemas.DRAINED`.

    `ids` are the members' by their numbers; `until` is the database's time at which they stop, None is never.
    """

    settings: RelaySettings
    ids: tuple[str, ...]
    until: datetime | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Relay, one member after the other. Raises NotReached, OutboxError."""
        logs.configure(self.settings.log_format, self.settings.log_level)
        answer = schemas.arrow(schemas.DRAINED)
        for batch in batches:
            counts = [self._relay(self.ids[number]) for number in batch["id"].to_pylist()]
            yield pa.RecordBatch.from_pylist(counts, answer)

    def _relay(self, id: str) -> dict[str, int]:
        tally = Tally(datadog.client())
        try:
            worker = App(self.settings, id=id, metrics=tally)
            drained = until_drained(worker.store, lambda: worker.membership.shards, self.settings.poll_interval)
            with self._stop(worker) as stop:
                code = worker.until_stopped(stop, drained, late=exits.WORK_LEFT)
        finally:
            tally.stop()
        if code == exits.FAILED:
            raise OutboxError(f"the member {id} of the drain cannot go on; the log of its executor says why")
        return {name: tally.sums[metric] for name, metric in _COUNTED.items()}

    @contextlib.contextmanager
    def _stop(self, worker: App) -> Iterator[threading.Event]:
        """Yield an event that is set when the time has come."""
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
            timer.cancel()  # the process serves other tasks then
