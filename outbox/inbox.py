"""The subscriber's inbox: each task takes effect once, although Pub/Sub delivers its message more than once.

    @inbox.Handler(database, consumer="billing")
    def charge(transaction, message): ...

    subscriber.subscribe(subscription, charge)

`process_once` records the ID of a task in the table ProcessedTasks of the subscriber's own database, in the transaction
that also changes the subscriber's rows. `Handler` does this for each message, and acknowledges after the commit.
"""

import inspect
import logging
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, get_args

from google.api_core.exceptions import Aborted, DeadlineExceeded, GoogleAPIError, RetryError, ServiceUnavailable
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.streamed import StreamedResultSet
from google.cloud.spanner_v1.transaction import Transaction
from google.protobuf.json_format import ParseDict, ParseError
from google.pubsub_v1.types import PubsubMessage

from outbox.batches import Collector
from outbox.errors import InvalidConsumer, InvalidMessage, MissingTaskId, NotReached
from outbox.message import TASK_ID_ATTRIBUTE, RawPubsubMessage
from outbox.metrics import count_delivery
from outbox.table.transact import CONTENT, transact
from outbox.table.transactions import (
    SupportsReadInsert,
    check_transaction,
    existing,
    insert,
    insert_once,
)
from outbox.table.values import check_finished, plain
from outbox.table.watching import Watch, uncommitted, watched
from outbox.tracing import processing

T = TypeVar("T")

TABLE = "ProcessedTasks"
COLUMNS = ("Consumer", "TaskId", "ProcessedAt")
#: The lengths of the columns.
MAX_CONSUMER_CHARACTERS, MAX_ID_CHARACTERS = 256, 128

#: Max messages in one transaction.
MAX_BATCH = 1_000

#: What identifies a message without a task ID: with "message_id" its message ID, with "task_id" nothing: it is an
#: error.
Key: TypeAlias = Literal["task_id", "message_id"]

#: For a message without a task ID: "nack" asks Pub/Sub to redeliver it, "raise" ends the streaming pull.
Missing: TypeAlias = Literal["nack", "raise"]

_log = logging.getLogger("outbox")


class ReceivedMessage(Protocol):
    """A received message with `attributes` and `message_id`, from a streaming pull or as a PubsubMessage."""

    @property
    def attributes(self) -> Mapping[str, str]:
        """Return the attributes."""

    @property
    def message_id(self) -> str:
        """Return the ID that Pub/Sub gave the message."""


class PulledMessage(ReceivedMessage, Protocol):
    """A message that can be acknowledged, such as `google.cloud.pubsub_v1.subscriber.message.Message`."""

    def ack_with_response(self) -> Any:
        """Acknowledge the message and return a future."""

    def nack(self) -> object:
        """Ask Pub/Sub to deliver the message again."""


def process_once(
    transaction: SupportsReadInsert, message: ReceivedMessage, *, consumer: str, key: Key = "task_id"
) -> bool:
    """Record the task of `message` as processed, and return whether this is the first time.

    Reads one row by its key and adds one insert. Change your own rows in the same transaction if the answer is True,
    and do nothing if it is False. Of two concurrent transactions, one gets True, and the other runs again and gets
    False. Acknowledge the message after the commit.

    Args:
        transaction: the Spanner Transaction that `database.run_in_transaction` passes to its function.
        message: a message of Pub/Sub's clients, or the result of `pushed_message` for a push request.
        consumer: names the subscriber, 1 to 256 printable characters without leading or trailing spaces. Each
            consumer processes each task once, so under a new name all messages are processed again.
        key: with "message_id", a message without a task ID is recorded by its message ID. Message IDs are unique
            only within a topic, so use a separate consumer name for each topic.

    Raises:
        MissingTaskId: the message has no task ID, or one longer than 128 characters, and `key` is "task_id".
        InvalidConsumer: `consumer` is not a valid name.
        InvalidTransaction: `transaction` belongs to a DB-API connection, which would drop the record after an abort.
        NotReached: the database has no table ProcessedTasks.
        RetryError, DeadlineExceeded: from google.api_core. Spanner was unavailable, or another transaction held the
            record, for 30 s.
        ValueError: `key` is neither "task_id" nor "message_id".
        TypeError: `transaction` cannot read or write, or `message` is not a message.
    """
    check_transaction(transaction, "process_once", reads=True)
    return record_with(partial(insert_once, transaction), message, consumer, key)


