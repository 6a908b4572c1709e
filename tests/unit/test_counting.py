"""The counting proxy: a client does not notice it, and it counts each call, byte, row and shard."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import grpc
import pytest
from google.cloud.spanner_v1 import CommitRequest, ExecuteSqlRequest, PartialResultSet

from tests.support.counting import Counting

COMMIT, EXECUTE = "/google.spanner.v1.Spanner/Commit", "/google.spanner.v1.Spanner/ExecuteStreamingSql"


@pytest.fixture
def server() -> mock.Mock:
    """The methods of the server behind the proxy."""
    return mock.Mock(**{"execute.experimental_non_blocking": False})  # gRPC asks for it


@pytest.fixture
def proxy(server: mock.Mock) -> Iterator[Counting]:
    """Run the server, and the proxy of it."""
    methods = {
        "Commit": grpc.unary_unary_rpc_method_handler(server.commit),
        "ExecuteStreamingSql": grpc.unary_stream_rpc_method_handler(server.execute),
    }
    with ThreadPoolExecutor(8) as pool:
        target = grpc.server(pool)
        target.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("google.spanner.v1.Spanner", methods),))
        port = target.add_insecure_port("127.0.0.1:0")
        target.start()
        with Counting(f"127.0.0.1:{port}") as made:
            yield made
        target.stop(0).wait(5)


@pytest.fixture
def channel(proxy: Counting) -> Iterator[grpc.Channel]:
    """A client's channel to the proxy."""
    with grpc.insecure_channel(proxy.address) as made:
        yield made


def test_a_unary_call_is_forwarded_and_counted_by_its_tag(
    server: mock.Mock, proxy: Counting, channel: grpc.Channel
) -> None:
    """The bytes go through as they are, with the metadata, in both directions."""
    request = CommitRequest.pb()(session="s", request_options={"transaction_tag": "outbox-relay"}).SerializeToString()

    def echo(request: bytes, context: grpc.ServicerContext) -> bytes:
        assert ("x-goog-request-params", "a=b") in [tuple(each) for each in context.invocation_metadata()]
        context.send_initial_metadata((("before", "1"),))
        context.set_trailing_metadata((("after", "2"),))
        return request

    server.commit.side_effect = echo
    metadata = (("x-goog-request-params", "a=b"),)
    answer, call = channel.unary_unary(COMMIT).with_call(request, metadata=metadata, timeout=5)
    assert answer == request
    assert ("before", "1") in call.initial_metadata()
    assert ("after", "2") in call.trailing_metadata()
    assert proxy.counts == {("Commit", "outbox-relay"): 1}
    assert proxy.bytes == {("Commit", "outbox-relay"): len(request)}
    proxy.clear()
    assert not proxy.counts


def test_the_rows_of_a_stream_are_counted(server: mock.Mock, proxy: Counting, channel: grpc.Channel) -> None:
    """A value that is cut in two is one value."""
    first, second = PartialResultSet.pb()(chunked_value=True), PartialResultSet.pb()()
    for name in ("a", "b"):
        first.metadata.row_type.fields.add(name=name)
    for part, values in ((first, ("1", "2", "3", "fo")), (second, ("ur", "5", "6"))):
        for value in values:
            part.values.add(string_value=value)
    parts = [first.SerializeToString(), second.SerializeToString()]
    server.execute.side_effect = lambda _request, _context: iter(parts)
    request = ExecuteSqlRequest.pb()(sql="SELECT", request_options={"request_tag": "outbox-poll"})
    request.params.update({"shards": ["0", "7", "8"]})
    assert list(channel.unary_stream(EXECUTE)(request.SerializeToString(), timeout=5)) == parts
    assert proxy.rows == {("ExecuteStreamingSql", "outbox-poll"): 3}
    assert proxy.shards == {("ExecuteStreamingSql", "outbox-poll"): 3}


def test_an_error_is_forwarded_with_what_comes_with_it(
    server: mock.Mock, proxy: Counting, channel: grpc.Channel
) -> None:
    """The client retries by the code and by the trailing metadata."""

    def refuse(_request: bytes, context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata((("google.rpc.retryinfo-bin", b"\x00\x01"),))
        context.abort(grpc.StatusCode.ABORTED, "again")

    server.commit.side_effect = refuse
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(COMMIT)(b"", timeout=5)
    error: Any = caught.value
    assert (error.code(), error.details()) == (grpc.StatusCode.ABORTED, "again")
    assert ("google.rpc.retryinfo-bin", b"\x00\x01") in error.trailing_metadata()
    assert proxy.counts == {("Commit", ""): 1}
