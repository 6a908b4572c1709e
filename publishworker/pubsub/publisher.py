"""Publish tasks to Pub/Sub, and return an answer for each one that was tried.

It calls gRPC on the channel of the client library, so that a deadline cancels the request. With the library's
PublisherClient, a caller can only stop waiting: the request goes on. Messages are raw protobuf, because
proto-plus takes too much CPU (docs/decisions.md, 0001).
"""

import contextlib
import re
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar
from urllib.parse import quote

import grpc
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
from google.pubsub_v1.types import PublishRequest, PublishResponse
from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, format_trace_id

from outbox import __version__
from outbox.base.values import topic_name
from outbox.errors import InvalidMessage
from outbox.message import (
    MAX_FIELDS,
    MAX_REQUEST_BYTES,
    TASK_ID_ATTRIBUTE,
    RawPublishRequest,
    check_topic,
    has_too_many_fields,
    parsed,
)
from outbox.observing import span_of
from publishworker.host import Queue, Threads
from publishworker.log import log
from publishworker.pubsub.failures import reason_of
from publishworker.types import Answer, Failed, LockedRow, Published

#: Messages in one publish request (https://cloud.google.com/pubsub/quotas#resource_limits).
MAX_REQUEST_MESSAGES = 1_000
#: Max task IDs to remember. If a request of several tasks is refused and no time is left to split it, each of them is
#: sent alone in its next batch. The oldest IDs are forgotten. OUT-DELAY-1: if Pub/Sub takes longer than half of the
#: publish timeout, one message that it refuses would otherwise hold back its batch.
MAX_SEND_ALONE = 10_000


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


class PubSubPublisher:
    """Publishes to topics whose full names are `allowed`. `create_command` returns the command that creates one."""

    def __init__(
        self,
        transport: PublisherGrpcTransport,
        project: str,
        allowed: Callable[[str], bool] = lambda _name: True,
        clock: Callable[[], float] = time.monotonic,
        threads: Threads = Threads(),  # noqa: B008 - it has no state
        *,
        create_command: Callable[[str], str] = "gcloud pubsub topics create {}".format,
    ) -> None:
        self._project = project
        self._allowed = allowed
        self._clock = clock
        self._threads = threads
        self._create_command = create_command
        self._send_alone: dict[str, None] = {}  # in order of insertion, see MAX_SEND_ALONE
        self._lock = threading.Lock()
        self._publish = transport.grpc_channel.unary_unary(
            "/google.pubsub.v1.Publisher/Publish",
            request_serializer=PublishRequest.pb().SerializeToString,
            response_deserializer=PublishResponse.pb().FromString,
        )

    def publish(
        self, topic: str, rows: Sequence[LockedRow], seconds: float, alone: Collection[str] = frozenset()
    ) -> dict[str, Answer]:
        """Return Published or Failed for each row that was tried within `seconds`. Raises nothing.

        Rows of an ordering key are published in the given order, in one request if they fit, otherwise one request
        after the other. Rows behind a failure are not tried. Rows with IDs in `alone` share no request, so that no
        other row fails with them. Requests of different keys, and without a key, are sent concurrently. A later request
        starts only if at least half of the time remains, so a healthy message never times out because it started late.
        """
        name = topic_name(topic, self._project)
        call = _Call(name, self._clock() + seconds, self._threads.queue(), self._create_command)
        valid, failed = self._prepared(name, rows)
        alone = {row.id for row in rows if row.id in self._send_alone} | {*alone}
        with publish_span(name, [message for _, message in valid], call.answers):
            first = lanes(name, valid, alone)
            in_flight = sum(self._start(lane, call, blocking=len(first) == 1) for lane in first)
            while in_flight:
                lane, future = call.responses.get()  # each request has an answer by the deadline
                in_flight -= 1
                for next_lane in _record_answer(lane, future, call):
                    in_flight += self._start(next_lane, call, min_seconds=seconds / 2)
        self._remember(call)
        return failed | call.answers

    def refusals(self, topic: str, rows: Sequence[LockedRow]) -> dict[str, Failed]:
        """Return the failures of rows that can never be published. Sends nothing."""
        name = topic_name(topic, self._project)
        valid, failed = self._prepared(name, rows)
        for id, message in valid:
            [(_, request)] = requests(name, [(id, message)])
            if failure := too_large(request):
                failed[id] = failure
        return failed

    def _prepared(self, name: str, rows: Sequence[LockedRow]) -> tuple[list[tuple[str, Any]], dict[str, Failed]]:
        """Return the messages that may be published, and the failures.

        A row behind a failed row of its ordering key is in neither.
        """
        try:
            check_topic(name)
        except InvalidMessage as error:
            return [], {row.id: Failed("invalid_topic", str(error)) for row in rows}
        if not self._allowed(name):
            failure = Failed("topic_not_allowed", f"{name} matches no pattern of --allowed-topics")
            return [], {row.id: failure for row in rows}
        valid: list[tuple[str, Any]] = []
        failed: dict[str, Failed] = {}
        stopped: set[str | None] = set()
        for row in rows:
            if row.ordering_key in stopped:
                continue
            message = decode(row)
            if not isinstance(message, Failed):
                valid.append((row.id, message))
                continue
            failed[row.id] = message
            if row.ordering_key is not None:
                stopped.add(row.ordering_key)
        return valid, failed

    def _remember(self, call: "_Call") -> None:
        """Remember the tasks of refused requests that there was no time to split. Forget those with an answer."""
        with self._lock:
            self._send_alone |= dict.fromkeys(call.not_retried)
            for id in call.answers:
                self._send_alone.pop(id, None)
            for id in list(self._send_alone)[: max(0, len(self._send_alone) - MAX_SEND_ALONE)]:
                del self._send_alone[id]

    def _start(self, lane: Lane, call: "_Call", min_seconds: float = 0.0, *, blocking: bool = False) -> bool:
        """Send the next request of a lane if more than `min_seconds` remain, and return whether it was sent.

        With `blocking`, this thread waits for the answer. Otherwise gRPC does, on a thread that costs CPU. Tasks that
        are not tried get no answer.
        """
        ids, request = lane.requests[0]
        if failure := too_large(request):
            call.answers.update(dict.fromkeys(ids, failure))
            return False
        remaining = call.deadline - self._clock()
        if remaining <= min_seconds:
            call.not_retried += lane.refused
            return False
        header = (("x-goog-request-params", f"topic={quote(call.name, safe='')}"),)
        if blocking:
            call.responses.put((lane, self._send_and_wait(request, remaining, header)))
            return True
        future = self._publish.future(request, timeout=remaining, metadata=header)
        future.add_done_callback(lambda answered: call.responses.put((lane, answered)))
        return True

    def _send_and_wait(self, request: Any, seconds: float, header: Any) -> Any:
        try:
            _, future = self._publish.with_call(request, timeout=seconds, metadata=header)
        except grpc.RpcError as error:
            # The error is also the future of the call. Its traceback could be a reference cycle (see `_record_answer`).
            return error.with_traceback(None)
        return future


