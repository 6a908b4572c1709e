"""Writes what subscriptions deliver to a file, as a subscription to BigQuery would: for demos and tests.

In production Pub/Sub does it by itself: https://cloud.google.com/pubsub/docs/bigquery, with the metadata.
"""

import base64
import json
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from google.cloud import pubsub_v1

#: Seconds for the streams to stop.
STOP_SECONDS = 10.0


class Collector:
    """Appends one line of JSON a delivery to a file while the `with` block runs; acknowledges what is written."""

    def __init__(self, subscriptions: Sequence[str], path: Path) -> None:
        """Begin to receive; the names of the subscriptions are full ones."""
        self._lock = threading.Lock()
        self._file = path.open("a", encoding="utf-8")
        self._count, self._last_at = 0, time.monotonic()
        client = pubsub_v1.SubscriberClient()
        self._streams = [client.subscribe(name, partial(self._write, name)) for name in subscriptions]

    @property
    def count(self) -> int:
        """Return how many deliveries are written."""
        return self._count

    def check(self) -> None:
        """Raise the error that ended a stream; without one, return."""
        for stream in self._streams:
            if stream.done():
                stream.result()

    def quiet_since(self, began: float) -> float:
        """Return for how many seconds nothing has come, counted from `began` by the monotonic clock at the earliest."""
        return time.monotonic() - max(began, self._last_at)

    def _write(self, subscription: str, message: Any) -> None:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._streams:
            stream.cancel()
        deadline = time.monotonic() + STOP_SECONDS
        for stream in self._streams:
            stream.result(max(0.0, deadline - time.monotonic()))
        self._file.close()
