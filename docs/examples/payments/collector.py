"""Writes what subscriptions deliver to a file, as a subscription to BigQuery would: for demos and tests.

In production Pub/Sub does it by itself: https://cloud.google.com/pubsub/docs/bigquery, with the metadata.
"""

import base64
import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

from orders.subscriber import Subscriber

from outbox.inbox import PulledMessage


class Collector:
    """Appends one line of JSON a delivery to a file, and acknowledges what is written."""

    def __init__(self, file: TextIO) -> None:
        """Write to a file that is open."""
        self._lock = threading.Lock()
        self._file = file
        self._count, self._last_at = 0, time.monotonic()
        self._subscribers: list[Subscriber] = []

    @property
    def count(self) -> int:
        """Return how many deliveries are written."""
        return self._count

    def check(self) -> None:
        """Raise the error that ended a stream; without one, return."""
        for each in self._subscribers:
            each.check()

    def quiet_since(self, began: float) -> float:
        """Return for how many seconds nothing has come, counted from `began` by the monotonic clock at the earliest."""
        return time.monotonic() - max(began, self._last_at)

    def receive(self, subscription: str, message: PulledMessage) -> None:
        """Write a message that came from a subscription."""
        line = {
            "subscription_name": subscription,
            "message_id": message.message_id,
            "publish_time": message.publish_time.isoformat(),
            "attributes": json.dumps(dict(message.attributes)),
            "data": base64.b64encode(message.data).decode(),
        }
        with self._lock:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            self._count, self._last_at = self._count + 1, time.monotonic()
        message.ack()  # only now: until then a crash brings the message back

    def subscribe(self, subscription: str) -> Subscriber:
        """Return what receives from a subscription, to be entered."""
        made = Subscriber([subscription], partial(self.receive, subscription))
        self._subscribers.append(made)
        return made


@contextlib.contextmanager
def collecting(subscriptions: Sequence[str], path: Path) -> Iterator[Collector]:
    """Collect what comes from subscriptions, by their full names, while the block runs."""
    with contextlib.ExitStack() as stack:
        collector = Collector(stack.enter_context(path.open("a", encoding="utf-8")))
        for each in subscriptions:
            stack.enter_context(collector.subscribe(each))
        yield collector
