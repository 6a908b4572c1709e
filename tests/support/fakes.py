"""A store and a publisher in memory. The contract tests compare them with Spanner and Pub/Sub."""

import contextlib
import dataclasses
import itertools
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from outbox.base.values import topic_name
from outbox.message import RawPubsubMessage
from outbox.table.controls import NO_CONTROLS, TopicControls
from outbox.table.ddl import Layout
from outbox.table.shared_sql import FORGET_WORKER_SECONDS
from outbox.table.states import NEVER, first_due
from publishworker.pubsub.failures import FailureKind, failure_kind
from publishworker.pubsub.publisher import decode
from publishworker.spanner.relay_sql import times_sent
from publishworker.spanner.store import LIVENESS_TIMEOUT_SECONDS, Decide, Discovery, PollRequest, Workers
from publishworker.spanner.write_errors import NotWritten, Refused, StoreError
from publishworker.types import (
    Answer,
    Candidate,
    Deferred,
    Failed,
    KeyHeads,
    LockedRow,
    NotSent,
    Published,
    QueuedTask,
    RowChange,
    TopicKey,
)


@dataclasses.dataclass(slots=True)
class StoredTask:
    id: str
    topic: str
    data: bytes
    #: In each layout.
    shards: tuple[int, ...]
    priority: int = 50
    ordering_key: str | None = None
    created_at: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    available_at: datetime | None = None
    sent_at: datetime | None = None
    attempts: int = 0
    last_error: str | None = None
    expires_at: datetime | None = None
    at_most_once: bool = False
    sequence: int | None = None
    blocked_by: str | None = None
    due_at: datetime | None = None
    times_sent: int = 0


