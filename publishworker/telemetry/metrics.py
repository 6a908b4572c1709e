"""The table of all metrics, and `Metrics`, which sends them and never fails the relay."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

from outbox.errors import InvalidMessage
from outbox.message import check_topic
from outbox.observing import Recorder
from outbox.table.states import UNSENT
from publishworker.log import log
from publishworker.topics.availability import FORGET_TOPIC_SECONDS
from publishworker.types import CLAIM, COMMIT, POLL, PUBLISH

Type = Literal["count", "gauge", "distribution"]
#: States of `TOPIC_TASKS`; pending tasks of a paused topic are `paused`.
TASK_STATES = (*UNSENT, "paused")
#: Phases of `PHASE_DURATION`.
PHASES = (POLL, CLAIM, PUBLISH, COMMIT)
#: Values of `CIRCUIT_STATE`.
CLOSED, HALF_OPEN, OPEN = 0, 1, 2
#: Values of the tag `reason` of `FORCED_STOP`.
STOP_REASONS = SHUTDOWN_TIMEOUT, STUCK = "shutdown_timeout", "stuck"
#: The value of the tag `topic` for all topics whose name is invalid.
INVALID_TOPIC = "invalid"
#: Max seconds for sending buffered metrics at the end.
STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of docs/reference/metrics.md and of k8s/datadog/metadata.csv, which are generated from this table.

    `unit` and `orientation` are Datadog's: 1 if a higher value is better, -1 if a lower value is better, otherwise 0.
    """

    name: str
    type: Type
    unit: str
    tags: tuple[str, ...]
    orientation: Literal[-1, 0, 1]
    meaning: str


# To add a metric: define it here, add it to a tuple below, count it in `reporter.py` (outcomes of batches) or sample it
# in `gauges.py` (every 15 s), query it in k8s/datadog/dashboard.json, and run `make docs`.
# fmt: off
REGISTERED = Metric("outbox.registered_task_count", "count", "task", ("topic",), 0,
    "Tasks passed to `outbox.register`, whether or not their transaction commits.")
INBOX = Metric("outbox.inbox_message_count", "count", "message", ("consumer", "outcome"), 0,
    "Messages that an `outbox.inbox.Handler` received, by outcome: `processed`, `duplicate`, `failed` or "
    "`missing_task_id`. With exactly-once delivery, a message whose acknowledgment fails is counted again as "
    "`not_acknowledged`.")
PUBLISHED = Metric("outbox.total_published_task_count", "count", "task", ("topic",), 1,
    "Tasks published to Pub/Sub, even if the commit then fails.")
ALREADY_PUBLISHED = Metric("outbox.already_published_tasks_count", "count", "task", ("topic",), -1,
    "Tasks claimed too late: another worker had sent them.")
UNCOMMITTED = Metric("outbox.published_but_failed_commits_count", "count", "task", ("topic",), -1,
    "Tasks in doubt: published, but the commit failed or its outcome is unknown. A duplicate may follow.")
CANCELLED = Metric("outbox.cancelled_after_publish_count", "count", "task", ("topic",), -1,
    "Tasks that were published and then found cancelled before the worker could mark them, so subscribers receive a "
    "message that an application or an operator has cancelled. The worker marks and logs each.")
FAILED = Metric("outbox.failed_task_count", "count", "task", ("topic", "reason"), -1,
    "Failed attempts to publish a task, by reason.")
DEAD = Metric("outbox.dead_task_count", "count", "task", ("topic", "reason"), -1,
    "Tasks that became dead, by the reason of their last failure. Only an operator can send them again.")
UNCONFIRMED = Metric("outbox.at_most_once_unconfirmed_count", "count", "task", ("topic",), -1,
    "At-most-once tasks that may be lost: they may be marked as sent although Pub/Sub does not have them.")
DEFERRED = Metric("outbox.deferred_task_count", "count", "task", ("topic",), 0,
    "Tasks deferred behind the head of their ordering key, which had failed, was scheduled or is dead.")
ABORTED = Metric("outbox.aborted_transaction_count", "count", "transaction", ("topic",), -1,
    "Transactions of batches that Spanner aborted after their rows were locked. Each ran again.")
