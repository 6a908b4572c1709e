"""The metrics of the worker: one table, and a recorder that can never break the loop."""

import logging
from dataclasses import dataclass
from typing import Protocol

_log = logging.getLogger("publishworker")


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of docs/reference/metrics.md, which is generated from this table."""

    name: str
    type: str
    tags: tuple[str, ...]
    meaning: str


REGISTERED = Metric(
    "outbox.registered_task_count",
    "count",
    ("topic",),
    "Tasks handed to `outbox.register`, whether or not they commit.",
)
PUBLISHED = Metric(
    "outbox.total_published_task_count",
    "count",
    ("topic",),
    "Tasks published to Pub/Sub, also if the commit then fails.",
)
ALREADY_PUBLISHED = Metric(
    "outbox.already_published_tasks_count",
    "count",
    ("topic",),
    "Tasks claimed too late: another worker had sent them.",
)
UNCOMMITTED = Metric(
    "outbox.published_but_failed_commits_count",
    "count",
    ("topic",),
    "Tasks that were published and whose commit failed or has an unknown outcome: a duplicate may come.",
)
FAILED = Metric(
    "outbox.failed_task_count", "count", ("topic", "reason"), "Attempts to publish a task that failed, by reason."
)
DEAD = Metric(
    "outbox.dead_task_count",
    "count",
    ("topic", "reason"),
    "Tasks that became dead, by the reason of their last failure: nothing sends them but an operator.",
)
IN_DOUBT = Metric(
    "outbox.at_most_once_in_doubt_count",
    "count",
    ("topic",),
    "Tasks registered with `at_most_once` that are marked as sent, or may be, and are not known to be published.",
)
PARKED = Metric(
    "outbox.parked_task_count",
    "count",
    ("topic",),
    "Tasks put off behind the head of their ordering key, which had failed, or was scheduled or dead.",
)
ABORTED = Metric(
    "outbox.aborted_transaction_count",
    "count",
    ("topic",),
    "Transactions of groups that Spanner aborted after their rows were locked; each was run again.",
)
SHARDS = Metric("outbox.owned_shard_count", "gauge", (), "Shards that this worker polls.")
OLDEST_AGE = Metric(
    "outbox.oldest_task_age",
    "gauge, seconds",
    (),
    "Now minus the later of CreatedAt and AvailableAt of the task that has been ready or due longest, of any topic "
    "that is not paused and any priority; 0 if there is none.",
)
DRAIN_TIMEOUT = Metric(
    "outbox.drain_timeout_count", "count", (), "Stops that ended with tasks in flight, after --drain-timeout."
)

METRICS = (
    REGISTERED,
    PUBLISHED,
    ALREADY_PUBLISHED,
    UNCOMMITTED,
    FAILED,
    DEAD,
    IN_DOUBT,
    PARKED,
    ABORTED,
    SHARDS,
    OLDEST_AGE,
    DRAIN_TIMEOUT,
)


class Client(Protocol):
    """What a metrics client offers; `datadog.DogStatsd` is one."""

    def increment(self, metric: str, value: float, tags: list[str]) -> object:
        """Add to a counter."""

    def gauge(self, metric: str, value: float, tags: list[str]) -> object:
        """Set a gauge."""

    def stop(self) -> object:
        """Send what is buffered and close."""


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

    def gauge(self, metric: Metric, value: float, **tags: str) -> None:
        """Set a gauge."""
        if self._client is not None:
            self._guarded(self._client.gauge, metric, value, tags)

    def stop(self) -> None:
        """Send what is buffered: counts are lost otherwise."""
        if self._client is not None:
            try:
                self._client.stop()
            except Exception:
                _log.warning("the last metrics could not be sent", exc_info=True, extra={"action": "metrics"})

    def _guarded(self, send: object, metric: Metric, value: float, tags: dict[str, str]) -> None:
        try:
            send(metric.name, value, tags=[f"{key}:{value}" for key, value in tags.items()])  # type: ignore[operator]  # two methods of one shape
        except Exception:  # metrics are no reason to stop sending tasks
            if not self._complained:
                self._complained = True
                _log.warning("metrics are lost: the client failed", exc_info=True, extra={"action": "metrics"})
