"""A Spanner transaction that records what an application writes, and answers its reads from prepared rows."""

import base64
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partialmethod
from typing import Any, NamedTuple, TypeAlias

from google.cloud.spanner_v1 import KeyRange, KeySet
from google.cloud.spanner_v1.streamed import StreamedResultSet
from google.cloud.spanner_v1.transaction import Transaction
from google.cloud.spanner_v1.types import ExecuteBatchDmlResponse, ResultSetMetadata, StructType
from google.pubsub_v1.types import PubsubMessage

from outbox.message import RawPubsubMessage
from outbox.registration import TABLE
from outbox.table.values import check_finished, in_utc, plain

#: A prepared row, by column. For `read` it begins with the columns of the key, for `execute_sql` it has their order.
Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RegisteredTask:
    """One registered task. `message` has the task ID in its attributes, and the times are aware."""

    id: str
    topic: str
    message: PubsubMessage
    priority: int
    ordering_key: str
    available_at: datetime | None
    expires_at: datetime | None
    at_most_once: bool


class Mutation(NamedTuple):
    """One mutation: `method` is "insert", "update", "insert_or_update", "replace" or "delete"."""

    method: str
    table: str
    columns: tuple[str, ...]
    values: Any  # the rows, as a list of tuples; of a delete the KeySet


class Statement(NamedTuple):
    """One query or DML statement."""

    sql: str
    params: dict[str, Any]


class RecordingTransaction(Transaction):
    """A Spanner Transaction without a database, for unit tests.

    `mutations` and `statements` have what the application wrote and executed, in order. `inserts` has the inserts as
    (table, columns, rows), `tasks` those of `outbox.register` and `register_once`. Reads return the prepared rows,
    whatever the transaction has written. A request of another kind, such as a commit, is an AttributeError.
    """

    def __init__(
        self,
        task_ids: Collection[str] = (),
        *,
        rows: Mapping[str, Iterable[Row]] | None = None,
        execute: Callable[[str, dict[str, Any]], Iterable[Row] | int] | None = None,
    ) -> None:
        """Prepare what reads and statements return.

        Args:
            task_ids: tasks with these IDs exist already, for `register_once`.
            rows: the rows of each table, for `read`. A read by an index uses the rows under the index's name.
            execute: called with each statement and its parameters. Returns the rows of a query, or the number of rows
                that DML changes. Without it, each DML statement changes one row, and a query is a LookupError.
        """
        super().__init__(_NoSession())  # type: ignore[no-untyped-call]  # the client has no types
        self.mutations: list[Mutation] = []
        self.statements: list[Statement] = []
        self._prepared: dict[str, list[Row]] = {TABLE: [{"Id": id} for id in task_ids]}
        for name, prepared in (rows or {}).items():
            self._prepared[plain(name)] = [{plain(column): row[column] for column in row} for row in prepared]
        self._execute = execute

    @property
    def inserts(self) -> list[tuple[str, tuple[str, ...], list[tuple[Any, ...]]]]:
        """Return the inserts as (table, columns, rows)."""
        return [each[1:] for each in self.mutations if each.method == "insert"]

    @property
    def tasks(self) -> list[RegisteredTask]:
        """Return the registered tasks."""
        return [
            task_of(dict(zip(columns, row, strict=True)))
            for table, columns, rows in self.inserts
            if table == TABLE
            for row in rows
        ]

    def _write(self, method: str, table: str, columns: Sequence[str], values: Iterable[Sequence[Any]]) -> None:
        """Record a mutation."""
        rows = [tuple(row) for row in values]
        getattr(Transaction, method)(self, table, columns, rows)  # refuses values that the client cannot send
        self.mutations.append(Mutation(method, table, tuple(columns), rows))

    insert = partialmethod(_write, "insert")
    update = partialmethod(_write, "update")
    insert_or_update = partialmethod(_write, "insert_or_update")
    replace = partialmethod(_write, "replace")

    def delete(self, table: str, keyset: KeySet) -> None:
        """Record a delete."""
        Transaction.delete(self, table, keyset)  # refuses what is no KeySet
        self.mutations.append(Mutation("delete", table, (), keyset))

    def read(self, *arguments: Any, **options: Any) -> StreamedResultSet:
        """Return the prepared rows that the key set selects. The parameters are those of the client.

        Raises:
            LookupError: no rows of the table or index are prepared, or one has no value of a column.
        """
        call = _call(Transaction.read, arguments, options)
        name, columns = plain(call["index"] or call["table"]), [plain(each) for each in call["columns"]]
        if name not in self._prepared:
            example = ", ".join(f"{column!r}: ..." for column in columns)
            raise LookupError(
                f"no rows of {name} are prepared: use RecordingTransaction(rows={{{name!r}: [{{{example}}}]}}), where "
                "each row begins with the columns of the key"
            )
        selected = [row for row in self._prepared[name] if _selects(call["keyset"], row.values())]
        for row in selected:
            if missing := [column for column in columns if column not in row]:
                raise LookupError(f"the row {dict(row)} of {name} has no {', '.join(missing)}: add it to `rows`")
        return _Result(columns, [[row[column] for column in columns] for row in selected[: call["limit"] or None]])

    def execute_sql(self, *arguments: Any, **options: Any) -> StreamedResultSet:
        """Record a query, or DML with THEN RETURN, and return the rows of `execute`.

        The parameters are those of the client.

        Raises:
            LookupError: `execute` is missing or returns no rows.
        """
        call = _call(Transaction.execute_sql, arguments, options)
        answer = self._run(call["sql"], call["params"])
        check_finished(None if isinstance(answer, Iterator) else answer, "execute")
        if answer is None or isinstance(answer, int):
            raise LookupError(
                f"no rows of the query {call['sql']!r} are prepared: use RecordingTransaction(execute=...) with a "
                "function of (sql, params) that returns them, such as [{'OrderId': 'order-1'}]"
            )
        rows = list(answer)
        return _Result(list(rows[0]) if rows else [], [list(row.values()) for row in rows])

    def execute_update(self, *arguments: Any, **options: Any) -> int:
        """Record a DML statement and return the number of rows that `execute` says, or 1.

        The parameters are those of the client.
        """
        call = _call(Transaction.execute_update, arguments, options)
        answer = self._run(call["dml"], call["params"])
        check_finished(answer, "execute")
        return answer if isinstance(answer, int) else 1

    def batch_update(self, *arguments: Any, **options: Any) -> tuple[Any, list[int]]:
        """Record DML statements and return the status OK and their numbers of rows, like `execute_update`.

        The parameters are those of the client.
        """
        statements = _call(Transaction.batch_update, arguments, options)["statements"]
        pairs = [(each, None) if isinstance(each, str) else each[:2] for each in statements]
        return ExecuteBatchDmlResponse().status, [self.execute_update(*each) for each in pairs]

    def _run(self, sql: str, params: Mapping[str, Any] | None) -> Iterable[Row] | int | None:
        statement = Statement(sql, dict(params or {}))
        self.statements.append(statement)
        return self._execute(*statement) if self._execute else None


