"""One trace from the business transaction to the subscriber, on the emulators."""

import contextlib
import queue
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest
from google.cloud.pubsub_v1 import SubscriberClient
from google.cloud.pubsub_v1.subscriber.message import Message
from google.cloud.pubsub_v1.types import SubscriberOptions
from google.cloud.spanner_v1.database import Database
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import outbox
from outbox.program.channels import open_pubsub
from outbox.table.ddl import Layout
from publishworker.pubsub.publisher import PubSubPublisher
from tests.support import real
from tests.support.parts import relay_of
from tests.support.pubsub import Subscription
from tests.support.relays import unsent
from tests.support.spanner import PROJECT, place
from tests.support.waiting import eventually


def place_order(database: Database, topic: str) -> ReadableSpan:
    with trace.get_tracer("shop").start_as_current_span("place order") as span:
        database.run_in_transaction(lambda transaction: outbox.register(transaction, topic, b"order-1"))
    assert isinstance(span, ReadableSpan)
    return span


def relay_all(database: Database) -> None:
    relay = relay_of(real.Store(database, Layout(10)), PubSubPublisher(open_pubsub(place()), PROJECT))
    eventually(lambda: (relay.turn(), not unsent(database))[1])


def only(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    return eventually(lambda: next((each for each in spans.get_finished_spans() if each.name == name), None))


def is_within(context: trace.SpanContext | None, span: ReadableSpan, spans: InMemorySpanExporter) -> bool:
    """Return whether a context is a span's or a descendant's: the Spanner client creates spans for its calls."""
    parents = {each.context.span_id: each.parent for each in spans.get_finished_spans()}
    while context is not None and context.span_id != span.context.span_id:
        context = parents.get(context.span_id)
    return context is not None


@pytest.fixture
def received(subscription: Subscription) -> Iterator["queue.Queue[Message]"]:
    messages: queue.Queue[Message] = queue.Queue()
    client = SubscriberClient(subscriber_options=SubscriberOptions(enable_open_telemetry_tracing=True))

    def take(message: Message) -> None:
        message.ack()
        messages.put(message)

    pulling = client.subscribe(subscription.name, take)
    yield messages
    pulling.cancel()
    with contextlib.suppress(CancelledError, TimeoutError):
        pulling.result(timeout=30)
    client.close()


def test_one_trace_leads_from_the_transaction_to_googles_subscriber(
    database: Database, topic: str, received: "queue.Queue[Message]", spans: InMemorySpanExporter
) -> None:
    """Its span is a child of the application's; the relay's own span is linked to it."""
    order = place_order(database, topic)
    relay_all(database)
    message = received.get(timeout=30)
    # By this attribute any other subscriber can continue the trace, too.
    assert message.attributes["googclient_traceparent"].split("-")[1] == f"{order.context.trace_id:032x}"
    subscribe = eventually(
        lambda: next((each for each in spans.get_finished_spans() if each.name.endswith(" subscribe")), None),
        seconds=30,
    )
    assert subscribe.context.trace_id == order.context.trace_id
    assert is_within(subscribe.parent, order, spans)
    sent = only(spans, f"send {topic.rpartition('/')[2]}")
    [link] = sent.links
    assert is_within(link.context, order, spans)
    assert sent.context.trace_id != order.context.trace_id