def record_with(insert_once: Callable[..., bool], message: ReceivedMessage, consumer: str, key: Key) -> bool:
    """Record the task with a function that inserts a row unless its key exists. Return whether it did."""
    row = inbox_row(message, consumer, key)
    with table_errors():
        return insert_once(TABLE, COLUMNS, (*row, COMMIT_TIMESTAMP), key=row, tag="outbox-process-once")


def inbox_row(message: ReceivedMessage, consumer: str, key: Key) -> tuple[str, str]:
    """Return the values of Consumer and TaskId. Raises MissingTaskId, InvalidConsumer, TypeError."""
    consumer = _plain_consumer(consumer)
    _check_choice("key", key, Key)
    attributes: Any = getattr(message, "attributes", None)
    if not hasattr(attributes, "get"):
        raise TypeError(f"message is {type(message).__name__}. It must be a Pub/Sub message with attributes")
    task_id = plain(attributes.get(TASK_ID_ATTRIBUTE, ""))
    if 1 <= len(task_id) <= MAX_ID_CHARACTERS:
        return consumer, task_id
    message_id = plain(message.message_id)
    if key == "message_id" and message_id:
        # Message IDs increase, so a TaskId that began with one would be a hot spot: https://cloud.google.com/spanner/docs/schema-design
        return consumer, f"{zlib.crc32(message_id.encode()):08x}-message-{message_id}"
    problem = f"no attribute {TASK_ID_ATTRIBUTE}"
    if task_id:
        problem = f"an {TASK_ID_ATTRIBUTE} of {len(task_id)} characters (max {MAX_ID_CHARACTERS})"
    raise MissingTaskId(
        f"message {message_id!r} has {problem}, so it did not come from the outbox. Pass key='message_id' to process "
        "it by its message ID, or let Pub/Sub forward it to a dead-letter topic"
    )


@contextmanager
def table_errors() -> Iterator[None]:
    """Raise NotReached if the table is missing."""
    try:
        yield
    except Exception as error:
        # The DB-API driver raises its own error, with the client's error as the cause.
        if not any(f"Table not found: {TABLE}" in str(each) for each in (error, error.__cause__)):
            raise
        raise NotReached(
            f"table {TABLE} is missing in the database of this transaction. Create it in the subscriber's database "
            "with `outbox schema apply`, and pass a transaction of that database"
        ) from error


def _name(function: object) -> str:
    return getattr(function, "__qualname__", repr(function))


def _check_choice(name: str, value: object, choices: object) -> None:
    if value not in (allowed := get_args(choices)):
        raise ValueError(f"{name} is {value!r}. It must be {' or '.join(map(repr, allowed))}")


def _plain_consumer(consumer: str) -> str:
    if not isinstance(consumer, str):
        raise InvalidConsumer(f"consumer is {type(consumer).__name__}. It must be a str")
    consumer = plain(consumer)
    if not 1 <= len(consumer) <= MAX_CONSUMER_CHARACTERS:
        raise InvalidConsumer(f"consumer has {len(consumer)} characters. It must have 1 to {MAX_CONSUMER_CHARACTERS}")
    if not consumer.isprintable() or consumer != consumer.strip():
        raise InvalidConsumer(
            f"consumer {consumer!r} begins or ends with a space, or has a character that cannot be printed"
        )
    return consumer


def pushed_message(body: Any) -> PubsubMessage:
    """Return the message in the body of a push request.

    Args:
        body: the parsed JSON, a dictionary with `message`.

    Raises:
        InvalidMessage: the body has another form.
    """
    try:
        # Push requests have some fields twice: messageId and message_id.
        fields = {name: value for name, value in body["message"].items() if "_" not in name}
        raw = ParseDict(fields, RawPubsubMessage(), ignore_unknown_fields=True)
    except (TypeError, KeyError, AttributeError, ParseError) as error:
        raise InvalidMessage(
            "the body is not a push request of Pub/Sub, which is JSON with a `message`. If the subscription "
            f"has payload unwrapping, turn it off ({type(error).__name__}: {error})"
        ) from error
    message: PubsubMessage = PubsubMessage.wrap(raw)
    return message


#: Kinds of functions that do nothing when they are called: they return an object to await or to iterate over.
_WITHOUT_EFFECT: Mapping[Callable[[object], bool], str] = {
    inspect.iscoroutinefunction: "a coroutine function",
    inspect.isgeneratorfunction: "a generator function",
    inspect.isasyncgenfunction: "an async generator function",
}

