"""The publisher against a server that refuses, waits and fails: what the emulator cannot do."""

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport

from publishworker import messages
from publishworker.publisher import PubSubPublisher
from publishworker.task import Failed, Row, Sent
from tests.support.fakes import serialized
from tests.support.pubsub_server import PubSubServer, accept, pubsub_server, refuse

TOPIC = "projects/project/topics/orders"


@pytest.fixture
def server() -> Iterator[PubSubServer]:
    """A server that takes everything until told otherwise."""
    with pubsub_server() as running:
        yield running


@pytest.fixture
def publisher(server: PubSubServer) -> PubSubPublisher:
    """A publisher to it."""
    return PubSubPublisher(PublisherGrpcTransport(channel=grpc.insecure_channel(server.address)), "project")


def row(id: str, data: bytes = b"data", **fields: Any) -> Row:
    """Return a row under the lock."""
    ordering_key = fields.pop("ordering_key", None)
    return Row(id, "orders", serialized(data, **fields), ordering_key, datetime.now(UTC), None, None)


def test_a_group_is_one_request(publisher: PubSubPublisher, server: PubSubServer) -> None:
    """A thousand tasks cost one round trip; a bare topic id is one of the worker's project."""
    outcomes = publisher.publish("orders", [row(str(n)) for n in range(1000)], 5)
    assert [len(request.messages) for request in server.requests] == [1000]
    assert server.requests[0].topic == TOPIC
    assert all(isinstance(each, Sent) for each in outcomes.values())


def test_a_request_refused_as_invalid_goes_out_singly(publisher: PubSubPublisher, server: PubSubServer) -> None:
    """Nothing of it was published, and one message may be the culprit for all: only that one fails."""

    def refuse_poison(request: Any, context: grpc.ServicerContext) -> Any:
        if any(message.data == b"poison" for message in request.messages):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "poison")
        return accept(request, context)

    server.publish = refuse_poison
    outcomes = publisher.publish("orders", [row("a"), row("bad", b"poison"), row("b")], 5)
    assert isinstance(outcomes["a"], Sent)
    assert isinstance(outcomes["b"], Sent)
    assert outcomes["bad"] == Failed("invalid_argument", f"{TOPIC}: poison")
    assert sorted(len(request.messages) for request in server.requests) == [1, 1, 1, 3]


@pytest.mark.parametrize(
    ("code", "reason", "says"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, "permission_denied", "roles/pubsub.publisher"),
        (grpc.StatusCode.NOT_FOUND, "not_found", "topics create"),
        (grpc.StatusCode.UNAVAILABLE, "unavailable", "refused"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "resource_exhausted", "refused"),
        (grpc.StatusCode.UNAUTHENTICATED, "unauthenticated", "refused"),
    ],
)
def test_a_failure_says_why_and_what_to_do(
    publisher: PubSubPublisher, server: PubSubServer, code: grpc.StatusCode, reason: str, says: str
) -> None:
    """The reason is bounded (a metric's tag), the sentence is for a person; no retry, no exception."""
    server.publish = refuse(code)
    [outcome] = publisher.publish("orders", [row("a")], 5).values()
    assert isinstance(outcome, Failed)
    assert outcome.reason == reason
    assert says in outcome.error
    assert TOPIC in outcome.error
    assert len(server.requests) == 1


def test_an_answer_that_does_not_come_is_given_up_in_time(publisher: PubSubPublisher, server: PubSubServer) -> None:
    """The group's limit holds over all its requests; in doubt the tasks count as not sent."""
    release = threading.Event()

    def hang(request: Any, context: grpc.ServicerContext) -> Any:
        release.wait(20)
        return accept(request, context)

    server.publish = hang
    begin = time.monotonic()
    outcomes = publisher.publish("orders", [row("a"), row("b", ordering_key="k")], 0.5)
    took = time.monotonic() - begin
    release.set()
    assert {type(each) for each in outcomes.values()} == {Failed}
    assert {each.reason for each in outcomes.values() if isinstance(each, Failed)} == {"deadline_exceeded"}
    assert took < 5


def test_what_is_not_tried_in_time_has_no_outcome(server: PubSubServer) -> None:
    """The time ran out before the singles: they stay as they were, not failed."""
    seconds = iter([0.0, 1.0, 99.0, 99.0])
    transport = PublisherGrpcTransport(channel=grpc.insecure_channel(server.address))
    publisher = PubSubPublisher(transport, "project", clock=lambda: next(seconds))
    server.publish = refuse(grpc.StatusCode.INVALID_ARGUMENT)
    assert publisher.publish("orders", [row("a"), row("b")], 5) == {}
    assert len(server.requests) == 1


def test_a_body_that_no_request_can_hold_fails_alone(publisher: PubSubPublisher, server: PubSubServer) -> None:
    """Another writer's row of 10 MiB is not sent to the service, and costs its neighbours nothing."""
    outcomes = publisher.publish("orders", [row("large", bytes(10_400_000)), row("small")], 5)
    assert isinstance(outcomes["small"], Sent)
    assert isinstance(outcomes["large"], Failed)
    assert outcomes["large"].reason == "too_large"
    assert [len(request.messages) for request in server.requests] == [1]


@pytest.mark.parametrize("topic", ["projects/nope", "", "ümlaut", "new\nline", "projects/p/topics/go"])
def test_a_name_that_no_topic_can_have_is_not_sent(
    publisher: PubSubPublisher, server: PubSubServer, topic: str
) -> None:
    """Another writer's row: refused here with a reason, not once for each task at the service."""
    outcomes = publisher.publish(topic, [row("a"), row("b")], 5)
    assert {outcome.reason for outcome in outcomes.values() if isinstance(outcome, Failed)} == {"invalid_topic"}
    assert server.requests == []


def test_a_server_that_is_not_there_is_a_failure_like_others() -> None:
    """Connection refused: unavailable, within the limit."""
    channel = grpc.insecure_channel("127.0.0.1:1")
    publisher = PubSubPublisher(PublisherGrpcTransport(channel=channel), "project")
    [outcome] = publisher.publish("orders", [row("a")], 2).values()
    assert isinstance(outcome, Failed)
    assert outcome.reason == "unavailable"


def test_requests_are_cut_by_count_bytes_and_key() -> None:
    """At most 1,000 messages, 10,000,000 bytes, one ordering key; order kept."""

    def pairs(count: int, size: int = 1, key: str | None = None) -> list[tuple[str, Any]]:
        return [(f"{key}{n}", messages.decode(row(f"{key}{n}", bytes(size), ordering_key=key))) for n in range(count)]

    assert [len(ids) for ids, _ in messages.requests(TOPIC, pairs(2001))] == [1000, 1000, 1]
    assert [len(ids) for ids, _ in messages.requests(TOPIC, pairs(5, 3_000_000))] == [3, 2]
    mixed = [*pairs(2, key="x"), *pairs(2), *pairs(1, key="y")]
    assert [ids for ids, _ in messages.requests(TOPIC, mixed)] == [["x0", "x1"], ["None0", "None1"], ["y0"]]
    for _, request in messages.requests(TOPIC, pairs(30, 1_000_000)):
        assert messages.too_large(request) is None
