"""The inbox with `max_batch` on the emulators: one effect for each task, whatever fails, and few requests."""

import contextlib
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from google.cloud.pubsub_v1 import SubscriberClient
from google.cloud.pubsub_v1.types import FlowControl
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.instance import Instance

import outbox
from outbox import inbox
from outbox.table import ddl
from tests.support.inbox_subscriber import EFFECTS
from tests.support.pubsub import PubSub
from tests.support.spanner import fresh_database, query, record_requests
from tests.support.waiting import eventually

SECONDS = 60.0
CALLS = ("begin_transaction", "streaming_read", "execute_streaming_sql", "execute_sql", "commit", "rollback")


@pytest.fixture
def shop(spanner_instance: Instance) -> Iterator[Database]:
    with fresh_database(spanner_instance, [*ddl.statements(), EFFECTS]) as created:
        yield created


@pytest.fixture
def outcomes(set_metrics: Any) -> Counter[str]:
    counted: Counter[str] = Counter()
    set_metrics(SimpleNamespace(increment=lambda _name, _value, tags: counted.update([tags[1].partition(":")[2]])))
    return counted


def effects(shop: Database) -> Counter[str]:
    return Counter(id for [id] in query(shop, "SELECT TaskId FROM Effects"))


def ids_of(messages: Any) -> list[str]:
    return [of.attributes[outbox.TASK_ID_ATTRIBUTE] for of in messages]


def by_mutation(transaction: Any, task_ids: list[str]) -> None:
    transaction.insert("Effects", ("EffectId", "TaskId"), [(str(uuid.uuid4()), each) for each in task_ids])


def messages(ids: list[str], keys: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "data": str(n).encode(), "attributes": {outbox.TASK_ID_ATTRIBUTE: id},
            "ordering_key": f"k{n % keys}" if keys else "",
        }
        for n, id in enumerate(ids)
    ]  # fmt: skip


@contextlib.contextmanager
def pulling(subscription: str, *callbacks: Callable[[Any], None]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for callback in callbacks:
            subscriber = stack.enter_context(SubscriberClient())
            control = FlowControl(max_messages=100)
            future = subscriber.subscribe(subscription, callback, flow_control=control)
            stack.callback(future.result, SECONDS)
            stack.callback(future.cancel)
        yield


def test_a_batch_costs_one_read_and_one_commit(shop: Database, pubsub: PubSub, outcomes: Counter[str]) -> None:
    """Messages of an ordering key come one after the other, in their order."""
    topic, order = pubsub.new_topic(), list[str]()
    subscription, ids = pubsub.new_subscription(topic), [str(uuid.uuid4()) for _ in range(50)]

    @inbox.BatchHandler(shop, consumer="billing", max_batch=50, max_delay=SECONDS)
    def receive(transaction: Any, messages: Any) -> None:
        order.extend(ids_of(messages))
        by_mutation(transaction, ids_of(messages))

    query(shop, "SELECT 1")  # connects
    requests = record_requests(shop, *CALLS)
    pubsub.publisher.publish(topic=topic, messages=messages(ids))
    with pulling(subscription.name, receive):
        eventually(lambda: outcomes["processed"] == 50, seconds=SECONDS)
    assert [name for name, _ in requests] == ["streaming_read", "commit"]
    assert sorted(order) == sorted(ids)
    assert effects(shop) == dict.fromkeys(ids, 1)


def test_the_messages_of_an_ordering_key_keep_their_order(
    shop: Database, pubsub: PubSub, outcomes: Counter[str]
) -> None:
    topic, order = pubsub.new_topic(), dict[str, list[int]]()
    subscription, ids = pubsub.new_subscription(topic, ordered=True), [str(uuid.uuid4()) for _ in range(40)]

    @inbox.BatchHandler(shop, consumer="billing", max_batch=10, max_delay=0.05, default_retry_delay=0.02)
    def receive(transaction: Any, messages: Any) -> None:
        by_mutation(transaction, ids_of(messages))
        for of in messages:
            order.setdefault(of.ordering_key, []).append(int(of.data))

    for key in range(4):
        some = [each for each in messages(ids, keys=4) if each["ordering_key"] == f"k{key}"]
        pubsub.publisher.publish(topic=topic, messages=some)
    with pulling(subscription.name, receive):
        eventually(lambda: outcomes["processed"] == 40, seconds=SECONDS)
    assert {key: sorted(numbers) for key, numbers in order.items()} == order
    assert effects(shop) == dict.fromkeys(ids, 1)
