"""Plain data that the steps of a turn pass on: tasks, their outcomes, batches before and after their delivery, turns.

Candidate, ClaimedTask, LockedRow and Version are NamedTuples, because a relay creates very many of them, and creating a
frozen dataclass takes four times as long.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum, auto
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

from outbox.table.controls import NO_CONTROLS, TopicControls
from outbox.table.states import first_due, is_dead

#: The phases of a poll and of a batch whose durations are reported.
POLL, CLAIM, PUBLISH, COMMIT = "poll", "claim", "publish", "commit"
#: Max value of an INT64 column. Another writer may have set a column to it.
MAX_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PollRequest:
    """What a poll reads: the ready tasks of these shards and topics, and optionally more."""

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
        return self.pairs * (1 + self.due + (self.below_priority is not None))

    @property
    def pairs(self) -> int:
        return len(self.shards) * len(self.topics)


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
    cancelled_by: str | None = None

    @property
    def is_sent(self) -> bool:
        """Tell whether the task was sent. A cancelled one has a SentAt, too, and was not."""
        return self.sent_at is not None and self.cancelled_by is None

    def is_due(self, now: datetime) -> bool:
        """Tell whether the task may be sent at `now`, the database's time."""
        return self.available_at is None or self.available_at <= now

    def is_expired(self, now: datetime) -> bool:
        """Tell whether ExpiresAt has passed at `now`, the database's time."""
        return self.expires_at is not None and self.expires_at <= now


class Version(NamedTuple):
    """The state of a row when its task was last tried.

    `message` identifies the message. It changes if the ID is registered again after its row was deleted (CreatedAt,
    TimesSent), an operator moves the task (Topic, OrderingKey), repairs its message or resets SentAt (TimesSent), or a
    replay inserts the task again after its purge (the start of its age: deferrals and failed attempts keep it). Only
    TimesSent shows that a task was marked and reset in between. A cancel changes nothing of it.

    `schedule` changes if another worker defers the task, releases it or records a failed attempt. If only `schedule`
    has changed, a published task is still marked, because Pub/Sub has the message. A failure is recorded only if both
    are unchanged.
    """

    message: tuple[object, ...]
    schedule: tuple[object, ...]

    @classmethod
    def of(cls, row: LockedRow) -> "Version":
        """Return a row's version. It has a hash of the message instead of its bytes."""
        message = row.topic, row.ordering_key, row.created_at, row.times_sent, first_due(row), hash(row.data)
        return cls(message, (row.available_at, row.expires_at, row.attempts, row.deferred))

    def after(self, change: "NotSent | Deferred") -> "Version":
        """Return the version of the row after `change` is written."""
        _, expires_at, attempts, _ = self.schedule
        if isinstance(change, NotSent):
            attempts = change.attempts
        return self._replace(schedule=(change.available_at, expires_at, attempts, isinstance(change, Deferred)))

    def is_of_task(self, row: LockedRow | None) -> bool:
        """Tell whether this is still the row of the task. The ID of a purged one may be registered again."""
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
    - `cancelled`: the row has a CancelledBy. If another program has made it unsent, the commit ends it again.
    - `changed`: it was published, and then registered again, repaired, moved, or marked and reset.
    - `gone`: the row does not exist any more.
    - `not_due`: AvailableAt is in the future.
    - `moved`: its topic or ordering key has changed since the poll.
    - `at_most_once`: it must be marked first, in a batch of at-most-once tasks.
    - `blocked`: an earlier task of its ordering key is not due or must be marked first.
    """

    reason: Literal["sent", "cancelled", "changed", "gone", "not_due", "moved", "at_most_once", "blocked"]


@dataclass(frozen=True, slots=True)
class Failed:
    """The publish failed, or no request was sent: the task has expired, or its message or topic is invalid.

    `reason` is a name in `pubsub.failures.REASONS`, or another gRPC status in lower case, `error` a text.
    """

    reason: str
    error: str


#: The result of an attempt to publish a task: Pub/Sub's answer, or a failure without a request.
Answer = Published | Failed


@dataclass(frozen=True, slots=True)
class NotSent:
    """The values that a commit writes to a row that will have no SentAt.

    It records a failed attempt, releases a deferred task, or undoes the mark of an at-most-once task.
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


@dataclass(frozen=True, slots=True)
class EndedAgain:
    """A commit sets SentAt of a cancelled task that another program has made unsent, for example by a bulk DML."""


