"""The publisher against a server that refuses, waits and fails: what the emulator cannot do."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
from google.pubsub_v1.types import PublishResponse

from outbox.message import TASK_ID_ATTRIBUTE
from publishworker.pubsub import messages
from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.task import Failed, Outcome, Row, Sent
from tests.support.fakes import FakePublisher, serialized
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


def broken(id: str) -> Row:
    """Return a row whose bytes are no message."""
    return Row(id, "orders", b"\xff\xff\xff", None, datetime.now(UTC), None, None)


def refuse_poison(request: Any, context: grpc.ServicerContext) -> Any:
    """Refuse a request because of one of its messages."""
    if any(message.data == b"poison" for message in request.messages):
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "poison")
    return accept(request, context)


def ids_of(request: Any) -> list[str]:
    """Return the tasks of a request."""
    return [message.attributes[TASK_ID_ATTRIBUTE] for message in request.messages]


def reasons(outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    """Return why each failed that did."""
    return {id: outcome.reason for id, outcome in outcomes.items() if isinstance(outcome, Failed)}


def test_a_group_is_one_request(publisher: PubSubPublisher, server: PubSubServer) -> None:
    """A thousand tasks cost one round trip; a bare topic id is one of the worker's project."""
    outcomes = publisher.publish("orders", [row(str(n)) for n in range(1000)], 5)
    assert [len(request.messages) for request in server.requests] == [1000]
    assert server.requests[0].topic == TOPIC
    assert all(isinstance(each, Sent) for each in outcomes.values())


def test_a_request_refused_as_invalid_goes_out_singly(publisher: PubSubPublisher, server: PubSubServer) -> None:
    """Nothing of it was published, and one message may be the culprit for all: only that one fails."""
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


class Slowly:
    """A publisher, and a server that takes seconds over each request of several messages; so says the clock."""

    def __init__(self, server: PubSubServer, *seconds: float) -> None:
        """Let the requests of several messages take so long, one after the other."""
        self.seconds, left = 0.0, [*seconds]

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            if len(request.messages) > 1 and left:
                self.seconds += left.pop(0)
            return refuse_poison(request, context)

        server.publish = answer
        transport = PublisherGrpcTransport(channel=grpc.insecure_channel(server.address))
        self.publisher = PubSubPublisher(transport, "project", clock=lambda: self.seconds)

    def publish(self, rows: Sequence[Row]) -> dict[str, str]:
        """Publish, and return what came of it."""
        outcomes = self.publisher.publish("orders", rows, 5)
        return {id: getattr(outcome, "reason", "sent") for id, outcome in outcomes.items()}


@pytest.mark.parametrize("key", [None, "k"])
def test_what_was_refused_together_and_not_told_apart_in_time_goes_singly_next(
    server: PubSubServer, key: str | None
) -> None:
    """Else it would be refused together for ever. Once its outcome is known it is a task as any."""
    slowly = Slowly(server, 3)
    rows = [row("a", ordering_key=key), row("bad", b"poison", ordering_key=key), row("c", ordering_key=key)]
    assert slowly.publish(rows) == {}
    assert slowly.publish(rows) == {"a": "sent", "bad": "invalid_argument"} | ({} if key else {"c": "sent"})
    assert slowly.publish([row("a", ordering_key=key), row("d", ordering_key=key)]) == {"a": "sent", "d": "sent"}
    sizes = [len(request.messages) for request in server.requests]
    assert sizes == [3, 1, 1, *([] if key else [1]), 2]


def test_of_a_key_only_those_go_singly_that_were_refused_last(server: PubSubServer) -> None:
    """The half in which the culprit is; the other one goes as a request."""
    slowly = Slowly(server, 1, 3)
    rows = [row(id, b"poison" if id == "b" else b"data", ordering_key="k") for id in "abcd"]
    assert slowly.publish(rows) == {}
    mended = [row(id, ordering_key="k") for id in "abcd"]
    assert slowly.publish(mended) == dict.fromkeys("abcd", "sent")
    assert [len(request.messages) for request in server.requests] == [4, 2, 1, 1, 2]


