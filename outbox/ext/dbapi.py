"""Register, cancel and process tasks on a DB-API connection (`google.cloud.spanner_dbapi`).

After ABORTED the connection replays its statements, but not mutations. So tasks are an INSERT with parameters that are
fixed before its first execution, and a replay inserts the same rows.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, Unpack

from google.api_core.exceptions import AlreadyExists, GoogleAPICallError
from google.cloud.spanner_dbapi import Connection
from google.cloud.spanner_dbapi.batch_dml_executor import BatchMode
from google.cloud.spanner_dbapi.exceptions import DatabaseError, OperationalError
from google.cloud.spanner_dbapi.parse_utils import classify_statement
from google.cloud.spanner_dbapi.parsed_statement import ClientSideStatementType
from google.cloud.spanner_dbapi.transaction_helper import ResultType
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP

from outbox import registration
from outbox.base.values import chunked, class_name
from outbox.cancellation import next_heads
from outbox.errors import InvalidMessage, InvalidTransaction, NotReached
from outbox.inbox import Key, ReceivedMessage
from outbox.inbox.once import TABLE as INBOX
from outbox.inbox.once import record_with
from outbox.message import Message, check_task_id
from outbox.registration import Options, Task
from outbox.table.shared_sql import LOCK_UNSENT, RELEASED

E = TypeVar("E", bound=BaseException)
#: Values in the order of some columns.
Row = tuple[Any, ...]
#: Executes a statement with its parameters. Returns an object with `fetchall` and `rowcount`.
Execute = Callable[[str, Mapping[str, Any] | None], Any]

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
        NotReached: the database has no table AsynchronousTasks.
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

    See `outbox.register_once`. Call it once in a transaction, before any `register`. If a replay finds another answer
    than the first execution, the connection raises its RetryAborted, and the caller has to run its transaction again.

    Raises:
        InvalidMessage: see `outbox.register`.
        InvalidTransaction: see `register`, or the transaction has registered a task before.
        NotReached: see `register`.
        OperationalError: the driver's; the answer was lost. Roll back.
        TypeError: see `register`.
    """
    task = Task(topic, message, attributes, task_id=task_id, **options)
    return registration.register_with(Statements(connection).insert_once, task)


def register_many(connection: Connection, tasks: Collection[Task]) -> list[str]:
    """Insert all tasks in the transaction of `connection` and return their IDs in the same order.

    See `outbox.register_many`. Executes one INSERT for each 100 tasks, or 7.5 MB of messages.

    Raises:
        InvalidMessage: see `outbox.register_many`.
        InvalidTransaction: see `register`.
        IntegrityError: the driver's; a task with one of the IDs exists.
        TypeError: see `outbox.register_many`.
    """
    return registration.register_many(Statements(connection), tasks)


def process_once(connection: Connection, message: ReceivedMessage, *, consumer: str, key: Key = "task_id") -> bool:
    """Record the task of `message` as processed, and return whether this is the first time.

    See `outbox.inbox.process_once`. Executes one INSERT, and is called once in a transaction: Spanner refuses another
    one. If a replay finds another answer than the first execution, see `register_once`.

    Raises:
        MissingTaskId: see `outbox.inbox.process_once`.
        InvalidConsumer: the name of the consumer.
        InvalidTransaction: see `register`, or the transaction has a record already.
        NotReached: the database has no table ProcessedTasks.
        OperationalError: the driver's; the answer was lost. Roll back.
        TypeError: `connection` or `message` has another type.
    """
    return record_with(Statements(connection).insert_once, message, consumer, key)


