"""The callback for a streaming pull that processes messages that arrive together in one transaction."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

from google.api_core.exceptions import DeadlineExceeded, RetryError, ServiceUnavailable
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.transaction import Transaction

from outbox.errors import MissingTaskId, NotReached
from outbox.inbox.once import COLUMNS, TABLE, ReceivedMessage, inbox_row, table_errors
from outbox.inbox.receiver import EarlierFailed, Failure, Handle, PulledMessage, Receiver, Settings, log, uncommitted
from outbox.observing import count_delivery, processing
from outbox.table.transactions import PrimaryKey, existing, insert

#: Errors that may mean that Spanner is unavailable: each further message would wait as long.
_UNAVAILABLE = (RetryError, ServiceUnavailable, DeadlineExceeded)


class BatchReceiver(Receiver):
    """The callback for a streaming pull. `process` is for one message, as in a `Receiver`.

    Unit tests can call the attribute `handle`, the wrapped function, with a list of messages.
    """

    def __init__(self, settings: Settings, handle: Handle, max_batch: int, max_delay: float) -> None:
        super().__init__(settings, handle)
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

    def _row(self, message: ReceivedMessage) -> tuple[str, str]:
        return inbox_row(message, self._settings.consumer, self._settings.key)

    def _receive_all(self, messages: list[PulledMessage]) -> None:
        """Process messages, together if there are several. Raises what ends the streaming pull."""
        try:
            if len(messages) == 1:
                super().__call__(messages[0])
            elif error := self._receive_together(messages):
                text = "Consumer %s: a batch failed, so its %d messages get a transaction each: %s"
                log.warning(text, self._settings.consumer, len(messages), error)
                self._receive_singly(messages)
        except BaseException:
            # The streaming pull does this for the message of this call only.
            for message in messages:
                message.nack()
            raise

    def _receive_together(self, messages: list[PulledMessage]) -> Exception | None:
        """Process and acknowledge the messages. Return the error if that failed."""
        try:
            with table_errors():
                new = self._run(lambda transaction: self._attempt_all(transaction, messages))
        except NotReached:
            raise
        except Exception as error:
            return error
        for message in messages:
            count_delivery(self._settings.consumer, "processed" if id(message) in new else "duplicate")
        self._acknowledge(messages)
        return None

    def _attempt_all(self, transaction: Transaction, messages: list[PulledMessage]) -> set[int]:
        """Call the function with the first message of each task that was not processed. Return `id()` of these."""
        first: dict[PrimaryKey, PulledMessage] = {self._row(message): message for message in reversed(messages)}
        for row in existing(transaction, TABLE, COLUMNS[:2], {*first}, tag="outbox-process-once"):
            del first[row]
        new = [message for message in messages if first.get(self._row(message)) is message]
        if new:
            insert(transaction, TABLE, COLUMNS, [(*row, COMMIT_TIMESTAMP) for row in sorted(first)])
            with processing(self._settings.consumer, *new), uncommitted(transaction):
                self._call(transaction, new)
        return {*map(id, new)}

    def _handled(self, transaction: Transaction, messages: Sequence[ReceivedMessage]) -> object:
        return self.handle(transaction, [*messages])

    def _receive_singly(self, messages: list[PulledMessage]) -> None:
        """Process each message in its own transaction. After two unavailable errors in a row, reject the rest untried.

        The cause of only one such error may be its message.
        """
        failed, outage, unavailable = set[str](), None, None
        failures = list[Failure]()
        try:
            for message in messages:
                if error := outage or _earlier_failed(message, failed):
                    count_delivery(self._settings.consumer, "failed")
                    message.nack()
                elif error := self._receive(message):
                    failed.add(_ordering_key(message))
                failures += [(message, error)] if error else []
                if not outage:
                    before, unavailable = unavailable, error if isinstance(error, _UNAVAILABLE) else None
                    outage = before and unavailable
        finally:
            self._log_failures(failures)


def _earlier_failed(message: ReceivedMessage, failed: Collection[str]) -> Exception | None:
    if (key := _ordering_key(message)) and key in failed:
        return EarlierFailed(f"an earlier message of its ordering key {key!r} failed")
    return None


def _ordering_key(message: ReceivedMessage) -> str:
    return getattr(message, "ordering_key", "")


T = TypeVar("T")


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
