"""The callback for a streaming pull that processes one message in each transaction."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.streamed import StreamedResultSet
from google.cloud.spanner_v1.transaction import Transaction

from outbox.errors import MissingTaskId, NotReached
from outbox.inbox.once import Key, ReceivedMessage, inbox_row, process_once
from outbox.inbox.watching import uncommitted, unsettled
from outbox.message import TASK_ID_ATTRIBUTE
from outbox.metrics import count_delivery
from outbox.program.values import check_finished
from outbox.table.transact import transact
from outbox.tracing import processing

T = TypeVar("T")

#: For a message without a task ID: "nack" asks Pub/Sub to redeliver it, "raise" ends the streaming pull.
Missing: TypeAlias = Literal["nack", "raise"]

#: Changes the subscriber's rows in the transaction before it returns. It must not be `async def`, nor contain `yield`.
Handle: TypeAlias = Callable[[Transaction, Any], object]

log = logging.getLogger("outbox")


class PulledMessage(ReceivedMessage, Protocol):
    """A message that can be acknowledged, such as `google.cloud.pubsub_v1.subscriber.message.Message`."""

    def ack_with_response(self) -> Any:
        """Acknowledge the message and return a future."""

    def nack(self) -> object:
        """Ask Pub/Sub to deliver the message again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The checked arguments of a `Handler`."""

    database: Database
    consumer: str
    key: Key
    missing_task_id: Missing
    max_batch: int
    max_delay: float
    transaction_options: Mapping[str, Any]


class Receiver:
    """The callback for a streaming pull, and `process` for push requests and other ways to receive.

    Unit tests can call the attribute `handle`, the wrapped function.
    """

    def __init__(self, settings: Settings, handle: Handle) -> None:
        self._settings, self.handle = settings, handle
        update_wrapper(self, handle, updated=())

    def __call__(self, message: PulledMessage) -> None:
        """Process the message, and acknowledge it after the commit. A failure is logged and negatively acknowledged.

        Raises:
            NotReached: the table ProcessedTasks is missing. It ends the streaming pull, because no message can be
                processed.
            MissingTaskId: the message has no task ID, and `missing_task_id` is "raise".
        """
        self._receive(message)

    def process(self, message: ReceivedMessage) -> bool:
        """Run the function in a transaction, unless the task was processed before; return whether it ran.

        Does not acknowledge. In a push endpoint, answer with 2xx after it returns, and with an error if it raises.

        Raises:
            MissingTaskId: see `process_once`.
            InvalidTransaction: the function has called `commit` or `rollback`. Nothing was committed.
            NotReached: see `process_once`.
            TypeError: the function returned work that is not finished: an awaitable, a generator or another iterator, a
                future, or the rows of a query or DML statement that it has not read. Nothing was committed.
            Exception: whatever the function or Spanner raised.
        """
        outcome = "failed"
        try:
            inbox_row(message, self._settings.consumer, self._settings.key)  # before a transaction begins
            with processing(self._settings.consumer, message):
                is_first = self._run(lambda transaction: self._attempt(transaction, message))
            outcome = "processed" if is_first else "duplicate"
        except MissingTaskId:
            outcome = "missing_task_id"
            raise
        finally:
            count_delivery(self._settings.consumer, outcome)
        return is_first

    def _receive(self, message: PulledMessage) -> Exception | None:
        """Process and acknowledge the message. Return the error for which it is negatively acknowledged."""
        try:
            self.process(message)
        except Exception as error:
            if isinstance(error, NotReached) or (
                isinstance(error, MissingTaskId) and self._settings.missing_task_id == "raise"
            ):
                raise  # the streaming pull negatively acknowledges the message
            self._reject(message, error)
            return error
        self._acknowledge(message)
        return None

    def _acknowledge(self, message: PulledMessage) -> None:
        message.ack_with_response().add_done_callback(lambda future: self._acknowledged(message, future))

    def _reject(self, message: PulledMessage, error: Exception) -> None:
        text = "%s failed and will be redelivered: %s"
        has_trace = not isinstance(error, MissingTaskId | EarlierFailed)
        log.error(text, self._describe(message), error, exc_info=error if has_trace else None)
        message.nack()

    def _run(self, attempt: Callable[[Transaction], T]) -> T:
        """Run `attempt` in a transaction, again after each ABORTED."""
        database = self._settings.database
        result = transact(database, attempt, **self._settings.transaction_options)
        check_finished(result, f"run_in_transaction of {type(database).__name__}")
        return result

    def _attempt(self, transaction: Transaction, message: ReceivedMessage) -> bool:
        settings = self._settings
        if not process_once(transaction, message, consumer=settings.consumer, key=settings.key):
            return False
        with uncommitted(transaction):
            self._call(transaction, message)
        return True

    def _call(self, transaction: Transaction, message: ReceivedMessage) -> None:
        # A result that is not read was never sent: the client sends a statement when its first row is read.
        with unsettled(message):
            result = self.handle(transaction, message)
        check_finished(result, name_of(self.handle), StreamedResultSet)

    def _acknowledged(self, message: ReceivedMessage, future: Any) -> None:
        """Log and count a failed acknowledgement, which only a subscription with exactly-once delivery reports."""
        if error := future.exception():
            count_delivery(self._settings.consumer, "not_acknowledged")
            log.warning("%s was not acknowledged and may be redelivered: %s", self._describe(message), error)

    def _describe(self, message: ReceivedMessage) -> str:
        task_id = message.attributes.get(TASK_ID_ATTRIBUTE, "")
        return f"Consumer {self._settings.consumer}: task {task_id or 'without an ID'} (message {message.message_id})"


class EarlierFailed(Exception):
    """An earlier message of the ordering key failed, so the function was not called for this one."""


def name_of(function: object) -> str:
    """Return the name of a function for messages."""
    return getattr(function, "__qualname__", repr(function))
