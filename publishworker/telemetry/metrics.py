"""The table of all metrics, `Metrics`, which sends them and never fails the relay, and the clients of `--metrics`.

Only this module imports `datadog` and the OpenTelemetry SDK, when they are wanted.
"""

import importlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

from outbox import __version__
from outbox.base.start import install
from outbox.errors import InvalidMessage, SettingError
from outbox.message import check_topic
from outbox.observing import Recorder
from outbox.program.settings import one_of
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
#: An agent is configured if any of these is set. The client reads them, and DD_ENV, DD_SERVICE and DD_VERSION as tags.
AGENT_VARIABLES = ("DD_DOGSTATSD_URL", "DD_AGENT_HOST", "DD_DOGSTATSD_PORT")
#: Max packets that wait for a slow agent, and seconds for sending one.
QUEUED_PACKETS, SOCKET_SECONDS = 1000, 1.0
#: Seconds between two log lines about lost metrics.
LOST_SECONDS = 3600.0
#: The instrument of OpenTelemetry for each type of metric.
INSTRUMENTS = {"count": "counter", "gauge": "gauge", "distribution": "histogram"}
#: The standard variable that chooses the exporter of metrics.
EXPORTER = "OTEL_METRICS_EXPORTER"
#: The package of the exporter for each protocol of OTLP. The first one is the default and part of the extra.
EXPORTERS = {"http/protobuf": "http", "grpc": "grpc"}
#: Tags that have an attribute in the semantic conventions. Other attributes begin with `outbox.`.
#: https://opentelemetry.io/docs/specs/semconv/messaging/messaging-metrics
ATTRIBUTES = {"topic": "messaging.destination.name", "reason": "error.type"}
#: Boundaries of the histograms: from one millisecond to an hour, and from one task to the max batch size.
BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3600)
TASKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


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
    "Tasks that were published and then found deleted before the worker could mark them, so subscribers receive a "
    "message that an application or an operator has cancelled. The worker logs the ID of each.")
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
    "Age of the oldest pending, retrying or blocked task, as of ten seconds ago, in any topic that is not paused (the "
    "first 1,000 by name): the time since it should first have been sent. No failed attempt changes it. 0 without any.")
TOPIC_OLDEST_AGE = Metric("outbox.topic_oldest_task_age", "gauge", "second", ("topic",), -1,
    "The same by topic, for each topic with such tasks. A topic without any is sent as 0 for ten minutes.")
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
HEARTBEAT = Metric("outbox.heartbeat_count", "count", "unit", (), 1,
    "Each live worker adds 1 every 15 s, even while a service is unavailable. While polls time out, every 35 s.")
FORCED_STOP = Metric("outbox.forced_stop_count", "count", "event", ("reason",), -1,
    "Workers that ended with in-flight batches, by reason: `shutdown_timeout` after --shutdown-timeout, or `stuck` if "
    "a batch had no new transaction for over 120 s, beyond all time limits. The exit code is then 1.")
PIPELINE_ROWS = Metric("outbox.pipeline_row_count", "count", "row", ("job", "outcome"), 0,
    "Rows of a job of the pipeline, by outcome. `register`: `registered`, `existing`, `repeated`, `rejected`. "
    "`archive`: `written`, `deleted`, `resent`, `missing`. `drain`: `published`, `already_published`, `uncommitted`, "
    "`became_dead`. `replay`: `replayed`, `registered`, `unsent`, `resent`, `missing`. `audit`: `delivered`, `late`, "
    "`lost`, `unknown`, `republished`, `redelivered`, `mismatched`, `out_of_order`, `cancelled_after_publish`, "
    "`applied`, `not_applied`, `applied_late`, `unregistered`.")
PIPELINE_RUNS = Metric("outbox.pipeline_run_count", "count", "event", ("job", "result"), 0,
    "Jobs of the pipeline that ended, by result: `done`, `rejected` if the job rejected rows, `work_left` if a drain "
    "stopped with unsent tasks, `lost` or `not_applied` if an audit found such tasks, `incomplete` if its certificate "
    "has others that were not delivered, `empty` if it found no task, or `failed`. A killed job sends nothing. The job "
    "`certificate` counts certificates.")