def cancel(connection: Connection, task_id: str) -> bool:
    """Delete an unsent task in the transaction of `connection`, and return whether it did.

    False: the task is sent, or does not exist. See `outbox.cancel`: a task that it deletes may have been published
    before. Call it first in the transaction, and always before a registration. If a replay finds another answer than
    the first execution, see `register_once`.

    Raises:
        InvalidMessage: `task_id` is not 1 to 64 characters.
        InvalidTransaction: see `register`, or the transaction has registered a task before.
        NotReached: see `register`.
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
    if connection._batch_mode is not BatchMode.NONE:
        raise InvalidTransaction('the connection is collecting a batch of DML. Execute "RUN BATCH" first')


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
        self._connection, self._execute = connection, execute or on_cursors(connection.cursor)

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        """Insert the tasks in as few statements as Spanner's limits allow. Raises InvalidMessage."""
        data = columns.index("Data")
        for index, row in enumerate(rows):
            _check_size(row[data], f"tasks[{index}]: " if len(rows) > 1 else "")
        for some in chunked(rows, _MAX_ROWS, _MAX_BYTES, lambda row: len(row[data])):
            with _errors(table, _TOGETHER):
                self._execute(*_insert("INSERT", table, columns, some))

    def insert_once(self, table: str, columns: Sequence[str], row: Row, *, key: Row, tag: str) -> bool:
        """Insert a row unless its key exists; return whether it was inserted. Raises OperationalError."""
        if "Data" in columns:
            _check_size(row[columns.index("Data")])
        if self._has_inserted(table):
            raise _inserted_before(table, _ONCE[table])
        sql, parameters = _insert("INSERT OR IGNORE", table, columns, [row])
        with _errors(table, _ONCE[table]):
            result = self._execute(f"{sql} THEN RETURN {columns[0]}", parameters)
        # A replay compares the rows that were fetched, but not the row count of a single statement.
        result.fetchall()
        # `fetchall` returns no rows if it fails, but then the count is unknown as well.
        if result.rowcount not in (0, 1):
            raise OperationalError(
                f"no answer to the INSERT of task {key[-1]!r}. Roll back and run the transaction again"
            )
        return bool(result.rowcount)

    def cancel(self, task_id: str) -> bool:
        """Delete an unsent task; return whether it was deleted. Raises OperationalError."""
        check_task_id(task_id)
        if self._has_inserted(table := registration.TABLE):
            raise InvalidTransaction(
                "the transaction has called a function that registers a task before, so it cannot read the table, nor "
                "cancel a task of its own. Roll back, and call cancel before the first registration"
            )
        # The driver has no type for a list of IDs.
        heads = next_heads(lambda sql, _: self._about(task_id, sql.replace("@ids", "[@id]")), task_id)
        for id in heads or ():
            self._about(id, f"UPDATE {table} SET {' = NULL, '.join(RELEASED)} = NULL WHERE Id = @id")
        if heads is not None:
            self._about(task_id, f"DELETE FROM {table} WHERE Id = @id")
        return heads is not None

    def _about(self, id: str, sql: str) -> list[Sequence[Any]]:
        """Execute a statement about one task, and return its rows."""
        with _errors(registration.TABLE):
            result = self._execute(sql, {"id": id} if "@id" in sql else None)
        rows: list[Sequence[Any]] = result.fetchall() if "SELECT" in sql else []
        if sql == LOCK_UNSENT and not rows:  # `fetchall` returns no rows if it fails
            raise OperationalError(f"no answer about task {id!r}. Roll back and run the transaction again")
        return rows

    def _has_inserted(self, table: str) -> bool:
        """Tell whether the transaction has written a pending commit timestamp. Then Spanner reads the table no more.

        The emulator does, unless it finds such a row: https://cloud.google.com/spanner/docs/commit-timestamp
        """
        executed = self._connection._transaction_helper._statement_result_details_list
        return any(
            f" INTO {table} (" in getattr(each, "sql", "") and each.result_type is not ResultType.EXCEPTION
            for each in executed
        )


def on_cursors(cursor: Callable[[], Any]) -> Execute:
    """Return a function that executes each statement on a new cursor."""

    def execute(sql: str, parameters: Mapping[str, Any] | None) -> Any:
        opened = cursor()
        opened.execute(sql, parameters)
        return opened

    return execute


def _insert(verb: str, table: str, columns: Sequence[str], rows: Sequence[Row]) -> tuple[str, dict[str, Any]]:
    """Return a statement and its parameters. The commit timestamp is a function of SQL."""
    parameters: dict[str, Any] = {}
    values = []
    for number, row in enumerate(rows):
        named = {f"{column}{number}": value for column, value in zip(columns, row, strict=True)}
        given = {name: value for name, value in named.items() if value is not COMMIT_TIMESTAMP}
        words = [f"@{name}" if name in given else "PENDING_COMMIT_TIMESTAMP()" for name in named]
        values.append(f"({', '.join(words)})")
        parameters |= given
    return f"{verb} INTO {table} ({', '.join(columns)}) VALUES {', '.join(values)}", parameters


@contextmanager
def _errors(table: str, remedy: str = "") -> Iterator[None]:
    """Say what to do. The driver's own errors have the text "[]"."""
    try:
        yield
    except Exception as error:
        of_driver, cause = _in_chain(error, DatabaseError), _in_chain(error, GoogleAPICallError)
        if of_driver is None or cause is None:
            raise
        if "pending CommitTimestamp" in cause.message:
            raise _inserted_before(table, remedy) from error
        if f"Table not found: {table}" in cause.message:
            raise NotReached(
                f"table {table} is missing in the database of this transaction. Create it with `outbox schema "
                "apply`, or connect to the database that has it"
            ) from error
        advice = ". Use another ID, or register_once" if isinstance(cause, AlreadyExists) else ""
        raise type(of_driver)(cause.message.rstrip(".") + advice) from cause


def _inserted_before(table: str, remedy: str) -> InvalidTransaction:
    return InvalidTransaction(
        f"the transaction has inserted into {table} before. The Spanner emulator then refuses another INSERT into this "
        f"table, and Spanner one that returns rows. Roll back, and {remedy}"
    )


def _in_chain(error: BaseException | None, kind: type[E]) -> E | None:
    """Return the error of this kind among an error and its causes."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__
    return error


def _check_size(data: bytes, where: str = "") -> None:
    """Raise InvalidMessage, beginning with `where`, if a statement cannot hold a message."""
    if len(data) > _MAX_BYTES:
        raise InvalidMessage(
            f"{where}the message has {len(data) * 3 // 4:,} bytes; at most {_MAX_BYTES * 3 // 4:,} with SQLAlchemy, "
            "Django or DB-API, because Spanner limits a statement"
        )
