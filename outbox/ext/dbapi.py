"""Register, cancel and process tasks on a DB-API connection (`google.cloud.spanner_dbapi`).

After ABORTED the connection replays its statements, but not mutations. So tasks are an INSERT with parameters that are
fixed before its first execution, and a replay inserts the same rows.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Unpack

from google.cloud.spanner_dbapi import Connection
from google.cloud.spanner_dbapi.exceptions import OperationalError
from google.cloud.spanner_dbapi.parse_utils import classify_statement
from google.cloud.spanner_dbapi.parsed_statement import ClientSideStatementType

from outbox import registration
from outbox.base.values import class_name
from outbox.cancellation import check_not_registered, next_heads
from outbox.errors import InvalidMessage, InvalidTransaction, NotReached
from outbox.ext.collecting import STATEMENT_BYTES, Collected, Execute, check_no_batch, errors
from outbox.inbox import Key, ReceivedMessage
from outbox.inbox.once import record_with
from outbox.message import Message, check_task_id
from outbox.registration import Options, Task
from outbox.table.shared_sql import EXCLUSIVE, LOCK_UNSENT, RELEASED

#: Values in the order of some columns.
Row = tuple[Any, ...]


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
    """Delete an unsent task in the transaction of `connection`, and return whether it did.

    False: the task is sent, or does not exist. See `outbox.cancel`: a task that it deletes may have been published
    before. Call it first in the transaction. If a replay finds another answer than the first execution, see
    `register_once`.

    Raises:
        InvalidMessage: `task_id` is not 1 to 64 characters.
        InvalidTransaction: see `register`, or the transaction has registered the task itself.
        NotReached: see `register_once`.
        OperationalError: the driver's; the answer was lost. Roll back.
        TypeError: see `register`.
    """
    return Statements(connection).cancel(task_id)


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
        self._collected = Collected.of(connection)

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        """Insert the tasks before the commit. Raises InvalidMessage."""
        data = columns.index("Data")
        for index, row in enumerate(rows):
            _check_size(row[data], f"tasks[{index}]: " if len(rows) > 1 else "")
        for row in rows:
            self._collect(table, columns, row, row[:1])

    def insert_once(self, table: str, columns: Sequence[str], row: Row, *, key: Row, tag: str) -> bool:
        """Insert a row before the commit, unless its key exists; return whether. Raises OperationalError."""
        if "Data" in columns:
            _check_size(row[columns.index("Data")])
        if self._collected.has(table, key) or self._exists(table, columns[: len(key)], key):
            return False
        self._collect(table, columns, row, key)
        return True

    def cancel(self, task_id: str) -> bool:
        """Delete an unsent task; return whether it was deleted. Raises OperationalError."""
        check_task_id(task_id)
        table = registration.TABLE
        check_not_registered(task_id, [(task_id,)] if self._collected.has(table, (task_id,)) else [])
        # The driver has no type for a list of IDs.
        heads = next_heads(lambda sql, _: self._about(task_id, sql.replace("@ids", "[@id]")), task_id)
        for id in heads or ():
            self._about(id, f"UPDATE {table} SET {' = NULL, '.join(RELEASED)} = NULL WHERE Id = @id")
        if heads is not None:
            self._about(task_id, f"DELETE FROM {table} WHERE Id = @id")
        return heads is not None

    def _collect(self, table: str, columns: Sequence[str], row: Row, key: Row) -> None:
        self._collected.add(table, key, dict(zip(columns, row, strict=True)), self._execute)

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
            return self._query(registration.TABLE, sql, parameters, id)
        with errors(registration.TABLE, NotReached):
            result = self._execute(sql, parameters)
        return result.fetchall() if "SELECT" in sql else []

    def _query(self, table: str, sql: str, parameters: Mapping[str, Any] | None, id: str) -> list[Sequence[Any]]:
        """Return the rows of a query that returns at least one. Raises OperationalError, NotReached."""
        with errors(table, NotReached):
            rows: list[Sequence[Any]] = self._execute(sql, parameters).fetchall()
        if not rows:  # `fetchall` returns no rows if it fails
            raise OperationalError(f"no answer about task {id!r}. Roll back and run the transaction again")
        return rows


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
