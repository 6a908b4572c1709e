"""The relay's reads and writes on Spanner. Nothing else in the relay talks to it; the SQL is in `statements`."""

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from google.api_core.exceptions import Aborted, GoogleAPICallError, RetryError
from google.auth.exceptions import GoogleAuthError
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet, RequestOptions, param_types

from outbox.errors import NotReached
from outbox.storage.sql import PESSIMISTIC
from publishworker.spanner import rows, statements
from publishworker.spanner.connection import STREAM_RETRY, Deadline, LimitedDatabase
from publishworker.types import (
    Candidate,
    Deferred,
    FailedAttempt,
    Key,
    KeyHeads,
    LockedRow,
    Mark,
    PollRequest,
    Sent,
    TopicControls,
    TopicLimit,
    Workers,
)

#: Seconds for a read. With a large backlog the emulator, which scans whole tables, takes several.
POLL_SECONDS = 30.0
#: Seconds for the lock query. Other workers' transactions end within their own limits.
LOCK_SECONDS = 10.0
#: Seconds for a heartbeat, including aborts.
HEARTBEAT_TIMEOUT_SECONDS = 5.0
#: Seconds within which an aborted transaction is retried.
ABORTED_SECONDS = 20.0
#: Seconds to wait after ABORTED if Spanner names no delay. The client's default is at least 2 s.
ABORTED_DELAY_SECONDS = 0.02

_IDS = {"ids": param_types.Array(param_types.STRING)}
_POLL_TYPES = {
    "shards": param_types.Array(param_types.INT64),
    "topics": param_types.Array(param_types.STRING),
    "lows": param_types.Array(param_types.STRING),
    "highs": param_types.Array(param_types.STRING),
    "per_range": param_types.INT64,
    "below": param_types.INT64,
    "keys": param_types.Array(param_types.STRING),
    "per_key": param_types.INT64,
    "most": param_types.INT64,
    "skip_dead": param_types.BOOL,
}
_SERVICE_ERRORS = (GoogleAPICallError, RetryError, GoogleAuthError)

#: Called under the lock with the rows and the database's time, and again after an abort. Returns the marks by ID.
Decide = Callable[[Sequence[LockedRow], datetime], Mapping[str, Mark]]


class StoreError(NotReached):
    """Spanner did not answer, or refused. Whether something was written is unknown."""


class NotWritten(StoreError):
    """Nothing was written: the rows were not locked, or the transaction was aborted for the last time."""


@dataclass(frozen=True, slots=True)
class Unsent:
    """The number of tasks of a topic in one state: pending, retrying, scheduled, dead or paused.

    `ordered` of them have an ordering key.
    """

    topic: str
    state: str
    count: int
    ordered: int = 0


class Store(Protocol):
    """What the relay needs of a store. Each method raises StoreError if the store does not answer."""

    shards: Sequence[int]

    def poll(self, request: PollRequest) -> Sequence[Candidate]:
        """Return the unsent tasks that are requested, each once. Takes no locks."""

    def discover(self, shards: Sequence[int], known: Collection[str]) -> frozenset[str]:
        """Return topics that have unsent tasks in `shards` and are not `known`: at least one if there are any."""

    def topic_controls(self) -> TopicControls:
        """Return the paused topics and the limits."""

    def workers(self) -> Workers:
        """Return the live workers, and those whose rows may be deleted."""

    def key_heads(self, keys: Mapping[Key, int], per_key: int, *, skip_dead: bool) -> KeyHeads:
        """Return the first unsent tasks of each key in order, at most `per_key`. Takes no locks.

        `keys` maps each key to its shard. With `skip_dead` dead tasks are left out.
        """

    def claim(self, ids: Sequence[str], decide: Decide) -> datetime:
        """Lock the rows, call `decide`, write its marks and commit. All of it runs again after an abort.

        Returns the commit timestamp, which is the SentAt of the tasks that are marked as sent.
        """

    def heartbeat(self, worker: str, started_at: datetime, remove: Collection[str]) -> None:
        """Write the heartbeat of `worker`, which began at `started_at`. Delete the rows of the workers in `remove`."""

    def leave(self, worker: str) -> None:
        """Delete the worker's row."""

    def unsent(self, shards: Sequence[int] | None = None) -> list[Unsent]:
        """Count unsent tasks by topic and state, in `shards` or in all. A strong read of the whole index range."""


