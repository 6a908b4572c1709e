"""Registration with the experimental `AsyncClient` of google-cloud-spanner.

`outbox.register` and `outbox.register_many` work with its transactions and batches as they are, because its inserts are
synchronous. Only `register_once` reads. This module is experimental as long as the client is.
"""

import inspect
from collections.abc import AsyncIterable, Mapping, Sequence
from typing import Any, Protocol, Unpack

from google.cloud.spanner_v1 import KeySet

from outbox.message import Message, check_task_id
from outbox.metrics import count_registered
from outbox.registration import COLUMNS, TABLE, Options, Task, task_row
from outbox.table.transactions import SupportsInsert, insert, is_inserted, remember


class SupportsAsyncReadInsert(SupportsInsert, Protocol):
    """Reads and accepts an insert: the transaction of an `AsyncClient`."""

    async def read(
        self, table: str, columns: Sequence[str], keyset: KeySet, /, *, request_options: Any
    ) -> AsyncIterable[Sequence[Any]]:
        """Return the rows of `keyset`."""


async def register_once(
    transaction: SupportsAsyncReadInsert,
    topic: str,
    message: Message,
    attributes: Mapping[str, str] | None = None,
    *,
    task_id: str,
    **options: Unpack[Options],
) -> bool:
    """Register the task unless a row with `task_id` exists; return whether it was registered.

    Experimental. The arguments, the read and the errors are those of `outbox.register_once`. `transaction` is the one
    that `run_in_transaction` of an `AsyncClient`'s database passes to its function.

    Raises:
        InvalidMessage: like `outbox.register`, before anything is read.
        TypeError: `transaction` is not that of an `AsyncClient`, or `message` has a wrong type.
    """
    if not inspect.iscoroutinefunction(getattr(transaction, "read", None)):
        raise TypeError(
            f"transaction is {type(transaction).__name__}. It must be the transaction of a Spanner AsyncClient. With "
            "that of a Client use outbox.register_once"
        )
    check_task_id(task_id)
    row = task_row(Task(topic, message, attributes, task_id=task_id, **options))
    key = row[:1]
    if is_inserted(transaction, key):
        return False
    request = {"request_tag": "outbox-register-once"}
    rows = await transaction.read(TABLE, ("Id",), KeySet(keys=[list(key)]), request_options=request)
    if [row async for row in rows]:  # to the end, as in outbox.register_once
        return False
    insert(transaction, TABLE, COLUMNS, [row])
    remember(transaction, key)
    count_registered(row[1])
    return True
