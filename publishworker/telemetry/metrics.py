"""The metrics of the worker: one table, and a recorder that can never break the loop."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal, Protocol

from outbox.errors import InvalidMessage
from outbox.message import check_topic

_log = logging.getLogger("publishworker")


Type = Literal["count", "gauge", "distribution"]
#: States of `TOPIC_TASKS`; pending tasks of a paused topic are `paused`.
TASK_STATES = ("pending", "paused", "retrying", "scheduled", "dead")
#: Phases of `PHASE_DURATION`.
POLL, CLAIM, PUBLISH, COMMIT = "poll", "claim", "publish", "commit"
#: Seconds in which the last metrics are sent.
STOP_SECONDS = 5.0
#: The tag of all topics whose name none can have.
INVALID_TOPIC = "invalid"
#: Values of `CIRCUIT_STATE`.
CLOSED, HALF_OPEN, OPEN = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of docs/reference/metrics.md and of k8s/datadog/metadata.csv, which are generated from this table.

    `unit` is one of Datadog's units, `better` says whether a rise is good news (1), bad news (-1) or neither (0).
    """

    name: str
    type: Type
    unit: str
    tags: tuple[str, ...]
    meaning: str
    better: Literal[-1, 0, 1] = 0


REGISTERED = Metric(
    "outbox.registered_task_count",
    "count",
    "task",
    ("topic",),
    "Tasks handed to `outbox.register`, whether or not they commit.",
)
PUBLISHED = Metric(
    "outbox.total_published_task_count",
    "count",
    "task",
    ("topic",),
    "Tasks published to Pub/Sub, also if the commit then fails.",
    1,
)
ALREADY_PUBLISHED = Metric(
    "outbox.already_published_tasks_count",
    "count",
    "task",
    ("topic",),
    "Tasks claimed too late: another worker had sent them.",
    -1,
)
UNCOMMITTED = Metric(
    "outbox.published_but_failed_commits_count",
    "count",
    "task",
    ("topic",),
    "Tasks that were published and whose commit failed or has an unknown outcome: a duplicate may come.",
    -1,
)
FAILED = Metric(
    "outbox.failed_task_count",
    "count",
    "task",
    ("topic", "reason"),
    "Attempts to publish a task that failed, by reason.",
    -1,
)
DEAD = Metric(
    "outbox.dead_task_count",
    "count",
    "task",
    ("topic", "reason"),
    "Tasks that became dead, by the reason of their last failure: nothing sends them but an operator.",
    -1,
)
UNCONFIRMED = Metric(
    "outbox.at_most_once_unconfirmed_count",
    "count",
    "task",
    ("topic",),
    "Tasks registered with `at_most_once` that are marked as sent, or may be, and are not known to be published.",
    -1,
)
DEFERRED = Metric(
    "outbox.deferred_task_count",
    "count",
    "task",
    ("topic",),
    "Tasks put off behind the head of their ordering key, which had failed, or was scheduled or dead.",
)
ABORTED = Metric(
    "outbox.aborted_transaction_count",
    "count",
    "transaction",
    ("topic",),
    "Transactions of batches that Spanner aborted after their rows were locked; each was run again.",
    -1,
)
PENDING = Metric(
    "outbox.pending_task_count",
    "gauge",
    "task",
    (),
    "Ready and due tasks of all topics that are not paused, ten seconds ago: what the autoscaler looks at. Counting "
    "stops at 10,000 for each shard and topic, earlier where there are more than a hundred of these, and after 1,000 "
    "topics.",
    -1,
)
TOPIC_TASKS = Metric(
    "outbox.topic_task_count",
    "gauge",
    "task",
    ("topic", "state"),
    f"Unsent tasks by topic and state ({', '.join(TASK_STATES)}), ten seconds ago and counted with the same limit. A "
    "state of a topic that has become empty is sent as 0 for ten minutes.",
)
OLDEST_AGE = Metric(
    "outbox.oldest_task_age",
    "gauge",
    "second",
    (),
    "Ten seconds ago minus the later of CreatedAt and AvailableAt of the task that had been ready or due longest then, "
    "of any topic that is not paused (the first 1,000 by name) and any priority; 0 if there was none.",
    -1,
)
LATENCY = Metric(
    "outbox.task_latency",
    "distribution",
    "second",
    ("topic",),
    "From when a task became due (the later of CreatedAt and AvailableAt) to Pub/Sub's answer, by Spanner's clock. One "
    "that is sent again by plain DML counts from when it first was. Of a batch about 20 samples are sent.",
    -1,
)
PHASE_DURATION = Metric(
    "outbox.phase_duration",
    "distribution",
    "second",
    ("phase",),
    "How long a poll took, and for each batch how long the claim (until its rows were locked, aborted tries "
    "included), the publishing and the commit took: `poll`, `claim`, `publish`, `commit`.",
    -1,
)
BATCH_SIZE = Metric(
    "outbox.batch_size", "distribution", "task", ("topic",), "Tasks of a batch that was to be sent in one transaction."
)
IN_FLIGHT = Metric(
    "outbox.in_flight_batch_count",
    "distribution",
    "unit",
    (),
    "Batches that a worker has in flight, looked at every 15 s: at --concurrency it is busy.",
)
CIRCUIT_STATE = Metric(
    "outbox.circuit_state",
    "gauge",
    "unit",
    ("topic",),
    f"Of a topic that does not work, as a worker sees it: {OPEN} it rests, {HALF_OPEN} it is being probed or may be, "
    f"{CLOSED} it works again (for ten minutes). Topics that work are not sent.",
    -1,
)
SHARDS = Metric("outbox.owned_shard_count", "gauge", "shard", (), "Shards that this worker polls.")
WORKERS = Metric("outbox.live_worker_count", "gauge", "worker", (), "Workers that live, as this one sees it.")
HEARTBEAT = Metric(
    "outbox.heartbeat_count",
    "count",
    "unit",
    (),
    "One from each worker every 15 s, also while a service is away; where polls get no answer one in 35 s at most.",
    1,
)
BUILD = Metric(
    "outbox.build_info",
    "gauge",
    "unit",
    ("outbox_version", "python_version", "spanner_version", "pubsub_version"),
    "1; the tags say what runs: this package, Python, and Google's two clients.",
)
SHUTDOWN_TIMEOUT = Metric(
    "outbox.shutdown_timeout_count",
    "count",
    "event",
    (),
    "Stops that ended with tasks in flight, after --shutdown-timeout.",
    -1,
)
STUCK = Metric(
    "outbox.stuck_batch_count",
    "count",
    "event",
    ("topic",),
    "Batches that were in flight for over 120 s, which no time limit explains: the worker ended with exit code 1.",
    -1,
)

