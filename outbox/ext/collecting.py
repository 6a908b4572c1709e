"""Collect the rows that a DB-API connection inserts right before its commit, with one statement per table if they fit.

A pending commit timestamp in a table forbids to read the table in the same transaction, and the Spanner emulator then
refuses another INSERT, too. So the INSERT comes last. The connection executes it like the other statements of the
transaction, so a replay after ABORTED inserts the same rows, and nothing is collected a second time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from google.api_core.exceptions import AlreadyExists, GoogleAPICallError
from google.cloud.spanner_dbapi.batch_dml_executor import BatchMode
from google.cloud.spanner_dbapi.exceptions import DatabaseError
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP

from outbox.base.values import chunked
from outbox.errors import InvalidTransaction

E = TypeVar("E", bound=BaseException)
#: A primary key.
Key = tuple[Any, ...]
#: Values by column.
Row = Mapping[str, Any]
#: Executes a statement with its parameters. Returns an object with `fetchall` and `rowcount`.
Execute = Callable[[str, Mapping[str, Any] | None], Any]

#: Rows of one statement. Spanner allows 950 parameters: https://cloud.google.com/spanner/quotas#query-limits
_MAX_ROWS = 100
#: Bytes of messages in one statement, in base64. Spanner allows requests of 10 MiB, of which the other columns of 100
#: rows need less than 0.4 MB: https://cloud.google.com/spanner/quotas#request-limits
STATEMENT_BYTES = 10_000_000


class Collected:
    """The rows of the open transaction of one connection, whose `commit` inserts and whose `rollback` forgets them."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._rows: dict[str, list[tuple[Key, Row]]] = {}
        self._execute: Execute
        self._commit, self._rollback = connection.commit, connection.rollback
        connection.commit, connection.rollback = self.commit, self.rollback

    @classmethod
    def of(cls, connection: Any) -> "Collected":
        """Return the rows of a Connection."""
        if not hasattr(connection, "_outbox_collected"):
            connection._outbox_collected = cls(connection)
        found: Collected = connection._outbox_collected
        return found

    def add(self, table: str, key: Key, row: Row, execute: Execute) -> None:
        """Collect a row. `execute` executes the INSERT."""
        # Without a statement before, the setter of `autocommit` would not commit the row, and Django uses the setter.
        self._connection.transaction_checkout()
        self._execute = execute
        self._rows.setdefault(table, []).append((key, row))

    def has(self, table: str, key: Key) -> bool:
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
                self._insert(table, [row for _, row in keys_and_rows])
        except BaseException:
            with suppress(Exception):
                self._rollback()
            raise
        self._commit()

    def rollback(self) -> None:
        """Forget the rows, and roll back."""
        self._rows.clear()
        self._rollback()

    def _insert(self, table: str, rows: Sequence[Row]) -> None:
        for some in chunked(rows, _MAX_ROWS, STATEMENT_BYTES, lambda row: len(row.get("Data", ""))):
            with errors(table):
                self._execute(*_insert(table, some))


def check_no_batch(connection: Any) -> None:
    """Raise InvalidTransaction if the connection collects the statements that it is to execute."""
    if connection._batch_mode is not BatchMode.NONE:
        raise InvalidTransaction('the connection is collecting a batch of DML. Execute "RUN BATCH" first')


def _insert(table: str, rows: Sequence[Row]) -> tuple[str, dict[str, Any]]:
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
def errors(table: str, missing: type[Exception] | None = None) -> Iterator[None]:
    """Say what to do. The driver's own errors have the text "[]". `missing` is the class for a missing table."""
    try:
        yield
    except Exception as error:
        of_driver, cause = _in_chain(error, DatabaseError), _in_chain(error, GoogleAPICallError)
        if of_driver is None or cause is None:
            raise
        kind, text = type(of_driver), cause.message.rstrip(".")
        if isinstance(cause, AlreadyExists):
            text += ". Use another ID, or register_once"
        elif "pending CommitTimestamp" in text:
            text = (
                f"the Spanner emulator accepts one INSERT into {table} in a transaction, which holds {_MAX_ROWS} tasks "
                f"and {STATEMENT_BYTES * 3 // 4:,} bytes of messages. Register fewer tasks in one transaction of a test"
            )
        elif f"Table not found: {table}" in text:
            text = (
                f"table {table} is missing in the database of this transaction. Create it with `outbox schema apply`, "
                "or connect to the database that has it"
            )
            if missing:
                raise missing(text) from error
        raise kind(text) from cause


def _in_chain(error: BaseException | None, kind: type[E]) -> E | None:
    """Return the error of this kind among an error and its causes."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__
    return error
