"""An idempotent subscriber: it handles each task once, however often the message comes.

The relay delivers at least once. A message that comes again has the same task id in its attributes, though perhaps
another message id: Pub/Sub's own de-duplication does not see the difference, the subscriber must.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from google.cloud import pubsub_v1

from outbox import TASK_ID_ATTRIBUTE

#: Seconds for the streams to stop.
STOP_SECONDS = 10.0

_log = logging.getLogger("orders.subscriber")


@dataclasses.dataclass(frozen=True, slots=True)
class Delivery:
    """One arrival of a message."""

    task_id: str
    message_id: str
    received_at: datetime


class Inbox:
    """Calls `handle` once for each task id, and keeps a list of all arrivals for whoever wants to count."""

    def __init__(self, handle: Callable[[Any], None]) -> None:
        """Handle messages by `handle`; if it raises, the message comes again."""
        self._handle = handle
        self._lock = threading.Lock()
        self._handled: set[str] = set()
        self._deliveries: list[Delivery] = []

    def receive(self, message: Any) -> None:
        """Handle a message unless its task was handled before, then acknowledge it."""
        delivery = Delivery(message.attributes.get(TASK_ID_ATTRIBUTE, ""), message.message_id, datetime.now(UTC))
        _log.debug("received task %s as message %s", delivery.task_id, delivery.message_id)
        # A set and a lock are enough for one process that keeps no state. Elsewhere the id goes into a table with a
        # unique key, in the transaction in which the message takes effect.
        with self._lock:
            self._deliveries.append(delivery)
            if delivery.task_id not in self._handled:
                try:
                    self._handle(message)
                except Exception:
                    _log.exception("task %s was not handled and comes again", delivery.task_id)
                    message.nack()
                    return
                self._handled.add(delivery.task_id)
        message.ack()  # only now: until then a crash brings the message back

    def deliveries(self) -> list[Delivery]:
        """Return all arrivals so far."""
        with self._lock:
            return list(self._deliveries)

    def handled(self) -> int:
        """Return how many tasks were handled."""
        with self._lock:
            return len(self._handled)


class Subscriber:
    """Hands what several subscriptions deliver to one function while the `with` block runs."""

    def __init__(self, subscriptions: Iterable[str], receive: Callable[[Any], None]) -> None:
        """Begin to receive. The names of the subscriptions are full ones; `receive` acknowledges."""
        client = pubsub_v1.SubscriberClient()
        # At the end, callbacks that have begun may end and acknowledge; other messages go back to Pub/Sub at once.
        self._streams = [client.subscribe(name, receive, await_callbacks_on_shutdown=True) for name in subscriptions]

    def check(self) -> None:
        """Raise the error that ended a stream; without one, return."""
        for stream in self._streams:
            if stream.done():
                stream.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._streams:
            stream.cancel()
        deadline = time.monotonic() + STOP_SECONDS
        for stream in self._streams:
            with contextlib.suppress(Exception):  # `check` has told what ended a stream early
                stream.result(max(0.0, deadline - time.monotonic()))
        # The client stays open: a stream that lost Pub/Sub may still be at work on it, and it ends with the process.
