"""A gRPC server in Pub/Sub's place that answers as a test tells it, such as with failures.

The emulator knows no permissions, no outages and few limits.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
from google.pubsub_v1.types import GetTopicRequest, PublishRequest, PublishResponse, Topic

from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.types import Answer, Failed, Published

Handler = Callable[[Any, grpc.ServicerContext], Any]


class PubSubServer:
    """`publish` and `get_topic` are the answers; assign to them. `requests` are the publish requests seen."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.address = ""
        self.publish: Handler = accept
        self.get_topic: Handler = lambda request, _context: Topic.pb()(name=request.topic)

    def _publish(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        return self.publish(request, context)

    def _get_topic(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self.get_topic(request, context)

    def handlers(self) -> Any:
        def unary(answer: Handler, request: Any, response: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(
                answer,
                request_deserializer=request.pb().FromString,
                response_serializer=response.pb().SerializeToString,
            )

        return grpc.method_handlers_generic_handler(
            "google.pubsub.v1.Publisher",
            {
                "Publish": unary(self._publish, PublishRequest, PublishResponse),
                "GetTopic": unary(self._get_topic, GetTopicRequest, Topic),
            },
        )


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


@contextlib.contextmanager
def pubsub_server() -> Iterator[PubSubServer]:
    server = PubSubServer()
    with ThreadPoolExecutor(8) as pool:
        running = grpc.server(pool, options=[("grpc.max_receive_message_length", -1)])
        running.add_generic_rpc_handlers((server.handlers(),))
        server.address = f"127.0.0.1:{running.add_insecure_port('127.0.0.1:0')}"
        running.start()
        try:
            yield server
        finally:
            running.stop(0).wait(5)
