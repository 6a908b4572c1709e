"""What a resend publishes again after a failure, on a server that refuses and fails as the emulator cannot."""

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from outbox.admin.resend import Message
from outbox.errors import NotReached, OutboxError
from outbox.message import TASK_ID_ATTRIBUTE
from publishworker.pubsub import resending
from publishworker.pubsub.publisher import PubSubPublisher
from tests.support.fakes import serialized
from tests.support.pubsub_server import Handler, PubSubServer, accept, refuse, to_message

TOPIC = "projects/project/topics/replay"


def messages(*ids: str, key: str | None = None, **data: bytes) -> list[Message]:
    return [Message(id, key, serialized(data.get(id, b"data")), datetime.now(UTC)) for id in ids]


def received(server: PubSubServer) -> list[str]:
    return [message.attributes[TASK_ID_ATTRIBUTE] for each in server.requests for message in each.messages]


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only a wait moves."""
    waits: list[float] = []
    time = SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append)
    monkeypatch.setattr(resending, "time", time)
    return waits


@pytest.mark.parametrize("key", [None, "key"])
def test_a_refused_message_is_named_and_the_others_go_on(publisher: PubSubPublisher, server: PubSubServer, key: str):
    """Also those behind it in its ordering key, and behind one that needs no request to be refused."""
    server.publish = to_message(b"poison", refuse(grpc.StatusCode.INVALID_ARGUMENT, "no schema"))
    batch = messages("a", "bad", "b", "large", "c", key=key, bad=b"poison", large=bytes(10_400_000))
    broken = Message("broken", key, b"\xff", datetime.now(UTC))
    refused = resending.send(publisher, TOPIC, [broken, *batch])
    assert {id: why.split(":")[0] for id, why in refused.items()} == {
        "broken": "undecodable",
        "bad": "invalid_argument",
        "large": "too_large",
    }
    assert refused["bad"] == f"invalid_argument: {TOPIC}: no schema"
    arrived = [id for id in dict.fromkeys(received(server)) if id != "bad"]
    assert (arrived if key else sorted(arrived)) == ["a", "b", "c"]


def test_after_an_outage_each_key_goes_on_with_its_first_message_that_is_not_published(
    publisher: PubSubPublisher, server: PubSubServer, no_waiting: list[float]
):
    answers: Iterator[Handler] = itertools.chain([refuse(grpc.StatusCode.UNAVAILABLE)] * 3, itertools.repeat(accept))

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        return next(answers)(request, context)

    server.publish = answer
    assert resending.send(publisher, TOPIC, messages(*"abc", key="key")) == {}
    assert received(server) == [*"abc"] * 4
    assert no_waiting == [resending.OUTAGE_PROBE.first] * 3


@pytest.mark.parametrize(
    "case",
    [
        (grpc.StatusCode.NOT_FOUND, OutboxError, "the topic does not exist. Create it: `gcloud pubsub topics create "),
        (grpc.StatusCode.PERMISSION_DENIED, OutboxError, "Grant it roles/pubsub.publisher"),
        (grpc.StatusCode.UNAVAILABLE, NotReached, "Pub/Sub has accepted no message for 60 s: .*refused"),
    ],
)
def test_a_topic_that_accepts_nothing_ends_the_resend_with_a_sentence(
    publisher: PubSubPublisher, server: PubSubServer, no_waiting: list[float], case: tuple[Any, type[OutboxError], str]
):
    status, error, sentence = case
    server.publish = refuse(status)
    with pytest.raises(error, match=sentence) as raised:
        resending.send(publisher, TOPIC, messages("a", "b"))
    assert type(raised.value) is error
    assert sum(no_waiting) == (resending.PATIENCE_SECONDS if error is NotReached else 0)
