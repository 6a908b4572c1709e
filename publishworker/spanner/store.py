"""The relay's verbs on Spanner. The only module that talks to it; the statements are in `sql`."""

import contextlib
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from google.api_core.exceptions import Aborted, GoogleAPICallError, RetryError
from google.auth.exceptions import GoogleAuthError
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet, RequestOptions, TransactionOptions, param_types

from outbox.errors import NotReached
from outbox.storage.task_states import DEFERRED
from publishworker.spanner import rows, statements
from publishworker.spanner.connection import STREAM_RETRY, Deadline, LimitedDatabase
from publishworker.types import Deferred, FailedAttempt, Key, LockedRow, Mark, PollRequest, PollResult, QueuedTask, Sent

#: Seconds for a poll; a large backlog on the emulator, which scans whole tables, takes several.
POLL_SECONDS = 30.0
#: On the emulator more keys than this are first read whole.
FEW_KEYS = 4
#: Rows of that look at most; if there are more, the front of each key is read, as on Spanner.
WHOLE_KEYS_ROWS = 2_000
#: Seconds for the lock query: other workers' transactions end within their own limits.
LOCK_SECONDS = 10.0
#: Seconds for a heartbeat, over all its aborts.
HEARTBEAT_TIMEOUT_SECONDS = 5.0
#: Seconds in which an aborted transaction is run again.
ABORTED_SECONDS = 20.0
#: Seconds to wait after ABORTED where the service names no delay; the client's own default is 2 s and more.
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

#: Called under the lock with the rows found and the database's time; perhaps again after an abort.
Decide = Callable[[Sequence[LockedRow], datetime], Mapping[str, Mark]]


class StoreError(NotReached):
    """Spanner did not answer, or refused. Nothing is known to be written."""


class NotWritten(StoreError):
    """And surely nothing is: the rows were not locked, or the transaction was aborted for the last time."""


@dataclass(frozen=True, slots=True)
class Unsent:
    """How many tasks of a topic are in one of the states pending, retrying, scheduled, dead, paused.

    `ordered` of them have an ordering key.
    """

    topic: str
    state: str
    count: int
    ordered: int = 0


class Store(Protocol):
    """What the relay needs of a store. Each verb raises StoreError if the store does not answer."""

    shards: Sequence[int]

    def poll(self, look: PollRequest) -> PollResult:
        """Return the unsent tasks that `look` asks for, and its news. Takes no locks."""

    def key_heads(self, keys: Collection[Key], per_key: int, *, skip_dead: bool) -> Mapping[Key, Sequence[QueuedTask]]:
        """Return the first unsent tasks of each key in their order, `per_key` at most. Takes no locks.

        Dead tasks are left out if they are to be passed over.
        """

    def claim(self, ids: Sequence[str], decide: Decide) -> datetime:
        """Lock the rows, let `decide` act on them, write its marks, commit; all of it again on an abort.

        Returns the commit timestamp, which is the SentAt of what was marked as sent.
        """

    def heartbeat(self, worker: str, started_at: datetime, remove: Collection[str]) -> None:
        """Say that `worker`, which began at `started_at`, lives; delete the rows of the workers in `remove`."""

    def leave(self, worker: str) -> None:
        """Delete the worker's row."""

    def unsent(self, shards: Sequence[int] | None = None) -> list[Unsent]:
        """Count what is not sent, by topic and state, in `shards` or in all; a strong read of the whole index range."""


