"""What is added to an application's transaction."""

import contextlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from google.cloud.spanner_v1 import KeySet, Mutation
from google.cloud.spanner_v1.batch import Batch, MutationGroup
from google.cloud.spanner_v1.transaction import Transaction

from outbox.base.values import check_finished, class_name
from outbox.errors import InvalidTransaction, NotReached

#: The classes of the client whose inserts return nothing.
_CLIENT = (Transaction, Batch, MutationGroup)

#: A primary key, and the values of a row in the order of some columns.
PrimaryKey = tuple[str, ...]
Row = tuple[Any, ...]


class Changes(NamedTuple):
    """The keys that a transaction has inserted, and the tasks that it has cancelled."""

    inserted: set[PrimaryKey]
    cancelled: set[str]


#: A read does not see the buffered mutations of its own transaction. After ABORTED the client calls the function again
#: with a new Transaction, so each attempt begins with none.
_changes: WeakKeyDictionary[object, Changes] = WeakKeyDictionary()


class SupportsInsert(Protocol):
    """Accepts an insert: a Spanner Transaction, Batch, MutationGroup or AsyncTransaction, or a test's fake of one."""

    def insert(self, table: str, columns: Sequence[str], values: Sequence[tuple[Any, ...]], /) -> object:
        """Add one insert."""


class SupportsReadInsert(SupportsInsert, Protocol):
    """Accepts reads and inserts: a Spanner Transaction, or a test's fake of one."""

    def read(
        self, table: str, columns: Sequence[str], keyset: KeySet, /, *, request_options: Any, retry: Any, timeout: Any
    ) -> Iterable[Sequence[Any]]:
        """Return the rows of `keyset`."""


class SupportsUpdate(Protocol):
    """Accepts updates."""

    def update(self, table: str, columns: Sequence[str], values: Sequence[tuple[Any, ...]], /) -> object:
        """Add one update."""


class SupportsCancel(SupportsUpdate, Protocol):
    """Accepts queries and updates: a Spanner Transaction, or a test's fake of one."""

    def execute_sql(
        self, sql: str, /, *, params: Any, param_types: Any, request_options: Any, retry: Any, timeout: Any
    ) -> Iterable[Sequence[Any]]:
        """Return the rows of a query."""


#: By function, how the error ends for a transaction that cannot read.
_ALTERNATIVES = {
    "register_once": ", or use register. For the transaction of an AsyncClient, await outbox.aio.register_once",
    "cancel": ". For the transaction of an AsyncClient, await outbox.aio.cancel",
}


#: By the name of a class of the client, what to do instead of passing it as a transaction that inserts.
_REMEDIES = {
    "BatchCheckout": "Use `with database.batch() as batch:`, and pass batch",
    "MutationGroupsCheckout": "Use `with database.mutation_groups() as groups:`, and pass groups.group()",
    "MutationGroups": "Pass its group()",
    "Database": "Call {} in a function given to its run_in_transaction, and pass the transaction of this function",
}


def check_transaction(transaction: object, function: str, *, reads: bool = False) -> None:
    """Raise TypeError if `transaction` cannot insert, or if `reads` is true and it cannot read.

    Raises InvalidTransaction for a transaction that has ended, and for that of a DB-API connection, whose replay after
    ABORTED drops mutations. The errors name `function`.
    """
    read, insert = getattr(transaction, "read", None), getattr(transaction, "insert", None)
    # The client's AsyncTransaction inserts like the others, but its read must be awaited.
    if reads and (not callable(read) or not callable(insert) or inspect.iscoroutinefunction(read)):
        raise TypeError(
            f"transaction is {class_name(transaction)}. It must be a Spanner Transaction, because {function} reads "
            "before it writes: call it in a function given to database.run_in_transaction"
            + _ALTERNATIVES.get(function, "")
        )
    if not callable(insert):
        remedy = _REMEDIES.get(type(transaction).__name__) if "google." in class_name(transaction) else None
        raise TypeError(
            f"transaction is {class_name(transaction)}. It must be a Spanner Transaction, Batch or MutationGroup. "
            + (remedy or "With SQLAlchemy, Django or DB-API use {} of outbox.ext.sqlalchemy, .django or .dbapi").format(
                function
            )
        )
    check_open(transaction, function)
    # The client's `run_in_transaction` sets both attributes, and `session.transaction()` sets neither. Only DB-API sets
    # `isolation_level` without `read_lock_mode`.
    if (
        "google.cloud.spanner_dbapi" in sys.modules
        and isinstance(transaction, Transaction)
        and "isolation_level" in vars(transaction)
        and "read_lock_mode" not in vars(transaction)
    ):
        raise InvalidTransaction(
            "transaction belongs to a DB-API connection, such as that of SQLAlchemy or Django. After an abort the "
            "connection replays its statements but not this change, so it would be lost. Use "
            f"{function} of outbox.ext.sqlalchemy, .django or .dbapi"
        )


def check_open(transaction: object, function: str) -> None:
    """Raise InvalidTransaction, which names `function`, if `transaction` was committed or rolled back.

    The client would buffer the insert and never send it. A MutationGroup is not checked, because it does not record
    whether it was sent.
    """
    # A mock has these attributes as well, but with other values.
    if isinstance(getattr(transaction, "committed", None), datetime) or (
        getattr(transaction, "rolled_back", False) is True
    ):
        raise InvalidTransaction(
            f"transaction was committed or rolled back before, so a change would never be sent. Call {function} in the "
            "function given to database.run_in_transaction, or in the block of `with database.batch()`"
        )


def insert(
    transaction: SupportsInsert,
    table: str,
    columns: tuple[str, ...],
    rows: Sequence[Row],
    keys: Iterable[PrimaryKey] = (),
) -> None:
    """Add one insert, and note the `keys` of its rows, which the transaction's own reads do not return.

    Raises TypeError if `transaction.insert` returns a coroutine, because nothing is added then.
    """
    if isinstance(transaction, _CLIENT):
        transaction.insert(table, _converted(columns), rows)  # type: ignore[no-untyped-call]  # the client has no types
    else:
        check_finished(transaction.insert(table, columns, rows), f"the insert of {type(transaction).__name__}")
    changes(transaction).inserted.update(keys)


@lru_cache(maxsize=64)
def _converted(columns: tuple[str, ...]) -> Sequence[str]:
    """Return the names of columns in the type of the client's messages.

    The client converts each name of a tuple or a list at each insert, which takes longer than to convert the values.
    """
    names: Sequence[str] = Mutation.Write(columns=columns).columns
    return names


def missing_table(error: Exception, table: str) -> str | None:
    """Return what to do if the error means that the table does not exist, or None."""
    if f"Table not found: {table}" not in str(error):
        return None
    return (
        f"table {table} is missing in the database of this transaction. Create it with `outbox schema apply`, or use "
        "a transaction of the database that has it"
    )


@contextlib.contextmanager
def table_errors(table: str) -> Iterator[None]:
    """Raise NotReached if the table is missing."""
    try:
        yield
    except Exception as error:
        if text := missing_table(error, table):
            raise NotReached(text) from error
        raise


def changes(transaction: object) -> Changes:
    """Return what `transaction` has inserted and cancelled. The caller adds to it."""
    try:
        if (found := _changes.get(transaction)) is None:
            found = _changes[transaction] = Changes(set(), set())
    except TypeError:  # a test's fake that has no weak reference or no hash
        return Changes(set(), set())
    return found