PIPELINE_ROWS = Metric(
    "outbox.pipeline_row_count",
    "count",
    "row",
    ("job", "outcome"),
    "Rows of a job of the pipeline, by what became of them: `registered`, `existing`, `repeated` and `rejected` ones "
    "are all that `register` has read; `written`, `deleted`, `changed` and `missing` are of `archive` and its purge; "
    "`published`, `already_published`, `uncommitted` and `became_dead` are of `drain`; `replayed`, `registered`, "
    "`waiting`, `changed` and `missing` are of `replay`; `delivered`, `late`, `lost`, `unknown`, `republished`, "
    "`redelivered`, `mismatched` and `out_of_order` are of `audit`.",
)
PIPELINE_DURATION = Metric(
    "outbox.pipeline_duration", "distribution", "second", ("job",), "How long a job of the pipeline took."
)
PIPELINE_RUNS = Metric(
    "outbox.pipeline_run_count",
    "count",
    "event",
    ("job", "result"),
    "Jobs of the pipeline that ended, by result: `done`, `rejected` if rows were, `work_left` if a drain stopped with "
    "tasks to send, or `failed`; one that was killed sends nothing.",
)

#: Of the jobs on Spark, sent by their drivers. The members of a drain send METRICS, as workers do.
PIPELINE = (PIPELINE_ROWS, PIPELINE_DURATION, PIPELINE_RUNS)