class FakeStore:
    """Rows in a dictionary, locked row by row, and faults on request."""

    def __init__(self, shards: int = 10) -> None:
        #: The layouts to poll, and the states of those that are recorded.
        self.layouts: Sequence[Layout] = (Layout(shards),)
        self.recorded: dict[Layout, str] = {}
        #: The layouts that the table has.
        self.built: tuple[Layout, ...] = (Layout(shards),)
        #: What each worker polls.
        self.polled_by: dict[str, tuple[Layout, ...]] = {}
        self.rows: dict[str, StoredTask] = {}
        self.controls: dict[str, TopicControls] = {}
        self.now = datetime(2026, 1, 1, 12, tzinfo=UTC)
        #: Called before each commit: raise Abort to have the transaction run again, StoreError to fail it.
        self.before_commit: Callable[[], None] = lambda: None
        #: Whether a commit that fails is applied nevertheless.
        self.failed_commits_land = False
        #: IDs of rows that cannot be changed: a commit with a mark for one of them is refused.
        self.refused: set[str] = set()
        self.away = False
        #: When each worker was last seen.
        self.seen_at: dict[str, datetime] = {}
        self.liveness_timeout: dict[str, int] = {}
        #: What the last heartbeat of each worker said about it.
        self.info: dict[str, Mapping[str, object] | None] = {}
        self.heartbeats = 0
        #: How often each task has been claimed.
        self.claimed: Counter[str] = Counter()
        #: The requests of all polls.
        self.polls: list[PollRequest] = []
        #: The topics that were known at each discovery.
        self.discoveries: list[frozenset[str]] = []
        self._lock = threading.Lock()
        self._row_locks: dict[str, threading.Lock] = {}

    def insert(self, id: str, topic: str, data: bytes = b"", **columns: Any) -> None:
        shards = self.shards_of(columns.get("ordering_key") or id)
        self.rows[id] = StoredTask(id, topic, data, shards, **columns)

    def shards_of(self, text: str) -> tuple[int, ...]:
        return tuple(layout.ids[zlib.crc32(text.encode()) % layout.shards] for layout in self.built)

    def build(self, *layouts: Layout) -> None:
        """Give the table these layouts and no others."""
        self.built = layouts
        for row in self.rows.values():
            row.shards = self.shards_of(row.ordering_key or row.id)

    def require(self, shards: Iterable[int]) -> None:
        """Raise StoreError if the index of one of the shards is gone."""
        if gone := set(shards).difference(*(layout.ids for layout in self.built)):
            raise StoreError(f"no index AsynchronousTasksToSend has shard {gone.pop()}")

    def poll(self, request: PollRequest) -> Sequence[Candidate]:
        self._answer()
        self.require(request.shards)
        self.polls.append(request)
        unsent = self._unsent()
        found: dict[str, Candidate] = {}
        for shard, topic in itertools.product(request.shards, request.topics):
            of_range = [row for row in unsent if shard in row.shards and row.topic == topic]
            ready = sorted(
                (row for row in of_range if row.available_at is None), key=lambda row: (-row.priority, row.created_at)
            )
            due = [row for row in of_range if row.available_at is not None and self._is_due(row)]
            ranges = [ready]
            if request.below_priority is not None:
                ranges.append([row for row in ready if row.priority < request.below_priority])
            if request.due:
                ranges.append(sorted(due, key=lambda row: (row.available_at or NEVER, -row.priority, row.created_at)))
            found |= {row.id: candidate(row, shard) for rows in ranges for row in rows[: request.per_range]}
        return tuple(found.values())

    def discover(self, shards: Sequence[int], known: Collection[str], *, workers: bool = True) -> Discovery:
        self._answer()
        self.discoveries.append(frozenset(known))
        return Discovery(self.workers() if workers else None, dict(self.controls), self.topics_of(shards, known))

    def topics_of(self, shards: Sequence[int], known: Collection[str]) -> frozenset[str]:
        self.require(shards)
        return frozenset({row.topic for row in self._unsent() if _is_in(row, shards)}.difference(known))

    def seconds_until_due(self, shards: Sequence[int], topics: Collection[str]) -> float | None:
        self._answer()
        of = (row for row in self._unsent() if row.topic in topics and _is_in(row, shards))
        due = [row.available_at for row in of if row.available_at and row.available_at < NEVER]
        return max(0.0, (min(due) - self.now).total_seconds()) if due else None

    def control(self, topic: str, **values: Any) -> None:
        """Set controls of a topic."""
        self.controls[topic] = dataclasses.replace(self.controls.get(topic, NO_CONTROLS), **values)

    def workers(self) -> Workers:
        ages = {worker: (self.now - seen_at).total_seconds() for worker, seen_at in self.seen_at.items()}
        recorded = tuple(sorted(layout for layout, state in self.recorded.items() if state == "polled"))
        self.layouts = recorded or self.layouts
        return Workers(
            live={worker: left for worker, age in ages.items() if (left := self.live_for(worker) - age) > 0},
            gone=frozenset(worker for worker, age in ages.items() if age > FORGET_WORKER_SECONDS),
            layouts=recorded,
        )

    def live_for(self, worker: str) -> int:
        """Return the seconds for which the worker's heartbeat makes it live, by default as the column's default."""
        return self.liveness_timeout.get(worker, LIVENESS_TIMEOUT_SECONDS)

    def heartbeat(
        self,
        worker: str,
        _started_at: datetime,
        layouts: Iterable[Layout],
        *,
        liveness_timeout: int = LIVENESS_TIMEOUT_SECONDS,
        info: Any = None,
        remove: Collection[str] = (),
    ) -> None:
        self._answer()
        self.heartbeats += 1
        self.seen_at[worker], self.liveness_timeout[worker] = self.now, liveness_timeout
        self.polled_by[worker], self.info[worker] = tuple(layouts), info
        for each in remove:
            self.seen_at.pop(each, None)

    def record_published(self, message_ids: Mapping[str, str]) -> None:
        self._answer()

    def delete_heartbeat(self, worker: str) -> None:
        self._answer()
        self.seen_at.pop(worker, None)

    def key_heads(self, keys: Mapping[TopicKey, int], per_key: int, *, skip_dead: bool) -> KeyHeads:
        self._answer()
        self.require(keys.values())
        found: dict[TopicKey, list[QueuedTask]] = {}
        for row in sorted(self._unsent(), key=place_in_key):
            key = TopicKey(row.topic, row.ordering_key or "")
            if keys.get(key) in row.shards and not (skip_dead and self.is_dead(row)):
                found.setdefault(key, []).append(self.waiting(row))
        return {key: waiting[:per_key] for key, waiting in found.items()}

    def waiting(self, row: StoredTask) -> QueuedTask:
        is_due, deferred = self._is_due(row), row.blocked_by is not None
        expired = not is_due and row.expires_at is not None and row.expires_at <= self.now
        return QueuedTask(row.id, len(row.data), is_due or (deferred and not expired), deferred, expired)

    @staticmethod
    def is_dead(row: StoredTask) -> bool:
        return row.available_at is not None and row.available_at >= NEVER

    def _is_due(self, row: StoredTask) -> bool:
        return row.available_at is None or row.available_at <= self.now

    def claim(self, ids: Sequence[str], decide: Decide, *, may_delay: bool = False) -> datetime:
        with self._lock:
            self.claimed.update(ids)
        with contextlib.ExitStack() as locks:
            for id in sorted(ids):
                locks.enter_context(self._lock_of(id))
            while True:
                self._answer()
                rows = [self.as_locked(self.rows[id]) for id in sorted(ids) if id in self.rows]
                decided = decide(rows, self.now)
                marks = {row.id: decided[row.id] for row in rows if row.id in decided}
                try:
                    self.before_commit()
                    self.refuse(marks)
                except Abort:
                    continue
                except StoreError:
                    if self.failed_commits_land:
                        self._mark(marks)
                    raise
                return self._mark(marks)

    @contextlib.contextmanager
    def locked(self, id: str) -> Iterator[None]:
        with self._lock_of(id):
            yield

    def _lock_of(self, id: str) -> threading.Lock:
        with self._lock:
            return self._row_locks.setdefault(id, threading.Lock())

    def _unsent(self) -> list[StoredTask]:
        return [row for row in list(self.rows.values()) if row.sent_at is None]

    def _answer(self) -> None:
        if self.away:
            raise NotWritten("the fake store is away")

    def _mark(self, marks: Mapping[str, RowChange]) -> datetime:
        with self._lock:
            self.now += timedelta(milliseconds=1)
            committed = self.now
        self.apply(marks, committed)
        return committed

    def refuse(self, marks: Mapping[str, RowChange]) -> None:
        """Raise Refused if a commit with these marks is refused, because of `refused` or of a number beyond INT64."""
        numbers = {
            id: [times_sent(self.as_locked(self.rows[id]), sent=isinstance(each, Published))]
            for id, each in marks.items()
        }
        numbers |= {id: [*numbers[id], each.attempts] for id, each in marks.items() if isinstance(each, NotSent)}
        too_large = {id for id, some in numbers.items() if any(not -(2**63) <= each < 2**63 for each in some)}
        if bad := sorted(self.refused & marks.keys() | too_large):
            raise Refused(f"OUT_OF_RANGE: a constraint is violated by {bad[0]}")

    def apply(self, marks: Mapping[str, RowChange], committed: datetime) -> None:
        for id, mark in marks.items():
            row = self.rows[id]
            if isinstance(mark, Published | NotSent):
                row.times_sent = times_sent(self.as_locked(row), sent=isinstance(mark, Published))
            if isinstance(mark, Published):
                row.sent_at, row.available_at, row.expires_at = committed, None, None
                row.last_error, row.blocked_by, row.attempts, row.due_at = None, None, 0, None
            elif isinstance(mark, NotSent):
                row.sent_at, row.available_at, row.expires_at = None, mark.available_at, mark.expires_at
                row.last_error, row.blocked_by, row.attempts = mark.error, None, mark.attempts
                row.due_at = mark.due_at
            elif isinstance(mark, Deferred):
                row.due_at = first_due(self.as_locked(row))
                row.available_at, row.blocked_by = mark.available_at, mark.head

    @staticmethod
    def as_locked(row: StoredTask) -> LockedRow:
        data = row.data if row.sent_at is None else b""
        others = row.available_at, row.due_at, row.blocked_by, row.expires_at, row.last_error
        clean = (*others, row.attempts) == (*[None] * 5, 0)
        return LockedRow(
            row.id, row.topic, data, row.ordering_key, row.created_at, row.available_at, row.sent_at, clean,
            row.attempts, row.expires_at, row.at_most_once, row.blocked_by is not None, row.due_at, row.times_sent,
        )  # fmt: skip


