"""The callback for a streaming pull that processes one message in each transaction."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial, update_wrapper
from itertools import count
from traceback import walk_tb
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.streamed import StreamedResultSet
from google.cloud.spanner_v1.transaction import Transaction

from outbox.base.values import check_finished, counted, listed
from outbox.errors import InvalidTransaction, MissingTaskId, NotReached
from outbox.inbox.once import Key, ReceivedMessage, inbox_row, process_once
from outbox.message import TASK_ID_ATTRIBUTE
from outbox.observing import count_delivery, processing
from outbox.table.transactions import transact

T = TypeVar("T")

#: For a message without a task ID: "nack" asks Pub/Sub to redeliver it, "raise" ends the streaming pull.
Missing: TypeAlias = Literal["nack", "raise"]

#: Changes the subscriber's rows in the transaction before it returns. It must not be `async def`, nor contain `yield`.
Handle: TypeAlias = Callable[[Transaction, Any], object]

log = logging.getLogger("outbox")


class PulledMessage(ReceivedMessage, Protocol):
    """A message that can be acknowledged, such as `google.cloud.pubsub_v1.subscriber.message.Message`."""

    @property
    def publish_time(self) -> datetime:
        """Return when Pub/Sub received the message."""

    def ack(self) -> object:
        """Acknowledge the message."""

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
        if error := self._receive(message):
            self._log_failures([(message, error)])

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
            message.nack()
            return error
        self._acknowledge([message])
        return None

    def _acknowledge(self, messages: Sequence[PulledMessage]) -> None:
        refused, answers = list[Failure](), count(1)

        def answered(message: PulledMessage, future: Any) -> None:
            """Count a failure, and log all after the last answer.

            Only a subscription with exactly-once delivery reports failures.
            """
            if error := future.exception():
                count_delivery(self._settings.consumer, "not_acknowledged")
                refused.append((message, error))
            if next(answers) == len(messages):
                for messages_of_text, error in _by_text(refused):
                    text = "%s may be redelivered, because the acknowledgement failed: %s"
                    log.warning(text, self._describe(messages_of_text), error)

        for message in messages:
            message.ack_with_response().add_done_callback(partial(answered, message))

    def _log_failures(self, failures: Sequence["Failure"]) -> None:
        """Log each error text once, and one traceback for each line of code that raised errors."""
        places = set[object]()
        for messages, error in _by_text(failures):
            has_trace = not isinstance(error, MissingTaskId | EarlierFailed) and place_of(error) not in places
            places.add(place_of(error))
            text = "%s failed and will be redelivered: %s"
            log.error(text, self._describe(messages), error, exc_info=error if has_trace else None)

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
            self._call(transaction, [message])
        return True

    def _call(self, transaction: Transaction, messages: Sequence[ReceivedMessage]) -> None:
        # A result that is not read was never sent: the client sends a statement when its first row is read.
        with ExitStack() as stack:
            for message in messages:
                stack.enter_context(unsettled(message))
            result = self._handled(transaction, messages)
        check_finished(result, name_of(self.handle), StreamedResultSet)

    def _handled(self, transaction: Transaction, messages: Sequence[ReceivedMessage]) -> object:
        return self.handle(transaction, messages[0])

    def _describe(self, messages: Sequence[ReceivedMessage]) -> str:
        ids = [message.attributes.get(TASK_ID_ATTRIBUTE) or "without an ID" for message in messages]
        if len(ids) > 1:
            return f"Consumer {self._settings.consumer}: {counted(len(ids), 'task')} ({listed(ids)})"
        return f"Consumer {self._settings.consumer}: task {ids[0]} (message {messages[0].message_id})"


#: A message, and the error for which it will be redelivered.
Failure: TypeAlias = tuple[PulledMessage, BaseException]


def _by_text(failures: Iterable[Failure]) -> Iterable[tuple[list[PulledMessage], BaseException]]:
    """Return the messages of all errors that have the same class and text, and the first of these errors."""
    found: dict[tuple[type, str], tuple[list[PulledMessage], BaseException]] = {}
    for message, error in failures:
        found.setdefault((type(error), str(error)), ([], error))[0].append(message)
    return found.values()


def place_of(error: BaseException) -> object:
    """Return the class of the error and the line of code that raised it. They are equal for equal failures."""
    frames = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    return type(error), *frames[-1:]


class EarlierFailed(Exception):
    """An earlier message of the ordering key failed, so the function was not called for this one."""


def name_of(function: object) -> str:
    """Return the name of a function for messages."""
    return getattr(function, "__qualname__", repr(function))


def uncommitted(transaction: Transaction) -> AbstractContextManager[None]:
    """Refuse `commit` and `rollback` in the block. A commit would lose later writes, a rollback all writes."""
    return _refusing(
        transaction,
        ("commit", "rollback"),
        "the function has called commit or rollback of its transaction. Return instead, and the transaction is "
        "committed; raise an exception, and it is rolled back",
    )


def unsettled(message: object) -> AbstractContextManager[None]:
    """Refuse `ack` and `nack` in the block. If the function then fails, Pub/Sub would not redeliver the message."""
    return _refusing(
        message,
        ("ack", "ack_with_response", "nack", "nack_with_response"),
        "the function has called ack or nack of its message. Return instead, and the message is acknowledged after "
        "the commit; raise an exception, and it is redelivered",
    )


@contextmanager
def _refusing(target: object, names: Sequence[str], reason: str) -> Iterator[None]:
    """Replace methods in the block, on this object only."""

    def refuse(*_arguments: object, **_options: object) -> None:
        raise InvalidTransaction(reason)

    attributes = getattr(target, "__dict__", {})  # the message of a push request has none, and no such methods
    own = {name: attributes[name] for name in names if name in attributes}
    attributes.update(dict.fromkeys(names, refuse))
    try:
        yield
    finally:
        for name in names:
            del attributes[name]  # uncovers the methods of the class
        attributes.update(own)