@dataclass(slots=True)
class _Call:
    """The state of one call of `publish`, to the topic whose full name is `name`."""

    name: str
    deadline: float
    responses: Queue  # of (lane, future of the response)
    create_command: Callable[[str], str]
    answers: dict[str, Answer] = field(default_factory=dict)
    not_retried: list[str] = field(default_factory=list)  # refused in a shared request, with no time to split it


def _record_answer(lane: Lane, future: Any, call: _Call) -> list[Lane]:
    """Record the answer to a request. Return the lanes to go on with: smaller ones if it was refused."""
    ids, request = lane.requests.popleft()
    # `future.result()` would raise the future itself. Its traceback would be a reference cycle, which keeps the
    # messages of the batch in memory until the next garbage collection.
    error = future.exception()
    if error is None:
        answers = _answers_of(ids, future.result().message_ids, call.name)
    elif error.code() is grpc.StatusCode.INVALID_ARGUMENT and len(ids) > 1:
        return lane.split(ids, request)
    else:
        answers = dict.fromkeys(ids, failure_of(error, call.name, call.create_command))
    call.answers.update(answers)
    return [lane] if lane.requests and all(isinstance(each, Published) for each in answers.values()) else []


def _answers_of(ids: Sequence[str], message_ids: Sequence[str], name: str) -> dict[str, Answer]:
    if len(message_ids) == len(ids):
        return {id: Published(message_id) for id, message_id in zip(ids, message_ids, strict=True)}
    failure = Failed("unknown", f"{name}: Pub/Sub returned {len(message_ids)} message IDs for {len(ids)} messages")
    return dict.fromkeys(ids, failure)


def failure_of(error: Any, topic: str, create_command: Callable[[str], str]) -> Failed:
    """Return a failure with its reason, advice, and Pub/Sub's error details, which may name another cause."""
    reason, details = reason_of(error), (error.details() or "no details").rstrip(".")
    advice = {
        "not_found": f"the topic does not exist. Create it: `{create_command(topic)}`. Pub/Sub: ",
        "permission_denied": "the worker may not publish to the topic. Grant it roles/pubsub.publisher. Pub/Sub: ",
    }.get(reason, "")
    return Failed(reason, f"{topic}: {advice}{details}")


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
    """Return the result of `work`, or None if it raises, because an exception would lose the answers."""
    try:
        return work()
    except Exception as error:
        if (what := type(error).__name__) not in _logged_errors:
            _logged_errors.add(what)
            log.warning("Spans are lost because the tracer provider failed", exc_info=True, extra={"action": "tracing"})
        return None
