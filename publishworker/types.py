"""A task on its way through the relay, and what becomes of it. Plain data, no behaviour."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import zip_longest
from typing import Literal

from outbox.storage.task_states import NEVER


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the poll gives: an unsent task as the index shows it, without its body."""

    id: str
    topic: str
    shard: int
    priority: int
    created_at: datetime
    available_at: datetime | None  # None: ready; else due
    ordering_key: str | None
    bytes: int
    #: Of a run of an ordering key: the ids that go behind this one, in their order. `bytes` is then the size of all.
    behind: tuple[str, ...] = ()
    #: The task after the run, if it is deferred: no poll would see it.
    releases: str | None = None

    @property
    def tasks(self) -> int:
        """Return how many tasks go together."""
        return 1 + len(self.behind)


@dataclass(frozen=True, slots=True)
class Key:
    """Whose order is kept: the tasks of one topic that have the same ordering key."""

    topic: str
    ordering_key: str


@dataclass(frozen=True, slots=True)
class QueuedTask:
    """One of the first unsent tasks of a key."""

    id: str
    bytes: int
    sendable: bool  # it is ready, due, or deferred: nothing holds it but what stands before it
    deferred: bool = False
    expired_early: bool = False  # it has expired before it was due: it holds back nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class PollRequest:
    """What one poll reads: the ready tasks of these shards and topics, and what else is asked for."""

    shards: tuple[int, ...]
    topics: frozenset[str]
    #: Rows at most of each range, a range being the ready or the due tasks of one shard and topic.
    per_range: int
    #: Due tasks as well.
    due: bool = False
    #: From each range of ready tasks as many again, of a lower priority than this.
    below: int | None = None
    #: And news: topics that are not among these, pauses, the other workers.
    known: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class TopicLimit:
    """How fast the whole membership may publish to a topic, in tasks; None is no limit. Rate and burst come together."""

    rate: float | None = None
    burst: int | None = None
    in_flight: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What is found beside tasks: unknown topics, paused and limited ones, workers that live or are long gone."""

    topics: frozenset[str]
    paused: frozenset[str]
    living: frozenset[str]
    gone: frozenset[str]
    #: What AsynchronousTaskTopics says, also of paused topics; it may make no sense.
    limits: Mapping[str, "TopicLimit"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PollResult:
    """What one poll found: candidates, each once, and news if it looked for them."""

    candidates: tuple[Candidate, ...]
    news: News | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Tasks of one topic that share a transaction."""

    topic: str
    ids: tuple[str, ...]
    #: Those that met their topic's last outage: the next one is theirs, if the topic works beside them.
    suspects: frozenset[str] = frozenset()
    #: The topic has published something since an outage was last met.
    works: bool = True
    #: They are sent to see whether a topic that rests works again.
    probe: bool = False
    #: They are marked, and published when that has been committed.
    at_most_once: bool = False
    #: The ordering key of each task, if any has one; the tasks of a key stand in its order.
    keys: tuple[str | None, ...] = ()
    #: Deferred tasks that follow what is sent of their keys: they are to be ready again when it has gone.
    releases: tuple[str, ...] = ()
    #: Nothing is sent: the first is the head of a key, and not due, and the others are to be put off behind it.
    defers: bool = False
    #: Of all messages together.
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class LockedRow:
    """A task as it stands under the lock."""

    id: str
    topic: str
    data: bytes
    ordering_key: str | None
    created_at: datetime
    available_at: datetime | None
    sent_at: datetime | None
    clean: bool = False  # nothing is left of earlier attempts: SentAt is all there is to write
    attempts: int = 0
    expires_at: datetime | None = None
    at_most_once: bool = False
    deferred: bool = False

    def is_due(self, now: datetime) -> bool:
        """Tell whether the task may be sent at `now`, the database's time."""
        return self.available_at is None or self.available_at <= now

    def is_expired(self, now: datetime) -> bool:
        """Tell whether the task is not worth sending any more at `now`, the database's time."""
        return self.expires_at is not None and self.expires_at <= now


@dataclass(frozen=True, slots=True)
class Version:
    """A row as it was when its task was tried, but for the body.

    What is known of one version says nothing of another one: the row was registered again under its id, another worker
    failed on it, or an operator wants it sent again (`outbox retry`).
    """

    topic: str
    ordering_key: str | None
    created_at: datetime
    available_at: datetime | None
    expires_at: datetime | None
    attempts: int
    deferred: bool

    @classmethod
    def of(cls, row: LockedRow) -> "Version":
        """Return a row's version."""
        when = row.created_at, row.available_at, row.expires_at
        return cls(row.topic, row.ordering_key, *when, row.attempts, row.deferred)


