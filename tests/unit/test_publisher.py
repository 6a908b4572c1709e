"""The publisher and a resend against a server that refuses, hangs and fails, as the emulator cannot.

A failure stops its ordering key and no other. Tasks that were not tried have no outcome.
"""

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from unittest import mock

import grpc
import pytest
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
from google.pubsub_v1.types import PublishRequest, PublishResponse

from outbox.errors import NotReached, OutboxError
from outbox.message import MAX_REQUEST_BYTES, TASK_ID_ATTRIBUTE
from outbox_admin.changes import resending
from outbox_admin.changes.resending import message
from publishworker.pubsub.publisher import PubSubPublisher, topic_filter
from publishworker.types import Failed, LockedRow
from tests.support.fakes import serialized
from tests.support.rpc import Handler, PubSubServer, accept, hang, publisher_to, reasons, refuse, sent, to_message

TOPIC = "projects/project/topics/orders"


@pytest.fixture
def server() -> Iterator[PubSubServer]:
    """A server in Pub/Sub's place that accepts everything until a test changes that."""
    with PubSubServer() as running:
        yield running


@pytest.fixture
def publisher(server: PubSubServer) -> PubSubPublisher:
    return publisher_to(server.address)


def row(id: str, data: bytes = b"data", key: str | None = None) -> LockedRow:
    """Return a locked row whose message has another key than its column, which decides."""
    message = serialized(data, ordering_key="another") if data != b"broken" else b"\xff"
    return LockedRow(id, "orders", message, key, datetime.now(UTC), None, None)


def rows(ids: str, key: str | None = None) -> list[LockedRow]:
    return [row(id, key=key) for id in ids]


#: Bad in each way that needs no request to be found.
BAD = [row("large", bytes(10_400_000)), row("broken", b"broken")]
BAD_REASONS = {"large": "too_large", "broken": "undecodable"}


def requests(server: PubSubServer) -> list[list[str]]:
    return sorted([message.attributes[TASK_ID_ATTRIBUTE] for message in each.messages] for each in server.requests)


def received(server: PubSubServer) -> list[str]:
    return [message.attributes[TASK_ID_ATTRIBUTE] for each in server.requests for message in each.messages]


def test_a_failed_request_leaves_no_reference_cycle(publisher: PubSubPublisher, server: PubSubServer) -> None:
    """It would keep the messages of the batch in memory, because the worker collects garbage rarely."""
    server.publish = refuse(grpc.StatusCode.UNAVAILABLE)
    publisher.publish("orders", rows("ab"), 5)  # the first call imports
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        assert reasons(publisher.publish("orders", rows("ab"), 5)) == {"a": "unavailable", "b": "unavailable"}
        gc.collect()
        errors = [each for each in gc.garbage if isinstance(each, grpc.RpcError) and each.details() == "refused"]
        assert errors + [each for each in gc.garbage if isinstance(each, PublishRequest.pb())] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


ADVICE = {"PERMISSION_DENIED": "roles/pubsub.publisher", "NOT_FOUND": "topics create"}


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_a_failure_has_a_reason_and_advice(
    publisher: PubSubPublisher, server: PubSubServer, code: grpc.StatusCode
) -> None:
    """The reason is a metric's tag, the sentence is for an operator. No status is retried or raised here."""
    for details in ("refused", "", "no Getting metadata from plugin failed"):
        server.publish = refuse(code, details)
        outcomes = publisher.publish("orders", rows("ab"), 5, ["b"])
        assert reasons(outcomes) == dict.fromkeys("ab", code.name.lower())
        errors = [outcome.error for outcome in outcomes.values() if isinstance(outcome, Failed)]
        assert all(each.startswith(f"{TOPIC}: ") for each in errors)
        assert all(ADVICE.get(code.name, details or "no details") in each for each in errors)
    assert len(server.requests) == 6
    server.publish = accept
    assert sent(publisher.publish("orders", rows("a"), 5)) == {"a"}