def _call(method: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by their names in a method of the client. Raises TypeError, like the method."""
    bound = inspect.signature(method).bind(None, *arguments, **options)
    bound.apply_defaults()
    return bound.arguments


class _NoSession:
    """Where the methods of the real Transaction that need a database fail."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"RecordingTransaction has no session, and so no {name!r}: use a database of the emulator")


class _Result(StreamedResultSet):
    """Prepared rows with the methods of the client's result."""

    def __init__(self, columns: Sequence[str], rows: list[list[Any]]) -> None:
        super().__init__(iter(()))
        self._columns = columns
        self._prepared = iter(rows)

    def __iter__(self) -> Iterator[list[Any]]:
        fields = [StructType.Field(name=column) for column in self._columns]
        self._metadata = ResultSetMetadata.pb(ResultSetMetadata(row_type=StructType(fields=fields)))
        yield from self._prepared


def task_of(row: Mapping[str, Any]) -> RegisteredTask:
    """Return the task in a row of AsynchronousTasks, as the client takes and returns it."""
    return RegisteredTask(
        id=row["Id"],
        topic=row["Topic"],
        message=PubsubMessage.wrap(RawPubsubMessage.FromString(base64.b64decode(row["Data"]))),
        priority=row["Priority"],
        ordering_key=row.get("OrderingKey") or "",
        available_at=row.get("AvailableAt"),
        expires_at=row.get("ExpiresAt"),
        at_most_once=row.get("AtMostOnce", False),
    )


def _selects(keyset: KeySet, row: Iterable[Any]) -> bool:
    """Tell whether a row is one of a KeySet, by its first values."""
    values = _comparable(row)
    return (
        keyset.all_
        or any(values[: len(key)] == _comparable(key) for key in keyset.keys)
        or any(_is_within(each, values) for each in keyset.ranges)
    )


def _comparable(key: Iterable[Any]) -> list[Any]:
    return [in_utc(each) if isinstance(each, datetime) and each.tzinfo else each for each in key]


def _is_within(of: KeyRange, values: list[Any]) -> bool:
    ends = of.start_open or of.start_closed, of.end_open or of.end_closed
    start, end = (_comparable(each or ()) for each in ends)
    first, last = values[: len(start)], values[: len(end)]
    return bool(start <= first and last <= end) and not (
        (of.start_open and first == start) or (of.end_open and last == end)
    )
