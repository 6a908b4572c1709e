"""What a worker says every 15 s: that it lives, what it is busy with, and, if it owns shard 0, how much waits."""

import logging
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from typing import Generic, Protocol, TypeVar

from outbox import __version__
from outbox.admin import backlog
from outbox.admin.backlog import Backlog
from outbox.admin.table import TaskTable
from outbox.errors import OutboxError
from outbox.shared.throttled_log import ThrottledLog
from publishworker.membership import Membership
from publishworker.telemetry import metrics as m
from publishworker.telemetry.metrics import Metrics

_log = logging.getLogger("publishworker")
K = TypeVar("K")

#: Seconds between two reports, and between two looks at the table.
INTERVAL = 15.0
#: A look that takes long is followed by a wait of so many times as long, so that it never is most of the load; but of
#: no longer than LONGEST_REST, as the autoscaler takes what is five minutes old for unknown.
RESTS, LONGEST_REST = 4, 120.0
#: Seconds before the first look: until then the membership has told which worker it is to look.
FIRST_WAIT = 5.0
#: Seconds for which what has become 0 is sent as 0: a gauge that is no longer sent keeps its last value in a graph.
REMEMBER_SECONDS = 600.0

BUILD_TAGS = {
    "outbox_version": __version__,
    "python_version": platform.python_version(),
    "spanner_version": version("google-cloud-spanner"),
    "pubsub_version": version("google-cloud-pubsub"),
}


class HasState(Protocol):
    """What a report needs of a relay."""

    @property
    def in_flight(self) -> int:
        """Return how many batches are in flight."""

    @property
    def topics(self) -> Collection[str]:
        """Return the topics that have unsent tasks, or had some lately."""

    def open_circuits(self) -> Mapping[str, bool]:
        """Return the topics that do not work, and whether each rests now."""


class Fading(Generic[K]):
    """Values by key; one that is gone stays as 0 for a while."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Remember nothing."""
        self._clock = clock
        self._seen: dict[K, float] = {}

    def __call__(self, values: Mapping[K, float]) -> dict[K, float]:
        """Return `values`, and 0 for what was there lately and is not any more."""
        now = self._clock()
        self._seen = {key: at for key, at in self._seen.items() if now - at < REMEMBER_SECONDS}
        self._seen |= dict.fromkeys(values, now)
        return {key: values.get(key, 0) for key in self._seen}


class WorkerGauges:
    """Tells of this worker. It belongs to the thread of the loop: no report, no life."""

    def __init__(
        self, metrics: Metrics, membership: Membership, relay: HasState, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Tell `metrics`."""
        self._metrics = metrics
        self._membership = membership
        self._relay = relay
        self._clock = clock
        self._at = float("-inf")
        self._circuits = Fading[str](clock)

    def __call__(self) -> None:
        """Send what is to be sent, if it is time."""
        if not self._metrics.wanted or self._clock() - self._at < INTERVAL:
            return
        self._at = self._clock()
        self._metrics.count(m.HEARTBEAT, 1)
        self._metrics.gauge(m.BUILD, 1, **BUILD_TAGS)
        self._metrics.gauge(m.SHARDS, len(self._membership.shards))
        self._metrics.gauge(m.WORKERS, self._membership.size)
        self._metrics.sample(m.IN_FLIGHT, self._relay.in_flight)
        for topic in self._relay.topics:  # else "nothing is published" could not be seen
            self._metrics.zero(m.PUBLISHED, topic=topic)
        states = {topic: m.OPEN if rests else m.HALF_OPEN for topic, rests in self._relay.open_circuits().items()}
        for topic, state in self._circuits(states).items():
            self._metrics.gauge(m.CIRCUIT_STATE, state, topic=topic)


class BacklogCounts:
    """Tells how many tasks wait, in all and by topic and state."""

    def __init__(
        self, metrics: Metrics, topics: Callable[[], Collection[str]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Tell `metrics`, also that nothing is pending of `topics`."""
        self._metrics = metrics
        self._topics = topics
        self._lately = Fading[tuple[str, str]](clock)

    def __call__(self, table: TaskTable) -> None:
        """Count, and send. Raises OutboxError."""
        found = backlog.read(table, of_sent=False)
        self._metrics.gauge(m.PENDING, found.total.pending)
        none = {(topic, m.TASK_STATES[0]): 0 for topic in self._topics()}
        for (topic, state), number in (none | self._lately(by_topic_and_state(found))).items():
            self._metrics.gauge(m.TOPIC_TASKS, number, topic=topic, state=state)


def by_topic_and_state(found: Backlog) -> Counter[tuple[str, str]]:
    """Return how many unsent tasks each topic has in each of `metrics.TASK_STATES`, where it has any."""
    counts: Counter[tuple[str, str]] = Counter()
    for line in found.lines:
        numbers = (0, line.pending) if line.paused else (line.pending, 0)
        for state, number in zip(m.TASK_STATES, (*numbers, line.retrying, line.scheduled, line.dead), strict=True):
            counts[line.topic, state] += number
    return +counts


def oldest_age(metrics: Metrics) -> Callable[[TaskTable], None]:
    """Return what tells how old the oldest pending task is."""
    return lambda table: metrics.gauge(m.OLDEST_AGE, backlog.oldest_age(table))


class BacklogSampler:
    """Looks at the table now and then, on a thread of its own: a slow count must not hold up the relay."""

    def __init__(
        self,
        look: Callable[[TaskTable], None],
        open_table: Callable[[], TaskTable],
        membership: Membership,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Call `look` while the `fleet` has given shard 0 to this worker."""
        self._look = look
        self._open_table = open_table
        self._table: TaskTable | None = None
        self._membership = membership
        self._clock = clock
        self._throttled_log = ThrottledLog(clock)
        self._stop = threading.Event()

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, name="lookout", daemon=True).start()

    def stop(self) -> None:
        """Look no more; a look that has begun ends within its limits, or with the process."""
        self._stop.set()

    def once(self) -> float:
        """Look, if this worker is the one to do it; return for how many seconds to wait then."""
        if 0 not in self._membership.shards:
            return INTERVAL
        began = self._clock()
        try:
            self._table = self._table or self._open_table()
            self._look(self._table)
        except OutboxError as error:  # a figure is missing, the relay goes on
            self._table = None  # the store may have another database by now: a session was lost
            self._throttled_log.say("backlog", "", f"how much waits is not known: {error}")
            return INTERVAL
        return max(INTERVAL, min(LONGEST_REST, RESTS * (self._clock() - began)))

    def _run(self) -> None:
        wait = FIRST_WAIT
        while not self._stop.wait(wait):
            try:
                wait = self.once()
            except Exception:  # a defect of a figure is no reason to end the relay
                _log.exception("a look at the table failed; this is a defect", extra={"action": "backlog"})
                wait = INTERVAL