@dataclass(frozen=True, slots=True)
class Sent:
    """Pub/Sub has it and answered with this message id."""

    message_id: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """Not to be sent here and now.

    Another worker has sent it (or somebody has changed its row since we did), its row is gone, it is not due, its topic
    was changed, or it must be marked first, in a batch of its own, or one that stands before it in its ordering key is
    not due.
    """

    reason: Literal["sent", "gone", "not_due", "moved", "at_most_once", "held"]


@dataclass(frozen=True, slots=True)
class Failed:
    """Not sent, or in doubt. `reason` is a name of `failures.REASONS`, `error` is for a person."""

    reason: str
    error: str


Outcome = Sent | Skipped | Failed


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """What is written to a row that was not sent: after a failure, or to take back a mark that came before it."""

    attempts: int
    available_at: datetime | None
    expires_at: datetime | None  # as it was
    error: str | None

    @property
    def dead(self) -> bool:
        """Tell whether there is no next attempt."""
        return self.available_at is not None and self.available_at >= NEVER


@dataclass(frozen=True, slots=True)
class Deferred:
    """What is written to a row that waits behind the head of its ordering key, which is not due."""

    available_at: datetime
    head: str


#: What is written to a locked row; a row without a mark stays as it is.
Mark = Sent | FailedAttempt | Deferred


@dataclass(slots=True)
class BatchResult:
    """What became of one batch. Without `error` the commit landed, and with it every mark; else `unsure` says perhaps.

    `tried` is what came of each attempt, kept over re-runs of the transaction, and `versions` of which rows;
    `locked_at` is when they were last locked, by the database's clock; `outcomes` is what the last run decided. They
    differ where another worker sent a task while ours was published: tried says Sent, outcomes says Skipped. `recorded`
    are the failures that were written down, `traces` the trace ids of their messages if they have any, `deferred` tasks
    that were put off behind the head of their key, `unconfirmed` those that are marked, at most once, and not known to be
    published. `runs` counts the transaction's runs: each but the last was aborted. `waited` is for how many seconds
    those that Pub/Sub has had been due when it answered, and `phases` how many seconds the claim, the publishing and
    the commit took, over all runs.
    """

    batch: Batch
    tried: dict[str, Outcome] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    versions: dict[str, Version] = field(default_factory=dict)
    locked_at: datetime | None = None
    waited: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    recorded: dict[str, FailedAttempt] = field(default_factory=dict)
    traces: dict[str, str] = field(default_factory=dict)
    deferred: dict[str, Deferred] = field(default_factory=dict)
    unconfirmed: list[str] = field(default_factory=list)
    runs: int = 0
    error: str | None = None
    unsure: bool = False

    def published(self) -> list[str]:
        """Return the ids that Pub/Sub has, whether or not the commit landed."""
        return [id for id, outcome in self.tried.items() if isinstance(outcome, Sent)]

    def published_versions(self) -> dict[str, Version]:
        """Return which rows were published, by id."""
        return {id: self.versions[id] for id in self.published()}

    def taken_by_others(self) -> list[str]:
        """Return the ids that another worker had sent."""
        return [id for id, outcome in self.outcomes.items() if outcome == Skipped("sent")]

    def failed(self) -> dict[str, Failed]:
        """Return the failures by id."""
        return {id: outcome for id, outcome in self.tried.items() if isinstance(outcome, Failed)}

    def at_most_once(self) -> Batch | None:
        """Return the tasks that wait for a batch of their own, or None: not behind one of their key that failed."""
        pairs = list(zip_longest(self.batch.ids, self.batch.keys))
        failed = {key for id, key in pairs if key is not None and isinstance(self.tried.get(id), Failed)}
        once = [
            (id, key) for id, key in pairs if self.outcomes.get(id) == Skipped("at_most_once") and key not in failed
        ]
        if not once:
            return None
        ids, keys = zip(*once, strict=True)
        keys = keys if any(keys) else ()
        return Batch(self.batch.topic, ids, at_most_once=True, keys=keys, bytes=self.batch.bytes)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn did, in numbers."""

    polled: int = 0
    published: int = 0
    taken: int = 0
    failed: int = 0
    recorded: int = 0  # failures that were written to their rows
    deferred: int = 0  # tasks that were put behind the head of their ordering key, which is not due
    uncommitted: int = 0  # published, but the commit failed
    in_flight: int = 0  # batches that a later turn will report
    waits: bool = False  # batches that were waited for have not ended yet
    discovered: bool = False  # a topic, shards that are this worker's now, a topic that rests or works again
    again_in: float | None = None  # seconds until a topic that is held back may be tried again

    @property
    def made_progress(self) -> bool:
        """Tell whether there may be more at once: a task was sent or put off, or there is something else to look at."""
        return self.published > self.uncommitted or self.recorded + self.deferred > 0 or self.discovered
