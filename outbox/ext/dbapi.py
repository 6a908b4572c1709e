"""Register, cancel and process tasks on a DB-API connection (`google.cloud.spanner_dbapi`).

After ABORTED the connection replays its statements, but not mutations. So tasks are an INSERT with parameters that are
fixed before its first execution, and a replay inserts the same rows.
"""

import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, Unpack

from google.api_core.exceptions import Aborted, AlreadyExists, GoogleAPICallError
from google.cloud.spanner_dbapi import Connection
from google.cloud.spanner_dbapi.batch_dml_executor import BatchMode
from google.cloud.spanner_dbapi.exceptions import DatabaseError, OperationalError, RetryAborted
from google.cloud.spanner_dbapi.parse_utils import classify_statement
from google.cloud.spanner_dbapi.parsed_statement import ClientSideStatementType
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP

from outbox import registration
from outbox.base.schedules import CALL
from outbox.base.values import check_finished, chunked, class_name
from outbox.cancelling import check_not_registered, next_heads
from outbox.errors import InvalidMessage, InvalidTransaction, NotReached
from outbox.inbox import Key, ReceivedMessage
from outbox.inbox.once import record_with
from outbox.inbox.receiver import name_of
from outbox.message import Message, check_task_id
from outbox.registration import Options, Task
from outbox.table import states
from outbox.table.shared_sql import EXCLUSIVE, LOCK_UNSENT, RELEASED
from outbox.table.transactions import Row, missing_table

E = TypeVar("E", bound=BaseException)
T = TypeVar("T")
#: The values of a row by column.
_Values = Mapping[str, Any]
#: Executes a statement with its parameters. Returns an object with `fetchall` and `rowcount`.
Execute = Callable[[str, Mapping[str, Any] | None], Any]

#: How long a transaction is run again, as long as the Spanner client does it.
REPEAT_SECONDS = 30.0
#: Rows of one statement. Spanner allows 950 parameters: https://cloud.google.com/spanner/quotas#query-limits
_MAX_ROWS = 100
#: Bytes of messages in one statement, in base64. Spanner allows requests of 10 MiB. The other columns of 100 rows need
#: less than 0.4 MB: https://cloud.google.com/spanner/quotas#request-limits
STATEMENT_BYTES = 10_000_000


def register(
    connection: Connection,
    topic: str,
    message: Message,
    attributes: Mapping[str, str] | None = None,
    *,
    task_id: str | None = None,
    **options: Unpack[Options],
) -> str:
    """Insert one task in the transaction of `connection` and return its ID.

    Executes nothing yet: the commit first inserts all tasks of the transaction, with one INSERT for each 100 tasks or
    7.5 MB of messages. It raises the driver's IntegrityError if a task with this `task_id` exists. `connection` is a
    Connection of `google.cloud.spanner_dbapi`, not in autocommit mode or after BEGIN. The other arguments are those of
    `outbox.register`.

    Raises:
        InvalidMessage: see `outbox.register`.
        InvalidTransaction: `connection` would not commit the task together with the other statements.
        TypeError: `connection` or `message` has another type.
    """
    return registration.register(Statements(connection), topic, message, attributes, task_id=task_id, **options)


def register_once(
    connection: Connection,
    topic: str,
    message: Message,
    attributes: Mapping[str, str] | None = None,
    *,
    task_id: str,
    **options: Unpack[Options],
) -> bool:
    """Insert the task unless a row with `task_id` exists; return whether it was inserted.

    See `outbox.register_once`. Executes one SELECT, which locks the ID. If a replay finds another answer than the first
    execution, the connection raises its RetryAborted, and the caller has to run its transaction again.

    Raises:
        InvalidMessage: see `outbox.register`.
        InvalidTransaction: see `register`.
        NotReached: the database has no table AsynchronousTasks.
        OperationalError: the driver's; the answer was lost. Roll back.
        TypeError: see `register`.
    """
    task = Task(topic, message, attributes, task_id=task_id, **options)
    return registration.register_with(Statements(connection).insert_once, task)


def register_many(connection: Connection, tasks: Collection[Task]) -> list[str]:
    """Insert all tasks in the transaction of `connection` and return their IDs in the same order.

    See `outbox.register_many`, and `register` for the statements.

    Raises:
        InvalidMessage: see `outbox.register_many`.
        InvalidTransaction: see `register`.
        TypeError: see `outbox.register_many`.
    """
    return registration.register_many(Statements(connection), tasks)


