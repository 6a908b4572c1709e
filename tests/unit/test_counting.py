"""The counting proxy: a client does not notice it, and it counts what there was."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.cloud.spanner_v1 import CommitRequest, ExecuteSqlRequest, PartialResultSet

from tests.support.counting import Counting
from tests.support.waiting import eventually

SERVICE = "google.spanner.v1.Spanner"


class Target:
    """A server that answers each method as `answers` says."""

    def __init__(self) -> None:
        """Answer nothing."""
        self.answers: dict[str, Callable[[bytes, grpc.ServicerContext], Any]] = {}
        self.metadata: dict[str, Any] = {}

    def answer(self, request: bytes, context: grpc.ServicerContext, name: str) -> Any:
        """Keep what came with the call, and answer it."""
        self.metadata = dict(context.invocation_metadata())
        return self.answers[name](request, context)

    def handlers(self) -> Any:
        """Return what the server serves."""

        def unary(name: str) -> Any:
            return grpc.unary_unary_rpc_method_handler(lambda *call: self.answer(*call, name))

        def stream(name: str) -> Any:
            return grpc.unary_stream_rpc_method_handler(lambda *call: self.answer(*call, name))

        methods = {"Commit": unary("Commit"), "ExecuteStreamingSql": stream("ExecuteStreamingSql")}
        return grpc.method_handlers_generic_handler(SERVICE, methods)


@pytest.fixture
def target() -> Target:
    """What is behind the proxy."""
    return Target()


@pytest.fixture
def proxy(target: Target) -> Iterator[Counting]:
    """Run a server, and the proxy of it."""
    with ThreadPoolExecutor(8) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((target.handlers(),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with Counting(f"127.0.0.1:{port}") as made:
            yield made
        server.stop(0).wait(5)


@pytest.fixture
def channel(proxy: Counting) -> Iterator[grpc.Channel]:
    """A client's channel to the proxy."""
    with grpc.insecure_channel(proxy.address) as made:
        yield made


def commit(channel: grpc.Channel) -> Any:
    """Return the client's method of a unary call."""
    return channel.unary_unary(f"/{SERVICE}/Commit")


def execute(channel: grpc.Channel) -> Any:
    """Return the client's method of a stream."""
    return channel.unary_stream(f"/{SERVICE}/ExecuteStreamingSql")


def test_a_unary_call_is_forwarded_and_counted_by_its_tag(
    target: Target, proxy: Counting, channel: grpc.Channel
) -> None:
    """The bytes go through as they are, with the client's own metadata, in both directions."""
    request = CommitRequest.pb()(session="s", request_options={"transaction_tag": "outbox-relay"}).SerializeToString()

    def echo(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.send_initial_metadata((("before", "1"),))
        context.set_trailing_metadata((("after", "2"),))
        return request

    target.answers["Commit"] = echo
    answer, call = commit(channel).with_call(request, metadata=(("x-goog-request-params", "a=b"),), timeout=5)
    assert answer == request
    assert ("before", "1") in call.initial_metadata()
    assert ("after", "2") in call.trailing_metadata()
    assert target.metadata["x-goog-request-params"] == "a=b"
    assert proxy.counts == {("Commit", "outbox-relay"): 1}
    assert proxy.bytes == {("Commit", "outbox-relay"): len(request)}
    proxy.clear()
    assert not proxy.counts


def test_the_rows_of_a_stream_are_counted(target: Target, proxy: Counting, channel: grpc.Channel) -> None:
    """A value that is cut in two is one value."""
    first = PartialResultSet.pb()(chunked_value=True)
    for name in ("a", "b"):
        first.metadata.row_type.fields.add(name=name)
    for value in ("1", "2", "3", "fo"):
        first.values.add(string_value=value)
    second = PartialResultSet.pb()()
    for value in ("ur", "5", "6"):
        second.values.add(string_value=value)
    parts = [first.SerializeToString(), second.SerializeToString()]
    target.answers["ExecuteStreamingSql"] = lambda _request, _context: iter(parts)
    request = ExecuteSqlRequest.pb()(sql="SELECT", request_options={"request_tag": "outbox-poll"})
    request.params.update({"shards": ["0", "7", "8"]})
    assert list(execute(channel)(request.SerializeToString(), timeout=5)) == parts
    assert proxy.rows == {("ExecuteStreamingSql", "outbox-poll"): 3}
    assert proxy.shards == {("ExecuteStreamingSql", "outbox-poll"): 3}


def test_an_error_is_forwarded_with_what_comes_with_it(target: Target, proxy: Counting, channel: grpc.Channel) -> None:
    """The client retries by the code and by what the trailing metadata says."""

    def refuse(_request: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_trailing_metadata((("google.rpc.retryinfo-bin", b"\x00\x01"),))
        context.abort(grpc.StatusCode.ABORTED, "again")
        return b""

    target.answers["Commit"] = refuse
    with pytest.raises(grpc.RpcError) as caught:
        commit(channel)(b"", timeout=5)
    error: Any = caught.value
    assert (error.code(), error.details()) == (grpc.StatusCode.ABORTED, "again")
    assert ("google.rpc.retryinfo-bin", b"\x00\x01") in error.trailing_metadata()
    assert proxy.counts == {("Commit", ""): 1}


def test_a_cancelled_call_is_cancelled_behind_the_proxy(target: Target, channel: grpc.Channel) -> None:
    """Nothing goes on for a client that is gone."""
    begun, ended = threading.Event(), threading.Event()

    def endless(_request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.add_callback(ended.set)
        yield b""
        begun.set()
        ended.wait(10)

    target.answers["ExecuteStreamingSql"] = endless
    call = execute(channel)(b"", timeout=5)
    assert next(call) == b""
    eventually(begun.is_set)
    call.cancel()
    eventually(ended.is_set)


def test_a_time_limit_holds_behind_the_proxy(target: Target, channel: grpc.Channel) -> None:
    """The target knows how long the client waits."""
    remaining = []

    def note(_request: bytes, context: grpc.ServicerContext) -> bytes:
        remaining.append(context.time_remaining())
        return b""

    target.answers["Commit"] = note
    commit(channel)(b"", timeout=7)
    assert 0 < remaining[0] <= 8  # gRPC rounds
