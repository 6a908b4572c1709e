"""A span for each group that is published, linked to the transactions that registered its tasks.

By the OpenTelemetry API alone: whoever wants the spans starts the worker with a tracer provider
(docs/operations/tracing.md).
Attributes are those of https://opentelemetry.io/docs/specs/semconv/messaging/.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import Link, SpanKind, Status, StatusCode

from outbox import __version__
from outbox._tracing import span_of
from publishworker.task import Failed, Outcome


@contextlib.contextmanager
def sending(topic: str, messages: Sequence[Any], outcomes: Mapping[str, Outcome]) -> Iterator[None]:
    """Make a span of the block, in which `messages` are sent to the full name `topic`, and `outcomes` are filled."""
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):  # nobody wants spans
        yield
        return
    links = [Link(span) for message in messages if (span := span_of(message.attributes)) is not None]
    attributes: dict[str, str | int] = {
        "messaging.system": "gcp_pubsub",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": topic,
        "messaging.batch.message_count": len(messages),
    }
    tracer = trace.get_tracer("publishworker", __version__)
    with tracer.start_as_current_span(
        f"send {topic.rpartition('/')[2]}", kind=SpanKind.PRODUCER, attributes=attributes, links=links
    ) as sent:
        yield
        if failures := Counter(each.reason for each in outcomes.values() if isinstance(each, Failed)):
            reasons = ", ".join(f"{count} {reason}" for reason, count in failures.most_common())
            sent.set_attribute("error.type", failures.most_common(1)[0][0])
            sent.set_status(Status(StatusCode.ERROR, f"of {len(messages)} tasks: {reasons}"))
