"""W3C trace context through the OpenTelemetry API. Without a tracer provider it only reads a context variable.

A message carries it in the attributes that Google's Pub/Sub clients use:
https://cloud.google.com/pubsub/docs/open-telemetry-tracing
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import Link, NonRecordingSpan, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

#: The prefix of `traceparent` and `tracestate` in attributes.
PREFIX = "googclient_"

#: Max length of a value. Pub/Sub allows no longer one.
MAX_CHARACTERS = 1_024

_propagator = TraceContextTextMapPropagator()


def current() -> dict[str, str]:
    """Return the attributes with the current trace context; none without a current span."""
    context: dict[str, str] = {}
    _propagator.inject(context)
    return {PREFIX + name: value for name, value in context.items()}


def span_of(attributes: Mapping[str, str]) -> trace.SpanContext | None:
    """Return the span context in the attributes of a message, or None."""
    values = {name: attributes.get(PREFIX + name, "") for name in ("traceparent", "tracestate")}
    # A row may hold megabytes, and old versions of the API parse them in quadratic time.
    context = {name: value for name, value in values.items() if 0 < len(value) <= MAX_CHARACTERS}
    span = trace.get_current_span(_propagator.extract(context)).get_span_context() if context else None
    return span if span is not None and span.is_valid else None


@contextmanager
def processing(consumer: str, *messages: Any) -> Iterator[None]:
    """Continue the trace of a received message in a span for the block. A current span, as of a request, is linked.

    The span of several messages links their traces, as OpenTelemetry's conventions for batches ask for.
    """
    spans = [span for message in messages if (span := span_of(message.attributes))]
    [parent] = spans if len(spans) == len(messages) == 1 else [None]
    current = trace.get_current_span().get_span_context()
    of_one = {"messaging.message.id": messages[0].message_id}
    with trace.get_tracer("outbox").start_as_current_span(
        f"process {consumer}",
        context=trace.set_span_in_context(NonRecordingSpan(parent)) if parent else None,
        kind=SpanKind.CONSUMER,
        attributes={
            "messaging.system": "gcp_pubsub",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            **(of_one if len(messages) == 1 else {"messaging.batch.message_count": len(messages)}),
        },
        links=[Link(current)] if parent and current.is_valid else [] if parent else [*map(Link, spans)],
    ):
        yield


def ids() -> dict[str, str]:
    """Return the current `trace_id` and `span_id` as log lines name them; none without a current span."""
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return {}
    return {"trace_id": trace.format_trace_id(span.trace_id), "span_id": trace.format_span_id(span.span_id)}
