"""A task on its way through the relay, and what becomes of it. Plain data, no behaviour."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What is found beside tasks: unknown topics, paused ones, workers that live or are long gone."""

    topics: frozenset[str]
    paused: frozenset[str]
    living: frozenset[str]
    gone: frozenset[str]


@dataclass(frozen=True, slots=True)
class Poll:
    """What one poll found: candidates, each once, and news if it looked for them."""

    candidates: tuple[Candidate, ...]
    news: News | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Tasks of one topic that share a transaction."""

    topic: str
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A task as it stands under the lock."""

    id: str
    topic: str
    data: bytes
    ordering_key: str | None
    created_at: datetime
    available_at: datetime | None
    sent_at: datetime | None
    clean: bool = False  # nothing is left of earlier attempts: SentAt is all there is to write

    def is_due(self, now: datetime) -> bool:
        """Tell whether the task may be sent at `now`, the database's time."""
        return self.available_at is None or self.available_at <= now


@dataclass(frozen=True, slots=True)
class Sent:
    """Pub/Sub has it and answered with this message id."""

    message_id: str


@dataclass(frozen=True, slots=True)
class Taken:
    """Not ours to send now: another worker has sent it, its row is gone, it is not due, or its topic was changed."""

    reason: Literal["sent", "gone", "not_due", "moved"]


@dataclass(frozen=True, slots=True)
class Failed:
    """Not sent, or in doubt. `reason` is a bounded set (it becomes a metric's tag), `error` is for a person."""

    reason: str
    error: str


Outcome = Sent | Taken | Failed


@dataclass(slots=True)
class GroupResult:
    """What became of one group. Without `error` the commit landed, and with it every mark of a sent task.

    `tried` is what Pub/Sub answered, kept over re-runs of the transaction, and `created` is when those rows were made;
    `outcomes` is what the last run decided. They differ where another worker sent a task while ours was published:
    tried says Sent, outcomes says Taken. `runs` counts the transaction's runs: each but the last was aborted.
    """

    group: Group
    tried: dict[str, Outcome] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    created: dict[str, datetime] = field(default_factory=dict)
    runs: int = 0
    error: str | None = None

    def published(self) -> list[str]:
        """Return the ids that Pub/Sub has, whether or not the commit landed."""
        return [id for id, outcome in self.tried.items() if isinstance(outcome, Sent)]

    def taken_by_others(self) -> list[str]:
        """Return the ids that another worker had sent."""
        return [id for id, outcome in self.outcomes.items() if outcome == Taken("sent")]

    def failed(self) -> dict[str, Failed]:
        """Return the failures by id."""
        return {id: outcome for id, outcome in self.tried.items() if isinstance(outcome, Failed)}


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn did, in numbers."""

    polled: int = 0
    published: int = 0
    taken: int = 0
    failed: int = 0
    uncommitted: int = 0  # published, but the commit failed
    in_flight: int = 0  # groups that a later turn will report
    waits: bool = False  # groups that were waited for have not ended yet
    discovered: bool = False  # a topic, or shards that are this worker's now

    @property
    def made_progress(self) -> bool:
        """Tell whether there may be more at once: something was sent for good, or there is more to look at."""
        return self.published > self.uncommitted or self.discovered
