"""`drain`: a backlog that is too large for the fleet, sent by members on Spark's executors."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from random import Random
from uuid import uuid4

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from outbox.admin.table import TaskTable
from outbox_pipeline import schemas
from outbox_pipeline.jobs.drain.executor import Members, awake
from outbox_pipeline.settings import DrainSettings
from publishworker.app import is_work, open_store
from publishworker.spanner.store import SpannerStore, StoreError, Unsent
from publishworker.worker import Pause

#: Seconds of the longest wait between two rounds that publish nothing. The first is --poll-interval, each further one
#: is twice as long.
LONGEST_WAIT = 30.0

_log = logging.getLogger("outbox_pipeline")


@dataclass(frozen=True, slots=True)
class Drained:
    """What the members did, and how many tasks there are in each state after it, of all topics.

    `published` went to Pub/Sub, `uncommitted` of them without a commit, so that they may go there again;
    `already_published` were sent by others first; `failed` attempts failed, `became_dead` tasks by them; `unconfirmed`
    were to be sent at most once, and are marked or may be; `aborted` transactions were run again. What a killed
    executor had counted is in none of these. `rounds` were needed, of so many `workers`.
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
    dead: int
    paused: int
    seconds: float

    @property
    def work_left(self) -> bool:
        """Tell whether it stopped before the table was drained."""
        return self.pending + self.retrying > 0


def run(
    spark: SparkSession,
    settings: DrainSettings,
    *,
    deadline: float | None = None,
    note: Callable[[str], object] = lambda _text: None,
) -> Drained:
    """Send until nothing is pending or retrying outside of paused topics, or for `deadline` seconds.

    Workers that run share the shards with the members: what theirs hold when the members have ended is left to them, or
    to another round of members, which divides the shards anew.

    Raises NotReached: Spanner, the table or a permission. Raises OutboxError if a member failed as often as Spark tries
    a task; what was sent stays sent, and the job can be run again.
    """
    begin = time.monotonic()
    end = float("inf") if deadline is None else begin + deadline
    store = open_store(settings)
    until = None if deadline is None else TaskTable(store.database).now() + timedelta(seconds=deadline)
    workers = min(settings.workers or spark.sparkContext.defaultParallelism, len(store.shards))
    counts, rounds = Counter(dict.fromkeys(schemas.DRAINED.fieldNames(), 0)), 0
    pause = Pause(settings.poll_interval, LONGEST_WAIT, Random())  # noqa: S311 - it spreads load
    while _work(left := store.unsent()) and (rest := end - time.monotonic()) > 0:
        if rounds:
            time.sleep(min(pause.next(), rest))
        else:
            # Executors may take longer to start than the members' rows make them live.
            spark.range(0, workers, 1, workers).mapInArrow(awake, "id long").write.format("noop").mode("append").save()
        rounds += 1
        note(f"round {rounds}: {workers} members, {_work(left):,} tasks to send")
        done = _round(spark, settings, store, workers, until)
        counts.update(done)
        if done["published"]:
            pause.reset()
    of_state = Counter[str]()
    for each in left:
        of_state[each.state] += each.count
    states = {state: of_state[state] for state in ("pending", "retrying", "scheduled", "dead", "paused")}
    return Drained(**counts, rounds=rounds, workers=workers, **states, seconds=time.monotonic() - begin)


def _work(unsent: Sequence[Unsent]) -> int:
    return sum(each.count for each in unsent if is_work(each))


def _round(
    spark: SparkSession, settings: DrainSettings, store: SpannerStore, workers: int, until: datetime | None
) -> dict[str, int]:
    """Run members until all have ended, and return what they have counted."""
    run = uuid4().hex[:12]
    ids = tuple(f"spark-{run}-{number}" for number in range(workers))
    try:
        # All at once, before the first of them looks: else it would have all shards, until it sees the others.
        for id in ids:
            store.heartbeat(id, datetime.now(UTC), ())
        members = spark.range(0, workers, 1, workers).mapInArrow(Members(settings, ids, until), schemas.DRAINED)
        [row] = members.agg(*(f.sum(name).alias(name) for name in schemas.DRAINED.fieldNames())).collect()
        counts: dict[str, int] = row.asDict()
        return counts
    finally:
        for id in ids:  # those that were killed and not started again
            _leave(store, id)


def _leave(store: SpannerStore, id: str) -> None:
    try:
        store.leave(id)
    except StoreError as error:
        _log.warning(
            "%s did not take its leave, workers wait for its shards until its lease ends: %s", id, error,
            extra={"action": "leave"},
        )  # fmt: skip
