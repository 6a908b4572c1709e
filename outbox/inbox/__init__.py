"""The subscriber's inbox: each task takes effect once, although Pub/Sub delivers its message more than once.

    @inbox.Handler(database, consumer="billing")
    def charge(transaction, message): ...

    subscriber.subscribe(subscription, charge)

`process_once` records the ID of a task in the table ProcessedTasks of the subscriber's own database, in the transaction
that also changes the subscriber's rows. `Handler` does this for each message, and acknowledges after the commit.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from google.cloud.spanner_v1.database import Database

from outbox.inbox.batch import BatchReceiver
from outbox.inbox.once import Key, ReceivedMessage, check_choice, plain_consumer, process_once, pushed_message
from outbox.inbox.receiver import Handle, Missing, PulledMessage, Receiver, Settings, name_of
from outbox.table.transactions import check_database

__all__ = [
    "Handle", "Handler", "Key", "Missing", "PulledMessage", "ReceivedMessage", "Receiver", "process_once",
    "pushed_message",
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
        max_batch: int = 1,
        max_delay: float = 0.02,
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
            max_batch: max messages in one transaction of a streaming pull, 1 to 1,000. With 1, each message has its
                own. With more, one thread runs the function for one message after the other.
            max_delay: max seconds for which a message waits for others, if `max_batch` is more than 1; 0 to 3,600.
            transaction_options: for `database.run_in_transaction`, such as `timeout_secs` or `transaction_tag`.

        Raises:
            InvalidConsumer: see `process_once`.
            ValueError: an argument is not one of the values above.
            TypeError: `database` is not a Spanner Database, or an option is unknown.
        """
        if unknown := transaction_options.keys() - TRANSACTION_OPTIONS:
            raise TypeError(f"{min(unknown)} is no option of Handler, nor of run_in_transaction")
        check_database(
            database,
            ". With SQLAlchemy, Django or DB-API, call process_once of outbox.ext in a transaction for each message, "
            "without `max_batch`",
        )
        check_choice("key", key, Key)
        check_choice("missing_task_id", missing_task_id, Missing)
        if not (isinstance(max_batch, int) and 1 <= max_batch <= MAX_BATCH):
            raise ValueError(f"max_batch is {max_batch!r}. It must be 1 to {MAX_BATCH:,}")
        if not (isinstance(max_delay, int | float) and 0 <= max_delay <= MAX_DELAY_SECONDS):
            raise ValueError(f"max_delay is {max_delay!r}. It must be 0 to {MAX_DELAY_SECONDS:,} seconds")
        self._settings = Settings(
            database=database,
            consumer=plain_consumer(consumer),
            key=key,
            missing_task_id=missing_task_id,
            max_batch=max_batch,
            max_delay=max_delay,
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
        for is_kind, kind in _WITHOUT_EFFECT.items():
            if is_kind(handle):
                raise TypeError(f"{name_of(handle)} is {kind}. It must be a plain function")
        try:
            inspect.signature(handle).bind(None, None)
        except TypeError as error:
            raise TypeError(
                f"{name_of(handle)} cannot be called with a transaction and a message: {error}. Wrap a method where "
                "its object exists, as in Handler(...)(service.handle)"
            ) from error
        except ValueError:
            pass  # a function without a signature, such as one of C
        return (Receiver if self._settings.max_batch == 1 else BatchReceiver)(self._settings, handle)
