"""Registration, cancellation and the inbox with the experimental `AsyncClient` of google-cloud-spanner.

`outbox.register` and `outbox.register_many` work with its transactions and batches as they are, because its inserts are
synchronous. The functions of this module read. This module is experimental as long as the client is.
"""

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar, Unpack
from weakref import WeakKeyDictionary, ref

from google.api_core.retry import AsyncRetry
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet
from google.cloud.spanner_v1._async.transaction import Transaction

from outbox.base.values import class_name
from outbox.cancelling import CANCEL_TAG, check_not_registered, take_out
from outbox.inbox import Key, ReceivedMessage, once
from outbox.inbox.receiver import name_of
from outbox.message import Message, check_task_id
from outbox.observing import count_registered
from outbox.registration import Options, Task, insert_of
from outbox.table import timeouts, transactions
from outbox.table.ddl import Layout
from outbox.table.shared_sql import LAYOUTS, LOCK_UNSENT, NEXT_OF_KEYS, parameters
from outbox.table.states import TASKS_TABLE
from outbox.table.transactions import PrimaryKey, Row, SupportsInsert, SupportsUpdate

#: `Transaction` is for the type hints of applications, because the client has no public name for it.
__all__ = ["AsyncTransaction", "Transaction", "cancel", "process_once", "register_once", "run_in_transaction"]

T = TypeVar("T")
P = ParamSpec("P")

#: The transactions of `cancel`.
_cancelling: WeakKeyDictionary[object, asyncio.Lock] = WeakKeyDictionary()
#: In a function of `run_in_transaction`: its calls of this module. A weak reference, because asyncio tasks that the
#: function starts inherit it, and may run on.
_calls: ContextVar[Callable[[], "set[_Awaited] | None"]] = ContextVar("_calls", default=set)


@Coroutine.register
class _Awaited:
    """A coroutine that is neither true nor false: `if process_once(...):` without `await` would be true each time."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # send, throw and close, which asyncio calls

    def __await__(self) -> Any:
        return self._coroutine.__await__()

    def __bool__(self) -> NoReturn:
        name = self.__name__
        raise TypeError(f"outbox.aio.{name} was not awaited, so nothing has happened. Write `await aio.{name}(...)`")


def _awaited(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    @functools.wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> Any:
        awaited = _Awaited(function(*given, **named))
        if (calls := _calls.get()()) is not None:
            calls.add(awaited)
        return awaited

    return call


class AsyncTransaction(SupportsInsert, SupportsUpdate, Protocol):
    """Reads, runs queries and accepts mutations: the transaction of an `AsyncClient`."""

    async def read(
        self, table: str, columns: Sequence[str], keyset: KeySet, /, *, request_options: Any, retry: Any, timeout: Any
    ) -> AsyncIterable[Sequence[Any]]:
        """Return the rows of `keyset`."""

    async def execute_sql(
        self, sql: str, /, *, params: Any, param_types: Any, request_options: Any, retry: Any, timeout: Any
    ) -> AsyncIterable[Sequence[Any]]:
        """Return the rows of a query."""


@_awaited
async def register_once(
    transaction: AsyncTransaction,
    topic: str,
    message: Message,
    attributes: Mapping[str, str] | None = None,
    *,
    task_id: str,
    **options: Unpack[Options],
) -> bool:
    """Register the task unless a row with `task_id` exists; return whether it was registered.

    Experimental. The arguments, the read and the errors are those of `outbox.register_once`. `transaction` is the one
    that `run_in_transaction` of an `AsyncClient`'s database passes to its function. If the call is the first request of
    the transaction, await it before you send others, such as with `asyncio.gather`. Until the first answer, the client
    begins another transaction with each request, and the function fails.

    Raises:
        InvalidMessage: like `outbox.register`, before anything is read.
        InvalidTransaction: `transaction` was committed or rolled back before.
        TypeError: `transaction` is not that of an `AsyncClient`, or `message` has a wrong type.
        RetryError, DeadlineExceeded: see `outbox.register_once`.
    """
    _check(transaction, "register_once")
    check_task_id(task_id)
    columns, row = insert_of(Task(topic, message, attributes, task_id=task_id, **options))
    is_new = await _insert_once(transaction, TASKS_TABLE, columns, row, key=row[:1], tag="outbox-register-once")
    if is_new:
        count_registered(row[1])
    return is_new


@_awaited
async def process_once(
    transaction: AsyncTransaction, message: ReceivedMessage, *, consumer: str, key: Key = "task_id"
) -> bool:
    """Record the task of `message` as processed, and return whether this is the first time.

    Experimental. See `outbox.inbox.process_once`. For a batch, await it for one message after the other in one
    transaction. `transaction` is the one of `register_once`.

    Raises:
        MissingTaskId: see `outbox.inbox.process_once`.
        InvalidConsumer: `consumer` is not a valid name.
        InvalidTransaction: `transaction` was committed or rolled back before.
        NotReached: the database has no table ProcessedTasks.
        TypeError: `transaction` is not that of an `AsyncClient`, or `message` is not a message.
        RetryError, DeadlineExceeded: see `outbox.inbox.process_once`.
    """
    _check(transaction, "inbox.process_once")
    row = once.inbox_row(message, consumer, key)
    values = (*row, COMMIT_TIMESTAMP)
    return await _insert_once(
        transaction, once.PROCESSED_TABLE, once.PROCESSED_COLUMNS, values, key=row, tag="outbox-process-once"
    )


async def _insert_once(
    transaction: AsyncTransaction, table: str, columns: tuple[str, ...], row: Row, *, key: PrimaryKey, tag: str
) -> bool:
    keys, options = KeySet(keys=[list(key)]), timeouts.request(tag, kind=AsyncRetry)
    with transactions.table_errors(table):
        rows = await transaction.read(table, columns[: len(key)], keys, **options)
        # To the end, as in outbox.register_once.
        exists = [each async for each in rows]
    # After the read, because another coroutine may have inserted the row in the meantime.
    if exists or key in transactions.changes(transaction).inserted:
        return False
    transactions.insert(transaction, table, columns, [row], keys=[key])
    return True


@_awaited
async def run_in_transaction(
    database: Any, function: Callable[..., Awaitable[T]], *arguments: Any, **options: Any
) -> T:
    """Run `await function(transaction, *arguments)` in a transaction of an `AsyncClient`, and return its result.

    Experimental. Like `await database.run_in_transaction(...)`, whose options it takes. But that leaves the transaction
    and its locks open if the asyncio task is cancelled. This function then cancels `function`, rolls back, and raises
    CancelledError. If the commit has begun, it first waits for its end, so the transaction may be committed.

    Raises:
        CancelledError: from asyncio. The asyncio task was cancelled.
        TypeError: `database` is not that of an `AsyncClient`, or `function` is not `async def`, or has called a
            function of this module and not awaited it. Nothing was committed.
        Exception: whatever `function` or Spanner raised.
    """
    if not inspect.iscoroutinefunction(getattr(database, "run_in_transaction", None)):
        raise TypeError(
            f"database is {class_name(database)}. It must be the Database of a Spanner AsyncClient, as from `await "
            "instance.database(...)`. With that of a Client use its own run_in_transaction"
        )
    running: asyncio.Future[T] | None = None
    is_cancelled = False

    async def attempt(transaction: Any) -> T:
        nonlocal running
        if is_cancelled:
            raise _Cancelled
        running = asyncio.ensure_future(_checked(function, transaction, *arguments))
        try:
            return await running
        except asyncio.CancelledError:
            raise _Cancelled from None

    whole: asyncio.Task[T] = asyncio.ensure_future(database.run_in_transaction(attempt, **options))
    try:
        return await asyncio.shield(whole)
    except _Cancelled:
        raise asyncio.CancelledError from None
    except asyncio.CancelledError:
        is_cancelled = True
        while not whole.done():
            if running:
                running.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # it may be cancelled again, as AnyIO does until it ends
                await asyncio.wait([whole])
        if not whole.cancelled():
            whole.exception()  # otherwise asyncio logs it as an error that was never retrieved
        raise


async def _checked(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Await the function of a transaction. Raises TypeError if it is none to await, or has not awaited a call."""
    calls = set[_Awaited]()
    _calls.set(ref(calls))
    running = function(*arguments)
    if not inspect.isawaitable(running):
        raise TypeError(f"{name_of(function)} returned {class_name(running)}. It must be `async def`")
    result = await running
    for each in calls:
        if each.cr_frame:  # it has not ended
            bool(each)  # raises the error
    return result