#: Of the workers; REGISTERED is of applications.
METRICS = (
    PUBLISHED,
    ALREADY_PUBLISHED,
    UNCOMMITTED,
    FAILED,
    DEAD,
    UNCONFIRMED,
    DEFERRED,
    ABORTED,
    PENDING,
    TOPIC_TASKS,
    OLDEST_AGE,
    LATENCY,
    PHASE_DURATION,
    BATCH_SIZE,
    IN_FLIGHT,
    CIRCUIT_STATE,
    SHARDS,
    WORKERS,
    HEARTBEAT,
    BUILD,
    SHUTDOWN_TIMEOUT,
    STUCK,
)


@lru_cache(maxsize=4096)
def _tag(key: str, value: str) -> str:
    """Return the value of a tag: the names of topics are bounded, what other writers put in their place is not."""
    if key == "topic":
        try:
            check_topic(value)
        except InvalidMessage:
            return INVALID_TOPIC
    return value


class Client(Protocol):
    """What a metrics client offers; `datadog.DogStatsd` is one."""

    def increment(self, metric: str, value: float, tags: list[str]) -> object:
        """Add to a counter."""

    def gauge(self, metric: str, value: float, tags: list[str]) -> object:
        """Set a gauge."""

    def distribution(self, metric: str, value: float, tags: list[str], sample_rate: float = 1) -> object:
        """Add a sample, or leave it out: of all so many, each of which then counts for more."""

    def stop(self, timeout: float) -> object:
        """Send what is buffered within `timeout` seconds, and close."""


class Metrics:
    """Records through a client, or nowhere without one. A client that raises is reported once and outlived."""

    def __init__(self, client: Client | None = None) -> None:
        """Record through `client`."""
        self._client = client
        self._complained = False

    @property
    def wanted(self) -> bool:
        """Tell whether anyone listens: what is only made for a metric need not be made."""
        return self._client is not None

    def count(self, metric: Metric, value: int, **tags: str) -> None:
        """Add `value` to a counter; nothing is sent for 0."""
        if self._client is not None and value:
            self._guarded(self._client.increment, metric, value, tags)

    def zero(self, metric: Metric, **tags: str) -> None:
        """Add 0 to a counter: Datadog takes one that is never sent for unknown, not for 0."""
        if self._client is not None:
            self._guarded(self._client.increment, metric, 0, tags)

    def gauge(self, metric: Metric, value: float, **tags: str) -> None:
        """Set a gauge."""
        if self._client is not None:
            self._guarded(self._client.gauge, metric, value, tags)

    def sample(self, metric: Metric, value: float, rate: float = 1, **tags: str) -> None:
        """Add a sample to a distribution, or leave it to the others: `rate` of all are sent."""
        if self._client is not None:
            self._guarded(partial(self._client.distribution, sample_rate=min(1, rate)), metric, value, tags)

    def stop(self) -> None:
        """Send what is buffered: counts are lost otherwise."""
        if self._client is not None:
            try:
                self._client.stop(STOP_SECONDS)
            except Exception:
                _log.warning("the last metrics could not be sent", exc_info=True, extra={"action": "metrics"})

    def _guarded(self, send: Callable[..., object], metric: Metric, value: float, tags: dict[str, str]) -> None:
        try:
            send(metric.name, value, tags=[f"{key}:{_tag(key, each)}" for key, each in tags.items()])
        except Exception:  # metrics are no reason to stop sending tasks
            if not self._complained:
                self._complained = True
                _log.warning("metrics are lost: the client failed", exc_info=True, extra={"action": "metrics"})
