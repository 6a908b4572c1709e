"""Register, cancel and process tasks on a DB-API connection (`google.cloud.spanner_dbapi`).

After ABORTED the connection replays its statements, but not mutations. So tasks are an INSERT with parameters that are
fixed before its first execution, and a replay inserts the same rows.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Unpack

from google.cloud.spanner_dbapi import Connection, Cursor
from google.cloud.spanner_dbapi.batch_dml_executor import BatchMode
from google.cloud.spanner_dbapi.exceptions import OperationalError, ProgrammingError
from google.cloud.spanner_dbapi.parse_utils import classify_statement
from google.cloud.spanner_dbapi.parsed_statement import ClientSideStatementType
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP

from outbox import registration
from outbox.cancellation import next_heads
from outbox.errors import InvalidMessage, InvalidTransaction
from outbox.inbox import Key, ReceivedMessage
from outbox.inbox.once import TABLE as INBOX
from outbox.inbox.once import record_with
from outbox.message import Message
from outbox.program.values import chunked, class_name
from outbox.registration import Options, Task
from outbox.table.statements import LOCK_UNSENT, RELEASED

#: Values in the order of some columns.
Row = tuple[Any, ...]

#: Rows of one statement. Spanner allows 950 parameters: https://cloud.google.com/spanner/quotas#query-limits
_MAX_ROWS = 100
#: Bytes of messages in one statement, in base64. Spanner allows requests of 10 MiB, of which the other columns of 100
#: rows need less than 0.4 MB: https://cloud.google.com/spanner/quotas#request-limits
_MAX_BYTES = 10_000_000
#: What to do if Spanner or its emulator refuses a second INSERT.
_TOGETHER = (
    "register all tasks of the transaction with one call of register_many, which takes a list of outbox.Task. Up to "
    "100 tasks and 7.5 MB of messages are one INSERT"
)
_ONCE = {
    registration.TABLE: "call register_once once in a transaction, before any other registration",
    INBOX: "process one message in each transaction",
}


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

    Executes one INSERT, which also takes the lock of the ID. After it, statements of the same transaction cannot read
    the table. `connection` is a Connection of `google.cloud.spanner_dbapi`, not in autocommit mode or after BEGIN. The
    other arguments are those of `outbox.register`.

    Raises:
        InvalidMessage: see `outbox.register`.
        InvalidTransaction: `connection` would not commit the task together with the other statements.
        IntegrityError: the driver's; a task with this `task_id` exists.
        TypeError: `connection` or `message` has another type.
    """
    return registration.register(_Inserts(connection), topic, message, attributes, task_id=task_id, **options)


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

    See `outbox.register_once`. Call it once in a transaction, before any `register`. If a replay finds another answer
    than the first execution, the connection raises its RetryAborted, and the caller has to run its transaction again.

    Raises:
        InvalidMessage: see `outbox.register`.
        InvalidTransaction: see `register`.
        OperationalError: the driver's; the answer was lost. Roll back.
        TypeError: see `register`.
    """
    task = Task(topic, message, attributes, task_id=task_id, **options)
    return registration.register_with(_Inserts(connection).insert_once, task)


def register_many(connection: Connection, tasks: Collection[Task]) -> list[str]:
    """Insert all tasks in the transaction of `connection` and return their IDs in the same order.

    See `outbox.register_many`. Executes one INSERT for each 100 tasks, or 7.5 MB of messages.

    Raises:
        InvalidMessage: see `outbox.register_many`.
        InvalidTransaction: see `register`.
        IntegrityError: the driver's; a task with one of the IDs exists.
        TypeError: see `outbox.register_many`.
    """
    return registration.register_many(_Inserts(connection, "tasks[{}]: "), tasks)


def process_once(connection: Connection, message: ReceivedMessage, *, consumer: str, key: Key = "task_id") -> bool:
    """Record the task of `message` as processed, and return whether this is the first time.

    See `outbox.inbox.process_once`. Executes one INSERT, and is called once in a transaction: Spanner may refuse
    another one. If a replay finds another answer than the first execution, see `register_once`.

    Raises:
        MissingTaskId: see `outbox.inbox.process_once`.
        InvalidConsumer: the name of the consumer.
        InvalidTransaction: see `register`, or the transaction has a record already.
        NotReached: the database has no table ProcessedTasks.
        OperationalError: the driver's; the answer was lost. Roll back.
        TypeError: `connection` or `message` has another type.
    """
    return record_with(_Inserts(connection).insert_once, message, consumer, key)


def cancel(connection: Connection, task_id: str) -> bool:
    """Delete an unsent task in the transaction of `connection`, and return whether it did.

    False: the task is sent, or does not exist. See `outbox.cancel`: the call waits for a batch that holds the task, and
    a task that is in doubt may have been published. Call it before any registration in the transaction. If a replay
    finds another answer than the first execution, see `register_once`.

    Raises:
        InvalidMessage: `task_id` is not 1 to 64 characters.
        InvalidTransaction: see `register`, or the transaction has registered a task before.
        OperationalError: the driver's; the answer was lost. Roll back.
        TypeError: see `register`.
    """
    _check(connection)
    execute = functools.partial(_execute_cancel, connection, task_id)
    heads = next_heads(execute, task_id)
    for id in heads or ():
        _execute_cancel(
            connection, id, f"UPDATE {registration.TABLE} SET {' = NULL, '.join(RELEASED)} = NULL WHERE Id = @id"
        )
    if heads is not None:
        execute(f"DELETE FROM {registration.TABLE} WHERE Id = @id")
    return heads is not None


def _execute_cancel(connection: Connection, id: str, sql: str, _values: Any = None) -> list[Sequence[Any]]:
    """Execute a statement about one task, and return the rows. The driver has no type for a list of IDs."""
    cursor = connection.cursor()
    try:
        cursor.execute(sql.replace("@ids", "[@id]"), {"id": id} if "@id" in sql else None)
        rows: list[Sequence[Any]] = cursor.fetchall() if "SELECT" in sql else []
    except ProgrammingError as error:
        if "pending CommitTimestamp" not in str(error.__cause__):
            raise
        raise InvalidTransaction(
            "the transaction has registered a task before, so it cannot read the table. Roll back, and call cancel "
            "before the first registration"
        ) from error
    if sql == LOCK_UNSENT and not rows:  # `fetchall` returns no rows if it fails
        raise OperationalError(f"no answer about task {id!r}. Roll back and run the transaction again")
    return rows


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
    if connection._batch_mode is not BatchMode.NONE:
        raise InvalidTransaction('the connection is collecting a batch of DML. Execute "RUN BATCH" first')


def _has_begun(connection: Connection) -> bool:
    """Tell whether the statements that a replay executes begin with BEGIN."""
    statements = connection._transaction_helper._statement_result_details_list
    first = classify_statement(getattr(statements[0], "sql", "")) if statements else None  # it skips comments
    return first is not None and first.client_side_statement_type is ClientSideStatementType.BEGIN


class _Inserts:
    """The inserts of a transaction, as statements on a DB-API connection.

    Errors about one of several rows begin with `where` and its index. The constructor raises InvalidTransaction and
    TypeError.
    """

    def __init__(self, connection: Connection, where: str = "") -> None:
        _check(connection)
        self._connection, self._where = connection, where

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        """Insert the tasks in as few statements as Spanner's limits allow. Raises InvalidMessage."""
        data = columns.index("Data")
        for index, row in enumerate(rows):
            _check_size(row[data], self._where.format(index))
        for some in chunked(rows, _MAX_ROWS, _MAX_BYTES, lambda row: len(row[data])):
            self._execute(table, columns, some)

    def insert_once(self, table: str, columns: Sequence[str], row: Row, *, key: Row, tag: str) -> bool:
        """Insert a row unless its key exists; return whether it was inserted. Raises OperationalError."""
        if "Data" in columns:
            _check_size(row[columns.index("Data")])
        cursor = self._execute(table, columns, [row], once=True)
        # A replay compares the rows that were fetched, but not the row count of a single statement.
        cursor.fetchall()
        # `fetchall` returns no rows if it fails, but then the count is unknown as well.
        if cursor.rowcount not in (0, 1):
            raise OperationalError(
                f"no answer to the INSERT of task {key[-1]!r}. Roll back and run the transaction again"
            )
        return bool(cursor.rowcount)

    def _execute(self, table: str, columns: Sequence[str], rows: Sequence[Row], *, once: bool = False) -> Cursor:
        """Execute one statement with parameters. With `once`, it ignores keys that exist and returns a row for others.

        The commit timestamp is a function of SQL.
        """
        parameters: dict[str, Any] = {}
        values = []
        for number, row in enumerate(rows):
            named = {f"{column}{number}": value for column, value in zip(columns, row, strict=True)}
            given = {name: value for name, value in named.items() if value is not COMMIT_TIMESTAMP}
            words = [f"@{name}" if name in given else "PENDING_COMMIT_TIMESTAMP()" for name in named]
            values.append(f"({', '.join(words)})")
            parameters |= given
        verb, end, remedy = "INSERT", "", _TOGETHER
        if once:
            verb, end, remedy = "INSERT OR IGNORE", f"THEN RETURN {columns[0]}", _ONCE[table]
        cursor: Cursor = self._connection.cursor()
        try:
            cursor.execute(f"{verb} INTO {table} ({', '.join(columns)}) VALUES {', '.join(values)} {end}", parameters)
        except ProgrammingError as error:
            if "pending CommitTimestamp" not in str(error.__cause__):
                raise
            raise InvalidTransaction(
                f"the transaction has inserted into {table} before. The Spanner emulator then refuses another INSERT "
                f"into this table, and Spanner one that returns rows. Roll back, and {remedy}"
            ) from error
        return cursor


def _check_size(data: bytes, where: str = "") -> None:
    """Raise InvalidMessage, beginning with `where`, if a statement cannot hold a message."""
    if len(data) > _MAX_BYTES:
        raise InvalidMessage(
            f"{where}the message has {len(data) * 3 // 4:,} bytes; at most {_MAX_BYTES * 3 // 4:,} with SQLAlchemy, "
            "Django or DB-API, because Spanner limits a statement"
        )