def test_a_request_without_an_answer_fails_at_the_deadline(publisher: PubSubPublisher, server: PubSubServer) -> None:
    """All requests of a batch have one deadline. Only those without an answer fail."""
    seconds_left: list[float] = []

    def hang_on_poison(request: Any, context: grpc.ServicerContext) -> Any:
        seconds_left.append(context.time_remaining())
        return to_message(b"poison", hang)(request, context)

    server.publish = hang_on_poison
    hanging = [row("bad", b"poison"), row("worse", b"poison"), row("keyed", b"poison", key="k")]
    begin = time.monotonic()
    outcomes = publisher.publish("orders", [*hanging, *rows("abc")], 0.5, ["bad", "worse", "a"])
    took = time.monotonic() - begin
    assert sent(outcomes) == set("abc")
    assert reasons(outcomes) == dict.fromkeys(["bad", "worse", "keyed"], "deadline_exceeded")
    assert 0.5 <= took < 5
    assert len(seconds_left) == 5
    assert max(seconds_left) < 0.55  # gRPC rounds it up


def test_a_request_starts_only_if_half_of_the_timeout_remains(server: PubSubServer) -> None:
    """A healthy message must not fail because earlier ones of its key took long."""
    for third, in_time in ((2.4, "abc"), (2.6, "ab")):
        seconds = iter([0.0, 0.0, 1.0, third])
        publisher = publisher_to(server.address, clock=lambda seconds=seconds: next(seconds))
        assert set(publisher.publish("orders", rows("abc", "k"), 5, set("abc"))) == set(in_time)


def test_an_unreachable_server_is_distinguished_from_missing_credentials(server: PubSubServer) -> None:
    """The status of gRPC is the same, but a call without a token never leaves the worker."""
    assert reasons(publisher_to("127.0.0.1:1").publish("orders", rows("a"), 2)) == {"a": "unavailable"}

    def no_token(_context: Any, callback: Any) -> None:
        callback((), RuntimeError("no token today"))

    credentials = grpc.composite_channel_credentials(
        grpc.local_channel_credentials(), grpc.metadata_call_credentials(no_token)
    )
    channel = grpc.secure_channel(server.address, credentials)
    publisher = PubSubPublisher(PublisherGrpcTransport(channel=channel), "project")
    assert reasons(publisher.publish("orders", rows("a"), 5)) == {"a": "credentials"}
    assert server.requests == []


def test_single_tasks_are_published_in_parallel_with_the_rest(publisher: PubSubPublisher, server: PubSubServer) -> None:
    """Each has a request of its own, the rest has one, and none waits for another."""
    all_here = threading.Barrier(4, timeout=10)

    def wait_for_the_others(request: Any, context: grpc.ServicerContext) -> Any:
        all_here.wait()  # breaks, and fails the request, unless four are in flight at once
        return accept(request, context)

    server.publish = wait_for_the_others
    assert sent(publisher.publish("orders", rows("abcdef"), 8, {"b", "d", "e", "not there"})) == set("abcdef")
    assert requests(server) == [["a", "c", "f"], ["b"], ["d"], ["e"]]


def test_an_unsendable_message_fails_without_a_request(server: PubSubServer) -> None:
    publisher = publisher_to(server.address, lambda name: name != "projects/project/topics/secret")
    mixed = [*BAD, row("a"), row("keyed", key="k")]
    refusals = publisher.refusals("orders", mixed)
    assert reasons(refusals) == BAD_REASONS
    assert "bytes" in refusals["large"].error
    assert publisher.refusals("orders", rows("a")) == {}
    names = dict.fromkeys(["projects/nope", "", "ümlaut", "new\nline", "projects/p/topics/go"], "invalid_topic")
    for topic, reason in {**names, "secret": "topic_not_allowed"}.items():
        for outcomes in (publisher.refusals(topic, mixed), publisher.publish(topic, mixed, 5)):
            assert reasons(outcomes) == dict.fromkeys(["large", "broken", "a", "keyed"], reason)
    sentence = "projects/project/topics/secret matches no pattern of --allowed-topics"
    assert {failure.error for failure in publisher.refusals("secret", mixed).values()} == {sentence}
    assert server.requests == []


