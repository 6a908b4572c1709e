"""The callbacks for a streaming pull: one message in each transaction, or the messages that arrive together in one."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial, update_wrapper
from itertools import count
from traceback import walk_tb
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar, cast

from google.api_core.exceptions import DeadlineExceeded, RetryError, ServiceUnavailable
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.streamed import StreamedResultSet
from google.cloud.spanner_v1.transaction import Transaction

from outbox.base.values import check_finished, counted, listed
from outbox.errors import InvalidTransaction, MissingTaskId, NotReached
from outbox.inbox.once import PROCESSED_COLUMNS, PROCESSED_TABLE, Key, ReceivedMessage, inbox_row, process_once
from outbox.message import TASK_ID_ATTRIBUTE
from outbox.observing import count_delivery, processing
from outbox.table.existing_keys import existing
from outbox.table.own_transactions import transact
from outbox.table.transactions import PrimaryKey, insert, table_errors

T = TypeVar("T")

#: For a message without a task ID: "nack" asks Pub/Sub to redeliver it, "raise" ends the streaming pull.
Missing: TypeAlias = Literal["nack", "raise"]

#: Changes the subscriber's rows in the transaction before it returns. It must not be `async def`, nor contain `yield`.
Handle: TypeAlias = Callable[[Transaction, ReceivedMessage], object]
#: The same for the messages that arrive together.
BatchHandle: TypeAlias = Callable[[Transaction, list[ReceivedMessage]], object]

#: Errors that may mean that Spanner is unavailable: each further message would wait for the same timeout.
_UNAVAILABLE = (RetryError, ServiceUnavailable, DeadlineExceeded)

#: How many failures a receiver remembers, so that it logs their tracebacks once.
MAX_ORIGINS = 1_000

_log = logging.getLogger("outbox")


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
class HandlerSettings:
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

    _takes_list = False

    def __init__(self, settings: HandlerSettings, handle: Handle) -> None:
        self._settings, self.handle = settings, handle
        self._origins: dict[object, object] = {}
        update_wrapper(self, handle, updated=())

    def __call__(self, message: PulledMessage) -> None:
        """Process the message, and acknowledge it after the commit. After a failure, log it and nack.

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
            self._row(message)  # before a transaction begins
            with processing(self._settings.consumer, message):
                is_first = self._run(lambda transaction: self._attempt(transaction, message))
            outcome = "processed" if is_first else "duplicate"
        except MissingTaskId:
            outcome = "missing_task_id"
            raise
        finally:
            count_delivery(self._settings.consumer, outcome)
        return is_first

    def _row(self, message: ReceivedMessage) -> tuple[str, str]:
        return inbox_row(message, self._settings.consumer, self._settings.key)

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
                    _log.warning(text, self._describe(messages_of_text), error)

        for message in messages:
            message.ack_with_response().add_done_callback(partial(answered, message))

    def _log_failures(self, failures: Sequence["Failure"]) -> None:
        """Log each error text once, and equal tracebacks once in the life of the receiver.

        After MAX_ORIGINS other tracebacks, an equal one is logged again.
        """
        for messages, error in _by_text(failures):
            was_raised = error.__traceback__ is not None and not isinstance(error, MissingTaskId)
            has_trace = was_raised and self._is_new(_origin(error))
            text = "%s failed and will be redelivered: %r"
            _log.error(text, self._describe(messages), error, exc_info=error if has_trace else None)

    def _is_new(self, origin: object) -> bool:
        if origin not in self._origins and len(self._origins) >= MAX_ORIGINS:
            self._origins.clear()
        mark = object()
        return self._origins.setdefault(origin, mark) is mark  # true in one thread only

    def _run(self, attempt: Callable[[Transaction], T]) -> T:
        """Run `attempt` in a transaction, again after each ABORTED."""
        database = self._settings.database
        with table_errors(PROCESSED_TABLE):
            result = transact(database, attempt, **self._settings.transaction_options)
        check_finished(result, f"run_in_transaction of {type(database).__name__}")
        return result

    def _attempt(self, transaction: Transaction, message: ReceivedMessage) -> bool:
        settings = self._settings
        is_first = process_once(transaction, message, consumer=settings.consumer, key=settings.key)
        if is_first:
            self._call(transaction, [message])
        return is_first

    def _call(self, transaction: Transaction, messages: Sequence[ReceivedMessage]) -> None:
        with ExitStack() as stack:
            stack.enter_context(_refusing(transaction, _COMMIT, _COMMIT_REFUSED))
            for message in messages:
                stack.enter_context(_refusing(message, _ACK, _ACK_REFUSED))
            argument: Any = [*messages] if self._takes_list else messages[0]
            result = self.handle(transaction, argument)
        # A statement whose result is not read was never sent: the client sends a statement when its first row is read.
        check_finished(result, name_of(self.handle), StreamedResultSet)

    def _describe(self, messages: Sequence[ReceivedMessage]) -> str:
        ids = [message.attributes.get(TASK_ID_ATTRIBUTE) or "without an ID" for message in messages]
        if len(ids) > 1:
            return f"Consumer {self._settings.consumer}: {counted(len(ids), 'task')} ({listed(ids)})"
        return f"Consumer {self._settings.consumer}: task {ids[0]} (message {messages[0].message_id})"


