"""`drain`: send a backlog that is too large for the live workers, with workers on Spark's executors."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from random import Random
from uuid import uuid4

from pyspark.sql import SparkSession

from outbox.admin.table import TaskTable
from outbox_pipeline import schemas
from outbox_pipeline.jobs.drain.executor import Workers, warm_up
from outbox_pipeline.settings import DrainSettings
from publishworker.app import open_store
from publishworker.spanner.store import SpannerStore, StoreError
from publishworker.worker import Pause

#: Max seconds to wait after a round that published nothing. The first wait is --poll-interval, and each further one is
#: twice as long.
LONGEST_WAIT = 30.0

_log = logging.getLogger("outbox_pipeline")


@dataclass(frozen=True, slots=True)
class Drained:
    """What the drain's workers did, and how many tasks of all topics are left in each state, up to a limit.

    - `published` tasks, of which the commits of `uncommitted` failed, so that these may be published again
    - `already_published`: tasks that another worker had sent
    - `failed` attempts, and `became_dead` tasks that are dead because of them
    - `unconfirmed`: at-most-once tasks that may be lost
    - `aborted`: transactions that were retried
    - `rounds`, each with as many `workers`; `work_left` if pending or retrying tasks are left

    The counts of a killed executor are missing.
    """

    published: int
    already_published: int
    uncommitted: int
    failed: int
    became_dead: int
    unconfirmed: int
    aborted: int
    rounds: int
    workers: int
    pending: int
    retrying: int
    scheduled: int
    blocked: int
    dead: int
    paused: int
    work_left: bool
    seconds: float


def run(
    spark: SparkSession,
    settings: DrainSettings,
    *,
    deadline: float | None = None,
    note: Callable[[str], object] = lambda _text: None,
) -> Drained:
    """Send until nothing is pending or retrying outside of paused topics, or for `deadline` seconds.

    The drain's workers share the shards with all live workers. If tasks are left in their shards, another round
    starts with a new shard assignment.

    Raises NotReached if Spanner does not answer, or the table or a permission is missing. Raises OutboxError if a
    worker failed in all attempts of its Spark task. Sent tasks stay sent, and the job can be run again.
    """
    begin = time.monotonic()
    end = float("inf") if deadline is None else begin + deadline
    store = open_store(settings)
    until = None if deadline is None else TaskTable(store.database).now() + timedelta(seconds=deadline)
    workers = min(settings.workers or spark.sparkContext.defaultParallelism, store.layouts[0].shards)
    counts, rounds = Counter(dict.fromkeys(schemas.DRAINED.fieldNames(), 0)), 0
    pause = Pause(settings.poll_interval, LONGEST_WAIT, Random())  # noqa: S311 - jitter, not security
    while (work_left := store.has_work()) and (remaining := end - time.monotonic()) > 0:
        if rounds:
            time.sleep(min(pause.next(), remaining))
        else:
            # Executors may take longer to start than the liveness timeout of the heartbeats below.
            spark.range(0, workers, 1, workers).mapInArrow(warm_up, "id long").write.format("noop").mode(
                "append"
            ).save()
        rounds += 1
        note(f"Round {rounds}: {workers} workers")
        done = _round(spark, settings, store, workers, until)
        counts.update(done)
        if done["published"]:
            pause.reset()
    of_state = Counter[str]()
    for each in store.unsent():
        of_state[each.state] += each.count
    states = {state: of_state[state] for state in ("pending", "retrying", "scheduled", "blocked", "dead", "paused")}
    seconds = time.monotonic() - begin
    return Drained(**counts, rounds=rounds, workers=workers, **states, work_left=work_left, seconds=seconds)


def _round(
    spark: SparkSession, settings: DrainSettings, store: SpannerStore, workers: int, until: datetime | None
) -> dict[str, int]:
    """Run workers until all have stopped, and return the sums of their counts."""
    run = uuid4().hex[:12]
    ids = tuple(f"spark-{run}-{number}" for number in range(workers))
    try:
        # Write all heartbeats before the first worker polls. Otherwise it polls all shards until it reads the others.
        for id in ids:
            store.heartbeat(id, datetime.now(UTC), store.layouts, ())
        numbers = spark.range(0, workers, 1, workers)
        counts = Counter[str]()
        for row in numbers.mapInArrow(Workers(settings, ids, until), schemas.DRAINED).collect():
            counts.update(row.asDict())
        return counts
    finally:
        for id in ids:  # workers that were killed and not restarted left theirs
            _leave(store, id)


def _leave(store: SpannerStore, id: str) -> None:
    try:
        store.delete_heartbeat(id)
    except StoreError as error:
        _log.warning(
            "Heartbeat of %s was not deleted; other workers take over after the liveness timeout: %s", id, error,
            extra={"action": "leave"},
        )  # fmt: skip
