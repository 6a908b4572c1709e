"""gRPC servers of the tests: one forwards calls to another server, or fails; one answers in the place of Pub/Sub.

with Proxy(emulators.spanner_host) as network, Faulty(emulators.spanner_host, network) as proxy:
    worker = start(SPANNER_EMULATOR_HOST=network.address)
    with proxy.failing(lambda method: Fault.LOST if method == "Commit" else None):
        ...
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from threading import Event, Lock
from typing import Any, Self

import grpc
from google.cloud.spanner_v1 import CommitRequest, RollbackRequest
from google.iam.v1.policy_pb2 import Policy
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
from google.pubsub_v1.types import GetTopicRequest, PublishRequest, PublishResponse, Topic

from outbox.message import RawPublishRequest
from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.types import Answer, Failed, Published
from tests.support.proxy import Proxy

#: Calls at once; each holds a thread while it lasts.
THREADS = 64
#: Max seconds until an answer reaches the client. If the connection breaks before, the answer is lost.
ON_ITS_WAY = 0.2
#: A time limit of at least this many seconds counts as none.
FOR_EVER = 1e6

UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
_ROLLBACK = "/google.spanner.v1.Spanner/Rollback"


class Served:
    """A server on a loopback port whose answers are those of `forward`. For calls with one request."""

    address = ""

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="forwarding")
        self._server = grpc.server(self._pool, options=UNLIMITED)
        self._server.add_generic_rpc_handlers((_Handler(self.forward),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self._server.stop(1).wait(5)  # in order, or clients log a line
        self._pool.shutdown()

    def forward(self, method: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        raise NotImplementedError


class Forwarding(Served):
    """Forwards to `target` ("host:port")."""

    def __init__(self, target: str) -> None:
        """Prepare; nothing is sent before the first call."""
        self._channel = grpc.insecure_channel(target, options=UNLIMITED)

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self._channel.close()

    def forward(self, method: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        remaining = context.time_remaining()
        call: Any = self._channel.unary_stream(method, _as_it_is, _as_it_is)(
            request,
            metadata=_sent(context.invocation_metadata()),
            timeout=remaining if remaining is not None and remaining < FOR_EVER else None,
        )
        if not context.add_callback(call.cancel):
            call.cancel()  # it has ended already
        try:
            context.send_initial_metadata(call.initial_metadata())
            yield from call
        except grpc.RpcError:
            context.set_trailing_metadata(call.trailing_metadata())
            context.abort(call.code(), call.details())
        context.set_trailing_metadata(call.trailing_metadata())


#: A commit with the transaction tag of claims, unlike those of heartbeats.
RELAY_COMMIT = "Commit of tasks"


class Fault(Enum):
    #: It is not forwarded: UNAVAILABLE.
    REFUSED = "refused"
    #: It is forwarded, and its answer is lost: all connections are cut.
    LOST = "lost"
    #: Of a Commit: the transaction is rolled back, the answer is ABORTED.
    ABORTED = "aborted"


class Faulty(Forwarding):
    """Stands behind a proxy of connections, its `network`, in which calls may fail as well.

    `fault` is called with the method of each call; `seen` counts its answers. A commit of claimed tasks has the method
    RELAY_COMMIT, if `fault` says nothing of Commit.
    """

    def __init__(self, target: str, network: Proxy) -> None:
        super().__init__(target)
        self.network = network
        self.fault: Callable[[str], Fault | None] = lambda _method: None
        self.seen: Counter[tuple[str, Fault | None]] = Counter()
        #: Messages of publish requests that were under way when their connections broke, or whose answers were lost.
        self.unanswered = 0
        self._publishing: dict[object, tuple[int, float]] = {}
        self._lock = Lock()

    def __enter__(self) -> Self:
        super().__enter__()
        self.network.target = self.address
        self.network.on_break = self._count_unanswered
        return self

    @contextlib.contextmanager
    def failing(self, fault: Callable[[str], Fault | None]) -> Iterator[None]:
        self.fault = fault
        try:
            yield
        finally:
            self.fault = lambda _method: None

    def forward(self, method: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        name = method.rpartition("/")[2]
        if name != "Publish":
            yield from self._forward(method, name, request, context)
            return
        call = object()
        messages = len(RawPublishRequest.FromString(request).messages)
        with self._lock:
            self._publishing[call] = (messages, float("inf"))
        try:
            yield from self._forward(method, name, request, context)
        finally:
            with self._lock:
                self._publishing[call] = (messages, time.monotonic() + ON_ITS_WAY)

    def _count_unanswered(self) -> None:
        with self._lock:
            now = time.monotonic()
            self._publishing = {call: each for call, each in self._publishing.items() if each[1] > now}
            self.unanswered += sum(messages for messages, _ in self._publishing.values())

    def _forward(self, method: str, name: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        with self._lock:
            fault = self.fault(name)
            if name == "Commit" and fault is None and b"outbox-relay" in request:
                name = RELAY_COMMIT
                fault = self.fault(name)
            self.seen[name, fault] += 1
        if fault is Fault.REFUSED:
            context.abort(grpc.StatusCode.UNAVAILABLE, "refused")
        if fault is Fault.ABORTED:
            self._roll_back(request, context)
            context.abort(grpc.StatusCode.ABORTED, "aborted")
        answers = super().forward(method, request, context)
        if fault is Fault.LOST:
            for _ in answers:
                pass
            self.network.cut()
            context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        yield from answers

    def _roll_back(self, request: bytes, context: grpc.ServicerContext) -> None:
        commit: Any = CommitRequest.pb().FromString(request)
        if not commit.transaction_id:  # one that the Commit would have begun
            return
        message = RollbackRequest.pb()(session=commit.session, transaction_id=commit.transaction_id)
        self._channel.unary_unary(_ROLLBACK, _as_it_is, _as_it_is)(
            message.SerializeToString(), metadata=_sent(context.invocation_metadata()), timeout=10
        )


class _Handler(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    def __init__(self, forward: Callable[[str, bytes, grpc.ServicerContext], Iterator[bytes]]) -> None:
        self._forward = forward

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method

        def forward(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            return self._forward(method, request, context)

        return grpc.unary_stream_rpc_method_handler(forward)


def _as_it_is(data: bytes) -> bytes:
    return data


def _sent(metadata: Any) -> tuple[tuple[str, str | bytes], ...]:
    return tuple((key, value) for key, value in metadata if not key.startswith(("grpc-", "user-agent")))


Handler = Callable[[Any, grpc.ServicerContext], Any]


class PubSubServer(Served):
    """`publish` and `get_topic` are the answers; assign to them. `requests` are the publish requests seen."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.publish: Handler = accept
        self.get_topic: Handler = lambda request, _context: Topic.pb()(name=request.topic)
        self.policy = Policy()

    def forward(self, method: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        if method.endswith("/Publish"):
            self.requests.append(publishing := PublishRequest.pb().FromString(request))
            yield self.publish(publishing, context).SerializeToString()
        elif method.endswith("/GetIamPolicy"):
            yield self.policy.SerializeToString()
        else:
            assert method.endswith("/GetTopic")
            yield self.get_topic(GetTopicRequest.pb().FromString(request), context).SerializeToString()


def accept(request: Any, _context: grpc.ServicerContext) -> Any:
    return PublishResponse.pb()(message_ids=[str(n) for n, _ in enumerate(request.messages)])


def hang(request: Any, context: grpc.ServicerContext) -> Any:
    given_up = Event()
    if context.add_callback(given_up.set):
        given_up.wait()
    return accept(request, context)


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