PENDING = Metric("outbox.pending_task_count", "gauge", "task", (), -1,
    "Pending tasks of all topics that are not paused, ten seconds ago. The autoscaler uses it. Counting stops at "
    "10,000 tasks of each shard and topic, or earlier if more than 100 pairs of shard and topic have so many. At most "
    "1,000 topics are counted.")
TOPIC_TASKS = Metric("outbox.topic_task_count", "gauge", "task", ("topic", "state"), 0,
    f"Unsent tasks by topic and state ({', '.join(TASK_STATES)}), ten seconds ago, counted with the same limit. A "
    "state that has become empty is sent as 0 for ten minutes.")
OLDEST_AGE = Metric("outbox.oldest_task_age", "gauge", "second", (), -1,
    "Age of the oldest pending or retrying task, as of ten seconds ago, in any topic that is not paused (the first "
    "1,000 by name) and not sent as fast as its limits allow: the time since it should first have been sent. No failed "
    "attempt changes it. A blocked task waits for the head of its key, which counts. Of the ready tasks of a shard and "
    "topic, the 1,000 most urgent ones count. 0 without any.")
TOPIC_OLDEST_AGE = Metric("outbox.topic_oldest_task_age", "gauge", "second", ("topic",), -1,
    "The same by topic, also of topics at their limits. A topic without such tasks is sent as 0 for ten minutes.")
LATENCY = Metric("outbox.task_latency", "distribution", "second", ("topic",), -1,
    "Time from when a task should first have been sent to Pub/Sub's answer, with failed attempts, by Spanner's clock. "
    "A task that is sent again by plain DML counts from its CreatedAt. Each batch sends about 20 samples.")
PHASE_DURATION = Metric("outbox.phase_duration", "distribution", "second", ("phase", "topic"), -1,
    "Duration of a poll and, for each batch, of the claim (until its rows were locked, including aborted attempts), "
    "the publish and the commit: `poll`, `claim`, `publish`, `commit`. Only the publish has a topic.")
IN_FLIGHT = Metric("outbox.in_flight_batch_count", "distribution", "unit", (), 0,
    "Batches in flight in a worker, without those that have freed their place, every 15 s. If the value equals "
    "--concurrency, the worker has no free capacity.")
CIRCUIT_STATE = Metric("outbox.circuit_state", "gauge", "unit", ("topic",), -1,
    f"Circuit of a topic in a worker: {OPEN} open, {HALF_OPEN} half-open, {CLOSED} closed again (for ten minutes). A "
    "topic whose circuit has stayed closed has no value.")
WORKERS = Metric("outbox.live_worker_count", "gauge", "worker", (), 0,
    "Live workers, from this worker's point of view.")
DIED_WORKERS = Metric("outbox.died_worker_count", "gauge", "worker", (), -1,
    "Workers that ended within the hour without a shutdown, for example because they were killed.")
HEARTBEAT = Metric("outbox.heartbeat_count", "count", "unit", (), 1,
    "Each live worker adds 1 every 15 s, even while a service is unavailable. While polls time out, every 35 s.")
FORCED_STOP = Metric("outbox.forced_stop_count", "count", "event", ("reason",), -1,
    "Workers that ended with in-flight batches, by reason: `shutdown_timeout` after --shutdown-timeout, or `stuck` if "
    "a batch had no new transaction for over 120 s, beyond all time limits. The exit code is then 1.")
PIPELINE_ROWS = Metric("outbox.pipeline_row_count", "count", "row", ("job", "outcome"), 0,
    "Rows of a job of the pipeline, by outcome. `register`, and `sink` and `stream` of Spark's writes: `registered`, "
    "`existing`, `repeated`, `rejected`. "
    "`archive`: `written`, `deleted`, `resent`, `missing`. `drain`: `published`, `already_published`, `uncommitted`, "
    "`became_dead`. `replay`: `replayed`, `registered`, `unsent`, `resent`, `cancelled`, `replaced`. `audit`: "
    "`delivered`, `late`, `lost`, `cancelled`, `unknown`, `republished`, `redelivered`, `mismatched`, `out_of_order`, "
    "`cancelled_after_publish`, `applied`, `not_applied`, `applied_late`, `unregistered`.")
PIPELINE_RUNS = Metric("outbox.pipeline_run_count", "count", "event", ("job", "result"), 0,
    "Jobs of the pipeline that ended, by result: `done`, `rejected` if the job rejected rows, `work_left` if a drain "
    "stopped with unsent tasks, `lost` or `not_applied` if an audit found such tasks, `incomplete` if its certificate "
    "is not complete, `empty` if it found no task, or `failed`. A killed job sends nothing. The job "
    "`certificate` counts certificates.")

