"""The same scenarios on the fake publisher and on the Pub/Sub emulator."""

from datetime import UTC, datetime
from typing import Any, Protocol

import pytest

from outbox.message import TASK_ID_ATTRIBUTE
from publishworker.connection import open_pubsub
from publishworker.pubsub.publisher import Publisher, PubSubPublisher
from publishworker.task import Failed, Row, Sent
from tests.support.fakes import FakePublisher, serialized
from tests.support.pubsub import Subscription


class Harness(Protocol):
    """A publisher, one topic that exists, and what arrived there."""

    publisher: Publisher
    topic: str

    def received(self, count: int) -> list[Any]:
        """Return the messages that arrived, at least `count`."""


class FakeHarness:
    """Behind the fake."""

    def __init__(self) -> None:
        """Know one topic."""
        self.topic = "projects/test-project/topics/orders"
        self.publisher = self._fake = FakePublisher("orders")

    def received(self, count: int) -> list[Any]:
        """See Harness."""
        assert len(self._fake.published) >= count
        return [message for _, _, message in self._fake.published]


class PubSubHarness:
    """Behind the emulator."""

    def __init__(self, topic: str, subscription: Subscription) -> None:
        """Subscribe to one topic."""
        self.topic = topic
        self._subscription = subscription
        self.publisher = PubSubPublisher(open_pubsub(), "test-project")

    def received(self, count: int) -> list[Any]:
        """See Harness."""
        return [type(each).pb(each) for each in self._subscription.pull_until(count)]


@pytest.fixture(params=["fake", "pubsub"])
def harness(request: pytest.FixtureRequest) -> Harness:
    """Each scenario runs on both."""
    if request.param == "fake":
        return FakeHarness()
    return PubSubHarness(request.getfixturevalue("topic"), request.getfixturevalue("subscription"))


def row(id: str, topic: str = "orders", data: bytes | None = None, ordering_key: str | None = None) -> Row:
    """Return a row under the lock."""
    return Row(id, topic, serialized() if data is None else data, ordering_key, datetime.now(UTC), None, None)


def test_published_tasks_are_sent_with_message_ids(harness: Harness) -> None:
    """Each task of a group has a message id of its own."""
    outcomes = harness.publisher.publish(harness.topic, [row("a"), row("b")], 5)
    message_ids = {outcome.message_id for outcome in outcomes.values() if isinstance(outcome, Sent)}
    assert set(outcomes) == {"a", "b"}
    assert len(message_ids) == 2


def test_the_message_arrives_with_the_columns_id_and_ordering_key(harness: Harness) -> None:
    """The columns are the truth: the id attribute and the ordering key come from the row, the rest as registered."""
    data = serialized(b"\x00\xffbytes", attributes={TASK_ID_ATTRIBUTE: "old", "kept": "yes"}, ordering_key="old")
    harness.publisher.publish(harness.topic, [row("new", data=data, ordering_key="key")], 5)
    [message] = harness.received(1)
    assert message.data == b"\x00\xffbytes"
    assert dict(message.attributes) == {TASK_ID_ATTRIBUTE: "new", "kept": "yes"}
    assert message.ordering_key == "key"


def test_a_missing_topic_fails_its_tasks(harness: Harness) -> None:
    """The outcome names the topic and its reason; nothing is raised."""
    outcomes = harness.publisher.publish("projects/test-project/topics/missing", [row("a"), row("b")], 5)
    assert {type(each) for each in outcomes.values()} == {Failed}
    assert {each.reason for each in outcomes.values() if isinstance(each, Failed)} == {"not_found"}


def test_a_missing_topic_fails_every_task_of_its_own_request(harness: Harness) -> None:
    """However the tasks are divided into requests."""
    rows = [row("a"), row("b"), row("c")]
    outcomes = harness.publisher.publish("projects/test-project/topics/missing", rows, 5, {"a", "c"})
    assert {id: outcome.reason for id, outcome in outcomes.items() if isinstance(outcome, Failed)} == {
        "a": "not_found",
        "b": "not_found",
        "c": "not_found",
    }


def test_tasks_that_share_no_request_arrive_once_each(harness: Harness) -> None:
    """With the rest, and with an id that is not among the rows; one that is bad fails alone."""
    rows = [row("a"), row("b", data=b"\xff\xff\xff"), row("c", ordering_key="key"), row("d")]
    outcomes = harness.publisher.publish(harness.topic, rows, 5, ["b", "c", "a", "not there"])
    assert {id for id, outcome in outcomes.items() if isinstance(outcome, Sent)} == {"a", "c", "d"}
    assert isinstance(outcomes["b"], Failed)
    arrived = [message.attributes[TASK_ID_ATTRIBUTE] for message in harness.received(3)]
    assert sorted(arrived) == ["a", "c", "d"]


def test_refusals_are_the_failures_that_need_no_service(harness: Harness) -> None:
    """Nothing is published, and a topic that is missing is not noticed."""
    rows = [row("good"), row("bad", data=b"\xff\xff\xff"), row("empty", data=b"")]
    for topic in (harness.topic, "projects/test-project/topics/missing"):
        refusals = harness.publisher.refusals(topic, rows)
        assert refusals == {"bad": Failed("undecodable", "Data is not a serialized google.pubsub.v1.PubsubMessage")}
    harness.publisher.publish(harness.topic, [row("later")], 5)
    assert [message.attributes[TASK_ID_ATTRIBUTE] for message in harness.received(1)] == ["later"]


def test_an_undecodable_task_costs_its_group_nothing(harness: Harness) -> None:
    """Bytes that are no PubsubMessage fail alone."""
    outcomes = harness.publisher.publish(harness.topic, [row("bad", data=b"\xff\xff\xff"), row("good")], 5)
    assert isinstance(outcomes["good"], Sent)
    assert outcomes["bad"] == Failed("undecodable", "Data is not a serialized google.pubsub.v1.PubsubMessage")


def test_empty_data_is_a_message(harness: Harness) -> None:
    """The id attribute is always there, so Pub/Sub takes it."""
    outcomes = harness.publisher.publish(harness.topic, [row("empty", data=b"")], 5)
    assert isinstance(outcomes["empty"], Sent)


def test_ordering_keys_of_all_kinds_go_out_together(harness: Harness) -> None:
    """Pub/Sub refuses a request that mixes keys; the publisher never makes one."""
    rows = [row("a", ordering_key="x"), row("b", ordering_key="y"), row("c"), row("d", ordering_key="x")]
    outcomes = harness.publisher.publish(harness.topic, rows, 5)
    assert all(isinstance(each, Sent) for each in outcomes.values())
    assert len(harness.received(4)) == 4


def test_nothing_to_publish_is_no_request(harness: Harness) -> None:
    """An empty group has no outcome."""
    assert harness.publisher.publish(harness.topic, [], 5) == {}
