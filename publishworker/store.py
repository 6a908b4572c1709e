"""The relay's verbs on Spanner. The only module that talks to it; the statements are in `sql`."""

import base64
import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from google.api_core.exceptions import Aborted, GoogleAPICallError, RetryError
from google.auth.exceptions import GoogleAuthError
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, RequestOptions, TransactionOptions, param_types

from outbox.errors import NotReached
from publishworker import sql
from publishworker.connection import STREAM_RETRY, Deadline, LimitedDatabase
from publishworker.task import Candidate, Outcome, Poll, Row, Sent

#: Seconds for a poll; a large backlog on the emulator, which scans whole tables, takes several.
POLL_SECONDS = 30.0
#: Seconds for the age of the oldest task: a figure for a graph, which must not hold up the relay.
AGE_SECONDS = 5.0
#: Seconds for the lock query: other workers' transactions end within their own limits.
LOCK_SECONDS = 10.0
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
}
#: The time under a lock that found no row: there is nothing to compare it with.
_NO_TIME = datetime.min.replace(tzinfo=UTC)
_SERVICE_ERRORS = (GoogleAPICallError, RetryError, GoogleAuthError)

#: Called under the lock with the rows found and the database's time; perhaps again after an abort.
Decide = Callable[[Sequence[Row], datetime], Mapping[str, Outcome]]


class StoreError(NotReached):
    """Spanner did not answer, or refused. Nothing is known to be written."""


@dataclass(frozen=True, slots=True)
class Unsent:
    """How many tasks of a topic are in one of the states pending, retrying, scheduled, dead, paused."""

    topic: str
    state: str
    count: int


class Store(Protocol):
    """What the relay needs of a store. Each verb raises StoreError if the store does not answer."""

    shards: Sequence[int]

    def poll(self, topics: Iterable[str], known: Iterable[str], per_range: int, *, look_further: bool) -> Poll:
        """Return unsent ready tasks of `topics`, at most `per_range` of each shard and topic.

        With `look_further` due tasks as well, topics that are not `known`, and which topics are paused. Takes no locks.
        """

    def claim(self, ids: Sequence[str], decide: Decide) -> None:
        """Lock the rows, let `decide` act on them, mark what it says was sent, commit; all of it again on an abort."""

    def oldest_age(self) -> float:
        """Return for how many seconds the oldest ready or due task of a topic that is not paused has waited, or 0."""

    def unsent(self) -> list[Unsent]:
        """Count what is not sent, by topic and state; a strong read of the whole index range."""


