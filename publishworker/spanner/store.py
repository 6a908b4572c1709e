"""All reads and writes of the relay on Spanner. The SQL is in `relay_sql`."""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, JsonObject, KeySet, RequestOptions

from outbox.base.schedules import ABORTED
from outbox.table.connection import STREAM_RETRY, Deadline, LimitedDatabase
from outbox.table.controls import TopicControls, problems
from outbox.table.ddl import Layout, by_layout
from outbox.table.own_transactions import PESSIMISTIC, transact
from outbox.table.shared_sql import FORGET_WORKER_SECONDS, parameters
from publishworker.spanner import relay_sql
from publishworker.spanner.write_errors import (
    SERVICE_ERRORS,
    StoreError,
    describe,
    error_class,
    is_lost_session,
)
from publishworker.types import Candidate, KeyHeads, LockedRow, PollRequest, QueuedTask, RowChange, TopicKey

#: Seconds for a read. The emulator scans whole tables, so a read takes several seconds if the backlog is large.
READ_SECONDS = 30.0
#: Seconds for the lock query, which waits while a transaction of another worker holds a row.
LOCK_SECONDS = 10.0
#: Seconds for a heartbeat, including aborts.
HEARTBEAT_TIMEOUT_SECONDS = 5.0
#: An aborted transaction is retried until this many seconds after it began.
ABORTED_SECONDS = 20.0

#: Called under the lock with the rows and the database's time, and again after an abort. Returns the changes by ID.
Decide = Callable[[Sequence[LockedRow], datetime], Mapping[str, RowChange]]