#: Changes the subscriber's rows in the transaction before it returns. It must not be `async def`, nor contain `yield`.
Handle: TypeAlias = Callable[[Transaction, Any], object]


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
            max_delay: max seconds for which a message waits for others, if `max_batch` is more than 1.
            transaction_options: for `database.run_in_transaction`, such as `timeout_secs` or `transaction_tag`.

        Raises:
            InvalidConsumer: see `process_once`.
            ValueError: an argument is not one of the values above.
            TypeError: `database` is not a Spanner Database.
        """
        if not callable(getattr(database, "run_in_transaction", None)):
            raise TypeError(
                f"database is {type(database).__name__}. It must be a Spanner Database. With SQLAlchemy, Django or "
                "DB-API, call process_once of outbox.ext in a transaction for each message, without `max_batch`"
            )
        consumer = _plain_consumer(consumer)
        _check_choice("key", key, Key)
        _check_choice("missing_task_id", missing_task_id, Missing)
        if not 1 <= max_batch <= MAX_BATCH:
            raise ValueError(f"max_batch is {max_batch}. It must be 1 to {MAX_BATCH:,}")
        if not max_delay >= 0:
            raise ValueError(f"max_delay is {max_delay}. It must be 0 or more seconds")
        self.max_batch, self.max_delay = max_batch, max_delay
        self.database, self.consumer, self.key = database, consumer, key
        self.missing_task_id, self.transaction_options = missing_task_id, transaction_options

    def __call__(self, handle: Handle) -> "Receiver":
        """Return the callback.

        Args:
            handle: called with the transaction and the message, and again after each ABORTED. Its result is ignored.

        Raises:
            TypeError: `handle` is a coroutine, generator or async generator function, which would have no effect.
        """
        for is_kind, kind in _WITHOUT_EFFECT.items():
            if is_kind(handle):
                raise TypeError(f"{_name(handle)} is {kind}. It must be a plain function")
        return Receiver(self, handle) if self.max_batch == 1 else BatchReceiver(self, handle)


class Receiver:
    """The callback for a streaming pull, and `process` for push requests and other ways to receive.

    Unit tests can call the attribute `handle`, the wrapped function.
    """

    def __init__(self, settings: Handler, handle: Handle) -> None:
        self._settings, self.handle = settings, handle

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
        has_trace = not isinstance(error, MissingTaskId | _EarlierFailed)
        _log.error(text, self._describe(message), error, exc_info=error if has_trace else None)
        message.nack()

    def _run(self, attempt: Callable[[Transaction], T]) -> T:
        """Run `attempt` in a transaction, again after each ABORTED."""
        database, begun = self._settings.database, False

        def begin(transaction: Transaction) -> T:
            nonlocal begun
            begun = True
            return attempt(transaction)

        try:
            result = transact(database, begin, **self._settings.transaction_options)
        except RuntimeError:
            raise  # this thread is already in a transaction, so the flag below is right
        except Exception:
            if not begun:
                # If the client gets no session, it refuses all later transactions of this thread:
                # https://github.com/googleapis/google-cloud-python/issues/18375
                database._local.transaction_running = False  # noqa: SLF001 - nothing public resets it
            raise
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
        check_finished(self.handle(transaction, message), _name(self.handle), StreamedResultSet)

    def _acknowledged(self, message: ReceivedMessage, future: Any) -> None:
        """Log and count a failed acknowledgement, which only a subscription with exactly-once delivery reports."""
        if error := future.exception():
            count_delivery(self._settings.consumer, "not_acknowledged")
            _log.warning("%s was not acknowledged and may be redelivered: %s", self._describe(message), error)

    def _describe(self, message: ReceivedMessage) -> str:
        task_id = message.attributes.get(TASK_ID_ATTRIBUTE, "")
        return f"Consumer {self._settings.consumer}: task {task_id or 'without an ID'} (message {message.message_id})"


class _EarlierFailed(Exception):
    """An earlier message of the ordering key failed, so the function was not called for this one."""


class _Singly(Exception):
    """The messages of a batch must have a transaction each."""


#: Whether the function ran for a message (False: a duplicate), or its error.
Outcome: TypeAlias = bool | Exception


class BatchReceiver(Receiver):
    """The callback for a streaming pull with `max_batch`. Messages that arrive together have one transaction.

    `process` still uses one transaction for each message.
    """

    def __init__(self, settings: Handler, handle: Handle) -> None:
        super().__init__(settings, handle)
        self._batches = Collector[PulledMessage](self._receive_all, settings.max_batch, settings.max_delay)

    def __call__(self, message: PulledMessage) -> None:
        """Let the message wait for others, or process those that wait. See `Receiver`.

        The client extends the deadline of waiting messages, and its flow control limits their number.
        """
        try:
            self._row(message)
        except MissingTaskId:
            self._receive(message)
        else:
            self._batches.add(message)

    def _row(self, message: ReceivedMessage) -> tuple[str, str]:
        return inbox_row(message, self._settings.consumer, self._settings.key)

    def _receive_all(self, messages: list[PulledMessage]) -> None:
        """Process messages, together if there are several. Raises what ends the streaming pull."""
        try:
            if len(messages) == 1:
                self._receive(messages[0])
            else:
                self._receive_together(messages)
        except Exception:
            # The streaming pull does this for the message of this call only.
            for message in messages:
                message.nack()
            raise

    def _receive_together(self, messages: list[PulledMessage]) -> None:
        try:
            with table_errors():
                outcomes: list[Outcome] = self._run(lambda transaction: self._attempt_all(transaction, messages))
        except (_Singly, *CONTENT) as error:
            self._receive_singly(messages, error)
        except NotReached:
            raise
        except Exception as error:
            self._settle(messages, [error] * len(messages))
        else:
            self._settle(messages, outcomes)

    def _settle(self, messages: list[PulledMessage], outcomes: Sequence[Outcome]) -> None:
        """Count, and acknowledge or reject, after the transaction."""
        for message, outcome in zip(messages, outcomes, strict=True):
            failed = isinstance(outcome, Exception)
            count_delivery(self._settings.consumer, "failed" if failed else "processed" if outcome else "duplicate")
            if isinstance(outcome, Exception):
                self._reject(message, outcome)
            else:
                self._acknowledge(message)

    def _receive_singly(self, messages: list[PulledMessage], reason: Exception) -> None:
        """Process messages in a transaction each. Once Spanner is unavailable, reject the rest untried."""
        text = "Consumer %s: %d messages get a transaction each instead of one together: %s"
        _log.warning(text, self._settings.consumer, len(messages), reason)
        failed, outage = set[str](), None
        for message in messages:
            if error := outage or self._earlier_failed(message, failed):
                self._settle([message], [error])
            elif error := self._receive(message):
                failed.add(_ordering_key(message))
                outage = error if isinstance(error, _UNAVAILABLE) else None

    def _earlier_failed(self, message: ReceivedMessage, failed: Collection[str]) -> Exception | None:
        key = _ordering_key(message)
        return (
            _EarlierFailed(f"an earlier message of its ordering key {key!r} failed") if key and key in failed else None
        )

    def _attempt_all(self, transaction: Transaction, messages: list[PulledMessage]) -> list[Outcome]:
        rows = [self._row(message) for message in messages]
        processed = existing(transaction, TABLE, COLUMNS[:2], set(rows), tag="outbox-process-once")
        before, failed, outcomes = set(processed), set[str](), list[Outcome]()
        with uncommitted(transaction), watched(transaction) as watch:
            for message, row in zip(messages, rows, strict=True):
                outcome: Outcome = self._earlier_failed(message, failed) or row not in processed
                if outcome is True:
                    outcome = self._try(transaction, message, watch)
                if outcome is True:
                    processed.add(row)
                elif isinstance(outcome, Exception):
                    failed.add(_ordering_key(message))
                outcomes.append(outcome)
        if new := sorted(processed - before):
            insert(transaction, TABLE, COLUMNS, [(*row, COMMIT_TIMESTAMP) for row in new])
        return outcomes

    def _try(self, transaction: Transaction, message: ReceivedMessage, watch: Watch) -> Outcome:
        """Call the function. If it fails, drop what it has buffered. Raises _Singly if that is not enough."""
        savepoint = watch.begin(transaction)
        outcome: Outcome = True
        try:
            with processing(self._settings.consumer, message):
                self._call(transaction, message)
        except Aborted:
            raise
        except Exception as error:
            if watch.has_dml or isinstance(error, (GoogleAPIError, NotReached)):
                raise _Singly(f"one failed, and only a rollback undoes it: {error}") from error
            savepoint.restore()
            outcome = error
        if watch.reads_stale:
            raise _Singly(f"{_name(self.handle)} reads what an earlier message may have changed by a mutation")
        return outcome


#: Errors that mean that Spanner is unavailable: each further message would wait as long.
_UNAVAILABLE = (RetryError, ServiceUnavailable, DeadlineExceeded)


def _ordering_key(message: ReceivedMessage) -> str:
    return getattr(message, "ordering_key", "")