class SpannerStore:
    """The store of production."""

    def __init__(self, database: LimitedDatabase, shards: int, *, emulator: bool = False) -> None:
        """PollResult all `shards` of the table in `database`.

        The `emulator` runs one read-write transaction at a time in a database and aborts the others, at random also the
        one that has published: waiting for our own turn here is cheaper. And it reads the whole table for each range.
        """
        self._database: Any = database  # its methods carry no types
        self.shards: Sequence[int] = range(shards)
        self._emulator = emulator
        self._turnstile = threading.Lock()

    @property
    def database(self) -> Any:
        """Return the database; another one when its session was lost."""
        return self._database

    def poll(self, look: PollRequest) -> PollResult:
        """See Store. A strong single-use read at MEDIUM priority, one request."""
        parameters = {"shards": look.shards, "topics": sorted(look.topics), "per_range": look.per_range}
        if look.below is not None:
            parameters["below"] = look.below
        if look.known is not None:
            known = sorted(look.known)
            lows = ["", *(topic + statements.NEXT for topic in known)]
            parameters |= {"lows": lows, "highs": [*known, statements.AFTER_ALL_TOPICS]}
        statement = statements.poll(due=look.due, lower=look.below is not None, news=look.known is not None)
        medium = RequestOptions.Priority.PRIORITY_MEDIUM
        found = self._query(statement, "outbox-poll", medium, parameters, POLL_SECONDS, lazy_decode=True)
        return PollResult(rows.candidates(found), None if look.known is None else rows.news(found))

    def key_heads(self, keys: Collection[Key], per_key: int, *, skip_dead: bool) -> Mapping[Key, Sequence[QueuedTask]]:
        """See Store. A strong single-use read at MEDIUM priority, one request: never a range under a lock."""
        parameters = {
            "topics": [key.topic for key in keys],
            "keys": [key.ordering_key for key in keys],
            "skip_dead": skip_dead,
        }
        medium = RequestOptions.Priority.PRIORITY_MEDIUM

        def ask(statement: str, **limit: int) -> list[Any]:
            return self._query(statement, "outbox-order", medium, parameters | limit, POLL_SECONDS, lazy_decode=True)

        if self._emulator and len(keys) > FEW_KEYS:
            found = ask(statements.WHOLE_KEYS, most=WHOLE_KEYS_ROWS)
            if len(found) < WHOLE_KEYS_ROWS:
                return {key: tasks[:per_key] for key, tasks in rows.key_heads(found).items()}
        return rows.key_heads(ask(statements.KEY_HEADS, per_key=per_key))

    def claim(self, ids: Sequence[str], decide: Decide) -> datetime:
        """See Store. Serializable and pessimistic, whatever the client's defaults say: else the hint locks nothing."""

        def work(transaction: Any) -> Any:
            locked, now = _lock(transaction, ids)
            _mark(transaction, locked, decide(locked, now))
            return transaction

        with self._failures(), self._our_turn():
            transaction = self._database.run_in_transaction(
                work,
                timeout_secs=ABORTED_SECONDS,
                default_retry_delay=ABORTED_DELAY_SECONDS,
                transaction_tag="outbox-relay",
                isolation_level=TransactionOptions.IsolationLevel.SERIALIZABLE,
                read_lock_mode=TransactionOptions.ReadWrite.ReadLockMode.PESSIMISTIC,
            )
        committed: datetime = transaction.committed
        return committed

    def heartbeat(self, worker: str, started_at: datetime, remove: Collection[str]) -> None:
        """See Store. One request: a commit without reads."""
        with self._failures(), self._our_turn(HEARTBEAT_TIMEOUT_SECONDS), self._batch() as batch:
            batch.insert_or_update(
                "AsynchronousTaskWorkers", statements.HEARTBEAT_COLUMNS, [(worker, started_at, COMMIT_TIMESTAMP)]
            )
            if remove:
                batch.delete("AsynchronousTaskWorkers", KeySet(keys=[[id] for id in remove]))

    def leave(self, worker: str) -> None:
        """See Store."""
        with self._failures(), self._our_turn(HEARTBEAT_TIMEOUT_SECONDS), self._batch() as batch:
            batch.delete("AsynchronousTaskWorkers", KeySet(keys=[[worker]]))

    def unsent(self, shards: Sequence[int] | None = None) -> list[Unsent]:
        """See Store."""
        low = RequestOptions.Priority.PRIORITY_LOW
        parameters = {"shards": list(self.shards if shards is None else shards)}
        found = self._query(statements.UNSENT, "outbox-unsent", low, parameters, POLL_SECONDS)
        return [Unsent(*row) for row in found]

    def _query(
        self,
        statement: str,
        tag: str,
        priority: RequestOptions.Priority,
        parameters: Mapping[str, Any],
        seconds: float,
        *,
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
                    timeout=Deadline(seconds),
                    lazy_decode=lazy_decode,
                )
            )

    @contextlib.contextmanager
    def _our_turn(self, seconds: float = -1) -> Iterator[None]:
        """Wait, on the emulator, until none of our transactions runs; for `seconds` at most, unless they are -1."""
        if not self._emulator:
            yield
            return
        if not self._turnstile.acquire(timeout=seconds):
            raise StoreError(f"the emulator runs one transaction at a time, and ours did not end in {seconds:g} s")
        try:
            yield
        finally:
            self._turnstile.release()

    def _batch(self) -> Any:
        return self._database.batch(
            RequestOptions(transaction_tag="outbox-heartbeat"),
            timeout_secs=HEARTBEAT_TIMEOUT_SECONDS,
            default_retry_delay=ABORTED_DELAY_SECONDS,
        )

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn what the client raises into StoreError."""
        used = self._database
        try:
            yield
        except (*_SERVICE_ERRORS, StoreError) as error:
            if "Session not found" in str(error) and self._database is used:  # else another thread was faster
                # Deleted by the service, or the database was restored: the client would use it for ever.
                self._database = used.renewed()
            if isinstance(error, StoreError):
                raise
            raise (NotWritten if isinstance(error, Aborted) else StoreError)(describe(error)) from error


def _lock(transaction: Any, ids: Sequence[str]) -> tuple[list[LockedRow], datetime]:
    """Return the rows under an exclusive lock and the database's time; sorted ids make workers lock in one order."""
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
        # An error of its own kind makes the client leave the transaction open, with its locks. This one makes it roll
        # back, if the transaction had begun.
        raise NotWritten(describe(error)) from error
    return rows.locked(found)


def _mark(transaction: Any, locked: Sequence[LockedRow], marks: Mapping[str, Mark]) -> None:
    clean: list[tuple[Any, ...]] = []
    others: list[tuple[Any, ...]] = []
    deferred: list[tuple[Any, ...]] = []
    for row in locked:
        match marks.get(row.id):
            case Sent() if row.clean:
                clean.append((row.id, COMMIT_TIMESTAMP))
            case Sent():
                others.append((row.id, COMMIT_TIMESTAMP, None, None, None, 0))
            case FailedAttempt() as failure:
                others.append((row.id, None, failure.available_at, failure.expires_at, failure.error, failure.attempts))
            case Deferred() as put_off:
                error = f"{DEFERRED}waits for the task {put_off.head} of its ordering key"
                deferred.append((row.id, put_off.available_at, error))
    marked = (
        (statements.MARK_CLEAN_COLUMNS, clean),
        (statements.MARK_COLUMNS, others),
        (statements.DEFER_COLUMNS, deferred),
    )
    for columns, values in marked:
        if values:  # an update without rows is an error
            transaction.update("AsynchronousTasks", columns, values)


def describe(error: Exception) -> str:
    """Return one line for a person: the first line of what the service said, without ids of requests."""
    text = str(getattr(error, "cause", None) or error)
    return re.sub(r",? request_id = [0-9.]+", "", text.splitlines()[0] if text else type(error).__name__)[:500]
