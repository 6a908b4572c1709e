"""Queries and transactions of workers' gauges, readers, operators and Spark.

Every request has LOW priority, a tag and a timeout.
"""

import contextlib
import getpass
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar

from google.api_core.exceptions import FailedPrecondition, InvalidArgument, NotFound
from google.cloud.spanner_v1 import RequestOptions
from google.cloud.spanner_v1.database import Database

from outbox.base.schedules import ABORTED
from outbox.errors import NotReached, OutboxError, SchemaDiffers
from outbox.program.settings import DatabaseSettings, PubSubSettings
from outbox.rows import counts_sql
from outbox.table import schema
from outbox.table.connection import open_database
from outbox.table.controls import CONTROLS, TopicControls
from outbox.table.ddl import Layout
from outbox.table.own_transactions import PESSIMISTIC, check_database, transact
from outbox.table.shared_sql import NOW, parameters
from outbox.table.timeouts import request

T = TypeVar("T")

#: Timeouts of a query: for a few seeks, for a bounded scan of many rows at LOW priority, for an unlimited count.
QUERY_SECONDS, SCAN_SECONDS, COUNT_SECONDS = 5.0, 60.0, 600.0
#: Max tasks of a shard that one query for topics reads.
TOPIC_ROWS = 200
#: How long an aborted transaction is retried.
OPERATOR_ABORTED_SECONDS = 60.0
#: Timeout of a locking query. A worker that publishes holds the locks for up to 5 s, and until its commit.
OPERATOR_LOCK_SECONDS = 20.0

_PARAMETER = re.compile(r"@(\w+)")
_LOW = RequestOptions.Priority.PRIORITY_LOW
SCHEMA_OPTIONS = {"priority": _LOW, "request_tag": "outbox-schema"}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user ID has no name
        return "unknown user"


@contextlib.contextmanager
def kept(at: datetime | None) -> Iterator[None]:
    """Raise OutboxError if Spanner refuses a read because it no longer keeps the versions of `at`."""
    try:
        yield
    except FailedPrecondition as error:
        if at is not None and ("staleness" in str(error) or "too old" in str(error)):
            raise OutboxError(too_old(at)) from error
        raise


def too_old(at: datetime) -> str:
    """Return the error message for a timestamp outside the version retention period."""
    return (
        f"the table cannot be read as of {at.isoformat()}: Spanner keeps old versions of rows for the database's "
        "version_retention_period, 1 hour by default. To keep later versions for up to 7 days, run ALTER DATABASE ... "
        "SET OPTIONS (version_retention_period = '7d'). This does not bring back older ones"
    )


def open_table(settings: DatabaseSettings) -> "TaskTable":
    """Return the table of the database that the settings name. Raises NotReached, SchemaDiffers."""
    return TaskTable(open_database(settings))


def read_before(at: datetime, age: timedelta, read: Callable[[datetime], T]) -> T:
    """Call `read` with the time `age` before `at`, or with `at` if the table was created since then."""
    try:
        return read(at - age)
    except OutboxError as error:
        if not isinstance(error.__cause__, NotFound | InvalidArgument | FailedPrecondition):
            raise
        return read(at)


class LayoutChanged(NotReached):
    """The indexes that the table was read with are gone, because the number of shards was changed. Call again."""