def test_the_memory_of_what_was_refused_is_bounded(server: PubSubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are forgotten, and refused together once more."""
    monkeypatch.setattr("publishworker.pubsub.publisher.MAX_REFUSED", 2)
    slowly = Slowly(server, 3)
    rows = [row(id, b"poison" if id == "b" else b"data") for id in "abcd"]
    assert slowly.publish(rows) == {}
    assert slowly.publish([row(id) for id in "abcd"]) == dict.fromkeys("abcd", "sent")
    assert sorted(len(request.messages) for request in server.requests[1:]) == [1, 1, 2]


def test_a_later_request_has_half_of_the_time_or_is_not_tried(server: PubSubServer) -> None:
    """A healthy message must not fail because those before it in its key took long."""
    transport = PublisherGrpcTransport(channel=grpc.insecure_channel(server.address))
    keyed = [row(id, ordering_key="k") for id in "abc"]
    for third, sent in ((2.4, "abc"), (2.6, "ab")):
        seconds = iter([0.0, 0.0, 1.0, third])
        publisher = PubSubPublisher(transport, "project", clock=lambda seconds=seconds: next(seconds))
        assert set(publisher.publish("orders", keyed, 5, set("abc"))) == set(sent)


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


def test_requests_are_cut_by_count_and_bytes_and_lanes_by_key() -> None:
    """At most 1,000 messages, 10,000,000 bytes; one ordering key; order kept."""

    def pairs(count: int, size: int = 1, key: str | None = None) -> list[tuple[str, Any]]:
        return [(f"{key}{n}", messages.decode(row(f"{key}{n}", bytes(size), ordering_key=key))) for n in range(count)]

    assert [len(ids) for ids, _ in messages.requests(TOPIC, pairs(2001))] == [1000, 1000, 1]
    assert [len(ids) for ids, _ in messages.requests(TOPIC, pairs(5, 3_000_000))] == [3, 2]
    mixed = [*pairs(2, key="x"), *pairs(2), *pairs(1, key="y")]
    lanes = [[ids for ids, _ in lane.requests] for lane in messages.lanes(TOPIC, mixed, {"None1", "not there"})]
    assert lanes == [[["None0"]], [["None1"]], [["x0", "x1"]], [["y0"]]]
    lanes = [[ids for ids, _ in lane.requests] for lane in messages.lanes(TOPIC, pairs(5, key="x"), {"x0", "x3"})]
    assert lanes == [[["x0"], ["x1", "x2"], ["x3"], ["x4"]]]
    assert messages.lanes(TOPIC, [], set()) == []
    for _, request in messages.requests(TOPIC, pairs(30, 1_000_000)):
        assert messages.too_large(request) is None


def test_tasks_of_their_own_go_out_beside_the_rest_at_the_same_time(
    publisher: PubSubPublisher, server: PubSubServer
) -> None:
    """Each of them in a request of its own, the rest in one, none after another's answer; so does the fake."""
    all_here = threading.Barrier(4, timeout=10)

    def wait_for_the_others(request: Any, context: grpc.ServicerContext) -> Any:
        all_here.wait()  # breaks, and fails the request, unless four are in flight at once
        return accept(request, context)

    server.publish = wait_for_the_others
    outcomes = publisher.publish("orders", [row(id) for id in "abcdef"], 8, {"b", "d", "e", "not there"})
    assert {id for id, outcome in outcomes.items() if isinstance(outcome, Sent)} == set("abcdef")
    assert sorted(ids_of(request) for request in server.requests) == [["a", "c", "f"], ["b"], ["d"], ["e"]]
    fake = FakePublisher("orders", project="project")
    fake.publish("orders", [row(id) for id in "abcdef"], 8, {"b", "d", "e", "not there"})
    assert sorted(fake.requests) == [["a", "c", "f"], ["b"], ["d"], ["e"]]


def test_one_of_them_that_hangs_fails_alone(publisher: PubSubPublisher, server: PubSubServer) -> None:
    """At the deadline of the group, under which all requests are, and takes none along."""
    release = threading.Event()
    seconds_left: list[float] = []

    def hang_on_poison(request: Any, context: grpc.ServicerContext) -> Any:
        seconds_left.append(context.time_remaining())
        if any(message.data == b"poison" for message in request.messages):
            release.wait(20)
        return accept(request, context)

    server.publish = hang_on_poison
    rows = [row("bad", b"poison"), row("worse", b"poison"), row("a"), row("b"), row("c")]
    begin = time.monotonic()
    outcomes = publisher.publish("orders", rows, 0.7, ["bad", "worse", "a"])
    took = time.monotonic() - begin
    release.set()
    assert {id for id, outcome in outcomes.items() if isinstance(outcome, Sent)} == {"a", "b", "c"}
    assert {outcome.reason for outcome in outcomes.values() if isinstance(outcome, Failed)} == {"deadline_exceeded"}
    assert 0.7 <= took < 5
    assert len(seconds_left) == 4
    assert max(seconds_left) < 0.75  # gRPC rounds it up


def test_tasks_of_their_own_that_are_refused_cost_no_second_request(
    publisher: PubSubPublisher, server: PubSubServer
) -> None:
    """A request of one message needs no singling out; the rest is tried again singly."""
    server.publish = refuse(grpc.StatusCode.INVALID_ARGUMENT)
    outcomes = publisher.publish("orders", [row(id) for id in "abc"], 5, {"a"})
    assert {outcome.reason for outcome in outcomes.values() if isinstance(outcome, Failed)} == {"invalid_argument"}
    assert sorted(ids_of(request) for request in server.requests) == [["a"], ["b"], ["b", "c"], ["c"]]


def test_tasks_of_their_own_may_be_bad_in_every_way(publisher: PubSubPublisher, server: PubSubServer) -> None:
    """What cannot be sent is found before a request, as without `singly`."""
    bad = [row("large", bytes(10_400_000)), broken("broken"), row("good")]
    outcomes = publisher.publish("orders", bad, 5, ["large", "broken", "good"])
    assert reasons(outcomes) == {"large": "too_large", "broken": "undecodable"}
    assert isinstance(outcomes["good"], Sent)
    assert [ids_of(request) for request in server.requests] == [["good"]]


def test_refusals_ask_nobody(server: PubSubServer) -> None:
    """What can be known without the service: bytes, size and name; what remains may be sent."""
    transport = PublisherGrpcTransport(channel=grpc.insecure_channel(server.address))
    publisher = PubSubPublisher(transport, "project", lambda name: name != "projects/project/topics/secret")
    rows = [row("large", bytes(10_400_000)), broken("broken"), row("a"), row("keyed", ordering_key="k")]
    refusals = publisher.refusals("orders", rows)
    assert reasons(refusals) == {"large": "too_large", "broken": "undecodable"}
    assert "bytes" in refusals["large"].error
    assert set(reasons(publisher.refusals("no topic", rows)).items()) == {(each.id, "invalid_topic") for each in rows}
    assert set(reasons(publisher.refusals("secret", rows)).items()) == {(each.id, "topic_not_allowed") for each in rows}
    assert publisher.refusals("orders", [row("a")]) == {}
    assert server.requests == []


def test_a_topic_that_is_not_allowed_gets_nothing(server: PubSubServer) -> None:
    """Whoever can write to the table cannot reach every topic that the worker can; the failure names the setting."""
    transport = PublisherGrpcTransport(channel=grpc.insecure_channel(server.address))
    publisher = PubSubPublisher(transport, "project", messages.topic_filter("orders", "project"))
    failure = Failed("topic_not_allowed", "projects/other/topics/orders matches no pattern of --allowed-topics")
    outcomes = publisher.publish("projects/other/topics/orders", [row("a"), row("b"), broken("c")], 5, ["b"])
    assert outcomes == {"a": failure, "b": failure, "c": failure}
    assert publisher.publish("projects/other/topics/orders", [row("a")], 5) == {"a": failure}
    assert server.requests == []
    for topic in ("orders", TOPIC):
        assert isinstance(publisher.publish(topic, [row("a")], 5)["a"], Sent)


@pytest.mark.parametrize(
    ("patterns", "yes", "no"),
    [
        ("*", ["own:orders", "own:x"], ["other:orders"]),
        ("orders", ["own:orders"], ["own:orders2", "own:my-orders", "own:order", "own:Orders", "other:orders"]),
        ("orders*", ["own:orders", "own:orders-eu"], ["own:my-orders", "other:orders"]),
        ("*orders", ["own:orders", "own:my-orders"], ["own:orders-eu"]),
        ("o*-*s", ["own:o-s", "own:orders-eu-shops"], ["own:orders", "own:xo-s"]),
        ("projects/other/topics/*", ["other:orders", "other:x"], ["own:orders", "others:orders", "another:orders"]),
        ("projects/oth*/topics/orders", ["other:orders", "oth:orders"], ["own:orders", "other:orders2"]),
        ("projects/*/topics/orders", ["own:orders", "other:orders"], ["own:invoices"]),
        ("orders,projects/other/topics/in*", ["own:orders", "other:in"], ["other:orders", "own:in", "own:orders,"]),
        ("a,b,c*", ["own:a", "own:b", "own:cc"], ["own:ab", "own:aa", "own:bc", "own:"]),
        ("or.ers+", ["own:or.ers+"], ["own:orders+", "own:orders", "own:or.erss"]),
        ("a%20b~c", ["own:a%20b~c"], ["own:a b~c"]),
    ],
)
def test_patterns_of_topics(patterns: str, yes: list[str], no: list[str]) -> None:
    """A star is any text of a name; everything else is itself; a pattern without a project is of the worker's own."""
    allowed = messages.topic_filter(patterns, "own")
    names = {each: "projects/{}/topics/{}".format(*each.split(":")) for each in yes + no}
    assert {each for each, name in names.items() if allowed(name)} == set(yes)


@pytest.mark.parametrize(
    "name",
    [
        "projects/own/topics/a/b",
        "projects/own/x/topics/b",
        "projects/own/topics/",
        "projects/own/topics",
        "orders",
        "x/projects/own/topics/orders",
        "projects/own/topics/orders/subscriptions/x",
    ],
)
def test_a_pattern_never_matches_across_a_slash(name: str) -> None:
    """The star ends where the name of a project or of a topic ends."""
    for patterns in ("orders*", "projects/*/topics/orders*", "a*b", "projects/o*n/topics/b", "*s/x"):
        assert not messages.topic_filter(patterns, "own")(name)
    assert not messages.topic_filter("*", "ow")(name)


def test_the_workers_own_project_is_no_pattern() -> None:
    """A project id may hold a dot, which is itself; and a colon."""
    allowed = messages.topic_filter("*", "example.com:shop")
    assert allowed("projects/example.com:shop/topics/orders")
    assert not allowed("projects/exampleXcom:shop/topics/orders")


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_no_status_leaves_the_publisher_as_an_exception(
    publisher: PubSubPublisher, server: PubSubServer, code: grpc.StatusCode
) -> None:
    """Each is an outcome, with the reason of its row in the table and what the service said or what to do."""
    server.publish = refuse(code, "")
    outcomes = publisher.publish("orders", [row("a"), row("b")], 5, ["b"])
    assert reasons(outcomes) == {"a": code.name.lower(), "b": code.name.lower()}
    assert all(outcome.error.startswith(f"{TOPIC}: ") for outcome in outcomes.values() if isinstance(outcome, Failed))
    server.publish = accept
    assert isinstance(publisher.publish("orders", [row("a")], 5)["a"], Sent)


def test_credentials_without_a_token_are_told_from_an_outage(server: PubSubServer) -> None:
    """The call never leaves: gRPC's status is that of a service that is away."""

    def no_token(_context: Any, callback: Any) -> None:
        callback((), RuntimeError("no token today"))

    credentials = grpc.composite_channel_credentials(
        grpc.local_channel_credentials(), grpc.metadata_call_credentials(no_token)
    )
    channel = grpc.secure_channel(server.address, credentials)
    publisher = PubSubPublisher(PublisherGrpcTransport(channel=channel), "project")
    [outcome] = publisher.publish("orders", [row("a")], 5).values()
    assert isinstance(outcome, Failed)
    assert outcome.reason == "credentials"
    assert server.requests == []


def test_an_answer_with_too_few_message_ids_is_a_failure(publisher: PubSubPublisher, server: PubSubServer) -> None:
    """Which of the messages it is about nobody knows, so none counts as sent."""
    server.publish = lambda _request, _context: PublishResponse.pb()(message_ids=["1"])
    failure = Failed("unknown", f"{TOPIC}: the answer has 1 message ids for 2 messages")
    assert publisher.publish("orders", [row("a"), row("b")], 5) == {"a": failure, "b": failure}
    # Nor does anything of its key go out after it.
    keyed = [row(id, ordering_key="k") for id in "abc"]
    assert publisher.publish("orders", keyed, 5, {"c"}) == {"a": failure, "b": failure}
