"""An idempotent subscriber: it handles each task once, even if Pub/Sub delivers several messages of the task.

The relay delivers at least once. All messages of a task have the same task ID in their attributes, but their message
IDs can differ. Pub/Sub deduplicates by message ID, so the subscriber must compare task IDs.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from google.cloud import pubsub_v1

from outbox import TASK_ID_ATTRIBUTE
from outbox.inbox import PulledMessage

#: Seconds for the streams to stop.
STOP_SECONDS = 10.0

_log = logging.getLogger("orders.subscriber")


@dataclasses.dataclass(frozen=True, slots=True)
class Delivery:
    """One delivery of a message."""

    task_id: str
    message_id: str
    received_at: datetime


class Inbox:
    """Calls `handle` once for each task ID, and keeps a list of all deliveries."""

    def __init__(self, handle: Callable[[PulledMessage], None]) -> None:
        """Handle messages by `handle`. If it raises an exception, Pub/Sub redelivers the message."""
        self._handle = handle
        self._lock = threading.Lock()
        self._handled: set[str] = set()
        self._deliveries: list[Delivery] = []

    def receive(self, message: PulledMessage) -> None:
        """Handle a message unless its task was handled before, then acknowledge it."""
        task_id = message.attributes.get(TASK_ID_ATTRIBUTE)
        if not task_id:
            _log.error("message %s has no task ID: it did not come from the outbox", message.message_id)
            message.nack()  # Pub/Sub redelivers it or forwards it to the dead-letter topic of the subscription
            return
        delivery = Delivery(task_id, message.message_id, datetime.now(UTC))
        _log.debug("received task %s as message %s", delivery.task_id, delivery.message_id)
        # A set and a lock are enough for one process without state. Other subscribers insert the ID into a table with
        # a unique key, in the same transaction as the side effect.
        with self._lock:
            self._deliveries.append(delivery)
            if delivery.task_id not in self._handled:
                try:
                    self._handle(message)
                except Exception:
                    _log.exception("task %s failed and will be redelivered", delivery.task_id)
                    message.nack()
                    return
                self._handled.add(delivery.task_id)
        message.ack()  # last: after a crash before this line, Pub/Sub redelivers the message

    def deliveries(self) -> list[Delivery]:
        """Return all deliveries so far."""
        with self._lock:
            return list(self._deliveries)

    def handled(self) -> int:
        """Return how many tasks were handled."""
        with self._lock:
            return len(self._handled)


class Subscriber:
    """Calls one function for the messages of several subscriptions while the `with` block runs."""

    def __init__(self, subscriptions: Iterable[str], receive: Callable[[PulledMessage], None]) -> None:
        """Subscribe to full subscription names. `receive` must acknowledge each message."""
        client = pubsub_v1.SubscriberClient()
        # On shutdown, running callbacks finish and acknowledge. Other messages return to Pub/Sub at once.
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
            with contextlib.suppress(Exception):  # `check` raises the error of a stream that ended early
                stream.result(max(0.0, deadline - time.monotonic()))
        # The client stays open, because a stream that lost its connection may still use it.