class TaskTable:
    """Queries and transactions on the outbox's tables, which must exist. Every method raises NotReached or OutboxError.

    When the layout is dropped, the method that notices it raises LayoutChanged, and the next one reads another layout.
    With a `tag`, all queries have this one, so that Spanner's statistics show what their sender costs. `name` is the
    full name of the database.
    """

    def __init__(self, database: Database, tag: str | None = None) -> None:
        check_database(database)
        self.database: Any = database  # its methods carry no types
        self.name = str(database.name)
        self._tag = tag
        self.read_layout()

    def read_layout(self) -> None:
        """Read the layout again, because the number of shards may have changed."""
        self.layout: Layout = schema.layout(self.database, request_options=SCHEMA_OPTIONS)

    @property
    def shards(self) -> Sequence[int]:
        """Return the shard numbers, passed to statements as @shards."""
        return range(self.layout.shards)

    @property
    def project(self) -> str:
        """Return the project of the database."""
        return self.name.split("/")[1]

    @property
    def pubsub(self) -> PubSubSettings:
        """Return where Pub/Sub is, by the environment. Raises SettingError."""
        _, project, _, instance, _, database = self.name.split("/")
        return PubSubSettings.read({"project": project, "instance": instance, "database": database})

    @property
    def principal(self) -> str:
        """Return the account of the credentials.

        Return `USER on HOST` if the credentials name no account, as is usual for gcloud user credentials.
        """
        credentials = self.database._instance._client.credentials  # noqa: SLF001 - the client of a database
        names = (getattr(credentials, name, None) for name in ("service_account_email", "signer_email", "account"))
        # A VM's account is called `default` until its first token arrives.
        account = next((name for name in names if name and name != "default"), None)
        return str(account or f"{_user()} on {socket.gethostname()}")

    def now(self) -> datetime:
        """Return the database's time. The times of tasks come from the same clock."""
        now: datetime = self.query(NOW, "outbox-now")[0][0]
        return now

    def query(
        self,
        statement: str,
        tag: str,
        values: Mapping[str, Any] | None = None,
        *,
        at: datetime | None = None,
        seconds: float = QUERY_SECONDS,
    ) -> list[list[Any]]:
        """Return the rows of one statement, read at the time `at`, or now. Takes no locks.

        `values` has at least its parameters. Unless given, @now is `at`, and @shards are those of the table.
        """
        with self._errors(), kept(at), self.database.snapshot(read_timestamp=at) as snapshot:
            return list(self._execute(snapshot, statement, tag, {"now": at, **(values or {})}, seconds))

    def strong_query(self, statement: str, tag: str, values: Mapping[str, Any]) -> tuple[list[list[Any]], datetime]:
        """Return the rows of one statement, and the timestamp of the read. It sees the commits until then."""
        with self._errors(), self.database.snapshot() as snapshot:
            result = self._execute(snapshot, statement, tag, values, SCAN_SECONDS)
            return list(result), result.metadata.transaction.read_timestamp

    def _execute(self, snapshot: Any, statement: str, tag: str, values: Mapping[str, Any], seconds: float) -> Any:
        given = {"shards": list(self.shards), **values}
        used = parameters({name: given[name] for name in _PARAMETER.findall(statement)})
        return snapshot.execute_sql(
            self.layout.sql(statement), **used, **request(self._tag or tag, seconds, priority=_LOW)
        )

    def controls(self, at: datetime | None = None) -> dict[str, TopicControls]:
        """Return the topic controls by topic: all rows."""
        return {topic: TopicControls(*row) for topic, *row in self.query(CONTROLS, "outbox-topics", at=at)}

    def topics(self, count: int | None = None, at: datetime | None = None) -> list[str]:
        """Return the topics that have an unsent task or a row of AsynchronousTaskTopics, sorted, at most `count`."""
        topics = {*self.controls(at)}
        # `topics` has every topic up to `complete_up_to`. If `complete_up_to` is None, it has all topics.
        complete_up_to: str | None = ""
        # Begin at the empty name: a writer that bypasses the library may have inserted an empty Topic.
        begin = ""
        while complete_up_to is not None and (count is None or sum(name <= complete_up_to for name in topics) < count):
            values = {"from_topic": begin, "limit": TOPIC_ROWS}
            rows = self.query(counts_sql.NEXT_TOPICS, "outbox-topics", values, at=at, seconds=SCAN_SECONDS)
            last, number = dict[int, str](), Counter[int]()
            for shard, topic, tasks in rows:
                last[shard] = max(topic, last.get(shard, ""))
                number[shard] += tasks
                topics.add(topic)
            complete_up_to = min((last[shard] for shard in last if number[shard] == TOPIC_ROWS), default=None)
            begin = f"{complete_up_to}\0"  # the next possible name
        return sorted(topics)[:count]

    def transact(self, tag: str, work: "Callable[[Transaction], T]") -> T:
        """Run `work` in a read-write transaction, retry it if Spanner aborts it, and return its result.

        The transaction is serializable and pessimistic. Otherwise the hint of `by_ids` has no effect.
        """
        with self._errors():
            return transact(
                self.database,
                lambda transaction: work(Transaction(transaction, tag, self.layout)),
                timeout_secs=OPERATOR_ABORTED_SECONDS,
                default_retry_delay=ABORTED.first,
                transaction_tag=tag,
                commit_request_options={"priority": _LOW},
                **PESSIMISTIC,
            )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Translate errors of the client. If Spanner rejects a statement, report the differences in the schema."""
        try:
            with schema.service_errors(self.name):
                yield
        except OutboxError as error:
            # NOT_FOUND is the answer for a missing database and for a missing table.
            if isinstance(error, NotReached | SchemaDiffers) and not isinstance(error.__cause__, NotFound):
                raise
            former = self.layout
            usable = schema.complete(schema.layouts(self.database, request_options=SCHEMA_OPTIONS))
            if usable and former not in usable:
                self.layout = usable[0]
                raise LayoutChanged(
                    f"{self.name}: column {former.column} is gone, because the number of shards was changed. "
                    "Run the command again."
                ) from error
            if wrong := schema.problems(self.database, self.layout, relay_only=False, request_options=SCHEMA_OPTIONS):
                raise NotReached(f"{self.name}: {'; '.join(wrong)}. See `outbox schema apply`.") from error
            raise


class Transaction:
    """A read-write transaction. The methods that buffer mutations are those of the client."""

    def __init__(self, transaction: Any, tag: str, layout: Layout) -> None:
        self._transaction, self._tag, self._layout = transaction, tag, layout
        self.insert, self.insert_or_update = transaction.insert, transaction.insert_or_update
        self.delete = transaction.delete

    def query(self, statement: str, values: Mapping[str, Any]) -> list[list[Any]]:
        """Return all rows of one statement."""
        options = request(self._tag, OPERATOR_LOCK_SECONDS, priority=_LOW)
        return list(self._transaction.execute_sql(self._layout.sql(statement), **parameters(values), **options))

    def read(self, table: str, columns: Sequence[str], keys: Any) -> list[list[Any]]:
        """Return the rows of `keys`, with shared locks."""
        return list(self._transaction.read(table, columns, keys, **request(self._tag, QUERY_SECONDS, priority=_LOW)))

    def update(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Buffer an update of `rows`. Do nothing if there are none, because Spanner rejects an empty update."""
        if rows:
            self._transaction.update(table, columns, rows)