class _Cancelled(Exception):
    """The client rolls back after this, but not after a CancelledError, which is no Exception."""


@_awaited
async def cancel(transaction: AsyncTransaction, task_id: str) -> bool:
    """Take an unsent task out in `transaction`, and return whether it did. False: see `outbox.cancel`.

    Experimental. Call it first in the transaction. A task that it takes out may have been published before. Concurrent
    calls in one transaction run one after the other. `transaction` is the one of `register_once`.

    Raises:
        InvalidMessage: `task_id` is not 1 to 64 characters.
        InvalidTransaction: `transaction` has registered the task itself, or was committed or rolled back before.
        TypeError: `transaction` is not that of an `AsyncClient`.
        RetryError, DeadlineExceeded: see `outbox.cancel`.
    """
    _check(transaction, "cancel")
    check_task_id(task_id)
    inserted, cancelled = transactions.changes(transaction)

    async def query(sql: str, **values: Any) -> list[Sequence[Any]]:
        options = timeouts.request(CANCEL_TAG, kind=AsyncRetry)
        with transactions.table_errors(TASKS_TABLE):
            return [row async for row in await transaction.execute_sql(sql, **parameters(values), **options)]

    # Two calls that read before either writes would both release no task of their common key.
    async with _cancelling.setdefault(transaction, asyncio.Lock()):
        [[is_unsent, ordering_key]] = await query(LOCK_UNSENT, id=task_id)
        # After the read, because another coroutine may have registered the task in the meantime.
        check_not_registered(task_id, inserted)
        if not is_unsent or task_id in cancelled:
            return False
        heads: list[Sequence[Any]] = []
        if ordering_key is not None:
            layout = Layout.usable(await query(LAYOUTS))
            heads = await query(layout.sql(NEXT_OF_KEYS), ids=[*cancelled, task_id])
        take_out(transaction, task_id, [id for id, _ in heads])
        return True


def _check(transaction: object, function: str) -> None:
    if not inspect.iscoroutinefunction(getattr(transaction, "read", None)):
        raise TypeError(
            f"transaction is {class_name(transaction)}. It must be the transaction of a Spanner AsyncClient. With "
            f"that of a Client use outbox.{function}"
        )
    transactions.check_open(transaction, function)