#: Of the workers.
METRICS = (
    PUBLISHED, ALREADY_PUBLISHED, UNCOMMITTED, CANCELLED, FAILED, DEAD, UNCONFIRMED, DEFERRED, ABORTED, PENDING,
    TOPIC_TASKS, OLDEST_AGE, TOPIC_OLDEST_AGE, LATENCY, PHASE_DURATION, IN_FLIGHT, CIRCUIT_STATE, WORKERS,
    HEARTBEAT, FORCED_STOP,
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
        """Set a gauge."""
        self._send("gauge", metric, value, tags)

    def gauges(self, metric: Metric, values: Mapping[Any, float]) -> None:
        """Set a gauge for each tuple of its tags, and for FORGET_TOPIC_SECONDS to 0 where it has no value now."""
        now, seen = self._clock(), self._seen[metric.name]
        seen |= dict.fromkeys(values, now)
        for tags, at in [*seen.items()]:
            if now - at >= FORGET_TOPIC_SECONDS:
                del seen[tags]
            else:
                self.gauge(metric, values.get(tags, 0), **dict(zip(metric.tags, tags, strict=True)))

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


def client(kind: str) -> Client | None:
    """Return the client of a kind, or None if no metrics are wanted or no agent is configured. Raises SettingError."""
    if kind == "opentelemetry":
        return _opentelemetry() if _chosen(EXPORTER, "otlp", "none") == "otlp" else None
    return _datadog() if kind == "datadog" else None


def _datadog() -> Client | None:
    configured = [name for name in AGENT_VARIABLES if os.environ.get(name)]
    if not configured:
        return None
    # The client warns for every packet that an agent misses, and for an invalid address when it is imported.
    _LostMetrics("the DogStatsD agent", "datadog.dogstatsd").begin()
    try:
        from datadog.dogstatsd.base import DogStatsd  # noqa: PLC0415 - 125 ms, and an extra that not everyone installs
    except ImportError as error:
        raise SettingError(
            f"{configured[0]} is set, but the package `datadog` is missing: {install('worker')}"
        ) from error
    # Packets hold many samples and are sent by a thread of the client, because the socket of a slow agent is full after
    # ten packets. `stop` sends the rest.
    client: Client = DogStatsd(
        disable_buffering=False,
        disable_background_sender=False,
        sender_queue_size=QUEUED_PACKETS,
        socket_timeout=SOCKET_SECONDS,
    )
    return client


def _opentelemetry() -> Client:
    """Return a client that exports to OTEL_EXPORTER_OTLP_ENDPOINT over OTLP.

    The standard variables apply: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables. The
    MeterProvider is the worker's own, so that the one of the process is neither used nor changed.
    """
    try:
        from opentelemetry.sdk.metrics import MeterProvider, _Gauge  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.metrics.export import (  # noqa: PLC0415 - the same
            AggregationTemporality,
            PeriodicExportingMetricReader,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - the same
    except ImportError as error:
        raise SettingError(
            f"--metrics opentelemetry: the OpenTelemetry SDK is missing: {install('opentelemetry')}"
        ) from error
    exporter_class = _exporter_class()
    # The exporter logs each failed attempt.
    lost = _LostMetrics("the OTLP endpoint", "opentelemetry.exporter", "opentelemetry.sdk")
    try:
        resource = Resource.create()
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "publishworker"}))
        # Otherwise the SDK exports a gauge forever, also the backlog of a worker that another one has replaced.
        exporter = exporter_class(preferred_temporality={_Gauge: AggregationTemporality.DELTA})
        provider = MeterProvider([PeriodicExportingMetricReader(exporter)], resource)
    except Exception as error:  # each variable has its own kind of error
        raise SettingError(f"--metrics opentelemetry: a variable OTEL_* is wrong: {error}") from error
    lost.begin()
    return _OpenTelemetry(provider)


