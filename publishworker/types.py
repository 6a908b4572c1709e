"""Plain data that the steps of a turn pass on: tasks, their outcomes, workers and topic controls.

Candidate, LockedRow and Version are NamedTuples, because a relay creates very many of them, and creating a frozen
dataclass takes four times as long.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, auto
from typing import Literal, NamedTuple

from outbox.table.controls import TopicControls
from outbox.table.ddl import Layout
from outbox.table.states import is_dead

#: The phases of a poll and of a batch whose durations are reported.
POLL, CLAIM, PUBLISH, COMMIT = "poll", "claim", "publish", "commit"
#: Max value of an INT64 column. Another writer may have set a column to it.
MAX_INT64 = 2**63 - 1


class Candidate(NamedTuple):
    """An unsent task that a poll has read, or the sendable prefix of an ordering key.

    The prefix is the first tasks of the key that may be sent now.
    """

    id: str
    topic: str
    shard: int
    priority: int
    created_at: datetime
    available_at: datetime | None  # None: ready; otherwise due
    ordering_key: str | None
    bytes: int
    #: For the sendable prefix of an ordering key: the IDs that follow this one. `bytes` is then the size of all of
    #: them.
    behind: tuple[str, ...] = ()
    #: The task after the prefix. If it is deferred, no poll reads it, so the commit that sends the prefix releases it.
    releases: str | None = None

    @property
    def task_count(self) -> int:
        """Return the number of tasks."""
        return 1 + len(self.behind)


@dataclass(frozen=True, slots=True)
class TopicKey:
    """A topic and an ordering key: their tasks are published in order."""

    topic: str
    ordering_key: str


@dataclass(frozen=True, slots=True)
class QueuedTask:
    """One of the first unsent tasks of an ordering key."""

    id: str
    bytes: int
    sendable: bool  # it is ready or due, or it is deferred and has not expired
    deferred: bool = False
    expired_before_due: bool = False  # expired before it was due, so it blocks no later task


#: The first unsent tasks of each key, in order.
KeyHeads = Mapping[TopicKey, Sequence[QueuedTask]]


#: Max rows of a poll. It is also the max number of ranges, because a poll asks for at least one row of each. A row
#: takes 2.8 kB of memory.
MAX_POLL_ROWS = 20_000
#: Seconds after which a topic without tasks is forgotten: it is not polled, its open circuit is closed, and a gauge of
#: it that has become 0 is not sent any more. Until then it is sent, because a graph keeps the last value.
FORGET_TOPIC_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PollRequest:
    """What to read: the ready tasks of these shards and topics, and optionally more."""

    #: Shard IDs, possibly of several layouts.
    shards: tuple[int, ...]
    topics: frozenset[str]
    #: Max rows of each range. A range is the ready or the due tasks of one shard and topic.
    per_range: int
    #: Read due tasks as well.
    due: bool = False
    #: Also read ready tasks with a priority below this, up to `per_range` of each shard and topic.
    below_priority: int | None = None

    @property
    def ranges(self) -> int:
        """Return the number of ranges."""
        return self.pairs * (1 + self.due + (self.below_priority is not None))

    @property
    def pairs(self) -> int:
        """Return the number of pairs of shard and topic."""
        return len(self.shards) * len(self.topics)


#: A worker is live until its last heartbeat is this many seconds old. The number is also the default of the column
#: LivenessTimeoutSeconds.
LIVENESS_TIMEOUT_SECONDS = 14


@dataclass(frozen=True, slots=True)
class Workers:
    """The live workers, and the IDs of workers whose heartbeat is so old that its row may be deleted.

    `live` maps the ID of each live worker to the seconds until its liveness timeout. `layouts` are the layouts to poll,
    as the database records them. They are empty until the table's first reshard.
    """

    live: Mapping[str, float] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()
    layouts: tuple[Layout, ...] = ()


@dataclass(frozen=True, slots=True)
class Discovery:
    """The result of a discovery: live workers, topic controls, and new topics.

    New topics have unsent tasks, and this worker does not poll them yet. `workers` is None if they were not read.
    """

    workers: Workers | None = field(default_factory=Workers)
    controls: Mapping[str, TopicControls] = field(default_factory=dict)
    topics: frozenset[str] = frozenset()


class LockedRow(NamedTuple):
    """A task as the claim reads it under the lock."""

    id: str
    topic: str
    data: bytes
    ordering_key: str | None
    created_at: datetime
    available_at: datetime | None
    sent_at: datetime | None
    clean: bool = False  # the columns that a mark resets have their defaults, so it writes only SentAt and TimesSent
    attempts: int = 0
    expires_at: datetime | None = None
    at_most_once: bool = False
    deferred: bool = False
    due_at: datetime | None = None
    times_sent: int = 0

    def is_due(self, now: datetime) -> bool:
        """Tell whether the task may be sent at `now`, the database's time."""
        return self.available_at is None or self.available_at <= now

    def is_expired(self, now: datetime) -> bool:
        """Tell whether ExpiresAt has passed at `now`, the database's time."""
        return self.expires_at is not None and self.expires_at <= now