#: A worker is live until its last heartbeat is this many seconds old. The number is also the default of the column
#: LivenessTimeoutSeconds.
LIVENESS_TIMEOUT_SECONDS = 14


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers that have a heartbeat row.

    `live` maps the ID of each live worker to the seconds until its liveness timeout. `silent` are those that have timed
    out, and `gone` are the ones of them whose row is so old that it may be deleted. `layouts` are the layouts to poll,
    as the database records them. They are empty until the table's first reshard.
    """

    live: Mapping[str, float] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
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


class SpannerStore:
    """Reads and writes of the relay on Spanner. Each method raises StoreError if Spanner does not answer or refuses.

    Reads outside of `claim` are strong, single-use, at the request priority, one for each layout, and take no locks.
    """

    def __init__(
        self,
        database: LimitedDatabase,
        layout: Layout,
        priority: str = "medium",
        heartbeat_database: LimitedDatabase | None = None,
        before_read: Callable[[], None] = lambda: None,
        *,
        commit_delay: float = 0.0,
    ) -> None:
        """`layout` is that of the table, `heartbeat_database` the same database on a connection that no batch uses.

        Each read calls `before_read`, so that the liveness probe does not take a slow turn for a hung one. Without
        `commit_delay` (seconds), Spanner chooses how long commits wait for others.
        """
        self._database: Any = database  # its methods carry no types
        self._heartbeat_database: Any = heartbeat_database or database
        self._renewal = threading.Lock()  # of the databases, because several batches may lose their session at once
        self._before_read = before_read
        self._commit_delay = timedelta(seconds=commit_delay) if commit_delay else None
        self._priority = RequestOptions.Priority[f"PRIORITY_{priority.upper()}"]
        #: The layouts to poll. `discover` replaces them if the database records others.
        self.layouts: Sequence[Layout] = (layout,)

    @property
    def database(self) -> Any:
        """Return the database. It is replaced when its session is lost."""
        return self._database

    def poll(self, request: PollRequest) -> Sequence[Candidate]:
        """Return the unsent tasks that are requested, each once."""
        parameters = {"topics": sorted(request.topics), "per_range": request.per_range}
        if request.below_priority is not None:
            parameters["below"] = request.below_priority
        statement = relay_sql.POLLS[request.due, request.below_priority is not None]
        found: dict[str, Candidate] = {}
        for shards in by_layout(request.shards):
            values = parameters | {"shards": shards.numbers}
            read = self._query(shards.sql(statement), "outbox-poll", values, lazy_decode=True)
            found |= relay_sql.candidates(read, shards.first_id)
        return tuple(found.values())

    def discover(self, shards: Sequence[int], known: Collection[str], *, workers: bool = True) -> Discovery:
        """Return live workers (unless `workers` is False), topic controls and unknown topics.

        The topics have unsent tasks in `shards` and are not `known`. The discovery returns some of them, at least one
        if there are any. Without `shards`, it reads no index of AsynchronousTasks, because a reshard may have dropped
        the index.
        """
        names = sorted(known)
        parameters = {"lows": ["", *(topic + relay_sql.NEXT_NAME_SUFFIX for topic in names)]}
        parameters["highs"] = [*names, relay_sql.AFTER_ALL_TOPICS]
        if shards:
            statement = relay_sql.DISCOVER if workers else relay_sql.DISCOVER_NO_WORKERS
            found = list(self._query_layouts(statement, "outbox-discover", shards, parameters))
        else:
            found = self._query(relay_sql.DISCOVER_NO_TOPICS, "outbox-discover", {})
        _topics, *rest, controls = found[0]
        return Discovery(
            self._workers(*rest) if rest else None,
            {topic: TopicControls(*row) for topic, *row in controls},
            frozenset(topic for topics, *_ in found for topic in topics),
        )

    def _workers(self, heartbeats: Sequence[Sequence[Any]], layouts: Sequence[Sequence[Any]]) -> Workers:
        recorded = tuple(sorted(filter(None, (Layout.recorded(column, number) for column, number in layouts))))
        self.layouts = recorded or self.layouts
        live = {id: left for id, age, timeout, _ in heartbeats if (left := timeout - age / 1000) > 0}
        return Workers(
            live=live,
            silent=frozenset(id for id, *_ in heartbeats if id not in live),
            gone=frozenset(id for id, age, *_ in heartbeats if age / 1000 > FORGET_WORKER_SECONDS),
            layouts=recorded,
        )

    def seconds_until_due(self, shards: Sequence[int], topics: Collection[str]) -> float | None:
        """Return the seconds until the next task becomes due, 0 if one is due already, or None if none will be."""
        found = self._query_layouts(relay_sql.NEXT_DUE, "outbox-next-due", shards, {"topics": sorted(topics)})
        return min((max(0.0, (at - now).total_seconds()) for at, now in found if at is not None), default=None)

    def key_heads(self, keys: Mapping[TopicKey, int], per_key: int, *, skip_dead: bool) -> KeyHeads:
        """Return the first unsent tasks of each key (with its shard), at most `per_key`, in order.

        It is no part of a claim's transaction, where it would lock index ranges.
        """
        return self._key_heads(relay_sql.KEY_HEADS, keys, skip_dead=skip_dead, per_key=per_key)

    def _key_heads(self, statement: str, keys: Mapping[TopicKey, int], **more: int) -> KeyHeads:
        """Return the result of a statement for `keys` (each with its shard). It has `more` parameters."""
        found: dict[TopicKey, list[QueuedTask]] = {}
        for shards in by_layout(keys.values()):
            of_layout = [key for key, shard in keys.items() if shard in shards]
            topics, names = [key.topic for key in of_layout], [key.ordering_key for key in of_layout]
            values = {"topics": topics, "keys": names, "shards": shards.numbers, **more}
            found |= relay_sql.key_heads(self._query(shards.sql(statement), "outbox-order", values, lazy_decode=True))
        return found

    def claim(self, ids: Sequence[str], decide: Decide, *, may_delay: bool = False) -> datetime:
        """Lock the rows, call `decide`, write its changes and commit, in one read-write transaction.

        Return the commit timestamp. After an abort, the transaction runs again and calls `decide` again. With
        `may_delay`, the commit may wait for --commit-delay.
        """

        def work(transaction: Any) -> Any:
            locked, now = relay_sql.lock(transaction, ids, self.request("outbox-claim", LOCK_SECONDS))
            relay_sql.write_changes(transaction, locked, decide(locked, now))
            return transaction

        with self._store_errors():
            done = transact(
                self._database,
                work,
                timeout_secs=ABORTED_SECONDS,
                default_retry_delay=ABORTED.first,
                transaction_tag="outbox-relay",
                commit_request_options={"priority": self._priority},
                max_commit_delay=self._commit_delay if may_delay else None,
                **PESSIMISTIC,
            )
        committed: datetime = done.committed
        return committed

    def heartbeat(
        self,
        worker: str,
        started_at: datetime,
        layouts: Iterable[Layout],
        *,
        liveness_timeout: int = LIVENESS_TIMEOUT_SECONDS,
        info: Mapping[str, object] | None = None,
        remove: Collection[str] = (),
    ) -> None:
        """Write the row of a worker that polls `layouts`, and delete the rows of the workers in `remove`.

        One request, a commit without reads. The worker is then live for `liveness_timeout` seconds. `info` is what it
        says about itself (`process.gauges`).

        It sets no request priority, and Spanner treats that as high. With a lower priority, an overloaded Spanner could
        delay heartbeats, and other workers would take over the shards.
        """
        with self._store_errors(), self._heartbeat_batch() as batch:
            polls = ",".join(layout.column for layout in layouts)
            row = (worker, started_at, COMMIT_TIMESTAMP, liveness_timeout, polls, JsonObject(info))
            batch.insert_or_update(relay_sql.WORKERS_TABLE, relay_sql.HEARTBEAT_COLUMNS, [row])
            if remove:
                batch.delete(relay_sql.WORKERS_TABLE, KeySet(keys=[[id] for id in remove]))

    def delete_heartbeat(self, worker: str) -> None:
        with self._store_errors(), self._heartbeat_batch() as batch:
            batch.delete(relay_sql.WORKERS_TABLE, KeySet(keys=[[worker]]))

    def _query_layouts(
        self, statement: str, tag: str, shards: Iterable[int], values: Mapping[str, Any]
    ) -> Iterator[list[Any]]:
        for each in by_layout(shards):
            yield from self._query(each.sql(statement), tag, {**values, "shards": each.numbers})

    def _query(self, statement: str, tag: str, values: Mapping[str, Any], *, lazy_decode: bool = False) -> list[Any]:
        with self.reading() as snapshot:
            return list(
                snapshot.execute_sql(
                    statement, **parameters(values), **self.request(tag, READ_SECONDS), lazy_decode=lazy_decode
                )
            )

    @contextlib.contextmanager
    def reading(self) -> Iterator[Any]:
        """Yield a strong snapshot. Raises StoreError for the client's errors."""
        self._before_read()
        with self._store_errors(), self._database.snapshot() as snapshot:
            yield snapshot

    def request(self, tag: str, seconds: float) -> dict[str, Any]:
        options = {"priority": self._priority, "request_tag": tag}
        return {"request_options": options, "retry": STREAM_RETRY, "timeout": Deadline(seconds)}

    def _heartbeat_batch(self) -> Any:
        return self._heartbeat_database.batch(
            RequestOptions(transaction_tag="outbox-heartbeat"),
            timeout_secs=HEARTBEAT_TIMEOUT_SECONDS,
            default_retry_delay=ABORTED.first,
        )

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        used = self._database
        try:
            yield
        except (*SERVICE_ERRORS, StoreError) as error:
            cause = error.__cause__ if isinstance(error, StoreError) else error
            with self._renewal:
                if self._database is used and is_lost_session(cause):  # otherwise another thread has replaced it
                    # Spanner has deleted the session, or the database was restored. The client would keep using the old
                    # session.
                    self._database, self._heartbeat_database = used.renewed(), self._heartbeat_database.renewed()
            if isinstance(error, StoreError):
                raise
            raise error_class(error)(describe(error)) from error


