"""Register and process tasks on a DB-API connection (`google.cloud.spanner_dbapi`).

After ABORTED the connection replays its statements, but not mutations. So tasks are an INSERT with parameters that are
fixed before its first execution, and a replay inserts the same rows.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

from google.cloud.spanner_dbapi import Connection, Cursor
from google.cloud.spanner_dbapi.batch_dml_executor import BatchMode
from google.cloud.spanner_dbapi.exceptions import OperationalError, ProgrammingError
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP

from outbox.errors import InvalidMessage, InvalidTransaction
from outbox.inbox import COLUMNS as INBOX_COLUMNS
from outbox.inbox import TABLE as INBOX
from outbox.inbox import Key, ReceivedMessage, inbox_row, table_errors
from outbox.message import Message, check_task_id
from outbox.metrics import count_registered
from outbox.registration import COLUMNS, TABLE, Options, Task, count_rows, task_row, task_rows
from outbox.table.values import chunked

#: Rows of one statement. Spanner allows 950 parameters: https://cloud.google.com/spanner/quotas#query-limits
_MAX_ROWS = 100
#: Bytes of messages in one statement, in base64. Spanner allows requests of 10 MiB, of which the other columns of 100
#: rows need less than 0.4 MB: https://cloud.google.com/spanner/quotas#request-limits
_MAX_BYTES = 10_000_000
_DATA = COLUMNS.index("Data")
#: What to do if the emulator refuses a second INSERT.
_TOGETHER = (
    "register all tasks of the transaction with one call of register_many, which takes a list of outbox.Task. Up to "
    "100 tasks and 7.5 MB of messages are one INSERT"
)


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
    the table.

    Args:
        connection: a Connection of `google.cloud.spanner_dbapi`, not in autocommit mode or after BEGIN.
        topic: see `outbox.register`.
        message: see `outbox.register`.
        attributes: see `outbox.register`.
        task_id: see `outbox.register`.
        options: the other arguments of `outbox.register`.

    Raises:
        InvalidMessage: see `outbox.register`.
        InvalidTransaction: `connection` would not commit the task together with the other statements.
        IntegrityError: the driver's; a task with this `task_id` exists.
        TypeError: `connection` or `message` has another type.
    """
    _check(connection)
    [row] = _fitting([task_row(Task(topic, message, attributes, task_id=task_id, **options))])
    _insert(connection.cursor(), TABLE, COLUMNS, [row])
    count_registered(row[1])
    id: str = row[0]
    return id


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

    See `outbox.register_once`. If a replay finds another answer than the first execution, the connection raises its
    RetryAborted, and the caller has to run its transaction again.

    Raises:
        InvalidMessage: see `outbox.register`.
        InvalidTransaction: see `register`.
        OperationalError: the driver's; the answer was lost. Roll back.
        TypeError: see `register`.
    """
    _check(connection)
    check_task_id(task_id)
    [row] = _fitting([task_row(Task(topic, message, attributes, task_id=task_id, **options))])
    remedy = "call register_once once in a transaction, before any other registration"
    is_new = _insert_once(connection.cursor(), TABLE, COLUMNS, row, id_column="Id", remedy=remedy)
    if is_new:
        count_registered(row[1])
    return is_new


def register_many(connection: Connection, tasks: Iterable[Task]) -> list[str]:
    """Insert all tasks in the transaction of `connection` and return their IDs in the same order.

    See `outbox.register_many`. Executes one INSERT for each 100 tasks, or 7.5 MB of messages.

    Raises:
        InvalidMessage: see `outbox.register_many`.
        InvalidTransaction: see `register`.
        IntegrityError: the driver's; a task with one of the IDs exists.
        TypeError: see `outbox.register_many`.
    """
    _check(connection)
    rows = _fitting(task_rows(tasks)[0], "tasks[{}]: ")
    for some in chunked(rows, _MAX_ROWS, _MAX_BYTES, lambda row: len(row[_DATA])):
        _insert(connection.cursor(), TABLE, COLUMNS, some)
    count_rows(rows)
    return [row[0] for row in rows]


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
    _check(connection)
    row = (*inbox_row(message, consumer, key), COMMIT_TIMESTAMP)
    remedy = "process one message in each transaction"
    with table_errors():
        return _insert_once(connection.cursor(), INBOX, INBOX_COLUMNS, row, id_column="TaskId", remedy=remedy)


def _check(connection: object) -> None:
    """Refuse a connection on which the task and the other statements would not be one transaction."""
    if not isinstance(connection, Connection):
        raise TypeError(
            f"connection is {type(connection).__name__}. It must be a Connection of google.cloud.spanner_dbapi"
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
    first = getattr(statements[0], "sql", "") if statements else ""
    return re.match(r"\s*(BEGIN|START)\b", first, re.IGNORECASE) is not None


def _insert_once(
    cursor: Cursor, table: str, columns: tuple[str, ...], row: tuple[Any, ...], *, id_column: str, remedy: str
) -> bool:
    """Insert a row unless its key exists; return whether it was inserted. Raises OperationalError without an answer."""
    _insert(cursor, table, columns, [row], verb="INSERT OR IGNORE", end=f"THEN RETURN {id_column}", remedy=remedy)
    # A replay compares the rows that were fetched, but not the row count of a single statement.
    cursor.fetchall()
    # `fetchall` returns no rows if it fails, but then the count is unknown as well.
    if cursor.rowcount not in (0, 1):
        id = row[columns.index(id_column)]
        raise OperationalError(f"no answer to the INSERT of task {id!r}. Roll back and run the transaction again")
    return bool(cursor.rowcount)


def _insert(
    cursor: Cursor,
    table: str,
    columns: tuple[str, ...],
    rows: Sequence[tuple[Any, ...]],
    *,
    verb: str = "INSERT",
    end: str = "",
    remedy: str = _TOGETHER,
) -> None:
    """Execute one INSERT with parameters. The commit timestamp is a function of SQL."""
    parameters: dict[str, Any] = {}
    values = []
    for number, row in enumerate(rows):
        named = {f"{column}{number}": value for column, value in zip(columns, row, strict=True)}
        words = [
            "PENDING_COMMIT_TIMESTAMP()" if value is COMMIT_TIMESTAMP else f"@{name}" for name, value in named.items()
        ]
        values.append(f"({', '.join(words)})")
        parameters |= {name: value for name, value in named.items() if value is not COMMIT_TIMESTAMP}
    try:
        cursor.execute(f"{verb} INTO {table} ({', '.join(columns)}) VALUES {', '.join(values)} {end}", parameters)
    except ProgrammingError as error:
        if "pending CommitTimestamp" not in str(error.__cause__):
            raise
        raise InvalidTransaction(
            f"the transaction has inserted into {table} before. The Spanner emulator then refuses another INSERT into "
            f"this table, and Spanner one that returns rows. Roll back, and {remedy}"
        ) from error


def _fitting(rows: list[tuple[Any, ...]], where: str = "") -> list[tuple[Any, ...]]:
    """Return the rows. Raises InvalidMessage, beginning with `where` and the row's index, if one is too large."""
    for index, row in enumerate(rows):
        if len(row[_DATA]) > _MAX_BYTES:
            raise InvalidMessage(
                f"{where.format(index)}the message has {len(row[_DATA]) * 3 // 4:,} bytes; at most "
                f"{_MAX_BYTES * 3 // 4:,} with SQLAlchemy, Django or DB-API, because Spanner limits a statement"
            )
    return rows
