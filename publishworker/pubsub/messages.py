"""Build publish requests from task rows, divide them into lanes, and trace them.

They use raw protobuf messages, because proto-plus takes too much CPU (docs/decisions.md, 0001).
"""

import contextlib
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, format_trace_id

from outbox import __version__
from outbox.base.values import topic_name
from outbox.message import (
    MAX_FIELDS,
    MAX_REQUEST_BYTES,
    TASK_ID_ATTRIBUTE,
    RawPublishRequest,
    has_too_many_fields,
    parsed,
)
from outbox.observing import span_of
from publishworker.log import log
from publishworker.types import Answer, Failed, LockedRow

#: Messages in one publish request (https://cloud.google.com/pubsub/quotas#resource_limits).
MAX_REQUEST_MESSAGES = 1_000


def topic_filter(patterns: str, project: str) -> Callable[[str], bool]:
    """Return a function that tells whether a full topic name matches one of the comma-separated `patterns`.

    In a pattern, * is any text without a slash. A bare ID is a topic of `project`.
    """
    names = [topic_name(pattern, project) for pattern in patterns.split(",")]
    alternatives = "|".join("[^/]*".join(map(re.escape, name.split("*"))) for name in names)
    matches = re.compile(alternatives).fullmatch
    return lambda name: matches(name) is not None


def decode(row: LockedRow) -> Any | Failed:
    """Return the row's PubsubMessage, with the ID attribute and the ordering key from the columns."""
    message = parsed(row.data)
    if message is None:
        too_many = f", or has more than {MAX_FIELDS} fields" if has_too_many_fields(row.data) else ""
        return Failed("undecodable", f"Data is not a serialized google.pubsub.v1.PubsubMessage{too_many}")
    message.ClearField("message_id")
    message.ClearField("publish_time")
    message.attributes[TASK_ID_ATTRIBUTE] = row.id  # OUT-TWICE-1
    message.ordering_key = row.ordering_key or ""
    return message


def trace_id(data: bytes) -> str | None:
    """Return the trace ID in the attributes of a message, or None. Raises nothing, because it is only for logs."""
    message = parsed(data)
    span = None if message is None else span_of(message.attributes)
    return None if span is None else format_trace_id(span.trace_id)


def requests(topic: str, messages: Sequence[tuple[str, Any]]) -> Iterator[tuple[list[str], Any]]:
    """Cut (ID, message) pairs into publish requests and yield each with its IDs, in order.

    All messages have the same ordering key or none, because Pub/Sub refuses a request that mixes keys. A request holds
    at most 1,000 messages and 10,000,000 bytes. A message that is too large by itself makes a request that is too
    large; see `too_large`.
    """
    ids: list[str] = []
    request = RawPublishRequest(topic=topic)
    size = empty = request.ByteSize()
    for id, message in messages:
        cost = message.ByteSize() + 6  # the field's tag and its length, at most
        if ids and (len(ids) == MAX_REQUEST_MESSAGES or size + cost > MAX_REQUEST_BYTES):
            yield ids, request
            ids, request, size = [], RawPublishRequest(topic=topic), empty
        ids.append(id)
        request.messages.append(message)
        size += cost
    if ids:
        yield ids, request


@dataclass(slots=True)
class Lane:
    """Requests that are sent one after the other, each after the answer to the previous one."""

    requests: deque[tuple[list[str], Any]]
    ordered: bool = False
    #: The IDs in this lane that Pub/Sub refused in the last shared request.
    refused: Sequence[str] = ()

    def split(self, ids: Sequence[str], request: Any) -> list["Lane"]:
        """Return the lanes for a refused request: single messages, or halves if their order matters."""
        pairs = list(zip(ids, request.messages, strict=True))
        if not self.ordered:
            return [Lane(deque(requests(request.topic, [pair])), refused=(pair[0],)) for pair in pairs]
        middle = len(pairs) // 2
        halves = (each for half in (pairs[:middle], pairs[middle:]) for each in requests(request.topic, half))
        return [Lane(deque(halves) + self.requests, ordered=True, refused=ids)]


def lanes(topic: str, messages: Sequence[tuple[str, Any]], alone: Collection[str]) -> list[Lane]:
    """Return one lane for each ordering key, and one for each request of messages without a key."""
    by_key: defaultdict[str, list[tuple[str, Any]]] = defaultdict(list)
    for id, message in messages:
        by_key[message.ordering_key].append((id, message))
    unordered = sorted(by_key.pop("", []), key=lambda pair: pair[0] in alone)
    parallel = [Lane(deque([request])) for request in _pieces(topic, unordered, alone)]
    return parallel + [Lane(deque(_pieces(topic, pairs, alone)), ordered=True) for pairs in by_key.values()]


def _pieces(topic: str, messages: Sequence[tuple[str, Any]], alone: Collection[str]) -> Iterator[tuple[list[str], Any]]:
    """Yield requests in order. A message whose ID is in `alone` has a request of its own."""
    for _, piece in groupby(messages, key=lambda pair: pair[0] if pair[0] in alone else None):
        yield from requests(topic, list(piece))


def too_large(request: Any) -> Failed | None:
    """Return the failure of a request that exceeds Pub/Sub's size limit, or None."""
    size = request.ByteSize()
    if size <= MAX_REQUEST_BYTES:
        return None
    return Failed("too_large", f"the publish request has {size} bytes; Pub/Sub allows {MAX_REQUEST_BYTES}")


T = TypeVar("T")
_logged_errors: set[str] = set()  # classes of errors that were logged


@contextlib.contextmanager
def publish_span(topic: str, messages: Sequence[Any], answers: Mapping[str, Answer]) -> Iterator[None]:
    """Open a span for the block, which publishes `messages` to the topic and fills `answers`."""
    span = _guarded(lambda: _started(topic, messages))
    if span is None:
        yield
        return
    try:
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            yield
    finally:
        _guarded(lambda: _end(span, len(messages), answers))


def _started(topic: str, messages: Sequence[Any]) -> Span | None:
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):  # no provider is configured
        return None
    links = [Link(span) for message in messages if (span := span_of(message.attributes)) is not None]
    attributes: dict[str, str | int] = {
        "messaging.system": "gcp_pubsub",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": topic,
        "messaging.batch.message_count": len(messages),
    }
    tracer = provider.get_tracer("publishworker", __version__)
    name = f"send {topic.rpartition('/')[2]}"
    return tracer.start_span(name, kind=SpanKind.PRODUCER, attributes=attributes, links=links)


def _end(span: Span, count: int, answers: Mapping[str, Answer]) -> None:
    if failures := Counter(each.reason for each in answers.values() if isinstance(each, Failed)):
        reasons = ", ".join(f"{number} {reason}" for reason, number in failures.most_common())
        span.set_attribute("error.type", failures.most_common(1)[0][0])
        span.set_status(Status(StatusCode.ERROR, f"of {count} tasks: {reasons}"))
    span.end()


def _guarded(work: Callable[[], T]) -> T | None:
    """Return the result of `work`, or None if it raises: the answers would be lost, and the tasks published twice."""
    try:
        return work()
    except Exception as error:
        if (what := type(error).__name__) not in _logged_errors:
            _logged_errors.add(what)
            log.warning("Spans are lost because the tracer provider failed", exc_info=True, extra={"action": "tracing"})
        return None
