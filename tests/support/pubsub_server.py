"""A gRPC server in Pub/Sub's place that answers as a test tells it, such as with failures.

The emulator knows no permissions, no outages and few limits.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
from google.pubsub_v1.types import GetTopicRequest, PublishRequest, PublishResponse, Topic

from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.types import Answer, Failed, Published
from tests.support.rpc import Served

Handler = Callable[[Any, grpc.ServicerContext], Any]


class PubSubServer(Served):
    """`publish` and `get_topic` are the answers; assign to them. `requests` are the publish requests seen."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.publish: Handler = accept
        self.get_topic: Handler = lambda request, _context: Topic.pb()(name=request.topic)

    def forward(self, method: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        if method.endswith("/Publish"):
            self.requests.append(publishing := PublishRequest.pb().FromString(request))
            yield self.publish(publishing, context).SerializeToString()
        else:
            assert method.endswith("/GetTopic")
            yield self.get_topic(GetTopicRequest.pb().FromString(request), context).SerializeToString()


def accept(request: Any, _context: grpc.ServicerContext) -> Any:
    return PublishResponse.pb()(message_ids=[str(n) for n, _ in enumerate(request.messages)])


def refuse(code: grpc.StatusCode, details: str = "refused") -> Handler:
    def answer(_request: Any, context: grpc.ServicerContext) -> Any:
        context.abort(code, details)

    return answer


def to_message(data: bytes, answer: Handler) -> Handler:
    return lambda request, context: (answer if any(message.data == data for message in request.messages) else accept)(
        request, context
    )


def publisher_to(address: str, *arguments: Any, **options: Any) -> PubSubPublisher:
    # gRPC shares connections by address: one that failed would make a later server on the same port look unavailable.
    options_of_channel = [("grpc.use_local_subchannel_pool", 1)]
    transport = PublisherGrpcTransport(channel=grpc.insecure_channel(address, options_of_channel))
    return PubSubPublisher(transport, "project", *arguments, **options)


def reasons(outcomes: Mapping[str, Answer]) -> dict[str, str]:
    return {id: outcome.reason for id, outcome in outcomes.items() if isinstance(outcome, Failed)}


def sent(outcomes: Mapping[str, Answer]) -> set[str]:
    return {id for id, outcome in outcomes.items() if isinstance(outcome, Published)}
