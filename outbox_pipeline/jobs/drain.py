"""`drain`: send a backlog that is too large for the live workers, with workers on Spark's executors.

The driver starts rounds of Spark tasks. Each Spark task runs a worker until its shards are drained. If Spark retries
the Spark task, the new worker has the same ID, so it gets the same shards at once.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any
from uuid import uuid4

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.types import StringType, StructType

from outbox.base.schedules import ROUND, Backoff
from outbox.base.values import counted, listed
from outbox.errors import OutboxError
from outbox.program import logs
from outbox.rows import backlog
from outbox.rows.task_table import TaskTable
from outbox.table.states import UNSENT
from outbox_pipeline import schemas
from outbox_pipeline.spark.spark_tasks import Rows, map_rows, parallelism
from publishworker import process
from publishworker.process.app import App, open_store, until_drained
from publishworker.process.worker_settings import RelaySettings
from publishworker.spanner.store import SpannerStore, any_to_send
from publishworker.spanner.write_errors import StoreError
from publishworker.telemetry import metrics as m
from publishworker.telemetry.clients import client
from publishworker.telemetry.metrics import Client, Metric, Metrics

#: What a worker counts, and the relay's metric for each count.
_COUNTED = {
    "published": m.PUBLISHED,
    "already_published": m.ALREADY_PUBLISHED,
    "uncommitted": m.UNCOMMITTED,
    "failed": m.FAILED,
    "became_dead": m.DEAD,
    "unconfirmed": m.UNCONFIRMED,
    "aborted": m.ABORTED,
}
#: The counts of a worker, and why its last turn failed, or NULL if it did not.
_RESULT = StructType([*schemas.counts(*_COUNTED), *schemas.optional(last_error=StringType())])

_log = logging.getLogger("outbox_pipeline")


def run(spark: SparkSession, settings: RelaySettings, *, deadline: float | None = None) -> dict[str, Any]:
    """Send until nothing is pending or retrying outside of paused topics, or for `deadline` seconds.

    Returns the counts of docs/pipeline/drain.md. Those of a killed executor are missing.

    The drain's workers share the shards with all live workers. If tasks are left in their shards, another round
    starts with a new shard assignment.

    Raises NotReached, or OutboxError if a worker failed in all attempts of its Spark task. Sent tasks stay sent, and
    the job can be run again.
    """
    end = float("inf") if deadline is None else time.monotonic() + deadline
    store = open_store(settings)
    until = None if deadline is None else TaskTable(store.database).now() + timedelta(seconds=deadline)
    workers = min(parallelism(spark), store.layouts[0].shards)
    counts, rounds, last_error = Counter(dict.fromkeys(_COUNTED, 0)), 0, None
    pause = Backoff(ROUND._replace(first=settings.poll_interval), Random())  # noqa: S311 - jitter, not security
    while (work_left := any_to_send(store)) and (remaining := end - time.monotonic()) > 0:  # OUT-SPARK-1
        if rounds:
            time.sleep(min(pause.next(), remaining))
            workers = min(parallelism(spark), store.layouts[0].shards)  # executors can have started or ended
        else:
            # Executors may take longer to start than the liveness timeout of the heartbeats below.
            spark.range(0, workers, 1, workers).mapInArrow(warm_up, "id long").count()
        rounds += 1
        _log.info("Round %s: %s", rounds, counted(workers, "worker"), extra={"action": "drain"})
        done, last_error = _round(spark, settings, store, workers, until)
        counts.update(done)
        if done["published"]:
            pause.reset()
    work_left = work_left or any_to_send(store, misrouted=True)
    of_state = Counter[str]()
    for (_, state), number in backlog.read_unsent(TaskTable(store.database)).by_topic_and_state().items():
        of_state[state] += number
    if work_left:
        _log.warning(
            "Drain ended at its deadline, or because a route is invalid, with %s pending and %s retrying tasks left%s",
            f"{of_state['pending']:,}", f"{of_state['retrying']:,}",
            f". The last turn of a worker failed: {last_error}" if last_error else "", extra={"action": "work_left"},
        )  # fmt: skip
    states = {state: of_state[state] for state in (*UNSENT, "paused")}
    ended = {"work_left": work_left, "last_error": last_error}
    return {**counts, "rounds": rounds, "workers": workers, **states, **ended}


def _round(
    spark: SparkSession, settings: RelaySettings, store: SpannerStore, workers: int, until: datetime | None
) -> tuple[Counter[str], str | None]:
    """Run workers until all have stopped. Return the sums of their counts, and the last error of one, or None."""
    run = uuid4().hex[:12]
    ids = tuple(f"spark-{run}-{number}" for number in range(workers))
    try:
        # Write all heartbeats before the first worker polls. Otherwise it polls all shards until it reads the others.
        for id in ids:
            store.heartbeat(id, datetime.now(UTC), store.layouts)
        numbers = spark.range(0, workers, 1, workers)
        results = [row.asDict() for row in map_rows(numbers, _RESULT, run_workers, settings, ids, until).collect()]
        errors = [error for each in results if (error := each.pop("last_error"))]
        return sum(map(Counter, results), Counter[str]()), next(iter(errors), None)
    finally:
        left: dict[str, StoreError] = {}
        for id in ids:  # workers that were killed and not restarted left theirs
            try:
                store.delete_heartbeat(id)
            except StoreError as error:
                left[id] = error
        if left:
            _log.warning(
                "%s (%s) not deleted; other workers take over after the liveness timeout: %s",
                counted(len(left), "heartbeat"), listed(left), next(iter(left.values())), extra={"action": "leave"},
            )  # fmt: skip


def warm_up(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the input. This starts the process and its imports before the first heartbeats are written."""
    yield from batches


def run_workers(
    settings: RelaySettings, ids: Sequence[str], until: datetime | None, batches: Iterator[Rows]
) -> Iterator[Rows]:
    """Run the worker of each number in a Spark task, one after the other, and yield their results.

    `ids` are the worker IDs by number. The workers handle no signals. They stop at `until`, by the database's clock;
    None is no deadline. Raises NotReached, OutboxError.
    """
    logs.configure(settings.log_format, settings.log_level)
    for rows in batches:
        yield [_relay(settings, ids[row["id"]], until) for row in rows]


def _relay(settings: RelaySettings, id: str, until: datetime | None) -> dict[str, Any]:
    tally = Tally(client(settings.metrics, id))
    stop, timer = threading.Event(), None
    try:
        worker = App(settings, id=id, metrics=tally)
        drained = until_drained(worker.store, lambda: worker.membership.shards, settings.poll_interval)
        if until is not None:
            left = until - TaskTable(worker.store.database).now()
            timer = threading.Timer(left.total_seconds(), stop.set)
            timer.daemon = True
            timer.start()
        code = worker.until_stopped(stop, drained, timeout_exit_code=process.WORK_LEFT)
    finally:
        if timer:
            timer.cancel()  # Spark reuses the process for other Spark tasks
        tally.stop()
    if code == process.FAILED:
        raise OutboxError(f"Worker {id} failed. See the log of its executor")
    counts = {name: tally.sums[metric] for name, metric in _COUNTED.items()}
    return counts | {"last_error": str(worker.failure) if worker.failure else None}


class Tally(Metrics):
    """Adds up counts by metric, ignoring tags, and forwards all metrics to the client if there is one."""

    def __init__(self, client: Client | None = None) -> None:
        super().__init__(client)
        self.sums: Counter[Metric] = Counter()

    def count(self, metric: Metric, value: int, **tags: str) -> None:
        self.sums[metric] += value
        super().count(metric, value, **tags)