def _exporter_class() -> Any:
    names = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = _chosen(next(filter(os.environ.get, names), names[1]), *EXPORTERS)
    package = EXPORTERS[protocol]
    try:
        module = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{package}.metric_exporter")
    except ImportError as error:
        raise SettingError(
            f"--metrics opentelemetry: the exporter for {protocol} is missing. Install it: pip install "
            f"opentelemetry-exporter-otlp-proto-{package}. Another protocol can be set in {names[0]}"
        ) from error
    return module.OTLPMetricExporter


def _chosen(name: str, *choices: str) -> str:
    """Return the value of a variable, whose case does not matter, by default the first choice. Raises SettingError."""
    value: str = one_of(*choices).value((os.environ.get(name) or choices[0]).lower(), name)
    return value


class _OpenTelemetry:
    """A client whose instruments are the table of metrics."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        meter = provider.get_meter("publishworker", __version__)
        self._instruments = {metric.name: _instrument(meter, metric) for metric in (*METRICS, *PIPELINE)}

    def increment(self, metric: str, value: float, tags: list[str]) -> None:
        self._instruments[metric].add(value, _attributes(tags))

    def gauge(self, metric: str, value: float, tags: list[str]) -> None:
        self._instruments[metric].set(value, _attributes(tags))

    def distribution(self, metric: str, value: float, tags: list[str], sample_rate: float = 1) -> None:
        """Record a value, whatever the rate, because a histogram is aggregated in this process."""
        self._instruments[metric].record(value, _attributes(tags))

    def stop(self, timeout: float) -> None:
        self._provider.shutdown(timeout_millis=timeout * 1000)


def _instrument(meter: Any, metric: Metric) -> Any:
    described: dict[str, Any] = {"name": metric.name, "unit": unit_of(metric), "description": metric.meaning}
    if metric.type == "distribution":
        described["explicit_bucket_boundaries_advisory"] = BUCKETS if metric.unit == "second" else TASKS
    return getattr(meter, f"create_{INSTRUMENTS[metric.type]}")(**described)


def unit_of(metric: Metric) -> str:
    """Return the unit of a metric as a UCUM code (https://ucum.org): seconds, or an annotation such as `{task}`."""
    return "s" if metric.unit == "second" else f"{{{metric.unit}}}"


def _attributes(tags: list[str]) -> dict[str, str]:
    return {attribute_of(name): value for name, _, value in (tag.partition(":") for tag in tags)}


def attribute_of(tag: str) -> str:
    """Return the name of the attribute for a tag."""
    return ATTRIBUTES.get(tag, f"outbox.{tag}")


class _LostMetrics(logging.Handler):
    """Replaces the handlers of a client's loggers, which warn for each failed request, by one line per LOST_SECONDS.

    Before `begin`, the client reads its variables, and warns of each value that it replaces by a default.
    """

    def __init__(self, receiver: str, *loggers: str) -> None:
        super().__init__(logging.WARNING)
        self._receiver = receiver
        self._logged_at = float("-inf")
        self._loggers = [logging.getLogger(name) for name in loggers]
        self._begun = False
        for logger in self._loggers:
            logger.handlers = [self]
            logger.propagate = False
            logger.setLevel(logging.WARNING)

    def begin(self) -> None:
        self._begun = True
        for logger in self._loggers:
            logger.setLevel(logging.NOTSET)

    def emit(self, record: logging.LogRecord) -> None:
        if not self._begun:
            text = "A variable of the metrics is wrong: %s"
            log.warning(text, record.getMessage(), extra={"action": "metrics"})
        elif time.monotonic() - self._logged_at >= LOST_SECONDS:
            self._logged_at = time.monotonic()
            log.warning(
                "Metrics are lost, and publishing continues: %s does not accept them: %s",
                self._receiver, record.getMessage().partition("\n")[0], extra={"action": "metrics"},
            )  # fmt: skip
