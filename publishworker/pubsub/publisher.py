"""Publish tasks to Pub/Sub, and return an answer for each one that was tried.

It calls gRPC on the channel of the client library, so that a deadline cancels the request. With the library's
PublisherClient, a caller can only stop waiting: the request goes on.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import grpc
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
from google.pubsub_v1.types import PublishRequest, PublishResponse

from outbox.base.values import topic_name
from outbox.errors import InvalidMessage
from outbox.message import check_topic
from publishworker.host import Queue, Threads
from publishworker.pubsub import messages
from publishworker.pubsub.failures import reason_of
from publishworker.types import Answer, Failed, LockedRow, Published

#: Max task IDs to remember. If a request of several tasks is refused and no time is left to split it, each of them is
#: sent alone in its next batch. The oldest IDs are forgotten. OUT-DELAY-1: if Pub/Sub takes longer than half of the
#: publish timeout, one message that it refuses would otherwise hold back its batch.
MAX_SEND_ALONE = 10_000


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
        other row fails with them. All other requests are sent concurrently. A later request starts only if at least
        half of the time remains, so a healthy message never times out because it started late.
        """
        name = topic_name(topic, self._project)
        call = _Call(name, self._clock() + seconds, self._threads.queue(), self._create_command)
        valid, failed = self._prepared(name, rows)
        alone = {row.id for row in rows if row.id in self._send_alone} | {*alone}
        with messages.publish_span(name, [message for _, message in valid], call.answers):
            lanes = messages.lanes(name, valid, alone)
            in_flight = sum(self._start(lane, call, blocking=len(lanes) == 1) for lane in lanes)
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
            [(_, request)] = messages.requests(name, [(id, message)])
            if failure := messages.too_large(request):
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
            message = messages.decode(row)
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

    def _start(self, lane: messages.Lane, call: "_Call", min_seconds: float = 0.0, *, blocking: bool = False) -> bool:
        """Send the next request of a lane if more than `min_seconds` remain, and return whether it was sent.

        With `blocking`, this thread waits for the answer. Otherwise gRPC does, on a thread that costs CPU. Tasks that
        are not tried get no answer.
        """
        ids, request = lane.requests[0]
        if failure := messages.too_large(request):
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


def _record_answer(lane: messages.Lane, future: Any, call: _Call) -> list[messages.Lane]:
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
