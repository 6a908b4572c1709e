"""A gRPC server that forwards every call to another one as it is, and counts: what a client asks for, and gets.

with Counting(emulators.spanner_host) as proxy:
    worker = start(SPANNER_EMULATOR_HOST=proxy.address)
    assert proxy.counts["ExecuteStreamingSql", "outbox-poll"] <= 70
"""

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc
from google.cloud.spanner_v1 import (
    BeginTransactionRequest,
    CommitRequest,
    ExecuteSqlRequest,
    PartialResultSet,
    ReadRequest,
)

#: Method and tag: that of the request, else that of its transaction, else nothing.
Key = tuple[str, str]

#: Calls at once; each holds a thread while it lasts.
THREADS = 64
#: Seconds from which on a time limit is none.
FOR_EVER = 1e6

_UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
_TAGGED = {
    "BeginTransaction": BeginTransactionRequest,
    "Commit": CommitRequest,
    "ExecuteSql": ExecuteSqlRequest,
    "ExecuteStreamingSql": ExecuteSqlRequest,
    "Read": ReadRequest,
    "StreamingRead": ReadRequest,
}
_WITH_ROWS = ("ExecuteStreamingSql", "StreamingRead")


class Counting:
    """Forwards to `target` ("host:port") on a loopback port. For calls with one request: no client streams.

    `counts` are the calls, `bytes` the serialized sizes of their answers, `rows` the rows in these, `shards` how many
    the statements' parameter of that name has.
    """

    def __init__(self, target: str) -> None:
        """Prepare; nothing is open before the block is entered."""
        self._target = target
        self._lock = threading.Lock()
        self.counts: Counter[Key] = Counter()
        self.bytes: Counter[Key] = Counter()
        self.rows: Counter[Key] = Counter()
        self.shards: Counter[Key] = Counter()
        self.address = ""

    def __enter__(self) -> Self:
        """Serve."""
        self._channel = grpc.insecure_channel(self._target, options=_UNLIMITED)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="counting")
        self._server = grpc.server(self._pool, options=_UNLIMITED)
        self._server.add_generic_rpc_handlers((_Handler(self),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what is open, and end."""
        self._server.stop(1).wait(5)  # in order, or clients log a line
        self._channel.close()
        self._pool.shutdown()

    def clear(self) -> None:
        """Begin again with nothing."""
        with self._lock:
            for counter in (self.counts, self.bytes, self.rows, self.shards):
                counter.clear()

    def forward(self, method: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Make the same call of the target, and answer what it answers. A unary call is a stream of one."""
        key, shards = key_of(method, request)
        self._add(self.counts, key, 1)
        self._add(self.shards, key, shards)
        remaining = context.time_remaining()
        call: Any = self._channel.unary_stream(method, _as_it_is, _as_it_is)(
            request,
            metadata=_sent(context.invocation_metadata()),
            timeout=remaining if remaining is not None and remaining < FOR_EVER else None,
        )
        if not context.add_callback(call.cancel):
            call.cancel()  # it has ended already
        counter = _Rows() if key[0] in _WITH_ROWS else None
        try:
            context.send_initial_metadata(call.initial_metadata())
            for answer in call:
                self._add(self.bytes, key, len(answer))
                if counter:
                    self._add(self.rows, key, counter.more(answer))
                yield answer
        except grpc.RpcError:
            context.set_trailing_metadata(call.trailing_metadata())
            context.abort(call.code(), call.details())
        context.set_trailing_metadata(call.trailing_metadata())

    def _add(self, counter: Counter[Key], key: Key, number: int) -> None:
        with self._lock:
            counter[key] += number


class _Handler(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """Serves every method there is."""

    def __init__(self, counting: Counting) -> None:
        self._counting = counting

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method

        def forward(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            return self._counting.forward(method, request, context)

        return grpc.unary_stream_rpc_method_handler(forward)


def key_of(method: str, request: bytes) -> tuple[Key, int]:
    """Return under what a call is counted, and how many shards it asks for."""
    name = method.rpartition("/")[2]
    if name not in _TAGGED:
        return (name, ""), 0
    message: Any = _TAGGED[name].pb().FromString(request)
    tag = message.request_options.request_tag or message.request_options.transaction_tag
    shards = message.params["shards"] if name.startswith("Execute") and "shards" in message.params else ()
    return (name, tag), len(shards)


def _as_it_is(data: bytes) -> bytes:
    return data


def _sent(metadata: Any) -> tuple[tuple[str, str | bytes], ...]:
    return tuple((key, value) for key, value in metadata if not key.startswith(("grpc-", "user-agent")))


class _Rows:
    """Counts the rows of one stream; values come in a row's order, and one may be cut over several answers."""

    def __init__(self) -> None:
        self._columns = 1
        self._values = self._rows = 0

    def more(self, answer: bytes) -> int:
        """Return how many rows this answer has finished."""
        part: Any = PartialResultSet.pb().FromString(answer)
        self._columns = len(part.metadata.row_type.fields) or self._columns
        self._values += len(part.values) - part.chunked_value
        before, self._rows = self._rows, self._values // self._columns
        return self._rows - before