class BatchReceiver(Receiver):
    """The callback for a streaming pull. `process` is for one message, as in a `Receiver`.

    Unit tests can call the attribute `handle`, the wrapped function, with a list of messages.
    """

    _takes_list = True

    def __init__(self, settings: HandlerSettings, handle: BatchHandle, max_batch: int, max_delay: float) -> None:
        super().__init__(settings, cast(Handle, handle))  # which `_call` gives a list
        self._batches = Collector[PulledMessage](self._receive_all, max_batch, max_delay)

    def __call__(self, message: PulledMessage) -> None:
        """Let the message wait for others, or process those that wait. See `Receiver`.

        The client extends the deadline of waiting messages, and its flow control limits their number.
        """
        try:
            self._row(message)
        except MissingTaskId:
            super().__call__(message)
        else:
            self._batches.add(message)

    def _receive_all(self, messages: list[PulledMessage]) -> None:
        """Process messages, together if there are several. Raises what ends the streaming pull."""
        try:
            if len(messages) == 1 or not self._receive_together(messages):
                self._receive_singly(messages)
        except BaseException:
            # The streaming pull does this for the message of this call only.
            for message in messages:
                message.nack()
            raise

    def _receive_together(self, messages: list[PulledMessage]) -> bool:
        """Process and acknowledge the messages. Return whether that succeeded."""
        try:
            new = self._run(lambda transaction: self._attempt_all(transaction, messages))
        except NotReached:
            raise
        except Exception as error:
            text = "Consumer %s: a batch failed, so its %d messages get a transaction each: %s"
            _log.warning(text, self._settings.consumer, len(messages), error)
            return False
        for message in messages:
            count_delivery(self._settings.consumer, "processed" if id(message) in new else "duplicate")
        self._acknowledge(messages)
        return True

    def _attempt_all(self, transaction: Transaction, messages: list[PulledMessage]) -> set[int]:
        """Call the function with the first message of each task that was not processed. Return `id()` of these."""
        first: dict[PrimaryKey, PulledMessage] = {self._row(message): message for message in reversed(messages)}
        for row in existing(transaction, PROCESSED_TABLE, PROCESSED_COLUMNS[:2], {*first}, tag="outbox-process-once"):
            del first[row]
        new = [message for message in messages if first.get(self._row(message)) is message]
        if new:
            insert(transaction, PROCESSED_TABLE, PROCESSED_COLUMNS, [(*row, COMMIT_TIMESTAMP) for row in sorted(first)])
            with processing(self._settings.consumer, *new):
                self._call(transaction, new)
        return {*map(id, new)}

    def _receive_singly(self, messages: list[PulledMessage]) -> None:
        """Process each message in its own transaction.

        After two errors in a row that mean that Spanner is unavailable, nack the rest without trying them. The cause of
        a single one may be its message.
        """
        failed, outage, unavailable = set[str](), None, None
        failures = list[Failure]()
        try:
            for message in messages:
                key = getattr(message, "ordering_key", "")
                error = outage
                if key and key in failed:
                    error = outage or Exception(f"an earlier message of its ordering key {key!r} failed")
                if error:
                    count_delivery(self._settings.consumer, "failed")
                    message.nack()
                elif error := self._receive(message):
                    failed.add(key)
                failures += [(message, error)] if error else []
                if not outage:
                    before, unavailable = unavailable, error if isinstance(error, _UNAVAILABLE) else None
                    outage = before and unavailable
        finally:
            self._log_failures(failures)