def process_once(connection: Connection, message: ReceivedMessage, *, consumer: str, key: Key = "task_id") -> bool:
    """Record the task of `message` as processed, and return whether this is the first time.

    See `outbox.inbox.process_once`. Executes one SELECT, and the commit one INSERT. If a replay finds another answer
    than the first execution, see `register_once`.

    Raises:
        MissingTaskId: see `outbox.inbox.process_once`.
        InvalidConsumer: the name of the consumer.
        InvalidTransaction: see `register`.
        NotReached: the database has no table ProcessedTasks.
        OperationalError: the driver's; the answer was lost. Roll back.
        TypeError: `connection` or `message` has another type.
    """
    return record_with(Statements(connection).insert_once, message, consumer, key)


def cancel(connection: Connection, task_id: str) -> bool:
    """Take an unsent task out in the transaction of `connection`, and return whether it did.

    False: the task is sent, cancelled already, or does not exist. See `outbox.cancel`: a task that it takes out may
    have been published before. Call it first in the transaction. If a replay finds another answer than the first
    execution, see `register_once`.

    Raises:
        InvalidMessage: `task_id` is not 1 to 64 characters.
        InvalidTransaction: see `register`, or the transaction has registered the task itself.
        NotReached: see `register_once`.
        OperationalError: the driver's; the answer was lost. Roll back.
        TypeError: see `register`.
    """
    return Statements(connection).cancel(task_id)


def run_in_transaction(connection: Connection, function: Callable[..., T], *arguments: Any) -> T:
    """Call `function(connection, *arguments)`, commit, and return its result. After a failed replay, do all again.

    A replay fails if another transaction has changed what this one has read. `function` can run several times, so it
    must only change this database.

    Raises:
        RetryAborted: replays have failed for 30 s.
        InvalidTransaction: see `register`.
        TypeError: `connection` has another type, or `function` is `async def` or contains `yield`. Nothing was
            committed.
        Exception: whatever `function` or the commit raised. The transaction is rolled back.
    """
    _check(connection)

    def attempt() -> T:
        try:
            result = call(function, connection, *arguments)
            connection.commit()
        except BaseException:
            with suppress(Exception):
                connection.rollback()
            raise
        return result

    return repeat(attempt)


def call(function: Callable[..., T], *arguments: Any) -> T:
    """Call the function of a transaction. Raises TypeError if its result shows that it has not run."""
    result = function(*arguments)
    if isinstance(result, (Awaitable, Generator, AsyncGenerator)):
        check_finished(result, name_of(function))
    return result


def repeat(attempt: Callable[[], T]) -> T:
    """Run a transaction, and again with a pause after a failed replay, for REPEAT_SECONDS. Return its result."""
    number, end = 0, time.monotonic() + REPEAT_SECONDS
    while True:
        try:
            return attempt()
        except Exception as error:
            if time.monotonic() > end or not (_in_chain(error, RetryAborted) or _in_chain(error, Aborted)):
                raise
        time.sleep(random.uniform(0, CALL.nth(number)))  # noqa: S311 - no secret
        number += 1


def _check(connection: object) -> None:
    """Refuse a connection on which the task and the other statements would not be one transaction."""
    if not isinstance(connection, Connection):
        raise TypeError(
            f"connection is {class_name(connection)}. It must be a Connection of google.cloud.spanner_dbapi"
        )
    if connection.is_closed:
        raise InvalidTransaction("the connection is closed. Register before you close it")
    if connection.read_only:
        raise InvalidTransaction("the connection is read-only. Set read_only to False before the transaction begins")
    if connection.autocommit and not _has_begun(connection):
        raise InvalidTransaction(
            "the connection is in autocommit mode, so the task would be committed alone. Turn autocommit off, or "
            'execute "BEGIN" with a cursor first (not connection.begin(), which a replay does not repeat)'
        )
    check_no_batch(connection)


def _has_begun(connection: Connection) -> bool:
    """Tell whether the statements that a replay executes begin with BEGIN."""
    statements = connection._transaction_helper._statement_result_details_list
    first = classify_statement(getattr(statements[0], "sql", "")) if statements else None  # it skips comments
    return first is not None and first.client_side_statement_type is ClientSideStatementType.BEGIN