#: What a commit writes to a locked row: a mark (a Published sets SentAt), or new values. Other rows are not written.
RowChange = Published | NotSent | Deferred | EndedAgain


class Kind(Enum):
    """What happens to the tasks of a claim."""

    PUBLISH = auto()  # they are published and then marked, in one transaction
    MARK_FIRST = auto()  # at most once: they are marked, and published after the commit
    DEFER = auto()  # nothing is published: the first unsent task of a key (its head) is not due, so the others wait


class ClaimedTask(NamedTuple):
    """A task to claim, as a poll or a read of key heads has returned it."""

    id: str
    ordering_key: str | None
    shard: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A batch: tasks of one topic.

    If the kind is DEFER, the first task is the key head, and the others are in any order. Otherwise the tasks of each
    ordering key are in order.
    """

    topic: str
    tasks: tuple[ClaimedTask, ...]
    kind: Kind = Kind.PUBLISH
    #: For each ordering key, the task behind the claimed ones. It is locked, too, and released if it is deferred and
    #: becomes the head.
    releases: tuple[ClaimedTask, ...] = ()
    #: Size of all messages of the batch. A part keeps the size of the whole.
    bytes: int = 0
    #: Whether the batch probes a topic whose circuit is open.
    probe: bool = False
    #: Tasks whose publish failed in an outage of the topic. They share no request. If one fails again while the circuit
    #: is closed, a failed attempt is recorded.
    suspects: frozenset[str] = frozenset()
    #: The controls of the topic when the batch starts.
    controls: TopicControls = NO_CONTROLS

    @property
    def destination(self) -> str:
        """Return the Pub/Sub topic that the messages go to."""
        return self.controls.publish_to or self.topic

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(task.id for task in self.tasks)

    @property
    def locks(self) -> tuple[str, ...]:
        return tuple(task.id for task in (*self.tasks, *self.releases))

    @property
    def keys(self) -> dict[TopicKey, int]:
        """Return the ordering keys of the tasks, each with its shard."""
        tasks = (*self.tasks, *self.releases)
        return {TopicKey(self.topic, key): shard for _, key, shard in tasks if key is not None}

    @property
    def may_delay(self) -> bool:
        """Tell whether nothing waits for the commit: no next task of an ordering key, and no at-most-once message."""
        return self.kind is Kind.PUBLISH and all(task.ordering_key is None for task in self.tasks)

    def part(self, ids: Collection[str], kind: Kind | None = None) -> "Claim":
        """Return a claim of only these tasks.

        `releases` are then the tasks after them in each ordering key.
        """
        ids = frozenset(ids)
        tasks = tuple(task for task in self.tasks if task.id in ids)
        keys = {task.ordering_key for task in tasks} - {None}
        behind = (
            after
            for task, after in pairwise(self.tasks)
            if task.ordering_key in keys and after.ordering_key == task.ordering_key
            if task.id in ids and after.id not in ids
        )
        releases = (*behind, *(task for task in self.releases if task.ordering_key in keys))
        return replace(self, tasks=tasks, kind=kind or self.kind, releases=releases)

    def of_deferred(self, heads: KeyHeads) -> "Claim":
        """Return a claim that releases the deferred tasks among the `heads` of its keys."""
        releases = (
            ClaimedTask(head.id, key.ordering_key, self.keys[key])
            for key, queue in heads.items()
            for head in queue[:1]
            if head.deferred
        )
        return replace(self, tasks=(), releases=tuple(releases))

    def single_claims(self) -> "tuple[Claim, ...]":
        """Return a claim for each task.

        For a single task with `releases`, return its claim without them. For one without, return nothing. The tasks in
        `releases` need no transaction of their own, because the batch reads the key heads after its tasks are marked.
        """
        if len(self.tasks) > 1:
            return tuple(self.part([id]) for id in self.ids)
        return (replace(self, releases=()),) if self.releases else ()


class CancelledTask(NamedTuple):
    """A published task that was cancelled or deleted before its mark. If its row is there, it is marked as sent."""

    message_id: str
    #: CancelledBy of the row. None: the row was deleted, or its ID was registered again.
    by: str | None


#: What has happened to a task whose change cannot be written. `marked`: an at-most-once task whose mark is committed,
#: but which Pub/Sub has refused, or not answered.
MarkState: TypeAlias = Literal["published", "unpublished", "marked"]


@dataclass(frozen=True, slots=True)
class TransactionError:
    """Why a transaction of a batch failed. If it failed in the phase CLAIM, it has locked and written nothing."""

    claim: Claim
    phase: str
    text: str


@dataclass(frozen=True, slots=True)
class Delivered:
    """The first report of a batch: what became of its tasks.

    `error` says why a transaction failed. It is None after a commit, and if Spanner refused only some rows, because
    each of them is reported as an Unmarked.
    """

    claim: Claim
    #: Pub/Sub's answer for each task that was tried, over all attempts. A task that is expired or cannot
    #: be published has a failure instead, without a request.
    answers: Mapping[str, Answer] = field(default_factory=dict)
    #: The tasks that the last attempt skipped. A published task can be here, too, if another worker has sent it after
    #: an abort.
    skipped: Mapping[str, Skipped] = field(default_factory=dict)
    #: Failed attempts, which are written, or will be with the marks.
    recorded: Mapping[str, NotSent] = field(default_factory=dict)
    #: Deferrals that are written.
    deferred: Mapping[str, Deferred] = field(default_factory=dict)
    #: Published tasks that were cancelled before their mark.
    cancelled: Mapping[str, CancelledTask] = field(default_factory=dict)
    #: Tasks whose rows are still to be written. The batch goes on to write them.
    unmarked: frozenset[str] = frozenset()
    #: At-most-once tasks that may be marked as sent without having been published.
    unconfirmed: tuple[str, ...] = ()
    #: Seconds between a task's due time and Pub/Sub's answer.
    latencies: Mapping[str, float] = field(default_factory=dict)
    #: Seconds of each phase, over all attempts.
    phases: Mapping[str, float] = field(default_factory=dict)
    #: Attempts that were aborted after they had decided.
    aborted: int = 0
    error: TransactionError | None = None

    def published(self) -> list[str]:
        """Return the IDs of the published tasks, whether or not they are marked."""
        return [id for id, answer in self.answers.items() if isinstance(answer, Published)]

    def uncommitted(self) -> list[str]:
        """Return the IDs of published tasks whose marks are not written yet."""
        return [id for id in self.published() if id in self.unmarked]

    def has_written(self) -> bool:
        """Tell whether the batch has changed a row. Then the next poll may find other tasks."""
        return any(id not in self.unmarked for id in (*self.published(), *self.recorded, *self.deferred))

    def already_sent(self) -> list[str]:
        """Return the IDs that another worker had sent."""
        return self._skipped("sent")

    def failed(self) -> dict[str, Failed]:
        return {id: answer for id, answer in self.answers.items() if isinstance(answer, Failed)}

    def at_most_once(self) -> Claim | None:
        """Return a claim of the skipped at-most-once tasks that are behind no failure, or None if there are none."""
        if not (skipped := self._skipped("at_most_once")):
            return None
        passed = {*self.published(), *self.skipped}.difference(self.failed())
        stopped = {task.ordering_key for task in self.claim.tasks if task.id not in passed} - {None}
        once = {task.id for task in self.claim.tasks if task.id in skipped and task.ordering_key not in stopped}
        return self.claim.part(once, Kind.MARK_FIRST) if once else None

    def _skipped(self, reason: str) -> list[str]:
        return [id for id, skipped in self.skipped.items() if skipped.reason == reason]


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Published tasks that were found cancelled, after the first report of their batch."""

    claim: Claim
    tasks: Mapping[str, CancelledTask]


@dataclass(frozen=True, slots=True)
class Unmarked:
    """Tasks whose rows the batch cannot write. Unless it has `given_up`, it tries again."""

    claim: Claim
    error: str
    state: MarkState
    given_up: bool = False


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
    recorded: int = 0  # failed attempts that are written to their rows, or will be with the marks
    deferred: int = 0  # put behind a key head that is not due
    uncommitted: int = 0  # published, but the commit failed
    cancelled: int = 0  # published, and cancelled before the mark
    in_flight: int = 0  # batches that have not ended
    next: Next = Next.LATER
    seconds_to_change: float = math.inf  # seconds until a topic that is unavailable now may be tried again

    @property
    def made_progress(self) -> bool:
        """Tell whether the next poll may find more tasks now.

        False for STILL_WAITING, although the next turn starts at once then.
        """
        return self.next is Next.AT_ONCE
