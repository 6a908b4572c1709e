"""The subscriber's inbox: each task takes effect once, although Pub/Sub delivers its message more than once.

    @inbox.Handler(database, consumer="billing")
    def charge(transaction, message): ...

    subscriber.subscribe(subscription, charge)

`process_once` records the ID of a task in the table ProcessedTasks of the subscriber's own database, in the transaction
that also changes the subscriber's rows. `Handler` does this for each message, and acknowledges after the commit.
`BatchHandler` calls a function with the messages that arrive together.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.transaction import Transaction

from outbox.base.values import class_name
from outbox.inbox.once import Key, ReceivedMessage, check_choice, plain_consumer, process_once, pushed_message
from outbox.inbox.receiver import (
    BatchHandle,
    BatchReceiver,
    Handle,
    HandlerSettings,
    Missing,
    PulledMessage,
    Receiver,
    name_of,
)
from outbox.table.own_transactions import check_database

__all__ = [
    "BatchHandle", "BatchHandler", "BatchReceiver", "Handle", "Handler", "Key", "Missing", "PulledMessage",
    "ReceivedMessage", "Receiver", "Transaction", "process_once", "pushed_message",
]  # fmt: skip

#: Max messages in one transaction.
MAX_BATCH = 1_000
#: Google's client extends the acknowledgement deadline of a message for an hour by default.
MAX_DELAY_SECONDS = 3_600
#: The options of the client's `run_in_transaction`. It passes all others to the function, which then fails.
TRANSACTION_OPTIONS = frozenset({
    "client_context", "commit_request_options", "default_retry_delay", "exclude_txn_from_change_streams",
    "isolation_level", "max_commit_delay", "read_lock_mode", "timeout_secs", "transaction_tag",
})  # fmt: skip

#: Kinds of functions that do nothing when they are called: they return an object to await or to iterate over.
_WITHOUT_EFFECT: Mapping[Callable[[object], bool], str] = {
    inspect.iscoroutinefunction: "a coroutine function",
    inspect.isgeneratorfunction: "a generator function",
    inspect.isasyncgenfunction: "an async generator function",
}


class Handler:
    """Wraps a function `handle(transaction, message)`, whose changes are committed once for each task.

    A decorator. Its result is a `Receiver`: the callback for `SubscriberClient.subscribe`.
    """

    def __init__(
        self,
        database: Database,
        *,
        consumer: str,
        key: Key = "task_id",
        missing_task_id: Missing = "nack",
        **transaction_options: Any,
    ) -> None:
        """Check the settings; nothing is sent.

        Args:
            database: the subscriber's database, with the table ProcessedTasks.
            consumer: see `process_once`.
            key: see `process_once`.
            missing_task_id: what happens to a message without a task ID if `key` is "task_id". With "nack" Pub/Sub
                redelivers it. If the subscription has a dead-letter topic, Pub/Sub forwards it there after the maximum
                number of delivery attempts. With "raise" the streaming pull ends, and its future raises MissingTaskId.
            transaction_options: for `database.run_in_transaction`, such as `timeout_secs` or `transaction_tag`.

        Raises:
            InvalidConsumer: see `process_once`.
            ValueError: an argument is not one of the values above.
            TypeError: `database` is not a Spanner Database, or an option is unknown.
        """
        if unknown := transaction_options.keys() - TRANSACTION_OPTIONS:
            raise TypeError(f"{min(unknown)} is no option of {type(self).__name__}, nor of run_in_transaction")
        check_database(
            database,
            ". With SQLAlchemy, Django or DB-API, call process_once of outbox.ext in a transaction for each message",
        )
        check_choice("key", key, Key)
        check_choice("missing_task_id", missing_task_id, Missing)
        self._settings = HandlerSettings(
            database=database,
            consumer=plain_consumer(consumer),
            key=key,
            missing_task_id=missing_task_id,
            transaction_options=transaction_options,
        )

    def __call__(self, handle: Handle) -> "Receiver":
        """Return the callback.

        Args:
            handle: called with the transaction and the message, and again after each ABORTED. Its result is ignored.

        Raises:
            TypeError: `handle` is a coroutine, generator or async generator function, which would have no effect, or
                cannot be called with two arguments, such as a method without its object.
        """
        self._check(handle, "a message")
        return Receiver(self._settings, handle)

    def _check(self, handle: Callable[..., object], second: str) -> None:
        for is_kind, kind in _WITHOUT_EFFECT.items():
            if is_kind(handle):
                raise TypeError(f"{name_of(handle)} is {kind}. It must be a plain function")
        if not callable(handle):
            call = f"{type(self).__name__}(...)(function)"
            raise TypeError(f"handle is {class_name(handle)}. It must be a function, because {call} is the callback")
        try:
            inspect.signature(handle).bind(None, None)
        except TypeError as error:
            raise TypeError(
                f"{name_of(handle)} cannot be called with a transaction and {second}: {error}. Wrap a method where "
                f"its object exists, as in {type(self).__name__}(...)(service.handle)"
            ) from error
        except ValueError:
            pass  # a function without a signature, such as one of C


class BatchHandler(Handler):
    """Wraps a function `handle(transaction, messages)`, which gets the messages that arrive together as a list.

    The list has the messages that the consumer has not processed, each task once, at least one. The changes of a call
    are committed together. If the call or the commit fails, nothing of it is kept, and each message is tried alone, as
    a list of one in a transaction of its own. So a bad message delays no other.

    A decorator like `Handler`. It needs a streaming pull with several threads, as by default, because a message waits
    for others on the thread that brought it. Only one thread runs the function at a time.
    """

    def __init__(
        self,
        database: Database,
        *,
        consumer: str,
        key: Key = "task_id",
        missing_task_id: Missing = "nack",
        max_batch: int = 100,
        max_delay: float = 0.02,
        **transaction_options: Any,
    ) -> None:
        """Check the settings; nothing is sent.

        Args:
            database: see `Handler`.
            consumer: see `process_once`.
            key: see `process_once`.
            missing_task_id: see `Handler`.
            max_batch: max messages of a list, 1 to 1,000. Spanner limits the mutations of a commit to 80,000.
            max_delay: max seconds for which a message waits for others, 0 to 3,600.
            transaction_options: see `Handler`.

        Raises:
            InvalidConsumer: see `process_once`.
            ValueError: an argument is not one of the values above.
            TypeError: see `Handler`.
        """
        super().__init__(database, consumer=consumer, key=key, missing_task_id=missing_task_id, **transaction_options)
        if not (isinstance(max_batch, int) and not isinstance(max_batch, bool) and 1 <= max_batch <= MAX_BATCH):
            raise ValueError(f"max_batch is {max_batch!r}. It must be 1 to {MAX_BATCH:,}")
        if not (isinstance(max_delay, int | float) and 0 <= max_delay <= MAX_DELAY_SECONDS):
            raise ValueError(f"max_delay is {max_delay!r}. It must be 0 to {MAX_DELAY_SECONDS:,} seconds")
        self._max_batch, self._max_delay = max_batch, max_delay

    def __call__(self, handle: BatchHandle) -> BatchReceiver:  # type: ignore[override]  # it gets a list
        """Return the callback. See `Handler`: `handle` is called with the transaction and the list of messages."""
        self._check(handle, "a list of messages")
        return BatchReceiver(self._settings, handle, self._max_batch, self._max_delay)