#: A message, and the error for which it will be redelivered.
Failure: TypeAlias = tuple[PulledMessage, BaseException]


def _by_text(failures: Iterable[Failure]) -> Iterable[tuple[list[PulledMessage], BaseException]]:
    """Return the messages of all errors that have the same class and text, and the first of these errors."""
    found: dict[tuple[type, str], tuple[list[PulledMessage], BaseException]] = {}
    for message, error in failures:
        found.setdefault((type(error), str(error)), ([], error))[0].append(message)
    return found.values()


def _origin(error: BaseException) -> object:
    """Return the class of the error and the lines of its traceback. They are equal for equal failures."""
    return type(error), *((frame.f_code, line) for frame, line in walk_tb(error.__traceback__))


def name_of(function: object) -> str:
    """Return the name of a function for messages."""
    return getattr(function, "__qualname__", repr(function))


#: A commit would lose later writes, a rollback all writes.
_COMMIT = ("commit", "rollback")
_COMMIT_REFUSED = (
    "the function has called commit or rollback of its transaction. Return instead, and the transaction is committed; "
    "raise an exception, and it is rolled back"
)
#: If the function then fails, Pub/Sub would not redeliver the message.
_ACK = ("ack", "ack_with_response", "nack", "nack_with_response")
_ACK_REFUSED = (
    "the function has called ack or nack of its message. Return instead, and the message is acknowledged after the "
    "commit; raise an exception, and it is redelivered"
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


class Collector(Generic[T]):
    """Passes items to `process` in lists of at most `max_size`, in the order of `add`, and one list at a time.

    An item waits up to `max_delay` seconds for others, and until the list before has been processed.
    """

    def __init__(self, process: Callable[[list[T]], None], max_size: int, max_delay: float) -> None:
        """Start nothing: a thread that calls `add` does the work."""
        self._process, self._max_size, self._max_delay = process, max_size, max_delay
        self._items: deque[tuple[T, float]] = deque()
        self._arrived = threading.Condition()
        self._is_busy = False

    def add(self, item: T) -> None:
        """Return at once if another thread is processing. Otherwise process lists until no item is left.

        Raises what `process` raises. Items that are left then wait for the next call.
        """
        with self._arrived:
            self._items.append((item, time.monotonic() + self._max_delay))
            if self._is_busy:
                if len(self._items) >= self._max_size:
                    self._arrived.notify()
                return
            self._is_busy = True
        try:
            while items := self._next():
                self._process(items)
        except BaseException:
            self._is_busy = False
            raise

    def _next(self) -> list[T]:
        """Return the next list when it is full or has waited. Return none, and stop being busy, if no item is left."""
        with self._arrived:
            if self._items:
                delay = self._items[0][1] - time.monotonic()
                self._arrived.wait_for(lambda: len(self._items) >= self._max_size, max(delay, 0))
            else:
                self._is_busy = False
            return [self._items.popleft()[0] for _ in range(min(len(self._items), self._max_size))]
