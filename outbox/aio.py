"""Registration and cancellation with the experimental `AsyncClient` of google-cloud-spanner.

`outbox.register` and `outbox.register_many` work with its transactions and batches as they are, because its inserts are
synchronous. Only `register_once` and `cancel` read. This module is experimental as long as the client is.
"""

import asyncio
import inspect
from collections.abc import AsyncIterable, Mapping, Sequence
from typing import Any, Protocol, Unpack
from weakref import WeakKeyDictionary

from google.api_core.retry import AsyncRetry
from google.cloud.spanner_v1 import KeySet

from outbox import cancellation
from outbox.base.values import class_name
from outbox.message import Message, check_task_id
from outbox.metrics import count_registered
from outbox.registration import COLUMNS, TABLE, Options, Task, task_row
from outbox.table.layouts import Layout
from outbox.table.shared_sql import LAYOUTS, LOCK_UNSENT, NEXT_OF_KEYS, parameters
from outbox.table.transact import retry_and_timeout
from outbox.table.transactions import (
    IN_TRANSACTION_SECONDS,
    SupportsDelete,
    SupportsInsert,
    check_open,
    deleted,
    insert,
    inserted,
)

#: The transactions of `cancel`.
_cancelling: WeakKeyDictionary[object, asyncio.Lock] = WeakKeyDictionary()


class AsyncTransaction(SupportsInsert, SupportsDelete, Protocol):
    """Reads, runs queries and accepts mutations: the transaction of an `AsyncClient`."""

    async def read(
        self,
        table: str,
        columns: Sequence[str],
        keyset: KeySet,
        /,
        *,
        request_options: Any,
        retry: Any,
        timeout: Any,  # noqa: ASYNC109 - the client's name
    ) -> AsyncIterable[Sequence[Any]]:
        """Return the rows of `keyset`."""

    async def execute_sql(
        self,
        sql: str,
        /,
        *,
        params: Any,
        param_types: Any,
        request_options: Any,
        retry: Any,
        timeout: Any,  # noqa: ASYNC109 - the client's name
    ) -> AsyncIterable[Sequence[Any]]:
        """Return the rows of a query."""


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
    row = task_row(Task(topic, message, attributes, task_id=task_id, **options))
    key = row[:1]
    request = {"request_tag": "outbox-register-once"}
    rows = await transaction.read(TABLE, ("Id",), KeySet(keys=[list(key)]), request_options=request, **_limits())
    # To the end, as in outbox.register_once.
    exists = [row async for row in rows] and task_id not in deleted(transaction)
    # After the read, because another coroutine may have registered the task in the meantime.
    if exists or key in inserted(transaction):
        return False
    insert(transaction, TABLE, COLUMNS, [row])
    inserted(transaction).add(key)
    count_registered(row[1])
    return True


async def cancel(transaction: AsyncTransaction, task_id: str) -> bool:
    """Delete an unsent task in `transaction`, and return whether it did. False: it is sent, or does not exist.

    Experimental. See `outbox.cancel`: call it first in the transaction, and a task that it deletes may have been
    published before. Concurrent calls in one transaction run one after the other. `transaction` is the one of
    `register_once`.

    Raises:
        InvalidMessage: `task_id` is not 1 to 64 characters.
        InvalidTransaction: `transaction` has registered the task itself, or was committed or rolled back before.
        TypeError: `transaction` is not that of an `AsyncClient`.
        RetryError, DeadlineExceeded: see `outbox.cancel`.
    """
    _check(transaction, "cancel")

    async def query(sql: str, **values: Any) -> list[Sequence[Any]]:
        rows = await transaction.execute_sql(sql, **parameters(values), **cancellation.REQUEST_OPTIONS, **_limits())
        return [row async for row in rows]

    check_task_id(task_id)
    # Two calls that read before either deletes would both release no task of their common key.
    async with _cancelling.setdefault(transaction, asyncio.Lock()):
        [[is_unsent, ordering_key]] = await query(LOCK_UNSENT, id=task_id)
        # After the read, because another coroutine may have registered the task in the meantime.
        cancellation.check_not_registered(task_id, inserted(transaction))
        if not is_unsent or task_id in deleted(transaction):
            return False
        heads: list[Sequence[Any]] = []
        if ordering_key is not None:
            layout = Layout.usable(await query(LAYOUTS))
            heads = await query(layout.sql(NEXT_OF_KEYS), ids=[*deleted(transaction), task_id])
        cancellation.delete(transaction, task_id, [id for (id,) in heads])
        return True


def _limits() -> dict[str, Any]:
    """Return the time limits of one request."""
    return retry_and_timeout(IN_TRANSACTION_SECONDS, AsyncRetry)


def _check(transaction: object, function: str) -> None:
    if not inspect.iscoroutinefunction(getattr(transaction, "read", None)):
        raise TypeError(
            f"transaction is {class_name(transaction)}. It must be the transaction of a Spanner AsyncClient. With "
            f"that of a Client use outbox.{function}"
        )
    check_open(transaction, function)
