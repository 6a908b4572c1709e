"""Metrics that a worker sends every 15 s: its heartbeat and load and, if it polls the first shard, the backlog."""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from outbox.admin import backlog
from outbox.admin.table import TaskTable
from outbox.base.schedules import COUNT
from outbox.errors import OutboxError
from outbox.table.states import UNSENT
from publishworker.log import ThrottledLog, log
from publishworker.telemetry import metrics as m
from publishworker.telemetry.history import History
from publishworker.telemetry.metrics import Metrics
from publishworker.turn.membership import Membership
from publishworker.turn.relay import Relay
from publishworker.types import FORGET_TOPIC_SECONDS

#: Seconds between two reports, and between two counts of the backlog.
REPORT_SECONDS = 15.0


def with_zeros(clock: Callable[[], float]) -> Callable[[Mapping[Any, float]], dict[Any, float]]:
    """Return a function that adds a 0 for each key that had a value within FORGET_TOPIC_SECONDS."""
    seen: dict[Any, float] = {}

    def add(values: Mapping[Any, float]) -> dict[Any, float]:
        nonlocal seen
        now = clock()
        seen = {key: at for key, at in seen.items() if now - at < FORGET_TOPIC_SECONDS} | dict.fromkeys(values, now)
        return {key: values.get(key, 0) for key in seen}

    return add


class WorkerGauges:
    """Sends the gauges of this worker. It runs on the worker's thread, so a hung worker sends none."""

    def __init__(
        self, metrics: Metrics, membership: Membership, relay: Relay, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._membership = membership
        self._relay = relay
        self._clock = clock
        self._at = float("-inf")
        self._circuits = with_zeros(clock)

    def __call__(self) -> None:
        """Send the gauges if they are due."""
        if not self._metrics.wanted or self._clock() - self._at < REPORT_SECONDS:
            return
        self._at = self._clock()
        self._metrics.count(m.HEARTBEAT, 1)
        self._metrics.gauge(m.WORKERS, self._membership.size)
        load = self._relay.load
        self._metrics.sample(m.IN_FLIGHT, load.places_taken)
        # The worker ends after these events. A counter that begins with its last value has no increase in Prometheus.
        for reason in m.STOP_REASONS:
            self._metrics.zero(m.FORCED_STOP, reason=reason)
        for topic in load.topics:
            self._metrics.zero(m.PUBLISHED, topic=topic)  # so that "nothing is published" is visible
        states = {topic: m.OPEN if circuit.is_open else m.HALF_OPEN for topic, circuit in load.circuits.items()}
        for topic, state in self._circuits(states).items():
            self._metrics.gauge(m.CIRCUIT_STATE, state, topic=topic)


def backlog_counts(
    metrics: Metrics,
    history: History,
    topics: Callable[[], Collection[str]],
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[TaskTable], None]:
    """Return a function that sends the numbers of unsent tasks, and notes them: 0 for `topics` without pending ones."""
    padded = with_zeros(clock)

    def send(table: TaskTable) -> None:
        found = backlog.read_unsent(table, backlog.STALENESS)
        metrics.gauge(m.PENDING, found.total.pending)
        none = {(topic, "pending"): 0 for topic in topics()}
        for (topic, state), number in (none | padded(found.by_topic_and_state())).items():
            metrics.gauge(m.TOPIC_TASKS, number, topic=topic, state=state)
        if found.whole:
            lines = found.topics().items()
            unsent = {topic: None if line.at_least & {*UNSENT} else line.unsent for topic, line in lines}
            history.add_backlog({topic: line.pending for topic, line in lines}, unsent)

    return send


def oldest_ages(
    metrics: Metrics, history: History, clock: Callable[[], float] = time.monotonic
) -> Callable[[TaskTable], None]:
    """Return a function that sends the age of the oldest task, of all topics and of each, and notes it."""
    padded = with_zeros(clock)

    def send(table: TaskTable) -> None:
        ages = backlog.oldest_ages(table)
        metrics.gauge(m.OLDEST_AGE, max(ages.values(), default=0.0))
        for topic, age in padded(ages).items():
            metrics.gauge(m.TOPIC_OLDEST_AGE, age, topic=topic)
        history.add_ages(ages)

    return send


class BacklogSampler:
    """Reads the table at an interval, on a thread of its own, so that a slow count does not delay the relay."""

    def __init__(
        self,
        sample: Callable[[TaskTable], None],
        open_table: Callable[[], TaskTable],
        membership: Membership,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sample = sample
        self._open_table = open_table
        self._table: TaskTable | None = None
        self._membership = membership
        self._clock = clock
        self._throttled_log = ThrottledLog(clock)
        self._stop = threading.Event()

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, name="backlog", daemon=True).start()

    def stop(self) -> None:
        """Stop. A count that has begun ends within its time limits, or with the process."""
        self._stop.set()

    def once(self) -> float:
        """Count if this worker counts the backlog, and return the seconds to wait. Errors are logged only."""
        if not self._membership.counts_backlog:
            return REPORT_SECONDS
        began = self._clock()
        try:
            self._table = self._table or self._open_table()
            self._sample(self._table)
        except OutboxError as error:
            self._table = None  # a session was lost, so the store may have replaced the database
            self._throttled_log.log(
                "backlog", "", f"Counting the backlog failed. Its metrics are missing until a count succeeds: {error}"
            )
            return REPORT_SECONDS
        except Exception:
            log.exception(
                "Counting the backlog failed with an unexpected error. Please report it.", extra={"action": "backlog"}
            )
            return REPORT_SECONDS
        return max(REPORT_SECONDS, COUNT.after(self._clock() - began))

    def _run(self) -> None:
        wait = COUNT.first
        while not self._stop.wait(wait):
            wait = self.once()
