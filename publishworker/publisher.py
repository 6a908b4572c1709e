"""Pub/Sub: tasks in, an outcome for each out. The only module that talks to it.

Plain gRPC futures on the client's own channel: one request for many messages, no thread per batch, and a time limit
that is kept (the high-level publisher's futures can be given up, not stopped).
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol
from urllib.parse import quote

import grpc
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
from google.pubsub_v1.types import PublishRequest, PublishResponse

from outbox.errors import InvalidMessage
from outbox.message import check_topic
from publishworker import messages
from publishworker.failures import reason_of
from publishworker.task import Failed, Outcome, Row, Sent


class Publisher(Protocol):
    """What the relay needs of a publisher."""

    def publish(
        self, topic: str, rows: Sequence[Row], seconds: float, singly: Collection[str] = frozenset()
    ) -> dict[str, Outcome]:
        """Return Sent or Failed for each row that was tried within `seconds`; raises nothing.

        The rows with ids in `singly` share no request with others, so that they take none along.
        """

    def refusals(self, topic: str, rows: Sequence[Row]) -> dict[str, Failed]:
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
        self._publish = transport.grpc_channel.unary_unary(
            "/google.pubsub.v1.Publisher/Publish",
            request_serializer=PublishRequest.pb().SerializeToString,
            response_deserializer=PublishResponse.pb().FromString,
        )

    def publish(
        self, topic: str, rows: Sequence[Row], seconds: float, singly: Collection[str] = frozenset()
    ) -> dict[str, Outcome]:
        """See Publisher. All requests go out at once and share one deadline."""
        deadline = self._clock() + seconds
        name = messages.topic_name(topic, self._project)
        good, failed = self._prepared(name, rows)
        outcomes: dict[str, Outcome] = dict(failed)
        together = messages.requests(name, [pair for pair in good if pair[0] not in singly])
        alone = _alone(name, [pair for pair in good if pair[0] in singly])
        refused = self._send(chain(together, alone), name, deadline, outcomes)
        self._send(_alone(name, refused), name, deadline, outcomes)
        return outcomes

    def refusals(self, topic: str, rows: Sequence[Row]) -> dict[str, Failed]:
        """See Publisher."""
        name = messages.topic_name(topic, self._project)
        good, failed = self._prepared(name, rows)
        for [id], request in _alone(name, good):
            if failure := messages.too_large(request):
                failed[id] = failure
        return failed

    def _prepared(self, name: str, rows: Sequence[Row]) -> tuple[list[tuple[str, Any]], dict[str, Failed]]:
        """Return the ids and messages of what may be sent to the topic of that full name, and the failures."""
        try:
            check_topic(name)
        except InvalidMessage as error:
            return [], {row.id: Failed("invalid_topic", str(error)) for row in rows}
        if not self._allowed(name):
            failure = Failed("topic_not_allowed", f"{name} matches no pattern of --allowed-topics")
            return [], {row.id: failure for row in rows}
        good: list[tuple[str, Any]] = []
        failed: dict[str, Failed] = {}
        for row in rows:
            message = messages.decode(row)
            if isinstance(message, Failed):
                failed[row.id] = message
            else:
                good.append((row.id, message))
        return good, failed

    def _send(
        self, requests: Iterable[tuple[list[str], Any]], name: str, deadline: float, outcomes: dict[str, Outcome]
    ) -> list[tuple[str, Any]]:
        """Send `requests`, await every answer, note the outcomes.

        Returns the messages of requests that were refused as invalid and held several: nothing of such a request was
        published, and one message may be the culprit for all, so the caller sends them singly.
        """
        flights = []
        for ids, request in requests:
            if failure := messages.too_large(request):
                outcomes.update(dict.fromkeys(ids, failure))
                continue
            remaining = deadline - self._clock()
            if remaining <= 0:
                break  # not tried, so without an outcome: the tasks stay as they were
            header = (("x-goog-request-params", f"topic={quote(name, safe='')}"),)
            flights.append((ids, request, self._publish.future(request, timeout=remaining, metadata=header)))
        refused: list[tuple[str, Any]] = []
        for ids, request, future in flights:
            try:
                message_ids = future.result().message_ids
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT and len(ids) > 1:
                    refused.extend(zip(ids, request.messages, strict=True))
                else:
                    outcomes.update(dict.fromkeys(ids, failure_of(error, name)))
            else:
                outcomes.update(_sent(ids, message_ids, name))
        return refused


def _alone(name: str, pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[list[str], Any]]:
    for pair in pairs:
        yield from messages.requests(name, [pair])


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