def _is_in(row: StoredTask, shards: Collection[int]) -> bool:
    return any(shard in shards for shard in row.shards)


def place_in_key(row: StoredTask) -> tuple[datetime, int, str]:
    """Return what orders the rows of a key. A row without Sequence comes first."""
    return row.created_at, -(2**63) if row.sequence is None else row.sequence, row.id


def candidate(row: StoredTask, shard: int) -> Candidate:
    size = len(row.data)
    return Candidate(row.id, row.topic, shard, row.priority, row.created_at, row.available_at, row.ordering_key, size)


class Abort(Exception):
    """Raised by `FakeStore.before_commit` for ABORTED."""


class FakePublisher:
    """Keeps what it publishes; topics must exist, and fail on request."""

    def __init__(self, *topics: str, project: str = "test-project") -> None:
        self.project = project
        self.topics = {topic_name(topic, project) for topic in topics}
        self.published: list[tuple[str, str, Any]] = []  # full topic name, task id, message
        #: The ids of each request.
        self.requests: list[list[str]] = []
        #: Task IDs that fail, with the failure; one that meets an outage fails its whole request. So does
        #: one with an ordering key, unless its message is refused: then the tasks before it are published.
        self.failing: dict[str, Failed] = {}
        #: Full topic names that fail.
        self.down: dict[str, Failed] = {}
        #: IDs of tasks for which the deadline leaves no time.
        self.out_of_time: set[str] = set()
        self._message_ids = itertools.count(1)
        self._lock = threading.Lock()

    def ids(self) -> list[str]:
        return [id for _, id, _ in self.published]

    def publish(
        self, topic: str, rows: Sequence[LockedRow], seconds: float, alone: Collection[str] = frozenset()
    ) -> dict[str, Answer]:
        name = topic_name(topic, self.project)
        outcomes: dict[str, Answer] = {}
        stopped: set[str | None] = set()
        with self._lock:
            for request in _requests(rows, alone):
                key = request[0].ordering_key
                if key in stopped:
                    continue
                tried = self._request(name, [row for row in request if row.id not in self.out_of_time])
                outcomes |= tried
                if key is not None and not all(isinstance(tried.get(row.id), Published) for row in request):
                    stopped.add(key)
        return outcomes

    def refusals(self, topic: str, rows: Sequence[LockedRow]) -> dict[str, Failed]:
        decoded = {row.id: decode(row) for row in rows}
        return {id: message for id, message in decoded.items() if isinstance(message, Failed)}

    def _request(self, name: str, rows: Sequence[LockedRow]) -> dict[str, Answer]:
        decoded = {row.id: decode(row) for row in rows}
        outcomes: dict[str, Answer] = {id: each for id, each in decoded.items() if isinstance(each, Failed)}
        ordered = any(row.ordering_key for row in rows)
        refused = {id for id, failure in self.failing.items() if failure_kind(failure.reason) is FailureKind.CONTENT}
        if ordered and (culprit := next((id for id in decoded if id in refused | outcomes.keys()), None)):
            # The tasks before it are published, it fails alone, the tasks behind it are not tried.
            decoded = dict(itertools.takewhile(lambda pair: pair[0] != culprit, decoded.items()))
            outcomes = {culprit: outcomes.get(culprit) or self.failing[culprit]}
        sent = {id: message for id, message in decoded.items() if id not in outcomes}
        if not sent:
            return outcomes
        self.requests.append([*sent])
        missing = None if name in self.topics else Failed("not_found", f"{name}: the topic does not exist")
        outages = (
            each
            for id, each in self.failing.items()
            if id in sent and (ordered or failure_kind(each.reason) is FailureKind.OUTAGE)
        )
        if failure := self.down.get(name) or missing or next(outages, None):
            return outcomes | dict.fromkeys(sent, failure)
        for id, message in sent.items():
            outcomes[id] = self.failing.get(id) or Published(str(next(self._message_ids)))
            if id not in self.failing:
                self.published.append((name, id, message))
        return outcomes


