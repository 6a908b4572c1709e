"""The table of tasks as operators' commands meet it: all they read and write is of LOW priority, tagged and limited."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from google.api_core.exceptions import Aborted, GoogleAPIError
from google.cloud.spanner_v1 import RequestOptions, TransactionOptions
from google.cloud.spanner_v1.database import Database

from outbox.admin import statements
from outbox.errors import NotReached, OutboxError, SchemaDiffers
from outbox.storage import schema

T = TypeVar("T")

#: Seconds for one query: a few seeks; a bounded look at many rows, at LOW priority; a count over everything.
QUERY_SECONDS, LOOK_SECONDS, COUNT_SECONDS = 5.0, 60.0, 600.0
#: Tasks of a shard that are read at once to find topics.
TOPIC_ROWS = 200
#: Seconds in which a transaction that Spanner aborts is run again, and between two runs if it names no pause.
ABORTED_SECONDS, AGAIN_SECONDS = 60.0, 0.05
#: Seconds for the lock of a transaction: a worker that publishes holds it for up to 8 s (`--publish-timeout`).
LOCK_SECONDS = 20.0

_LOW = RequestOptions.Priority.PRIORITY_LOW
SCHEMA_OPTIONS = {"priority": _LOW, "request_tag": "outbox-schema"}


class TaskTable:
    """Queries and transactions on the outbox's tables. Every method raises NotReached or OutboxError."""

    def __init__(self, database: Database) -> None:
        """Look whether the tasks' table is there, and how many shards it has."""
        self._database: Any = database  # its methods carry no types
        self.shards: Sequence[int] = range(schema.shard_count(database, request_options=SCHEMA_OPTIONS))

    @property
    def name(self) -> str:
        """Return the full name of the database."""
        return str(self._database.name)

    def now(self) -> datetime:
        """Return the database's time: whatever is compared with a task's times comes from the same clock."""
        [[now]] = self.query(statements.NOW, "outbox-now")
        time: datetime = now
        return time

    def query(
        self,
        statement: str,
        tag: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        at: datetime | None = None,
        seconds: float = QUERY_SECONDS,
    ) -> list[list[Any]]:
        """Return the rows of one statement, read at the time `at`, or now. Takes no locks."""
        values = dict(parameters or {})
        with self._errors(), self._database.snapshot(read_timestamp=at) as snapshot:
            return list(
                snapshot.execute_sql(
                    statement,
                    params=values,
                    param_types={name: statements.TYPES[name] for name in values},
                    request_options={"priority": _LOW, "request_tag": tag},
                    **schema.limits(seconds),
                )
            )

    def read(
        self, table: str, columns: Sequence[str], keys: Any, tag: str, *, seconds: float = QUERY_SECONDS
    ) -> list[list[Any]]:
        """Return the rows of `keys`, read now. Takes no locks."""
        with self._errors(), self._database.snapshot() as snapshot:
            options = {"priority": _LOW, "request_tag": tag}
            return list(snapshot.read(table, columns, keys, request_options=options, **schema.limits(seconds)))

    def topics(self, count: int | None = None, at: datetime | None = None) -> list[str]:
        """Return all topics that have an unsent task or a row of their own, sorted, or the first `count` of them."""
        found = {name for (name,) in self.query(statements.CONTROLLED_TOPICS, "outbox-topics", at=at)}
        seen: str | None = ""  # all topics up to this one are found; None: all
        begin = ""  # another writer may have inserted the empty name
        while seen is not None and (count is None or sum(name <= seen for name in found) < count):
            values = {"shards": list(self.shards), "from_topic": begin, "limit": TOPIC_ROWS}
            rows = self.query(statements.NEXT_TOPICS, "outbox-topics", values, at=at, seconds=LOOK_SECONDS)
            last, number = dict[int, str](), Counter[int]()
            for shard, topic, tasks in rows:
                last[shard] = max(topic, last.get(shard, ""))
                number[shard] += tasks
                found.add(topic)
            seen = min((last[shard] for shard in last if number[shard] == TOPIC_ROWS), default=None)
            begin = f"{seen}\0"  # the next one after it
        return sorted(found)[:count]

    def transact(self, tag: str, work: "Callable[[Transaction], T]") -> T:
        """Run `work` in a read-write transaction, again if Spanner aborts it, and return what it returned.

        Serializable and pessimistic, whatever the client's defaults are: else the hint of `statements.locked` locks
        nothing.
        """
        with self._errors():
            result: T = self._database.run_in_transaction(
                lambda transaction: work(Transaction(transaction, self.name, tag)),
                timeout_secs=ABORTED_SECONDS,
                default_retry_delay=AGAIN_SECONDS,
                transaction_tag=tag,
                commit_request_options={"priority": _LOW},
                isolation_level=TransactionOptions.IsolationLevel.SERIALIZABLE,
                read_lock_mode=TransactionOptions.ReadWrite.ReadLockMode.PESSIMISTIC,
            )
        return result

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn what the client raises into errors for people; a refused statement is a table of another shape."""
        try:
            with schema.service_errors(self.name):
                yield
        except (NotReached, SchemaDiffers):
            raise
        except OutboxError as error:
            expected = schema.statements(pipeline=False)
            if wrong := schema.differences(self._database, expected, request_options=SCHEMA_OPTIONS):
                raise NotReached(f"{self.name}: {'; '.join(wrong)}. See `outbox schema apply`.") from error
            raise


class Transaction:
    """A read-write transaction in which a first statement that fails does not leave locks behind."""

    def __init__(self, transaction: Any, name: str, tag: str) -> None:
        """Wrap one of the client."""
        self._transaction, self._name = transaction, name
        self._options = {"priority": _LOW, "request_tag": tag}

    def query(self, statement: str, parameters: Mapping[str, Any]) -> list[list[Any]]:
        """Return all rows of one statement."""
        types = {name: statements.TYPES[name] for name in parameters}
        with self._own_errors():
            return list(
                self._transaction.execute_sql(
                    statement,
                    params=parameters,
                    param_types=types,
                    request_options=self._options,
                    **schema.limits(LOCK_SECONDS),
                )
            )

    def read(self, table: str, columns: Sequence[str], keys: Any, *, seconds: float = QUERY_SECONDS) -> list[list[Any]]:
        """Return the rows of `keys`; whoever reads tasks may have to wait for a worker's locks, see LOCK_SECONDS."""
        with self._own_errors():
            limits = schema.limits(seconds)
            return list(self._transaction.read(table, columns, keys, request_options=self._options, **limits))

    def update(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Buffer an update of `rows`, none for none: an empty one is an error of Spanner."""
        if rows:
            self._transaction.update(table, columns, rows)

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Buffer new rows, none for none."""
        if rows:
            self._transaction.insert(table, columns, rows)

    def insert_or_update(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Buffer the rows, which take the place of those that are there."""
        self._transaction.insert_or_update(table, columns, rows)

    def delete(self, table: str, keys: Any) -> None:
        """Buffer a deletion."""
        self._transaction.delete(table, keys)

    @contextlib.contextmanager
    def _own_errors(self) -> Iterator[None]:
        """Turn the client's errors into ours: it rolls back for those, but not for its own."""
        try:
            yield
        except Aborted:
            raise  # the client runs the function again
        except GoogleAPIError:
            with schema.service_errors(self._name):
                raise
