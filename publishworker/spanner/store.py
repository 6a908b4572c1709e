"""All reads and writes of the relay on Spanner. The SQL is in `statements`."""

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from google.api_core.exceptions import (
    Aborted,
    GoogleAPICallError,
)
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeyRange, KeySet, RequestOptions, param_types

from outbox.table.connection import STREAM_RETRY, Deadline, LimitedDatabase
from outbox.table.layouts import Layout, by_suffix, first_id, renamed, suffix_of
from outbox.table.sql import FORGET_WORKER_SECONDS, PESSIMISTIC
from outbox.table.states import TO_SEND, is_dead
from publishworker.spanner import marks, rows, statements
from publishworker.spanner.errors import (
    CONTENT,
    SERVICE_ERRORS,
    NotWritten,
    StoreError,
    describe,
    is_lost_session,
    kind_of,
)
from publishworker.types import (
    Candidate,
    Discovery,
    Heartbeat,
    Key,
    KeyHeads,
    LockedRow,
    Mark,
    PollRequest,
    QueuedTask,
    TopicControls,
    TopicLimit,
    Workers,
)

#: Seconds for a read. The emulator scans whole tables, so a read takes several seconds if the backlog is large.
READ_SECONDS = 30.0
#: Seconds for the lock query, which waits while a transaction of another worker holds a row.
LOCK_SECONDS = 10.0
#: Seconds for a heartbeat, including aborts.
HEARTBEAT_TIMEOUT_SECONDS = 5.0
#: Max seconds from the start of a transaction during which it is retried after ABORTED.
ABORTED_SECONDS = 20.0
#: Seconds to wait after ABORTED if Spanner names no delay. The client's default is at least 2 s.
ABORTED_DELAY_SECONDS = 0.02

#: Rows of the first read of unsent tasks, and of each further read of the same topic.
FIRST_ROWS, MORE_ROWS = 1_000, 10_000
#: Max unsent tasks of a shard and topic that `unsent` counts. The last read may exceed it.
COUNT_LIMIT = 10_000

_IDS = {"ids": param_types.Array(param_types.STRING)}
_PARAM_TYPES = {
    "shards": param_types.Array(param_types.INT64),
    "topics": param_types.Array(param_types.STRING),
    "lows": param_types.Array(param_types.STRING),
    "highs": param_types.Array(param_types.STRING),
    "per_range": param_types.INT64,
    "below": param_types.INT64,
    "keys": param_types.Array(param_types.STRING),
    "per_key": param_types.INT64,
    "max_rows": param_types.INT64,
    "skip_dead": param_types.BOOL,
}
#: Called under the lock with the rows and the database's time, and again after an abort. Returns the marks by ID.
Decide = Callable[[Sequence[LockedRow], datetime], Mapping[str, Mark]]


@dataclass(frozen=True, slots=True)
class UnsentCount:
    """The number of tasks of a topic in one state: pending, retrying, scheduled, blocked, dead or paused.

    With `at_least`, the count of the topic stopped early, so there may be more.
    """

    topic: str
    state: str
    count: int
    at_least: bool = False


