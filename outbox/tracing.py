"""W3C trace context, by the OpenTelemetry API alone: without a tracer provider it is a look at a context variable.

In a message it stands where Google's Pub/Sub clients put it and look for it, in attributes with a prefix of theirs:
https://cloud.google.com/pubsub/docs/open-telemetry-tracing
"""

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

#: What the client puts before `traceparent` and `tracestate`.
PREFIX = "googclient_"

#: Of a value that is read: Pub/Sub takes no longer one.
MAX_CHARACTERS = 1_024

_propagator = TraceContextTextMapPropagator()


def current() -> dict[str, str]:
    """Return the attributes that say which trace a message comes from; none without a current span."""
    if not trace.get_current_span().get_span_context().is_valid:
        return {}
    context: dict[str, str] = {}
    _propagator.inject(context)
    return {PREFIX + name: value for name, value in context.items()}


def span_of(attributes: Mapping[str, str]) -> trace.SpanContext | None:
    """Return the span that `current` has put into the attributes of a message, or None."""
    found = {name: attributes.get(PREFIX + name, "") for name in ("traceparent", "tracestate")}
    # A row may hold megabytes, and old versions of the API take the square of that time to read them.
    context = {name: value for name, value in found.items() if 0 < len(value) <= MAX_CHARACTERS}
    span = trace.get_current_span(_propagator.extract(context)).get_span_context() if context else None
    return span if span is not None and span.is_valid else None


def ids() -> dict[str, str]:
    """Return the current `trace_id` and `span_id` as log lines name them; none without a current span."""
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return {}
    return {"trace_id": trace.format_trace_id(span.trace_id), "span_id": trace.format_span_id(span.span_id)}