class SpannerStore:
    """The store on Spanner."""

    def __init__(self, database: LimitedDatabase, shards: int) -> None:
        """Poll all `shards` of the table in `database`."""
        self._database: Any = database  # its methods carry no types
        self.shards: Sequence[int] = range(shards)

    @property
    def database(self) -> Any:
        """Return the database. It is replaced when its session is lost."""
        return self._database

    def poll(self, request: PollRequest) -> Sequence[Candidate]:
        """See Store. A strong single-use read at MEDIUM priority, one request."""
        parameters = {"shards": request.shards, "topics": sorted(request.topics), "per_range": request.per_range}
        if request.below is not None:
            parameters["below"] = request.below
        statement = statements.POLLS[request.due, request.below is not None]
        return rows.candidates(self._query(statement, "outbox-poll", parameters, lazy_decode=True))

    def discover(self, shards: Sequence[int], known: Collection[str]) -> frozenset[str]:
        """See Store. A strong single-use read at MEDIUM priority, one request that finds a topic in each gap."""
        names = sorted(known)
        lows = ["", *(topic + statements.NEXT for topic in names)]
        parameters = {"shards": list(shards), "lows": lows, "highs": [*names, statements.AFTER_ALL_TOPICS]}
        return frozenset(topic for [topic] in self._query(statements.DISCOVER_TOPICS, "outbox-discover", parameters))

    def topic_controls(self) -> TopicControls:
        """See Store. A strong single-use read at MEDIUM priority, one request."""
        found = self._query(statements.TOPIC_CONTROLS, "outbox-controls", {})
        limits = {topic: TopicLimit(rate, burst, in_flight) for topic, _, rate, burst, in_flight in found}
        return TopicControls(
            paused=frozenset(topic for topic, paused, *_ in found if paused),
            limits={topic: limit for topic, limit in limits.items() if limit != TopicLimit()},
        )

    def workers(self) -> Workers:
        """See Store. A strong single-use read at MEDIUM priority, one request."""
        ages = dict(self._query(statements.WORKERS, "outbox-workers", {}))
        return Workers(
            live=frozenset(id for id, age in ages.items() if age < statements.LIVENESS_TIMEOUT_SECONDS),
            gone=frozenset(id for id, age in ages.items() if age > statements.FORGET_WORKER_SECONDS),
        )

    def key_heads(self, keys: Mapping[Key, int], per_key: int, *, skip_dead: bool) -> KeyHeads:
        """See Store. A strong single-use read at MEDIUM priority, one request, and never a range under a lock."""
        return rows.key_heads(self._read_keys(statements.KEY_HEADS, keys, skip_dead=skip_dead, per_key=per_key))

    def _read_keys(self, statement: str, keys: Mapping[Key, int], *, skip_dead: bool, **limit: int) -> list[Any]:
        parameters = {
            "topics": [key.topic for key in keys],
            "keys": [key.ordering_key for key in keys],
            "shards": list(keys.values()),
            "skip_dead": skip_dead,
            **limit,
        }
        return self._query(statement, "outbox-order", parameters, lazy_decode=True)

    def claim(self, ids: Sequence[str], decide: Decide) -> datetime:
        """See Store. Serializable and pessimistic, whatever the client's defaults are, because the hint needs it."""

        def work(transaction: Any) -> Any:
            locked, now = _lock(transaction, ids)
            _mark(transaction, locked, decide(locked, now))
            return transaction

        with self._failures(), self._transaction_slot(ABORTED_SECONDS) as seconds:
            transaction = self._database.run_in_transaction(
                work,
                timeout_secs=seconds,
                default_retry_delay=ABORTED_DELAY_SECONDS,
                transaction_tag="outbox-relay",
                **PESSIMISTIC,
            )
        committed: datetime = transaction.committed
        return committed

    def heartbeat(self, worker: str, started_at: datetime, remove: Collection[str]) -> None:
        """See Store. One request, a commit without reads."""
        with self._failures(), self._batch() as batch:
            batch.insert_or_update(
                "AsynchronousTaskWorkers", statements.HEARTBEAT_COLUMNS, [(worker, started_at, COMMIT_TIMESTAMP)]
            )
            if remove:
                batch.delete("AsynchronousTaskWorkers", KeySet(keys=[[id] for id in remove]))

    def leave(self, worker: str) -> None:
        """See Store."""
        with self._failures(), self._batch() as batch:
            batch.delete("AsynchronousTaskWorkers", KeySet(keys=[[worker]]))

    def unsent(self, shards: Sequence[int] | None = None) -> list[Unsent]:
        """See Store."""
        parameters = {"shards": list(self.shards if shards is None else shards)}
        found = self._query(
            statements.UNSENT, "outbox-unsent", parameters, priority=RequestOptions.Priority.PRIORITY_LOW
        )
        return [Unsent(*row) for row in found]

    def _query(
        self,
        statement: str,
        tag: str,
        parameters: Mapping[str, Any],
        *,
        priority: RequestOptions.Priority = RequestOptions.Priority.PRIORITY_MEDIUM,
        lazy_decode: bool = False,
    ) -> list[Any]:
        with self._failures(), self._database.snapshot() as snapshot:
            return list(
                snapshot.execute_sql(
                    statement,
                    params=parameters,
                    param_types={name: _POLL_TYPES[name] for name in parameters},
                    request_options={"priority": priority, "request_tag": tag},
                    retry=STREAM_RETRY,
                    timeout=Deadline(POLL_SECONDS),
                    lazy_decode=lazy_decode,
                )
            )

    def _transaction_slot(self, seconds: float) -> contextlib.AbstractContextManager[float]:
        """Return a context in which a transaction runs, and the part of `seconds` that it has left.

        The emulator's store lets one in at a time.
        """
        return contextlib.nullcontext(seconds)

    def _batch(self) -> Any:
        return self._database.batch(
            RequestOptions(transaction_tag="outbox-heartbeat"),
            timeout_secs=HEARTBEAT_TIMEOUT_SECONDS,
            default_retry_delay=ABORTED_DELAY_SECONDS,
        )

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn the client's errors into StoreError."""
        used = self._database
        try:
            yield
        except (*_SERVICE_ERRORS, StoreError) as error:
            if "Session not found" in str(error) and self._database is used:  # otherwise another thread has replaced it
                # Spanner has deleted the session, or the database was restored. The client would use it forever.
                self._database = used.renewed()
            if isinstance(error, StoreError):
                raise
            raise (NotWritten if isinstance(error, Aborted) else StoreError)(describe(error)) from error