class SpannerStore:
    """The store of production."""

    def __init__(self, database: LimitedDatabase, shards: int, *, one_at_a_time: bool = False) -> None:
        """Poll all `shards` of the table in `database`.

        `one_at_a_time` is for the emulator, which runs one read-write transaction at a time in a database and aborts
        the others, at random also the one that has published: waiting for our own turn here is cheaper.
        """
        self._database: Any = database  # its methods carry no types
        self.shards: Sequence[int] = range(shards)
        self._turnstile = threading.Lock() if one_at_a_time else contextlib.nullcontext()

    def poll(self, topics: Iterable[str], known: Iterable[str], per_range: int, *, look_further: bool) -> Poll:
        """See Store. A strong single-use read at MEDIUM priority, one request."""
        parameters = {"shards": list(self.shards), "topics": list(topics), "per_range": per_range}
        if look_further:
            edges = ["", *sorted(known), sql.LAST_TOPIC]
            parameters |= {"lows": edges[:-1], "highs": edges[1:]}
        rows = self._query(
            sql.POLL_ALL if look_further else sql.POLL_READY,
            "outbox-poll",
            RequestOptions.Priority.PRIORITY_MEDIUM,
            parameters,
            POLL_SECONDS,
        )
        found = [row for row in rows if row[0] is None]  # topics, not tasks: those of the probes, and the paused ones
        return Poll(
            candidates=tuple(Candidate(*row) for row in rows if row[0] is not None),
            new_topics=frozenset(topic for _, topic, shard, *_ in found if shard != sql.PAUSED),
            paused=frozenset(topic for _, topic, shard, *_ in found if shard == sql.PAUSED) if look_further else None,
        )

    def claim(self, ids: Sequence[str], decide: Decide) -> None:
        """See Store. Serializable and pessimistic, whatever the client's defaults say: else the hint locks nothing."""

        def work(transaction: Any) -> None:
            outcomes = decide(*_lock(transaction, ids))
            _mark(transaction, [id for id, outcome in outcomes.items() if isinstance(outcome, Sent)])

        try:
            with self._turnstile:
                self._database.run_in_transaction(
                    work,
                    timeout_secs=ABORTED_SECONDS,
                    default_retry_delay=ABORTED_DELAY_SECONDS,
                    transaction_tag="outbox-relay",
                    isolation_level=TransactionOptions.IsolationLevel.SERIALIZABLE,
                    read_lock_mode=TransactionOptions.ReadWrite.ReadLockMode.PESSIMISTIC,
                )
        except (*_SERVICE_ERRORS, StoreError) as error:
            raise self._failure(error) from error

    def oldest_age(self) -> float:
        """See Store."""
        low = RequestOptions.Priority.PRIORITY_LOW
        [[microseconds]] = self._query(sql.OLDEST_AGE, "outbox-age", low, {"shards": list(self.shards)}, AGE_SECONDS)
        return max(0.0, (microseconds or 0) / 1e6)

    def unsent(self) -> list[Unsent]:
        """See Store."""
        low = RequestOptions.Priority.PRIORITY_LOW
        rows = self._query(sql.UNSENT, "outbox-unsent", low, {"shards": list(self.shards)}, POLL_SECONDS)
        return [Unsent(*row) for row in rows]

    def _query(
        self,
        statement: str,
        tag: str,
        priority: RequestOptions.Priority,
        parameters: Mapping[str, Any],
        seconds: float,
    ) -> list[Any]:
        try:
            with self._database.snapshot() as snapshot:
                return list(
                    snapshot.execute_sql(
                        statement,
                        params=parameters,
                        param_types={name: _POLL_TYPES[name] for name in parameters},
                        request_options={"priority": priority, "request_tag": tag},
                        retry=STREAM_RETRY,
                        timeout=Deadline(seconds),
                    )
                )
        except _SERVICE_ERRORS as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> StoreError:
        if "Session not found" in str(error):
            # Deleted by the service, or the database was restored: the client would use it for ever.
            self._database = self._database.renewed()
        return error if isinstance(error, StoreError) else StoreError(describe(error))


def _lock(transaction: Any, ids: Sequence[str]) -> tuple[list[Row], datetime]:
    """Return the rows under an exclusive lock and the database's time; sorted ids make workers lock in one order."""
    try:
        rows = list(
            transaction.execute_sql(
                sql.LOCK,
                params={"ids": sorted(ids)},
                param_types=_IDS,
                request_options={"request_tag": "outbox-claim"},
                retry=STREAM_RETRY,
                timeout=Deadline(LOCK_SECONDS),
            )
        )
    except Aborted:
        raise
    except GoogleAPICallError as error:
        # An error of its own kind makes the client leave the transaction open, with its locks. This one makes it roll
        # back, if the transaction had begun.
        raise StoreError(describe(error)) from error
    now = rows[0][-1] if rows else _NO_TIME
    return [Row(id, topic, base64.b64decode(data or b""), *rest) for id, topic, data, *rest, _now in rows], now


def _mark(transaction: Any, ids: Sequence[str]) -> None:
    if ids:  # an update without rows is an error
        values = [(id, COMMIT_TIMESTAMP, None, None, None, 0) for id in ids]
        transaction.update("AsynchronousTasks", sql.MARK_COLUMNS, values)


def describe(error: Exception) -> str:
    """Return one line for a person: the first line of what the service said, without ids of requests."""
    text = str(getattr(error, "cause", None) or error)
    return re.sub(r",? request_id = [0-9.]+", "", text.splitlines()[0] if text else type(error).__name__)[:500]
