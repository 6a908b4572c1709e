"""A store and topics in memory. The contract tests compare the store with Spanner."""

import contextlib
import dataclasses
import itertools
import threading
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest
from sortedcontainers import SortedList

from outbox.base.values import topic_name
from outbox.message import MAX_REQUEST_BYTES, TASK_ID_ATTRIBUTE, RawPubsubMessage
from outbox.table.controls import NO_CONTROLS, TopicControls
from outbox.table.ddl import Layout
from outbox.table.shared_sql import FORGET_WORKER_SECONDS
from outbox.table.states import NEVER, first_due, is_dead
from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.spanner.relay_sql import times_sent
from publishworker.spanner.store import LIVENESS_TIMEOUT_SECONDS, Decide, Discovery, Workers
from publishworker.spanner.write_errors import NotWritten, StoreError, WriteRefused
from publishworker.telemetry.metrics import APPLICATION, METRICS, PHASE_DURATION, PIPELINE
from publishworker.types import (
    PUBLISH,
    Candidate,
    Deferred,
    EndedAgain,
    Failed,
    KeyHeads,
    LockedRow,
    NotSent,
    PollRequest,
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
    cancelled_by: str | None = None


class FakeStore:
    """Rows, locked one by one, with the ranges of the outbox's indexes, and faults on request."""

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
        #: Held while the rows and the ranges differ.
        self._lock = threading.RLock()
        self._row_locks: dict[str, threading.Lock] = {}
        self._ready: dict[tuple[int, str], SortedList[Any]] = defaultdict(SortedList)
        self._due: dict[tuple[int, str], SortedList[Any]] = defaultdict(SortedList)
        self._unsent_of_key: dict[TopicKey, SortedList[Any]] = defaultdict(SortedList)
        self._unsent_topics: dict[int, Counter[str]] = defaultdict(Counter)
        self.unsent_count = 0

    def insert(self, id: str, topic: str, data: bytes = b"", **columns: Any) -> None:
        shards = self.shards_of(columns.get("ordering_key") or id)
        with self._changing([id]):
            self.rows[id] = StoredTask(id, topic, data, shards, **columns)

    def delete(self, id: str) -> None:
        with self._changing([id]):
            del self.rows[id]

    def change(self, id: str, **columns: Any) -> None:
        with self._changing([id]):
            for name, value in columns.items():
                setattr(self.rows[id], name, value)

    @contextlib.contextmanager
    def _changing(self, ids: Collection[str]) -> Iterator[None]:
        """Change the entries of these rows in the ranges as the block changes the rows."""
        with self._lock:
            for row in (self.rows[id] for id in ids if id in self.rows):
                self._index(row, SortedList.remove, -1)
            yield
            for row in (self.rows[id] for id in ids if id in self.rows):
                self._index(row, SortedList.add, 1)

    def _index(self, row: StoredTask, change: Callable[[SortedList[Any], Any], None], number: int) -> None:
        """Add the entries of an unsent row to the ranges, or remove them."""
        if row.sent_at is not None:
            return
        for place in ((shard, row.topic) for shard in row.shards):
            if row.available_at is None:
                change(self._ready[place], (-row.priority, row.created_at, row.id))
            else:
                change(self._due[place], (row.available_at, -row.priority, row.created_at, row.id))
        if row.ordering_key is not None:
            change(self._unsent_of_key[TopicKey(row.topic, row.ordering_key)], place_in_key(row))
        for shard in row.shards:
            self._unsent_topics[shard][row.topic] += number
        self.unsent_count += number

    def shards_of(self, text: str) -> tuple[int, ...]:
        return tuple(layout.ids[zlib.crc32(text.encode()) % layout.shards] for layout in self.built)

    def build(self, *layouts: Layout) -> None:
        """Give the table these layouts and no others."""
        with self._changing(self.rows):
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
        found: dict[str, Candidate] = {}
        with self._lock:
            for place in itertools.product(request.shards, sorted(request.topics)):
                ids = [each[-1] for each in self._ready[place].islice(stop=request.per_range)]
                if request.below_priority is not None:
                    lower = self._ready[place].irange(minimum=(1 - request.below_priority,))
                    ids += [each[-1] for each in itertools.islice(lower, request.per_range)]
                if request.due:
                    due = itertools.takewhile(lambda each: each[0] <= self.now, self._due[place])
                    ids += [each[-1] for each in itertools.islice(due, request.per_range)]
                found |= {id: candidate(self.rows[id], place[0]) for id in ids}
        return tuple(found.values())

    def discover(self, shards: Sequence[int], known: Collection[str], *, workers: bool = True) -> Discovery:
        self._answer()
        self.discoveries.append(frozenset(known))
        return Discovery(self.workers() if workers else None, dict(self.controls), self.topics_of(shards, known))

    def topics_of(self, shards: Sequence[int], known: Collection[str]) -> frozenset[str]:
        self.require(shards)
        with self._lock:
            found = {topic for shard in shards for topic, number in self._unsent_topics[shard].items() if number}
        return frozenset(found.difference(known))

    def seconds_until_due(self, shards: Sequence[int], topics: Collection[str]) -> float | None:
        self._answer()
        with self._lock:
            ranges = [self._due[place] for place in itertools.product(shards, topics)]
            first = min((each[0][0] for each in ranges if each), default=NEVER)
        return max(0.0, (first - self.now).total_seconds()) if first < NEVER else None

    def control(self, topic: str, **values: Any) -> None:
        """Set controls of a topic."""
        self.controls[topic] = dataclasses.replace(self.controls.get(topic, NO_CONTROLS), **values)

    def workers(self) -> Workers:
        ages = {worker: (self.now - seen_at).total_seconds() for worker, seen_at in self.seen_at.items()}
        recorded = tuple(sorted(layout for layout, state in self.recorded.items() if state == "polled"))
        self.layouts = recorded or self.layouts
        live = {worker: left for worker, age in ages.items() if (left := self.live_for(worker) - age) > 0}
        return Workers(
            live=live,
            silent=frozenset(ages.keys() - live.keys()),
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

    def delete_heartbeat(self, worker: str) -> None:
        self._answer()
        self.seen_at.pop(worker, None)

    def unsent_of(self, key: TopicKey) -> Iterator[StoredTask]:
        """Return the unsent tasks of an ordering key in their order."""
        return (self.rows[id] for _, _, id in self._unsent_of_key.get(key, ()))

    def key_heads(self, keys: Mapping[TopicKey, int], per_key: int, *, skip_dead: bool) -> KeyHeads:
        self._answer()
        self.require(keys.values())
        found: dict[TopicKey, list[QueuedTask]] = {}
        with self._lock:
            for key in keys:
                wanted = (row for row in self.unsent_of(key) if not (skip_dead and is_dead(row.available_at)))
                if first := [self.waiting(row) for row in itertools.islice(wanted, per_key)]:
                    found[key] = first
        return found

    def waiting(self, row: StoredTask) -> QueuedTask:
        is_due, deferred = self.is_due(row) or row.cancelled_by is not None, row.blocked_by is not None
        expired = not is_due and row.expires_at is not None and row.expires_at <= self.now
        return QueuedTask(row.id, len(row.data), is_due or (deferred and not expired), deferred, expired)

    def is_due(self, row: StoredTask) -> bool:
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

    def unsent_rows(self) -> list[StoredTask]:
        return [row for row in self.rows.values() if row.sent_at is None]

    def _answer(self) -> None:
        if self.away:
            raise NotWritten("the fake store is away")

    def _mark(self, marks: Mapping[str, RowChange]) -> datetime:
        with self._lock:
            self.now += timedelta(milliseconds=1)
            self.apply(marks, self.now)
            return self.now

    def refuse(self, marks: Mapping[str, RowChange]) -> None:
        """Raise WriteRefused if a commit with these marks fails, because of `refused` or of a number beyond INT64."""
        numbers = {
            id: [times_sent(self.as_locked(self.rows[id]), sent=isinstance(each, Published))]
            for id, each in marks.items()
            if isinstance(each, Published | NotSent)
        }
        numbers |= {id: [*numbers[id], each.attempts] for id, each in marks.items() if isinstance(each, NotSent)}
        too_large = {id for id, some in numbers.items() if any(not -(2**63) <= each < 2**63 for each in some)}
        if bad := sorted(self.refused & marks.keys() | too_large):
            raise WriteRefused(f"OUT_OF_RANGE: a constraint is violated by {bad[0]}")

    def apply(self, marks: Mapping[str, RowChange], committed: datetime) -> None:
        with self._changing(marks):
            for id, mark in marks.items():
                row = self.rows[id]
                if isinstance(mark, Published | NotSent):
                    row.times_sent = times_sent(self.as_locked(row), sent=isinstance(mark, Published))
                if isinstance(mark, Published):
                    row.sent_at, row.available_at, row.expires_at = committed, None, None
                    row.last_error, row.blocked_by, row.attempts, row.due_at = None, None, 0, None
                    row.cancelled_by = None
                elif isinstance(mark, NotSent):
                    row.sent_at, row.available_at, row.expires_at = None, mark.available_at, mark.expires_at
                    row.last_error, row.blocked_by, row.attempts = mark.error, None, mark.attempts
                    row.due_at = mark.due_at
                elif isinstance(mark, Deferred):
                    row.due_at = first_due(self.as_locked(row))
                    row.available_at, row.blocked_by = mark.available_at, mark.head
                elif isinstance(mark, EndedAgain):
                    row.sent_at = committed

    @staticmethod
    def as_locked(row: StoredTask) -> LockedRow:
        data = row.data if row.sent_at is None or row.cancelled_by is not None else b""
        others = row.available_at, row.due_at, row.blocked_by, row.expires_at, row.last_error, row.cancelled_by
        clean = (*others, row.attempts) == (*[None] * 6, 0)
        return LockedRow(
            row.id, row.topic, data, row.ordering_key, row.created_at, row.available_at, row.sent_at, clean,
            row.attempts, row.expires_at, row.at_most_once, row.blocked_by is not None, row.due_at, row.times_sent,
            row.cancelled_by,
        )  # fmt: skip


def place_in_key(row: StoredTask) -> tuple[datetime, int, str]:
    """Return what orders the rows of a key. A row without Sequence comes first."""
    return row.created_at, -(2**63) if row.sequence is None else row.sequence, row.id


def candidate(row: StoredTask, shard: int) -> Candidate:
    size = len(row.data)
    return Candidate(row.id, row.topic, shard, row.priority, row.created_at, row.available_at, row.ordering_key, size)


class Abort(Exception):
    """Raised by `FakeStore.before_commit` for ABORTED."""


class CallFailed(grpc.RpcError):
    """A call that failed, which is its own future."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(code)
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


class Response:
    """The future of a publish request that has its answer: IDs of messages, or an error."""

    def __init__(self, message_ids: list[str], error: CallFailed | None = None) -> None:
        self.message_ids, self.error = message_ids, error

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        callback(self)

    def exception(self) -> CallFailed | None:
        return self.error

    def result(self) -> "Response":
        return self


class FakePublisher(PubSubPublisher):
    """The publisher on a channel to topics in memory: as strict as Pub/Sub. They must exist, and fail on request."""

    def __init__(self, *topics: str, project: str = "test-project", **options: Any) -> None:
        transport: Any = self
        self.grpc_channel = self
        super().__init__(transport, project, **options)
        self.topics = {topic_name(topic, project) for topic in topics}
        self.published: list[tuple[str, str, Any]] = []  # full topic name, task id, message
        #: The ids of each request.
        self.requests: list[list[str]] = []
        #: How each request fails that is to a topic, by its full name, or has a task, by its ID.
        self.failing: dict[str, Failed] = {}
        self._message_ids = itertools.count(1)

    def ids(self) -> list[str]:
        return [id for _, id, _ in self.published]

    def unary_unary(self, *_arguments: Any, **_more: Any) -> "FakePublisher":
        return self

    def with_call(self, request: Any, **_more: Any) -> tuple[None, Response]:
        return None, self.future(request)

    def future(self, request: Any, **_more: Any) -> Response:
        assert request.ByteSize() <= MAX_REQUEST_BYTES
        ids = [message.attributes[TASK_ID_ATTRIBUTE] for message in request.messages]
        self.requests.append(ids)
        if request.topic not in self.topics:
            return Response([], CallFailed(grpc.StatusCode.NOT_FOUND, "no topic"))
        if failure := next((self.failing[each] for each in (request.topic, *ids) if each in self.failing), None):
            return Response([], CallFailed(grpc.StatusCode[failure.reason.upper()], failure.error))
        if len({each.ordering_key for each in request.messages}) > 1 or any(map(is_refused, request.messages)):
            return Response([], CallFailed(grpc.StatusCode.INVALID_ARGUMENT, "no"))
        self.published += [(request.topic, *each) for each in zip(ids, request.messages, strict=True)]
        return Response([str(next(self._message_ids)) for _ in ids])


def is_refused(message: Any) -> bool:
    sizes = [(len(key.encode()), len(value.encode())) for key, value in message.attributes.items()]
    bad = any(not 0 < key <= 256 or value > 1024 for key, value in sizes)
    return bad or len(sizes) > 100 or len(message.ordering_key.encode()) > 1024


class Counted:
    """A metrics client that adds up by name, and keeps gauges and samples with their tags.

    A test fails if the tags are not those of the table of metrics.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.gauges: dict[tuple[str, ...], float] = {}
        #: Name, value, tags and sample rate.
        self.samples: list[tuple[str, float, list[str], float]] = []
        #: The tags of all counters.
        self.tags: set[str] = set()

    def increment(self, metric: str, value: float, tags: list[str]) -> None:
        _check_tags(metric, tags)
        self.counts[metric] += int(value)
        self.tags.update(tags)

    def gauge(self, metric: str, value: float, tags: list[str]) -> None:
        _check_tags(metric, tags)
        self.gauges[metric, *tags] = value

    def distribution(self, metric: str, value: float, tags: list[str], sample_rate: float = 1) -> None:
        _check_tags(metric, tags)
        self.samples.append((metric, value, tags, sample_rate))

    def stop(self, timeout: float) -> None:
        """Nothing is buffered."""


def _check_tags(metric: str, tags: Sequence[str]) -> None:
    known = next(each.tags for each in (*METRICS, *APPLICATION, *PIPELINE) if each.name == metric)
    names = tuple(tag.partition(":")[0] for tag in tags)
    if names != (("phase",) if metric == PHASE_DURATION.name and f"phase:{PUBLISH}" not in tags else known):
        pytest.fail(f"{metric} has the tags {tags}")  # no Exception, which `Metrics` would log


def serialized(data: bytes = b"data", **fields: Any) -> bytes:
    return bytes(RawPubsubMessage(data=data, **fields).SerializeToString())