def _lock(transaction: Any, ids: Sequence[str]) -> tuple[list[LockedRow], datetime]:
    """Return the locked rows and the database's time. IDs are sorted so that workers lock in one order."""
    try:
        found = list(
            transaction.execute_sql(
                statements.LOCK,
                params={"ids": sorted(ids)},
                param_types=_IDS,
                request_options={"request_tag": "outbox-claim"},
                retry=STREAM_RETRY,
                timeout=Deadline(LOCK_SECONDS),
                lazy_decode=True,
            )
        )
    except Aborted:
        raise
    except GoogleAPICallError as error:
        # After an error of its own the client leaves the transaction open, with its locks. After this one it rolls
        # back.
        raise NotWritten(describe(error)) from error
    return rows.locked(found)


def _mark(transaction: Any, locked: Sequence[LockedRow], marks: Mapping[str, Mark]) -> None:
    clean: list[tuple[Any, ...]] = []
    others: list[tuple[Any, ...]] = []
    deferred: list[tuple[Any, ...]] = []
    for row in locked:
        match marks.get(row.id):
            case Sent() if row.clean:
                clean.append((row.id, COMMIT_TIMESTAMP, row.times_sent + 1))
            case Sent():
                others.append((row.id, COMMIT_TIMESTAMP, row.times_sent + 1, None, None, None, None, 0))
            case FailedAttempt() as failure:
                # Of a sent row, it takes the mark back.
                times_sent = row.times_sent - (row.sent_at is not None)
                times = failure.available_at, None, failure.expires_at
                others.append((row.id, None, times_sent, *times, failure.error, failure.attempts))
            case Deferred() as deferral:
                deferred.append((row.id, deferral.available_at, deferral.head))
    marked = (
        (statements.MARK_CLEAN_COLUMNS, clean),
        (statements.MARK_COLUMNS, others),
        (statements.DEFER_COLUMNS, deferred),
    )
    for columns, values in marked:
        if values:  # an update without rows is an error
            transaction.update("AsynchronousTasks", columns, values)


def describe(error: Exception) -> str:
    """Return the first line of a service's error, without request IDs."""
    text = str(getattr(error, "cause", None) or error)
    return re.sub(r",? request_id = [0-9.]+", "", text.splitlines()[0] if text else type(error).__name__)[:500]
