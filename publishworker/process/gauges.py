"""What a worker says about itself, besides the results of batches.

Every 15 s it sends metrics: its heartbeat and load and, if it is one of two, the backlog. The column Info of its
heartbeat is for `outbox workers` and the charts. It has the backlog also if no metrics are sent, and no secret and no
message.
"""

import itertools
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from outbox import __version__
from outbox.base.schedules import COUNT
from outbox.errors import OutboxError
from outbox.program.settings import fields_of
from outbox.rows import backlog, workers
from outbox.rows.task_table import TaskTable
from outbox.table.states import UNSENT
from publishworker.log import ThrottledLog, log
from publishworker.process.worker_settings import RelaySettings
from publishworker.pubsub.failures import REASONS, FailureKind
from publishworker.telemetry import metrics as m
from publishworker.telemetry.history import WorkerHistory, size
from publishworker.telemetry.metrics import Metrics
from publishworker.turn.membership import Membership
from publishworker.turn.relay import Relay

#: Seconds between two reports, and between two counts of the backlog.
REPORT_SECONDS = 15.0
#: Max bytes of the JSON, and of all but the history. The row is written every few seconds, and read by each status.
MAX_BYTES, MAX_OTHER_BYTES = 6_000, 2_500
#: Max bytes of the list of shards. Only a worker with hundreds of scattered shards has more.
MAX_SHARD_BYTES = 1_200
#: Failures after which a task is dead in its first attempt.
DEAD_AT_ONCE = tuple(each.name for each in REASONS if each.kind is FailureKind.CONTENT)
#: Max characters of an error, and of the value of a setting.
MAX_CHARACTERS = 200


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

    def __call__(self) -> None:
        if not self._metrics.wanted or self._clock() - self._at < REPORT_SECONDS:
            return
        self._at = self._clock()
        self._metrics.count(m.HEARTBEAT, 1)
        self._metrics.gauge(m.WORKERS, self._membership.size)
        self._metrics.sample(m.IN_FLIGHT, self._relay.in_flight.places_by_topic().total())
        # The worker ends after these events. A counter that begins with its last value has no increase in Prometheus.
        for reason in m.STOP_REASONS:
            self._metrics.zero(m.FORCED_STOP, reason=reason)
        for topic in self._relay.discoverer.active_topics:
            self._metrics.zero(m.PUBLISHED, topic=topic)  # so that "nothing is published" is visible
            self._metrics.zero(m.UNCONFIRMED, topic=topic)  # the first event is an alarm, as above
            for reason in DEAD_AT_ONCE:
                self._metrics.zero(m.DEAD, topic=topic, reason=reason)
        circuits = self._relay.topics.circuits.states().items()
        states = {(topic,): m.OPEN if circuit.is_open else m.HALF_OPEN for topic, circuit in circuits}
        self._metrics.gauges(m.CIRCUIT_STATE, states)


def send_backlog(metrics: Metrics, history: WorkerHistory, topics: Collection[str], table: TaskTable) -> None:
    """Send the numbers of unsent tasks, and note them: 0 for `topics` without pending ones."""
    found = backlog.read_unsent(table, backlog.STALENESS)
    metrics.gauge(m.PENDING, found.total.pending)
    zeros = dict.fromkeys(((topic, "pending") for topic in topics), 0)
    metrics.gauges(m.TOPIC_TASKS, {**zeros, **found.by_topic_and_state()})
    if found.whole:
        lines = found.topics().items()
        unsent = {topic: None if line.at_least & {*UNSENT} else line.unsent for topic, line in lines}
        history.add_backlog({topic: line.pending for topic, line in lines}, unsent)


def send_ages(metrics: Metrics, history: WorkerHistory, table: TaskTable) -> None:
    """Send the age of the oldest task, of all topics and of each, and note it. Send how many workers died."""
    ages = backlog.oldest_ages(table)
    metrics.gauge(m.OLDEST_AGE, ages.oldest)
    metrics.gauges(m.TOPIC_OLDEST_AGE, {(topic,): age for topic, age in ages.by_topic.items()})
    history.add_ages(ages.by_topic, ages.oldest)
    if metrics.wanted:
        metrics.gauge(m.DIED_WORKERS, workers.died(table))


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
        except Exception:
            log.exception(
                "Counting the backlog failed with an unexpected error. Please report it.", extra={"action": "backlog"}
            )
        else:
            return max(REPORT_SECONDS, COUNT.after(self._clock() - began))
        return REPORT_SECONDS

    def _run(self) -> None:
        wait = COUNT.first
        while not self._stop.wait(wait):
            wait = self.once()


def worker_info(
    settings: RelaySettings, relay: Relay, history: WorkerHistory, shards: Sequence[int]
) -> dict[str, object]:
    """Return the JSON. Seconds count from the heartbeat. What does not fit is counted in `..._left_out`."""
    runs = list(_fitting(_runs(shards), MAX_SHARD_BYTES))
    info: dict[str, object] = {
        "host": socket.gethostname()[:MAX_CHARACTERS],
        "version": __version__,
        "shards": runs,
        "shards_left_out": len(shards) - sum(1 + last - first for first, last in runs),
        "in_flight": len(relay.in_flight),
        "utilization": round(relay.in_flight.utilization, 2),
        "settings": dict(_changed(settings)),
    }
    circuits = [
        {
            "topic": topic,
            "reason": state.failure.reason,
            "error": state.failure.error[:MAX_CHARACTERS],
            "open_seconds": round(state.seconds_open, 1),
            "seconds_to_probe": round(state.seconds_to_probe, 1),
        }
        for topic, state in sorted(relay.topics.circuits.states().items())
    ]
    info |= {"circuits": [], "circuits_left_out": len(circuits)}
    fitting = list(_fitting(circuits, MAX_OTHER_BYTES - size(info)))
    info |= {"circuits": fitting, "circuits_left_out": len(circuits) - len(fitting)}
    return info | {"history": history.as_json(MAX_BYTES - size(info) - len(',"history":'))}


def _changed(settings: RelaySettings) -> Iterator[tuple[str, Any]]:
    """Yield the settings that differ from their defaults. An endpoint is a host and a port, without credentials."""
    for field in fields_of(RelaySettings):
        value = getattr(settings, field.name)
        if field.default is not None and value != field.kind.value(field.default, field.flag):
            yield field.name, value[:MAX_CHARACTERS] if isinstance(value, str) else value


def _runs(shards: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of each run of shard IDs that follow each other."""
    for _, run in itertools.groupby(enumerate(sorted(shards)), lambda pair: pair[1] - pair[0]):
        ids = [id for _, id in run]
        yield ids[0], ids[-1]


def _fitting(values: Iterable[Any], left: int) -> Iterator[Any]:
    """Yield the first values whose JSON has at most `left` bytes."""
    for value in values:
        left -= size(value) + 1  # a comma
        if left < 0:
            return
        yield value