class Store(Protocol):
    """The store as the relay uses it. Each method raises StoreError if the store does not answer."""

    #: The layouts to poll. `discover` replaces them if the database records others.
    layouts: Sequence[Layout]

    def poll(self, request: PollRequest) -> Sequence[Candidate]:
        """Return the unsent tasks that are requested, each once. Takes no locks."""

    def discover(self, shards: Sequence[int], known: Collection[str]) -> Discovery:
        """Return live workers, topic controls and unknown topics.

        The topics have unsent tasks in `shards` and are not `known`. At least one is returned if there are any. Without
        shards, no index is read, because the index may have been dropped.
        """

    def seconds_until_due(self, shards: Sequence[int], topics: Collection[str]) -> float | None:
        """Return the seconds until the next task becomes due, 0 if one is due already, or None if none will be.

        A task that is due already counts, because it may have become due after the last poll.
        """

    def key_heads(self, keys: Mapping[Key, int], per_key: int, *, skip_dead: bool) -> KeyHeads:
        """Return the first unsent tasks of each key in order, at most `per_key`. Takes no locks.

        `keys` maps each key to its shard. With `skip_dead` dead tasks are left out.
        """

    def claim(self, ids: Sequence[str], decide: Decide) -> datetime:
        """Lock the rows, call `decide`, write its marks and commit. All of it runs again after an abort.

        Returns the commit timestamp, which is the SentAt of the tasks that are marked as sent.
        """

    def heartbeat(self, heartbeat: Heartbeat, remove: Collection[str] = ()) -> None:
        """Write a heartbeat. Delete the rows of the workers in `remove`."""

    def delete_heartbeat(self, worker: str) -> None:
        """Delete the worker's row."""

    def has_work(self, shards: Iterable[int] | None = None) -> bool:
        """Tell whether `shards`, or all, have a pending or retrying task outside of paused topics."""

    def topics_in_use(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the topics that have pending or retrying tasks, and the topics that have tasks with ordering keys.

        Only the first unsent tasks of each shard and topic are read.
        """

    def unsent(self) -> list[UnsentCount]:
        """Count unsent tasks by topic and state, up to a limit in each shard and topic."""


class SpannerStore:
    """The store on Spanner."""

    def __init__(
        self,
        database: LimitedDatabase,
        layout: Layout,
        priority: str = "medium",
        heartbeats: LimitedDatabase | None = None,
    ) -> None:
        """Poll the table in `database`, which has `layout`, with the request priority `low`, `medium` or `high`.

        `heartbeats` is the same database for heartbeats, on a connection without the requests of batches.
        """
        self._database: Any = database  # its methods carry no types
        self._heartbeats: Any = heartbeats or database
        self._priority = RequestOptions.Priority[f"PRIORITY_{priority.upper()}"]
        self.layouts: Sequence[Layout] = (layout,)

    @property
    def database(self) -> Any:
        """Return the database. It is replaced when its session is lost."""
        return self._database

    def poll(self, request: PollRequest) -> Sequence[Candidate]:
        """See Store. A strong single-use read at the request priority, one request for each layout."""
        parameters = {"topics": sorted(request.topics), "per_range": request.per_range}
        if request.below is not None:
            parameters["below"] = request.below
        statement = statements.POLLS[request.due, request.below is not None]
        found: dict[str, Candidate] = {}
        for suffix, shards in by_suffix(request.shards).items():
            values = parameters | {"shards": shards}
            read = self._query(renamed(statement, suffix), "outbox-poll", values, lazy_decode=True)
            found |= rows.candidates(read, first_id(suffix))
        return tuple(found.values())

    def discover(self, shards: Sequence[int], known: Collection[str]) -> Discovery:
        """See Store. A strong single-use read at the request priority, one request for each layout of `shards`."""
        names = sorted(known)
        parameters = {"lows": ["", *(topic + statements.NEXT_NAME_SUFFIX for topic in names)]}
        parameters["highs"] = [*names, statements.AFTER_ALL_TOPICS]
        if shards:
            found = list(self._query_layouts(statements.DISCOVER, "outbox-discover", shards, parameters))
        else:
            found = self._query(statements.DISCOVER_NO_TOPICS, "outbox-discover", {})
        _, seen, layouts, controls = found[0]
        recorded = tuple(sorted(filter(None, (Layout.recorded(column, number) for column, number in layouts))))
        self.layouts = recorded or self.layouts
        return Discovery(
            _workers(seen, recorded),
            _controls(controls),
            frozenset(topic for topics, *_ in found for topic in topics),
        )

    def seconds_until_due(self, shards: Sequence[int], topics: Collection[str]) -> float | None:
        """See Store. A strong single-use read at the request priority, one request for each layout."""
        found = self._query_layouts(statements.NEXT_DUE, "outbox-next-due", shards, {"topics": sorted(topics)})
        return min((max(0.0, (at - now).total_seconds()) for at, now in found if at is not None), default=None)

    def key_heads(self, keys: Mapping[Key, int], per_key: int, *, skip_dead: bool) -> KeyHeads:
        """See Store. A strong single-use read at the request priority, one request for each layout.

        The claim does not read key heads, because that would lock ranges of the index.
        """
        found: dict[Key, Sequence[QueuedTask]] = {}
        for suffix in by_suffix(keys.values()):
            of_layout = {key: shard for key, shard in keys.items() if suffix_of(shard) == suffix}
            found |= self._key_heads(suffix, of_layout, per_key, skip_dead=skip_dead)
        return found

    def _key_heads(self, suffix: str, keys: Mapping[Key, int], per_key: int, *, skip_dead: bool) -> KeyHeads:
        statement = renamed(statements.KEY_HEADS, suffix)
        return rows.key_heads(self._read_keys(statement, keys, skip_dead=skip_dead, per_key=per_key))

    def _read_keys(self, statement: str, keys: Mapping[Key, int], *, skip_dead: bool, **limit: int) -> list[Any]:
        [numbers] = by_suffix(keys.values()).values()
        parameters = {
            "topics": [key.topic for key in keys],
            "keys": [key.ordering_key for key in keys],
            "shards": numbers,
            "skip_dead": skip_dead,
            **limit,
        }
        return self._query(statement, "outbox-order", parameters, lazy_decode=True)

    def claim(self, ids: Sequence[str], decide: Decide) -> datetime:
        """See Store. Serializable and pessimistic, whatever the client's defaults are: LOCK_SCANNED_RANGES needs it."""
        transaction: Any = None

        def work(attempt: Any) -> None:
            nonlocal transaction
            locked, now = _lock(attempt, ids, self._priority)
            marks.write(attempt, locked, decide(locked, now))
            transaction = attempt

        with self._store_errors(), self._transaction_slot(ABORTED_SECONDS) as seconds:
            try:
                self._database.run_in_transaction(
                    work,
                    timeout_secs=seconds,
                    default_retry_delay=ABORTED_DELAY_SECONDS,
                    transaction_tag="outbox-relay",
                    commit_request_options={"priority": self._priority},
                    **PESSIMISTIC,
                )
            except CONTENT:
                # The client leaves the refused transaction and its locks open, but its rows are locked again at once.
                if transaction is not None:
                    with contextlib.suppress(*SERVICE_ERRORS):
                        transaction.rollback()
                raise
        committed: datetime = transaction.committed
        return committed

    def heartbeat(self, heartbeat: Heartbeat, remove: Collection[str] = ()) -> None:
        """See Store. One request, a commit without reads.

        It sets no request priority, which Spanner treats as high. Otherwise an overloaded Spanner could delay
        heartbeats, and other workers would take over the shards.
        """
        with self._store_errors(), self._heartbeat_batch() as batch:
            polls = ",".join(layout.column for layout in heartbeat.polls)
            row = (heartbeat.worker, heartbeat.started_at, COMMIT_TIMESTAMP, heartbeat.liveness_timeout, polls)
            batch.insert_or_update("AsynchronousTaskWorkers", statements.HEARTBEAT_COLUMNS, [row])
            if remove:
                batch.delete("AsynchronousTaskWorkers", KeySet(keys=[[id] for id in remove]))

    def delete_heartbeat(self, worker: str) -> None:
        """See Store."""
        with self._store_errors(), self._heartbeat_batch() as batch:
            batch.delete("AsynchronousTaskWorkers", KeySet(keys=[[worker]]))

    def has_work(self, shards: Iterable[int] | None = None) -> bool:
        """See Store. All reads use one timestamp. So do `topics_in_use` and `unsent`."""
        [[now, paused]] = self._query(statements.NOW_AND_PAUSED, "outbox-unsent", {})

        def skip_rest(last: rows.UnsentRow) -> bool:
            return is_dead(last.available_at) or last.topic in paused

        found = self._unsent(self.layouts[0].ids if shards is None else shards, now, skip_rest)
        return any(each.state(now, paused) in TO_SEND for each in found)

    def topics_in_use(self) -> tuple[frozenset[str], frozenset[str]]:
        """See Store."""
        [[now, _]] = self._query(statements.NOW_AND_PAUSED, "outbox-unsent", {})
        found = list(self._unsent(self.layouts[0].ids, now, lambda _last: True))
        working = frozenset(each.topic for each in found if each.state(now) in TO_SEND)
        return working, frozenset(each.topic for each in found if each.is_ordered)

    def unsent(self) -> list[UnsentCount]:
        """See Store."""
        [[now, paused]] = self._query(statements.NOW_AND_PAUSED, "outbox-unsent", {})
        counts, read, cut = Counter[tuple[str, str]](), Counter[tuple[int, str]](), set()

        def skip_rest(last: rows.UnsentRow) -> bool:
            if full := read[last.shard, last.topic] >= COUNT_LIMIT:
                cut.add(last.topic)
            return full

        for each in self._unsent(self.layouts[0].ids, now, skip_rest):
            read[each.shard, each.topic] += 1
            counts[each.topic, each.state(now, paused)] += 1
        return [UnsentCount(*key, counts[key], key[0] in cut) for key in sorted(counts)]

    def _unsent(
        self, shards: Iterable[int], at: datetime, skip_rest: Callable[[rows.UnsentRow], bool]
    ) -> Iterator[rows.UnsentRow]:
        for suffix, numbers in by_suffix(shards).items():
            yield from self._unsent_of(suffix, numbers, at, skip_rest)

    def _unsent_of(
        self, suffix: str, shards: Sequence[int], at: datetime, skip_rest: Callable[[rows.UnsentRow], bool]
    ) -> Iterator[rows.UnsentRow]:
        """Yield each task that is unsent at `at`, once, by shard, topic and time. No read is large enough to time out.

        If `skip_rest` is true of the last task of a read, the rest of its topic in its shard is left out.
        """
        starts: list[list[Any]] = [[shard, None] for shard in sorted(shards)]
        limit, known = FIRST_ROWS, frozenset[str]()
        while starts:
            found = self._read_unsent(suffix, starts, at, limit)
            yield from (each for each in found if each.id not in known)
            if len(found) < limit:
                return
            last = found[-1]
            start = last.place
            if skip_rest(last):
                start, limit, known = (
                    [last.shard, None, last.topic + statements.NEXT_NAME_SUFFIX],
                    FIRST_ROWS,
                    frozenset(),
                )
            else:
                # Several tasks may have the same index key, and a read starts at a key. So the next read returns the
                # tasks at this key again. Skip them.
                limit = limit * 2 if start == starts[0] else MORE_ROWS
                known = frozenset(each.id for each in found if each.place == start)
            starts = [start, *(each for each in starts if each[0] > last.shard)]

    def _read_unsent(
        self, suffix: str, starts: Sequence[Sequence[Any]], at: datetime, limit: int
    ) -> list[rows.UnsentRow]:
        ranges = [KeyRange(start_closed=start, end_closed=[start[0], None]) for start in starts]
        with self._store_errors(), self._database.snapshot(read_timestamp=at) as snapshot:
            found = snapshot.read(
                "AsynchronousTasks",
                [renamed(name, suffix) for name in statements.UNSENT_COLUMNS],
                KeySet(ranges=ranges),
                index=renamed("AsynchronousTasksToSend", suffix),
                limit=limit,
                request_options={"priority": self._priority, "request_tag": "outbox-unsent"},
                retry=STREAM_RETRY,
                timeout=Deadline(READ_SECONDS),
                lazy_decode=True,
            )
            return rows.unsent(found)

    def _query_layouts(
        self, statement: str, tag: str, shards: Iterable[int], parameters: Mapping[str, Any]
    ) -> Iterator[list[Any]]:
        """Yield the rows of a statement for each layout of `shards`."""
        for suffix, numbers in by_suffix(shards).items():
            yield from self._query(renamed(statement, suffix), tag, {**parameters, "shards": numbers})

    def _query(
        self,
        statement: str,
        tag: str,
        parameters: Mapping[str, Any],
        *,
        lazy_decode: bool = False,
    ) -> list[Any]:
        with self._store_errors(), self._database.snapshot() as snapshot:
            return list(
                snapshot.execute_sql(
                    statement,
                    params=parameters,
                    param_types={name: _PARAM_TYPES[name] for name in parameters},
                    request_options={"priority": self._priority, "request_tag": tag},
                    retry=STREAM_RETRY,
                    timeout=Deadline(READ_SECONDS),
                    lazy_decode=lazy_decode,
                )
            )

    def _transaction_slot(self, seconds: float) -> contextlib.AbstractContextManager[float]:
        """Return a context in which a transaction runs. It yields the remaining seconds. EmulatorStore overrides it."""
        return contextlib.nullcontext(seconds)

    def _heartbeat_batch(self) -> Any:
        return self._heartbeats.batch(
            RequestOptions(transaction_tag="outbox-heartbeat"),
            timeout_secs=HEARTBEAT_TIMEOUT_SECONDS,
            default_retry_delay=ABORTED_DELAY_SECONDS,
        )

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Turn the client's errors into StoreError."""
        used = self._database
        try:
            yield
        except (*SERVICE_ERRORS, StoreError) as error:
            cause = error.__cause__ if isinstance(error, StoreError) else error
            if self._database is used and is_lost_session(cause):  # otherwise another thread has replaced it
                # Spanner has deleted the session, or the database was restored. The client would keep using it.
                self._database, self._heartbeats = used.renewed(), self._heartbeats.renewed()
            if isinstance(error, StoreError):
                raise
            raise kind_of(error)(describe(error)) from error


def _workers(found: Sequence[Sequence[Any]], layouts: tuple[Layout, ...]) -> Workers:
    return Workers(
        live={id: left for id, age, timeout in found if (left := timeout - age / 1000) > 0},
        gone=frozenset(id for id, age, _ in found if age / 1000 > FORGET_WORKER_SECONDS),
        layouts=layouts,
    )


def _controls(found: Sequence[Sequence[Any]]) -> TopicControls:
    limits = {topic: TopicLimit(rate, burst, in_flight) for topic, _, rate, burst, in_flight in found}
    return TopicControls(
        paused=frozenset(topic for topic, paused, *_ in found if paused),
        limits={topic: limit for topic, limit in limits.items() if limit != TopicLimit()},
    )


def _lock(transaction: Any, ids: Sequence[str], priority: RequestOptions.Priority) -> tuple[list[LockedRow], datetime]:
    """Return the locked rows and the database's time. IDs are sorted so that workers lock in the same order."""
    try:
        found = list(
            transaction.execute_sql(
                statements.LOCK,
                params={"ids": sorted(ids)},
                param_types=_IDS,
                request_options={"priority": priority, "request_tag": "outbox-claim"},
                retry=STREAM_RETRY,
                timeout=Deadline(LOCK_SECONDS),
                lazy_decode=True,
            )
        )
    except Aborted:
        raise
    except GoogleAPICallError as error:
        # After a GoogleAPICallError the client leaves the transaction and its locks open. After any other exception it
        # rolls back.
        raise NotWritten(describe(error)) from error
    return rows.locked(found)