class Statements:
    """The statements of a transaction on a DB-API connection. Its errors are those of the driver.

    `execute` executes them in the layer above, which then sees each. The constructor raises InvalidTransaction and
    TypeError.
    """

    def __init__(self, connection: Connection, execute: Execute | None = None) -> None:
        _check(connection)
        self._execute = execute or on_cursors(connection.cursor)
        self._collected: Collected = getattr(connection, "_outbox_collected", None) or Collected(connection)

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        """Insert the tasks before the commit. Raises InvalidMessage."""
        data = columns.index("Data")
        for index, row in enumerate(rows):
            _check_size(row[data], f"tasks[{index}]: " if len(rows) > 1 else "")
        for row in rows:
            self._collected.add(table, row[:1], dict(zip(columns, row, strict=True)), self._execute)

    def insert_once(self, table: str, columns: Sequence[str], row: Row, *, key: Row, tag: str) -> bool:
        """Insert a row before the commit, unless its key exists; return whether. Raises OperationalError."""
        if "Data" in columns:
            _check_size(row[columns.index("Data")])
        if self._collected.has(table, key) or self._exists(table, columns[: len(key)], key):
            return False
        self._collected.add(table, key, dict(zip(columns, row, strict=True)), self._execute)
        return True

    def cancel(self, task_id: str) -> bool:
        """Take an unsent task out; return whether it was. Raises OperationalError."""
        check_task_id(task_id)
        table = states.TASKS_TABLE
        check_not_registered(task_id, [(task_id,)] if self._collected.has(table, (task_id,)) else [])
        # The driver has no type for a list of IDs.
        heads = next_heads(lambda sql, _: self._about(task_id, sql.replace("@ids", "[@id]")), task_id)
        for id in heads or ():
            self._about(id, f"UPDATE {table} SET {' = NULL, '.join(RELEASED)} = NULL WHERE Id = @id")
        if heads is not None:
            # No pending commit timestamp, because the transaction could not read the table any more.
            values = f"SentAt = CURRENT_TIMESTAMP(), CancelledBy = '{registration.APPLICATION}'"
            self._about(task_id, f"UPDATE {table} SET {values} WHERE Id = @id")
        return heads is not None

    def _exists(self, table: str, columns: Sequence[str], key: Row) -> bool:
        """Tell whether a row exists, with an exclusive lock of its key."""
        where = " AND ".join(f"{column} = @{column}" for column in columns)
        sql = f"{EXCLUSIVE}\nSELECT COUNT(*) FROM {table}@{{FORCE_INDEX=_BASE_TABLE}} WHERE {where}"
        [[count]] = self._query(table, sql, dict(zip(columns, key, strict=True)), key[-1])
        return bool(count)

    def _about(self, id: str, sql: str) -> list[Sequence[Any]]:
        """Execute a statement about one task, and return its rows."""
        parameters = {"id": id} if "@id" in sql else None
        if sql == LOCK_UNSENT:
            return self._query(states.TASKS_TABLE, sql, parameters, id)
        with errors(states.TASKS_TABLE, NotReached):
            result = self._execute(sql, parameters)
        return result.fetchall() if "SELECT" in sql else []

    def _query(self, table: str, sql: str, parameters: Mapping[str, Any] | None, id: str) -> list[Sequence[Any]]:
        """Return the rows of a query that returns at least one. Raises OperationalError, NotReached."""
        with errors(table, NotReached):
            rows: list[Sequence[Any]] = self._execute(sql, parameters).fetchall()
        if not rows:  # `fetchall` returns no rows if it fails
            raise OperationalError(f"no answer about task {id!r}. Roll back and run the transaction again")
        return rows