def _requests(rows: Sequence[LockedRow], alone: Collection[str]) -> list[list[LockedRow]]:
    requests: dict[str | None, list[list[LockedRow]]] = {}
    for row in rows:
        pieces = requests.setdefault(row.ordering_key, [[]])
        if row.id not in alone:
            pieces[-1 if row.ordering_key else 0].append(row)
        else:
            pieces += [[row], []] if row.ordering_key else [[row]]
    return [piece for pieces in requests.values() for piece in pieces if piece]


class Counted:
    """A metrics client that adds up by name, and keeps gauges and samples with their tags."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.gauges: dict[tuple[str, ...], float] = {}
        #: Name, value, tags and sample rate.
        self.samples: list[tuple[str, float, list[str], float]] = []
        #: The tags of all counters.
        self.tags: set[str] = set()

    def increment(self, metric: str, value: float, tags: list[str]) -> None:
        self.counts[metric] += int(value)
        self.tags.update(tags)

    def gauge(self, metric: str, value: float, tags: list[str]) -> None:
        self.gauges[metric, *tags] = value

    def distribution(self, metric: str, value: float, tags: list[str], sample_rate: float = 1) -> None:
        self.samples.append((metric, value, tags, sample_rate))

    def stop(self, timeout: float) -> None:
        """Nothing is buffered."""


def serialized(data: bytes = b"data", **fields: Any) -> bytes:
    return bytes(RawPubsubMessage(data=data, **fields).SerializeToString())
