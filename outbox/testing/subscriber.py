"""A subscription that delivers more than once, to test whether a callback is idempotent."""

import logging
import queue
from collections import Counter
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from google.cloud.pubsub_v1.subscriber._protocol.requests import AckRequest, ModAckRequest
from google.cloud.pubsub_v1.subscriber.message import Message
from google.pubsub_v1.types import PubsubMessage

from outbox.base.values import check_finished
from outbox.inbox.receiver import place_of

#: How often a message is delivered before its acknowledgement is given up.
MAX_DELIVERIES = 10


class RedeliveringSubscriber:
    """Delivers each message at least twice and in random order. Within an ordering key the order is kept.

    RedeliveringSubscriber(published("orders")).deliver(take_from_stock)
    """

    def __init__(self, messages: Iterable[PubsubMessage], *, seed: int = 0) -> None:
        """Take the messages, those of an ordering key in their order. Each seed gives another order."""
        #: Messages that stay in order, by their ordering key; a message without a key is alone.
        self._lanes: dict[str | int, list[PubsubMessage]] = {}
        for number, each in enumerate(messages):
            self._lanes.setdefault(each.ordering_key or number, []).append(each)
        self._random = Random(seed)  # noqa: S311 - an order that can be repeated, and no secret

    def deliver(self, callback: Callable[[Message], object]) -> None:
        """Call `callback` with one delivery after the other, as a streaming pull does, until all are acknowledged.

        After a negative acknowledgement, or none, the message is delivered again, and those behind it with the same key
        wait. After the last message of a key, all of its messages are delivered once more. An exception of the callback
        is raised here.

        The log of the inbox has one traceback for each line of code that fails, and not one for each delivery.

        Raises:
            AssertionError: a message was delivered ten times and not acknowledged. It names the last error that the
                inbox has logged.
            TypeError: the callback has returned, but its work is not finished: it is a coroutine function, for example.
        """
        __tracebackhide__ = True  # pytest shows the line of the test
        log, failures = logging.getLogger("outbox"), _Failures()
        log.addFilter(failures)
        try:
            self._deliver_all(callback, failures)
        finally:
            log.removeFilter(failures)

    def _deliver_all(self, callback: Callable[[Message], object], failures: "_Failures") -> None:
        __tracebackhide__ = True
        waiting = {lane: [*messages, *messages] for lane, messages in self._lanes.items()}
        refused: Counter[str | int] = Counter()
        while waiting:
            lane = self._random.choice([*waiting])
            message, failures.last = waiting[lane][0], ""
            if _deliver(message, callback):
                del waiting[lane][0], refused[lane]
                if not waiting[lane]:
                    del waiting[lane]
                continue
            refused[lane] += 1
            if refused[lane] == MAX_DELIVERIES:
                cause = f". The last one failed: {failures.last}" if failures.last else ""
                raise AssertionError(
                    f"message {message.message_id!r} with the attributes {dict(message.attributes)} was not "
                    f"acknowledged in {MAX_DELIVERIES} deliveries{cause}"
                )


class _Failures(logging.Filter):
    """Keeps the last error that was logged, and leaves out its traceback if one of the same line of code was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self._places = "", set[object]()

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        self.last = record.getMessage() if error is None else repr(error)
        place = error and place_of(error)
        record.exc_info = None if place in self._places else record.exc_info
        self._places.add(place)
        return True


def _deliver(message: PubsubMessage, callback: Callable[[Message], object]) -> bool:
    """Return whether the callback has acknowledged the message."""
    requests: queue.Queue[Any] = queue.Queue()
    result = callback(Message(PubsubMessage.pb(message), "test", 0, requests))
    answers = [each for each in requests.queue if not isinstance(each, ModAckRequest)]  # a longer deadline is no answer
    if not answers:
        check_finished(result, "the callback")
        return False
    return isinstance(answers[0], AckRequest)
