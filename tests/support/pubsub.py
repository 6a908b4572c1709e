"""Topics and pull subscriptions on a Pub/Sub emulator, by the generated clients: no threads, no batching."""

import contextlib
import dataclasses
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from google.pubsub_v1 import PublisherClient, SubscriberClient
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport
from google.pubsub_v1.types import PubsubMessage

from tests.support.spanner import PROJECT
from tests.support.waiting import eventually

#: Seconds for one call; the emulator answers in milliseconds.
CALL_SECONDS = 10.0
#: Seconds until a pulled message that is not acknowledged comes again: longer than any test.
ACK_DEADLINE = 600
#: Messages in one pull.
PULL_SIZE = 1_000


@dataclasses.dataclass(frozen=True, slots=True)
class Subscription:
    """A pull subscription; every message that it gives is acknowledged."""

    name: str
    topic: str
    client: SubscriberClient

    def pull_until(self, count: int, seconds: float = 10.0) -> list[PubsubMessage]:
        """Return at least `count` messages in the order of their arrival. Raises AssertionError after `seconds`.

        More than `count` are returned if a pull gave more. Later messages are found by `drain`.
        """
        messages: list[PubsubMessage] = []

        def enough() -> bool:
            messages.extend(self._pull())
            return len(messages) >= count

        eventually(enough, seconds=seconds, message=f"{count} messages on {self.topic}")
        return messages

    def drain(self, quiet_seconds: float = 0.3) -> list[PubsubMessage]:
        messages: list[PubsubMessage] = []
        while True:
            try:
                messages += self.pull_until(1, quiet_seconds)
            except AssertionError:
                return messages

    def _pull(self) -> Sequence[PubsubMessage]:
        # A pull that waits may lease messages and lose them when its deadline cuts it off; an immediate one cannot.
        request = {"subscription": self.name, "max_messages": PULL_SIZE, "return_immediately": True}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # return_immediately, for production's sake
            received = self.client.pull(request, timeout=CALL_SECONDS).received_messages
        if received:
            ids = [each.ack_id for each in received]
            self.client.acknowledge(subscription=self.name, ack_ids=ids, timeout=CALL_SECONDS)
        return [each.message for each in received]


@dataclasses.dataclass(frozen=True, slots=True)
class PubSub:
    publisher: PublisherClient
    subscriber: SubscriberClient

    @classmethod
    def on(cls, host: str) -> "PubSub":
        channel = grpc.insecure_channel(host)
        return cls(
            PublisherClient(transport=PublisherGrpcTransport(channel=channel)),
            SubscriberClient(transport=SubscriberGrpcTransport(channel=channel)),
        )

    def new_topic(self, topic_id: str = "") -> str:
        name = f"projects/{PROJECT}/topics/{topic_id or _random('topic')}"
        self.publisher.create_topic(name=name, timeout=CALL_SECONDS)
        return name

    def new_subscription(
        self, topic: str, *, ordered: bool = False, exactly_once: bool = False, ack_seconds: int = ACK_DEADLINE
    ) -> Subscription:
        name = f"projects/{PROJECT}/subscriptions/{_random('subscription')}"
        request = {
            "name": name,
            "topic": topic,
            "ack_deadline_seconds": ack_seconds,
            "enable_message_ordering": ordered,
            "enable_exactly_once_delivery": exactly_once,
        }
        self.subscriber.create_subscription(request, timeout=CALL_SECONDS)
        return Subscription(name, topic, self.subscriber)

    def publish(self, topic: str, *data: bytes) -> list[str]:
        messages = [PubsubMessage(data=each) for each in data]
        return list(self.publisher.publish(topic=topic, messages=messages, timeout=CALL_SECONDS).message_ids)


@contextlib.contextmanager
def pulling(subscription: str, callback: Callable[[Any], None], **options: Any) -> Iterator[None]:
    """Have Google's subscriber call a function with each message until the end of the block."""
    from google.cloud import pubsub_v1

    types = pubsub_v1.types
    with pubsub_v1.SubscriberClient(subscriber_options=types.SubscriberOptions(**options)) as subscriber:
        future = subscriber.subscribe(subscription, callback, flow_control=types.FlowControl(max_messages=100))
        try:
            yield
        finally:
            future.cancel()
            with contextlib.suppress(Exception):
                future.result(10)


def _random(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex[:12]}"