class Collected:
    """The rows of the open transaction of one connection, whose `commit` inserts and whose `rollback` forgets them.

    A pending commit timestamp in a table forbids to read the table in the same transaction, and the Spanner emulator
    then refuses another INSERT, too. So the INSERT comes last, with one statement per table if the rows fit. The
    connection executes it like the other statements of the transaction, so a replay after ABORTED inserts the same
    rows, and nothing is collected a second time.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._rows: dict[str, list[tuple[Row, _Values]]] = {}
        self._execute: Execute
        self._commit, self._rollback = connection.commit, connection.rollback
        connection.commit, connection.rollback = self.commit, self.rollback
        connection._outbox_collected = self

    def add(self, table: str, key: Row, row: _Values, execute: Execute) -> None:
        """Collect a row. `execute` executes the INSERT."""
        # Without a statement before, the setter of `autocommit` would not commit the row, and Django uses the setter.
        self._connection.transaction_checkout()
        self._execute = execute
        self._rows.setdefault(table, []).append((key, row))

    def has(self, table: str, key: Row) -> bool:
        """Tell whether the transaction inserts the key."""
        return any(key == each for each, _ in self._rows.get(table, ()))

    def commit(self) -> None:
        """Insert the rows, and commit. If an INSERT fails, roll back, as no later commit may leave the rows out.

        Raises InvalidTransaction.
        """
        if self._rows:
            check_no_batch(self._connection)  # which would take the INSERTs, and the commit would leave them out
        collected, self._rows = self._rows, {}
        try:
            for table, keys_and_rows in collected.items():
                rows = [row for _, row in keys_and_rows]
                for some in chunked(rows, _MAX_ROWS, STATEMENT_BYTES, lambda row: len(row.get("Data", ""))):
                    with errors(table, ids=[row["Id"] for row in some if "Id" in row]):
                        self._execute(*_insert(table, some))
        except BaseException:
            with suppress(Exception):
                self._rollback()
            raise
        self._commit()

    def rollback(self) -> None:
        """Forget the rows, and roll back."""
        self._rows.clear()
        self._rollback()


def check_no_batch(connection: Any) -> None:
    """Raise InvalidTransaction if the connection collects the statements that it is to execute."""
    if connection._batch_mode is not BatchMode.NONE:
        raise InvalidTransaction('the connection is collecting a batch of DML. Execute "RUN BATCH" first')


def _insert(table: str, rows: Sequence[_Values]) -> tuple[str, dict[str, Any]]:
    """Return a statement and its parameters. The commit timestamp is a function of SQL."""
    columns = dict.fromkeys(column for row in rows for column in row)
    parameters: dict[str, Any] = {}
    values = []
    for number, row in enumerate(rows):
        given = {f"{column}{number}": row.get(column) for column in columns}
        values.append(f"({', '.join(_word(name, value) for name, value in given.items())})")
        parameters |= {name: value for name, value in given.items() if _word(name, value) == f"@{name}"}
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES {', '.join(values)}", parameters


def _word(name: str, value: object) -> str:
    if value is COMMIT_TIMESTAMP:
        return "PENDING_COMMIT_TIMESTAMP()"
    return "DEFAULT" if value is None else f"@{name}"


@contextmanager
def errors(table: str, missing: type[Exception] | None = None, ids: Collection[str] = ()) -> Iterator[None]:
    """Say what to do. The driver's own errors have the text "[]". `missing` is the class for a missing table.

    `ids` are the tasks that are inserted. A replay may fail with the duplicate of a row of the application instead.
    """
    try:
        yield
    except Exception as error:
        of_driver, cause = _in_chain(error, DatabaseError), _in_chain(error, GoogleAPICallError)
        if of_driver is None or cause is None:
            raise
        kind, text = type(of_driver), cause.message.rstrip(".")
        if isinstance(cause, AlreadyExists) and any(id in text for id in ids):
            text += ". Use another ID, or register_once"
        elif "pending CommitTimestamp" in text:
            text = (
                f"the Spanner emulator accepts one INSERT into {table} in a transaction, which holds {_MAX_ROWS} tasks "
                f"and {STATEMENT_BYTES * 3 // 4:,} bytes of messages. Register fewer tasks in one transaction of a test"
            )
        elif is_missing := missing_table(cause, table):
            text = is_missing
            if missing:
                raise missing(text) from error
        raise kind(text) from cause


def _in_chain(error: BaseException | None, kind: type[E]) -> E | None:
    """Return the error of this kind among an error and its causes."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__
    return error


def on_cursors(cursor: Callable[[], Any]) -> Execute:
    """Return a function that executes each statement on a new cursor."""

    def execute(sql: str, parameters: Mapping[str, Any] | None) -> Any:
        opened = cursor()
        opened.execute(sql, parameters)
        return opened

    return execute


def _check_size(data: bytes, where: str = "") -> None:
    """Raise InvalidMessage, beginning with `where`, if a statement cannot hold a message."""
    if len(data) > STATEMENT_BYTES:
        raise InvalidMessage(
            f"{where}the message has {len(data) * 3 // 4:,} bytes; at most {STATEMENT_BYTES * 3 // 4:,} with "
            "SQLAlchemy, Django or DB-API, because Spanner limits a statement"
        )