class Version(NamedTuple):
    """The state of a row when its task was last tried.

    `message` identifies the message. It changes if an application registers the ID again (CreatedAt), or an operator
    moves the task (Topic, OrderingKey), repairs its message or resets SentAt (TimesSent). Only TimesSent shows that a
    task was marked and reset in between.

    `schedule` changes if another worker defers the task, releases it or records a failed attempt. If only `schedule`
    has changed, a published task is still marked, because Pub/Sub has the message. A failure is recorded only if both
    are unchanged.
    """

    message: tuple[object, ...]
    schedule: tuple[object, ...]

    @classmethod
    def of(cls, row: LockedRow) -> "Version":
        """Return a row's version. It has a hash of the message instead of its bytes."""
        message = row.topic, row.ordering_key, row.created_at, row.times_sent, hash(row.data)
        return cls(message, (row.available_at, row.expires_at, row.attempts, row.deferred))

    def after(self, change: "NotSent | Deferred") -> "Version":
        """Return the version of the row after `change` is written."""
        _, expires_at, attempts, _ = self.schedule
        if isinstance(change, NotSent):
            attempts = change.attempts
        return self._replace(schedule=(change.available_at, expires_at, attempts, isinstance(change, Deferred)))

    def is_of_task(self, row: LockedRow | None) -> bool:
        """Tell whether this is still the row of the task. The ID of a deleted one may be registered again."""
        return row is not None and row.created_at == self.message[2]

    def has_message_of(self, row: LockedRow) -> bool:
        """Tell whether the row still holds the message of this version."""
        return self.message == Version.of(row).message


@dataclass(frozen=True, slots=True)
class Published:
    """Pub/Sub has accepted the message and returned this message ID.

    If a commit writes it (as a RowChange), it sets SentAt: this is the mark.
    """

    message_id: str


#: A mark needs no message ID, because rows do not store message IDs.
MARKED = Published("")


@dataclass(frozen=True, slots=True)
class Skipped:
    """Why the transaction neither publishes nor marks the task.

    - `sent`: the row has a SentAt. `Delivered.already_sent` counts it.
    - `changed`: it was published, and then registered again, repaired, moved, or marked and reset.
    - `gone`: the row does not exist any more.
    - `not_due`: AvailableAt is in the future.
    - `moved`: its topic or ordering key has changed since the poll.
    - `at_most_once`: it must be marked first, in a batch of at-most-once tasks.
    - `blocked`: an earlier task of its ordering key is not due or must be marked first.
    """

    reason: Literal["sent", "changed", "gone", "not_due", "moved", "at_most_once", "blocked"]


@dataclass(frozen=True, slots=True)
class Failed:
    """The publish failed, or no request was sent: the task has expired, or its message or topic is invalid.

    `reason` is a name in `pubsub.failures.REASONS`, `error` a text.
    """

    reason: str
    error: str


#: The result of an attempt to publish a task: Pub/Sub's answer, or a failure without a request.
Answer = Published | Failed


class CircuitState(NamedTuple):
    """A circuit that is not closed: why, the seconds since it opened, and the seconds until the next probe."""

    failure: Failed
    seconds_open: float
    seconds_to_probe: float

    @property
    def is_open(self) -> bool:
        """Tell whether the circuit is open, so that polls skip the topic. Otherwise it is half-open."""
        return self.seconds_to_probe > 0


@dataclass(frozen=True, slots=True)
class NotSent:
    """The values that a commit writes to a row that will have no SentAt.

    It records a failed attempt, releases a deferred task, or takes back the mark of an at-most-once task.
    """

    attempts: int
    available_at: datetime | None
    expires_at: datetime | None  # unchanged, but the write covers all MARK_COLUMNS
    error: str | None
    due_at: datetime | None = None  # when the task should first have been sent, since `available_at` no longer says it
    trace_id: str | None = None  # of the message that failed: not written, but logged

    @property
    def dead(self) -> bool:
        """Tell whether there is no next attempt."""
        return is_dead(self.available_at)


@dataclass(frozen=True, slots=True)
class Deferred:
    """The values that a commit writes to a task behind a key head that is not due."""

    available_at: datetime
    head: str


#: What a commit writes to a locked row: a mark (a Published sets SentAt), or new values. Other rows are not written.
RowChange = Published | NotSent | Deferred


class Next(Enum):
    """When the next turn starts, unless an insert starts it."""

    AT_ONCE = auto()  # there is more to do
    STILL_WAITING = auto()  # at once, too: the turn has waited for batches, and none ended
    SOON = auto()  # something is left to try again: after at most a poll interval
    LATER = auto()  # nothing is left


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: counts of tasks unless noted, and when the next turn starts."""

    polled: int = 0
    poll_seconds: float | None = None  # None: the turn did not poll
    published: int = 0
    already_sent: int = 0  # claimed too late: another worker had sent them
    failed: int = 0
    recorded: int = 0  # failed attempts that were written to their rows
    deferred: int = 0  # put behind a key head that is not due
    uncommitted: int = 0  # published, but the commit failed
    cancelled: int = 0  # published, and then deleted before the mark
    in_flight: int = 0  # batches that have not ended
    next: Next = Next.LATER
    seconds_to_change: float = math.inf  # seconds until a topic that is unavailable now may be tried again

    @property
    def made_progress(self) -> bool:
        """Tell whether the next poll may find more tasks now.

        False for STILL_WAITING, although the next turn starts at once then.
        """
        return self.next is Next.AT_ONCE