# Whether any unsent task is left to send, and the topics of such tasks. No turn of the relay needs this.


def any_to_send(store: SpannerStore, shards: Iterable[int] | None = None, *, misrouted: bool = False) -> bool:
    """Tell whether `shards`, or all, have a pending or retrying task that workers may send. Raises StoreError.

    Workers hold back the tasks of paused topics, and of topics with an invalid route. With `misrouted`, tell whether
    there is such a task in a topic with an invalid route that is not paused.
    """
    shards = store.layouts[0].ids if shards is None else tuple(shards)
    topics, controls = _discover_all(store, shards)
    paused = {topic for topic, row in controls.items() if row.paused}
    invalid = {topic for topic, row in controls.items() if problems(TopicControls(publish_to=row.publish_to))}
    topics = (topics & invalid if misrouted else topics - invalid) - paused
    return bool(_read_topics_to_send(store, shards, topics))


def topics_to_send(store: SpannerStore) -> dict[str, bool]:
    """Return the topics with pending or retrying tasks, and whether the first of these have keys. Raises StoreError."""
    shards = store.layouts[0].ids
    return _read_topics_to_send(store, shards, _discover_all(store, shards)[0])


def _discover_all(store: SpannerStore, shards: Collection[int]) -> tuple[frozenset[str], Mapping[str, TopicControls]]:
    """Return all topics with unsent tasks, and the topic controls."""
    known = frozenset[str]()
    while True:
        found = store.discover(tuple(shards), known)
        if not found.topics:
            return known, found.controls
        known |= found.topics


def _read_topics_to_send(store: SpannerStore, shards: Iterable[int], topics: Collection[str]) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for each in by_layout(shards if topics else ()):
        values = parameters({"shards": each.numbers, "topics": sorted(topics)})
        request = store.request("outbox-unsent", READ_SECONDS)
        with store.reading() as snapshot:
            found |= dict(map(tuple, snapshot.execute_sql(each.sql(relay_sql.TOPICS_TO_SEND), **values, **request)))
    return found