def test_topic_patterns_match_whole_names() -> None:
    """A star is any text of a name, everything else is literal. A pattern without a project has the worker's own."""
    for patterns, yes, no in (
        ("*", ["own:orders", "own:x"], ["other:orders"]),
        ("orders", ["own:orders"], ["own:orders2", "own:my-orders", "own:order", "own:Orders", "other:orders"]),
        ("orders*", ["own:orders", "own:orders-eu"], ["own:my-orders", "other:orders"]),
        ("o*-*s", ["own:o-s", "own:orders-eu-shops"], ["own:orders", "own:xo-s"]),
        ("projects/other/topics/*", ["other:orders", "other:x"], ["own:orders", "others:orders", "another:orders"]),
        ("projects/*/topics/orders", ["own:orders", "other:orders"], ["own:invoices"]),
        ("orders,projects/other/topics/in*", ["own:orders", "other:in"], ["other:orders", "own:in", "own:orders,"]),
        ("or.ers+", ["own:or.ers+"], ["own:orders+", "own:orders", "own:or.erss"]),
        ("a%20b~c", ["own:a%20b~c"], ["own:a b~c"]),
    ):
        allowed = topic_filter(patterns, "own")
        names = {each: "projects/{}/topics/{}".format(*each.split(":")) for each in yes + no}
        assert {each for each, name in names.items() if allowed(name)} == set(yes), patterns


def test_a_pattern_never_matches_across_a_slash() -> None:
    """A star ends where the name of a project or topic ends. A dot in a project is literal."""
    paths = ["topics/a/b", "x/topics/b", "topics/", "topics", "topics/orders/subscriptions/x"]
    for name in ["orders", "x/projects/own/topics/orders", *(f"projects/own/{path}" for path in paths)]:
        for patterns in ("orders*", "projects/*/topics/orders*", "a*b", "projects/o*n/topics/b", "*s/x"):
            assert not topic_filter(patterns, "own")(name)
        assert not topic_filter("*", "ow")(name)
    allowed = topic_filter("*", "example.com:shop")
    assert allowed("projects/example.com:shop/topics/orders")
    assert not allowed("projects/exampleXcom:shop/topics/orders")


def test_an_answer_with_too_few_message_ids_is_a_failure(publisher: PubSubPublisher, server: PubSubServer) -> None:
    """It does not say which messages were published, so none counts as published, and the key stops."""
    server.publish = lambda _request, _context: PublishResponse.pb()(message_ids=["1"])
    failure = Failed("unknown", f"{TOPIC}: Pub/Sub returned 1 message IDs for 2 messages")
    assert publisher.publish("orders", rows("ab"), 5) == {"a": failure, "b": failure}
    assert publisher.publish("orders", rows("abc", "k"), 5, {"c"}) == {"a": failure, "b": failure}


def prefix(count: int, key: str = "k", size: int = 4) -> list[LockedRow]:
    return [row(f"{key}{n}", bytes(size), key) for n in range(count)]


@pytest.mark.parametrize(("count", "size", "tasks"), [(5, 3_000_000, [3, 2]), (2_001, 1, [1000, 1000, 1])])
def test_a_prefix_too_large_for_a_request_is_published_in_several_in_order(
    publisher: PubSubPublisher, server: PubSubServer, count: int, size: int, tasks: list[int]
) -> None:
    """Histories notice if a request does not wait for the answer to the one before."""
    assert 3 * 3_000_000 < MAX_REQUEST_BYTES < 4 * 3_000_000
    large, small = prefix(count, "large", size), prefix(3, "small")
    assert sent(publisher.publish("orders", [*large, *small], 8)) == {each.id for each in (*large, *small)}
    assert [len(each.messages) for each in server.requests if each.messages[0].ordering_key == "large"] == tasks
    assert [id for id in received(server) if id.startswith("large")] == [each.id for each in large]


@pytest.mark.parametrize("bad", BAD, ids=BAD_REASONS)
def test_an_unsendable_message_stops_its_key(publisher: PubSubPublisher, bad: LockedRow) -> None:
    keyed = [*prefix(3), bad._replace(ordering_key="k"), row("after", key="k")]
    outcomes = publisher.publish("orders", [*keyed, row("loose")], 5)
    assert reasons(outcomes) == {bad.id: BAD_REASONS[bad.id]}
    assert sent(outcomes) == {"k0", "k1", "k2", "loose"}


