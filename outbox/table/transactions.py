"""Read-write transactions, and the time limits of their requests; and what is added to an application's transaction."""

import contextlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

from google.api_core import exceptions as google
from google.api_core.retry import AsyncRetry, Retry, if_exception_type
from google.auth.exceptions import GoogleAuthError
from google.cloud.spanner_v1 import KeySet, Mutation, TransactionOptions
from google.cloud.spanner_v1.batch import Batch, MutationGroup
from google.cloud.spanner_v1.session import Session
from google.cloud.spanner_v1.transaction import Transaction

from outbox.base.schedules import CALL
from outbox.base.values import check_finished, class_name
from outbox.errors import InvalidTransaction, NotReached

T = TypeVar("T")

#: Errors about the content of a request, such as a value that a constraint forbids. Spanner has not executed it.
CONTENT = (google.AlreadyExists, google.FailedPrecondition, google.InvalidArgument, google.OutOfRange)

#: Options of `transact`: serializable and pessimistic, whatever the client's defaults are. Otherwise the hint
#: LOCK_SCANNED_RANGES=exclusive locks nothing.
PESSIMISTIC: Mapping[str, Any] = {
    "isolation_level": TransactionOptions.IsolationLevel.SERIALIZABLE,
    "read_lock_mode": TransactionOptions.ReadWrite.ReadLockMode.PESSIMISTIC,
}


def transact(database: Any, work: Callable[[Any], T], **options: Any) -> T:
    """Run `work` in a read-write transaction, again after each ABORTED, and return its result.

    `options` are those of `run_in_transaction`. After an error of Google's API the client leaves the transaction and
    its locks open. So it is rolled back here if `work` has failed with one other than ABORTED, or if Spanner has
    refused the commit. After other errors of `work` the client rolls back.

    If the client gets no session, it refuses all later transactions of the thread, unless the flag is reset here:
    https://github.com/googleapis/google-cloud-python/issues/18375
    """
    transaction: Any = None
    working = False

    def attempt(begun: Any) -> T:
        nonlocal transaction, working
        transaction, working = begun, True
        result = work(begun)
        working = False
        return result

    try:
        result: T = database.run_in_transaction(attempt, **options)
    except RuntimeError:
        raise  # the thread is already in a transaction, so the flag is right
    except Exception as error:
        if transaction is None:
            with contextlib.suppress(AttributeError):  # a test's fake
                database._local.transaction_running = False  # noqa: SLF001 - nothing public resets it
        elif isinstance(error, CONTENT) or (
            working and isinstance(error, google.GoogleAPICallError) and not isinstance(error, google.Aborted)
        ):
            with contextlib.suppress(google.GoogleAPIError, GoogleAuthError):
                transaction.rollback()
        raise
    return result


def retry_and_timeout(seconds: float, kind: type[Retry] | type[AsyncRetry] = Retry) -> dict[str, Any]:
    """Return `retry` and `timeout` for one call, because the client would repeat it for ever in an outage."""
    unavailable = if_exception_type(google.ServiceUnavailable)
    retry = kind(predicate=unavailable, initial=CALL.first, maximum=CALL.most, timeout=seconds)
    return {"retry": retry, "timeout": seconds}


#: Max seconds for a read in the transaction of an application, including the wait for another transaction's lock.
#: Without a limit of our own, the client repeats the read without a pause while Spanner is unavailable.
IN_TRANSACTION_SECONDS = 30.0


def request(tag: str, kind: type[Retry] | type[AsyncRetry] = Retry) -> dict[str, Any]:
    """Return the options of a read or a query in the transaction of an application."""
    return {"request_options": {"request_tag": tag}, **retry_and_timeout(IN_TRANSACTION_SECONDS, kind)}


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


def check_database(database: object, remedy: str = "") -> None:
    """Raise TypeError, which ends with `remedy`, unless `database` is that of a synchronous Spanner client.

    A Session has the same methods, but one transaction at a time.
    """
    run = getattr(database, "run_in_transaction", None)
    if inspect.iscoroutinefunction(run):
        remedy = ". That of an AsyncClient needs `await`, so use one of spanner.Client"
    elif callable(run) and not isinstance(database, Session):
        return
    raise TypeError(f"database is {class_name(database)}. It must be the Database of a Spanner Client{remedy}")


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


def insert(transaction: SupportsInsert, table: str, columns: tuple[str, ...], rows: Sequence[Row]) -> None:
    """Add one insert. Raises TypeError if `transaction.insert` returns a coroutine, because nothing is added then."""
    if isinstance(transaction, _CLIENT):
        transaction.insert(table, _converted(columns), rows)  # type: ignore[no-untyped-call]  # the client has no types
        return
    check_finished(transaction.insert(table, columns, rows), f"the insert of {type(transaction).__name__}")


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


def existing(
    transaction: SupportsReadInsert, table: str, columns: Sequence[str], keys: Collection[PrimaryKey], *, tag: str
) -> set[PrimaryKey]:
    """Return the keys that the table has, and lock all of `keys` for the transaction.

    Raises RetryError or DeadlineExceeded after IN_TRANSACTION_SECONDS, NotReached if the table is missing.
    """
    with table_errors(table):
        rows = transaction.read(table, columns, KeySet(keys=list(map(list, keys))), **request(tag))
        # Read to the end, because until then the client blocks the next statement of the transaction.
        return {tuple(row) for row in rows}


def insert_once(
    transaction: SupportsReadInsert, table: str, columns: tuple[str, ...], row: Row, *, key: PrimaryKey, tag: str
) -> bool:
    """Add an insert unless the table or the transaction has the key. Return whether it was added.

    The key stays locked until the commit.
    """
    inserted = changes(transaction).inserted
    if key in inserted or existing(transaction, table, columns[: len(key)], [key], tag=tag):
        return False
    insert(transaction, table, columns, [row])
    inserted.add(key)
    return True


def changes(transaction: object) -> Changes:
    """Return what `transaction` has inserted and cancelled. The caller adds to it."""
    try:
        if (found := _changes.get(transaction)) is None:
            found = _changes[transaction] = Changes(set(), set())
    except TypeError:  # a test's fake that has no weak reference or no hash
        return Changes(set(), set())
    return found
