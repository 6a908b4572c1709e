"""Registration with the experimental `AsyncClient` of google-cloud-spanner.

`outbox.register` and `outbox.register_many` work with its transactions and batches as they are, because its inserts are
synchronous. Only `register_once` reads. This module is experimental as long as the client is.
"""

import inspect
from collections.abc import AsyncIterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from google.cloud.spanner_v1 import KeySet

from outbox.message import Message
from outbox.registration import COLUMNS, TABLE, Priority, SupportsInsert, is_given, remember, task_row
from outbox.shared.metric_recorder import count_registered


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
    priority: int = Priority.NORMAL,
    ordering_key: str = "",
    available_at: datetime | None = None,
    expires_at: datetime | None = None,
    at_most_once: bool = False,
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
    row = task_row(
        topic, message, attributes, task_id=task_id, priority=priority, ordering_key=ordering_key,
        available_at=available_at, expires_at=expires_at, at_most_once=at_most_once,
    )  # fmt: skip
    if is_given(transaction, task_id):
        return False
    options = {"request_tag": "outbox-register-once"}
    rows = await transaction.read(TABLE, ("Id",), KeySet(keys=[[task_id]]), request_options=options)
    if [row async for row in rows]:  # to the end, as in outbox.register_once
        return False
    transaction.insert(TABLE, COLUMNS, [row])
    remember(transaction, task_id)
    count_registered(topic)
    return True