#: Of the workers.
METRICS = (
    PUBLISHED, ALREADY_PUBLISHED, UNCOMMITTED, CANCELLED, FAILED, DEAD, UNCONFIRMED, DEFERRED, ABORTED, PENDING,
    TOPIC_TASKS, OLDEST_AGE, TOPIC_OLDEST_AGE, LATENCY, PHASE_DURATION, IN_FLIGHT, CIRCUIT_STATE, WORKERS,
    DIED_WORKERS, HEARTBEAT, FORCED_STOP,
)
#: Of applications and subscribers.
APPLICATION = (REGISTERED, INBOX)
#: Of the jobs on Spark, sent by their drivers. The workers of a drain send METRICS.
PIPELINE = (PIPELINE_ROWS, PIPELINE_RUNS)
# fmt: on


class Client(Recorder, Protocol):
    """What the worker needs of a metrics client, such as `datadog.DogStatsd`."""

    def gauge(self, metric: str, value: float, tags: list[str]) -> object:
        """Set a gauge."""

    def distribution(self, metric: str, value: float, tags: list[str], sample_rate: float = 1) -> object:
        """Add a sample with probability `sample_rate`."""

    def stop(self, timeout: float) -> object:
        """Send what is buffered within `timeout` seconds, and close."""


class Metrics:
    """Sends metrics through a client, if there is one. The first error of the client is logged, and none is raised."""

    def __init__(self, client: Client | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._logged = False
        #: When each combination of the tags of a gauge last had a value.
        self._seen: defaultdict[str, dict[tuple[str, ...], float]] = defaultdict(dict)

    @property
    def wanted(self) -> bool:
        """Tell whether there is a client. Otherwise no values need to be computed."""
        return self._client is not None

    def count(self, metric: Metric, value: int, **tags: str) -> None:
        """Add `value` to a counter. Nothing is sent for 0."""
        if value:
            self._send("increment", metric, value, tags)

    def zero(self, metric: Metric, **tags: str) -> None:
        """Add 0 to a counter, because Datadog treats a counter that is never sent as unknown."""
        self._send("increment", metric, 0, tags)

    def gauge(self, metric: Metric, value: float, **tags: str) -> None:
        self._send("gauge", metric, value, tags)

    def gauges(self, metric: Metric, values: Mapping[Any, float]) -> None:
        """Set a gauge for each tuple of its tags, and to 0 for FORGET_TOPIC_SECONDS after its last other value."""
        now, seen = self._clock(), self._seen[metric.name]
        seen |= {tags: now for tags, value in values.items() if value}
        for tags in [tags for tags, at in seen.items() if now - at >= FORGET_TOPIC_SECONDS]:
            del seen[tags]
        for tags, value in {**dict.fromkeys(seen, 0), **values}.items():
            self.gauge(metric, value, **dict(zip(metric.tags, tags, strict=True)))

    def sample(self, metric: Metric, value: float, rate: float = 1, **tags: str) -> None:
        """Add a sample to a distribution with probability `rate`."""
        self._send("distribution", metric, value, tags, sample_rate=min(1, rate))

    def stop(self) -> None:
        """Send buffered metrics, which would be lost otherwise."""
        if self._client is not None:
            try:
                self._client.stop(STOP_SECONDS)
            except Exception:
                log.warning("The last metrics could not be sent", exc_info=True, extra={"action": "metrics"})

    def _send(self, method: str, metric: Metric, value: float, tags: dict[str, str], **more: float) -> None:
        if self._client is None:
            return
        try:
            texts = [f"{key}:{_tag(key, each)}" for key, each in tags.items()]
            getattr(self._client, method)(metric.name, value, tags=texts, **more)
        except Exception:  # metrics must not stop the relay
            if not self._logged:
                self._logged = True
                log.warning("Metrics are lost because the client failed", exc_info=True, extra={"action": "metrics"})


@lru_cache(maxsize=4096)
def _tag(key: str, value: str) -> str:
    """Return the value of a tag. Programs that write rows themselves may insert anything as a topic."""
    if key == "topic":
        try:
            check_topic(value)
        except InvalidMessage:
            return INVALID_TOPIC
    return value
