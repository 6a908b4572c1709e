"""The same scenarios on the fake publisher and on the Pub/Sub emulator."""

from datetime import UTC, datetime
from typing import Any

import pytest

from outbox.message import TASK_ID_ATTRIBUTE
from outbox.program.channels import open_pubsub
from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.types import Failed, LockedRow, Published
from tests.support.fakes import FakePublisher, serialized
from tests.support.pubsub import Subscription
from tests.support.spanner import place

UNDECODABLE = b"\xff\xff\xff"
REFUSAL = Failed("undecodable", "Data is not a serialized google.pubsub.v1.PubsubMessage")
MISSING = "projects/test-project/topics/missing"


class FakeHarness:
    def __init__(self) -> None:
        self.topic = "projects/test-project/topics/orders"
        self.publisher: PubSubPublisher = FakePublisher("orders")

    def received(self, count: int) -> list[Any]:
        assert isinstance(self.publisher, FakePublisher)
        assert len(self.publisher.published) >= count
        return [message for _, _, message in self.publisher.published]


class PubSubHarness:
    def __init__(self, topic: str, subscription: Subscription) -> None:
        self.topic = topic
        self.publisher: PubSubPublisher = PubSubPublisher(open_pubsub(place()), "test-project")
        self._subscription = subscription

    def received(self, count: int) -> list[Any]:
        return [type(each).pb(each) for each in self._subscription.pull_until(count)]


Harness = FakeHarness | PubSubHarness


@pytest.fixture(params=["fake", "pubsub"])
def harness(request: pytest.FixtureRequest) -> Harness:
    if request.param == "fake":
        return FakeHarness()
    return PubSubHarness(request.getfixturevalue("topic"), request.getfixturevalue("subscription"))


def row(id: str, data: bytes | None = None, ordering_key: str | None = None) -> LockedRow:
    return LockedRow(id, "orders", serialized() if data is None else data, ordering_key, datetime.now(UTC), None, None)


def test_each_published_task_has_a_message_id(harness: Harness) -> None:
    """Empty data is a message. An empty batch has no outcome."""
    outcomes = harness.publisher.publish(harness.topic, [row("a"), row("b"), row("empty", data=b"")], 5)
    message_ids = {outcome.message_id for outcome in outcomes.values() if isinstance(outcome, Published)}
    assert set(outcomes) == {"a", "b", "empty"}
    assert len(message_ids) == 3
    assert harness.publisher.publish(harness.topic, [], 5) == {}


def test_the_message_arrives_with_the_columns_id_and_ordering_key(harness: Harness) -> None:
    """The ID attribute and the ordering key come from the row, the rest as registered."""
    data = serialized(b"\x00\xffbytes", attributes={TASK_ID_ATTRIBUTE: "old", "kept": "yes"}, ordering_key="old")
    harness.publisher.publish(harness.topic, [row("new", data=data, ordering_key="key")], 5)
    [message] = harness.received(1)
    assert message.data == b"\x00\xffbytes"
    assert dict(message.attributes) == {TASK_ID_ATTRIBUTE: "new", "kept": "yes"}
    assert message.ordering_key == "key"


@pytest.mark.parametrize("alone", [(), ("a", "c")])
def test_a_missing_topic_fails_its_tasks(harness: Harness, alone: tuple[str, ...]) -> None:
    """However the tasks are divided into requests, each fails with the reason; nothing is raised."""
    outcomes = harness.publisher.publish(MISSING, [row("a"), row("b"), row("c")], 5, alone)
    assert {id: outcome.reason for id, outcome in outcomes.items() if isinstance(outcome, Failed)} == dict.fromkeys(
        "abc", "not_found"
    )


def test_tasks_published_singly_arrive_once_each(harness: Harness) -> None:
    """Together with the rest, and with an ID that is not among the rows. A bad task fails alone."""
    rows = [row("a"), row("b", data=UNDECODABLE), row("c", ordering_key="key"), row("d")]
    outcomes = harness.publisher.publish(harness.topic, rows, 5, ["b", "c", "a", "not there"])
    assert {id for id, outcome in outcomes.items() if isinstance(outcome, Published)} == {"a", "c", "d"}
    assert isinstance(outcomes["b"], Failed)
    arrived = [message.attributes[TASK_ID_ATTRIBUTE] for message in harness.received(3)]
    assert sorted(arrived) == ["a", "c", "d"]


def test_refusals_need_no_service(harness: Harness) -> None:
    """Nothing is published, and a missing topic is not noticed. A publish fails the same task, and only that one."""
    rows = [row("good"), row("bad", data=UNDECODABLE), row("empty", data=b"")]
    for topic in (harness.topic, MISSING):
        assert harness.publisher.refusals(topic, rows) == {"bad": REFUSAL}
    outcomes = harness.publisher.publish(harness.topic, [row("bad", data=UNDECODABLE), row("later")], 5)
    assert isinstance(outcomes["later"], Published)
    assert outcomes["bad"] == REFUSAL
    assert [message.attributes[TASK_ID_ATTRIBUTE] for message in harness.received(1)] == ["later"]


def test_several_ordering_keys_are_published_together(harness: Harness) -> None:
    """Pub/Sub refuses a request that mixes keys; the publisher never sends one."""
    rows = [row("a", ordering_key="x"), row("b", ordering_key="y"), row("c"), row("d", ordering_key="x")]
    outcomes = harness.publisher.publish(harness.topic, rows, 5)
    assert all(isinstance(each, Published) for each in outcomes.values())
    assert len(harness.received(4)) == 4