REPLAY = "projects/project/topics/replay"


def to_resend(*ids: str, key: str | None = None, **data: bytes) -> list[LockedRow]:
    return [message(id, key, serialized(data.get(id, b"data")), datetime.now(UTC)) for id in ids]


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
    batch = to_resend("a", "bad", "b", "large", "c", key=key, bad=b"poison", large=bytes(10_400_000))
    broken = message("broken", key, b"\xff", datetime.now(UTC))
    refused = resending.send(publisher, REPLAY, [broken, *batch])
    assert {id: why.split(":")[0] for id, why in refused.items()} == {
        "broken": "undecodable",
        "bad": "invalid_argument",
        "large": "too_large",
    }
    assert refused["bad"] == f"invalid_argument: {REPLAY}: no schema"
    arrived = [id for id in dict.fromkeys(received(server)) if id != "bad"]
    assert (arrived if key else sorted(arrived)) == ["a", "b", "c"]


def test_after_an_outage_each_key_goes_on_with_its_first_message_that_is_not_published(
    publisher: PubSubPublisher, server: PubSubServer, no_waiting: list[float]
):
    answers: Iterator[Handler] = itertools.chain([refuse(grpc.StatusCode.UNAVAILABLE)] * 3, itertools.repeat(accept))

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        return next(answers)(request, context)

    server.publish = answer
    assert resending.send(publisher, REPLAY, to_resend(*"abc", key="key")) == {}
    assert received(server) == [*"abc"] * 4
    assert no_waiting == [resending.OUTAGE_PROBE.first] * 3


def test_a_topic_that_accepts_nothing_ends_the_resend_with_a_sentence(
    publisher: PubSubPublisher, server: PubSubServer, no_waiting: list[float]
):
    for status, error, sentence, seconds in (
        (grpc.StatusCode.NOT_FOUND, OutboxError, "does not exist. Create it: `gcloud pubsub topics create ", 0),
        (grpc.StatusCode.PERMISSION_DENIED, OutboxError, "Grant it roles/pubsub.publisher", 0),
        (grpc.StatusCode.UNAVAILABLE, NotReached, "has accepted no message for 60 s: .*refused", 60),
    ):
        server.publish = refuse(status)
        with pytest.raises(error, match=sentence) as raised:
            resending.send(publisher, REPLAY, to_resend("a", "b"))
        assert (type(raised.value), sum(no_waiting)) == (error, seconds)


def slow_publish(server: PubSubServer, *seconds: float) -> Callable[[Sequence[LockedRow]], dict[str, str]]:
    now, left = [0.0], [*seconds]
    poison = to_message(b"poison", refuse(grpc.StatusCode.INVALID_ARGUMENT, "no schema"))

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        if len(request.messages) > 1 and left:
            now[0] += left.pop(0)
        return poison(request, context)

    server.publish = answer
    publisher = publisher_to(server.address, clock=lambda: now[0])

    def publish(rows: Sequence[LockedRow]) -> dict[str, str]:
        outcomes = publisher.publish("orders", rows, 5)
        return {id: getattr(outcome, "reason", "sent") for id, outcome in outcomes.items()}

    return publish


@pytest.mark.parametrize(
    ("key", "seconds", "bound", "sizes"),
    [
        ("k", (1, 3), 10_000, [1, 1, 2, 2, 4]),  # of a key, the half in which the culprit is
        (None, (3,), 2, [1, 1, 2, 4]),  # the oldest are forgotten, and share a request again
    ],
)
def test_only_the_last_refused_tasks_are_published_singly(
    server: PubSubServer, key: str | None, seconds: tuple[float, ...], bound: int, sizes: list[int]
) -> None:
    publish = slow_publish(server, *seconds)
    with mock.patch("publishworker.pubsub.publisher.MAX_SEND_ALONE", bound):
        assert publish([row(id, b"poison" if id == "b" else b"data", key) for id in "abcd"]) == {}
    assert publish(rows("abcd", key)) == dict.fromkeys("abcd", "sent")
    assert sorted(len(request.messages) for request in server.requests) == sizes
