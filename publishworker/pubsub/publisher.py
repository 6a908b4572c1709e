"""Pub/Sub: tasks in, an outcome for each out. The only module that talks to it.

Plain gRPC futures on the client's own channel: one request for many messages, no thread per batch, and a time limit
that is kept (the high-level publisher's futures can be given up, not stopped).
"""

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote

import grpc
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
from google.pubsub_v1.types import PublishRequest, PublishResponse

from outbox.errors import InvalidMessage
from outbox.message import check_topic
from publishworker.pubsub import messages
from publishworker.pubsub.errors import reason_of
from publishworker.telemetry import tracing
from publishworker.types import Failed, LockedRow, Outcome, Sent

#: Tasks that a publisher remembers because they were refused together; older ones are forgotten.
MAX_REFUSED = 10_000


class Publisher(Protocol):
    """What the relay needs of a publisher."""

    def publish(
        self, topic: str, rows: Sequence[LockedRow], seconds: float, singly: Collection[str] = frozenset()
    ) -> dict[str, Outcome]:
        """Return Sent or Failed for each row that was tried within `seconds`; raises nothing.

        Rows of an ordering key go out in the order in which they are given, as one request where they fit, else one
        after the other; what follows a failure is not tried. The rows with ids in `singly` share no request with
        others, so that they take none along.
        """

    def refusals(self, topic: str, rows: Sequence[LockedRow]) -> dict[str, Failed]:
        """Return the failures of rows that cannot be published at all, without asking the service."""


class PubSubPublisher:
    """The publisher of production."""

    def __init__(
        self,
        transport: PublisherGrpcTransport,
        project: str,
        allowed: Callable[[str], bool] = lambda _name: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Publish to topics of `project` where the task names none, and only to those whose full name is `allowed`."""
        self._project = project
        self._allowed = allowed
        self._clock = clock
        self._refused: dict[str, None] = {}  # together, and there was no time to tell which of them is the culprit
        self._lock = threading.Lock()
        self._publish = transport.grpc_channel.unary_unary(
            "/google.pubsub.v1.Publisher/Publish",
            request_serializer=PublishRequest.pb().SerializeToString,
            response_deserializer=PublishResponse.pb().FromString,
        )

    def publish(
        self, topic: str, rows: Sequence[LockedRow], seconds: float, singly: Collection[str] = frozenset()
    ) -> dict[str, Outcome]:
        """See Publisher. All share one deadline; what needs no order goes out at once.

        What goes out later has at least half of the time: a healthy message must not fail because little was left. So
        what was refused together may not be told apart in time; it goes singly the next time.
        """
        name = messages.topic_name(topic, self._project)
        call = _Call(name, self._clock() + seconds)
        good, failed = self._prepared(name, rows)
        singly = {row.id for row in rows if row.id in self._refused} | {*singly}
        with tracing.sending(name, [message for _, message in good], call.outcomes):
            in_flight = sum(self._start(lane, call) for lane in messages.lanes(name, good, singly))
            while in_flight:
                lane, future = call.answers.get()  # each is answered by the deadline
                in_flight -= 1
                for each in _answered(lane, future, call):
                    in_flight += self._start(each, call, least=seconds / 2)
        self._remember(call)
        return failed | call.outcomes

    def refusals(self, topic: str, rows: Sequence[LockedRow]) -> dict[str, Failed]:
        """See Publisher."""
        name = messages.topic_name(topic, self._project)
        good, failed = self._prepared(name, rows)
        for id, message in good:
            [(_, request)] = messages.requests(name, [(id, message)])
            if failure := messages.too_large(request):
                failed[id] = failure
        return failed

    def _prepared(self, name: str, rows: Sequence[LockedRow]) -> tuple[list[tuple[str, Any]], dict[str, Failed]]:
        """Return the ids and messages of what may be sent to the topic of that full name, and the failures.

        What follows a failure in its ordering key is in neither.
        """
        try:
            check_topic(name)
        except InvalidMessage as error:
            return [], {row.id: Failed("invalid_topic", str(error)) for row in rows}
        if not self._allowed(name):
            failure = Failed("topic_not_allowed", f"{name} matches no pattern of --allowed-topics")
            return [], {row.id: failure for row in rows}
        good: list[tuple[str, Any]] = []
        failed: dict[str, Failed] = {}
        stopped: set[str | None] = set()
        for row in rows:
            if row.ordering_key in stopped:
                continue
            message = messages.decode(row)
            if not isinstance(message, Failed):
                good.append((row.id, message))
                continue
            failed[row.id] = message
            if row.ordering_key is not None:
                stopped.add(row.ordering_key)
        return good, failed

    def _remember(self, call: "_Call") -> None:
        """Keep what was refused and not tried again; whoever has an outcome is known."""
        with self._lock:
            self._refused |= dict.fromkeys(call.left)
            for id in call.outcomes:
                self._refused.pop(id, None)
            for id in list(self._refused)[: max(0, len(self._refused) - MAX_REFUSED)]:
                del self._refused[id]

    def _start(self, lane: messages.Lane, call: "_Call", least: float = 0.0) -> bool:
        """Send the first request of a lane, if more than `least` seconds are left; return whether an answer will come.

        What is not tried in time has no outcome: the tasks stay as they were.
        """
        ids, request = lane.requests[0]
        if failure := messages.too_large(request):
            call.outcomes.update(dict.fromkeys(ids, failure))
            return False
        remaining = call.deadline - self._clock()
        if remaining <= least:
            call.left += lane.refused
            return False
        header = (("x-goog-request-params", f"topic={quote(call.name, safe='')}"),)
        future = self._publish.future(request, timeout=remaining, metadata=header)
        future.add_done_callback(lambda answered: call.answers.put((lane, answered)))
        return True


@dataclass(slots=True)
class _Call:
    """One call of `publish`, to the topic of that full name."""

    name: str
    deadline: float
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)  # refused with others, and not tried again in time
    answers: queue.SimpleQueue[tuple[messages.Lane, Any]] = field(default_factory=queue.SimpleQueue)


def _answered(lane: messages.Lane, future: Any, call: _Call) -> list[messages.Lane]:
    """Note the answer to the first request of a lane; return the lanes to go on with.

    A request that is refused as invalid and holds several messages has published nothing, and one of them may be the
    culprit for all: they go out again, in smaller requests.
    """
    ids, request = lane.requests.popleft()
    try:
        answer = _sent(ids, future.result().message_ids, call.name)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT and len(ids) > 1:
            return lane.smaller(ids, request)
        answer = dict.fromkeys(ids, failure_of(error, call.name))
    call.outcomes.update(answer)
    return [lane] if lane.requests and all(isinstance(each, Sent) for each in answer.values()) else []


def _sent(ids: Sequence[str], message_ids: Sequence[str], name: str) -> dict[str, Outcome]:
    if len(message_ids) == len(ids):
        return {id: Sent(message_id) for id, message_id in zip(ids, message_ids, strict=True)}
    failure = Failed("unknown", f"{name}: the answer has {len(message_ids)} message ids for {len(ids)} messages")
    return dict.fromkeys(ids, failure)


def failure_of(error: Any, topic: str) -> Failed:
    """Return the failure that a person and a metric can use: its reason, and what Pub/Sub said or what to do."""
    reason = reason_of(error)
    advice = {
        "not_found": f"the topic does not exist: `gcloud pubsub topics create {topic}`, or correct the task's topic",
        "permission_denied": "the worker may not publish there: grant it roles/pubsub.publisher on the topic",
    }.get(reason, error.details() or "no details")
    return Failed(reason, f"{topic}: {advice}")
