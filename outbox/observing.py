"""What an application observes: W3C trace context in messages, and the metrics client that it plugs in.

Without a tracer provider, tracing only reads a context variable. A message carries the context in the attributes that
Google's Pub/Sub clients use: https://cloud.google.com/pubsub/docs/open-telemetry-tracing

There is no metrics client by default, and it never fails the caller.
"""

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from opentelemetry import trace
from opentelemetry.trace import Link, NonRecordingSpan, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from outbox.base.values import check_finished, class_name

#: The prefix of `traceparent` and `tracestate` in attributes.
PREFIX = "googclient_"

#: Max length of a value. Pub/Sub allows no longer one.
MAX_CHARACTERS = 1_024

_propagator = TraceContextTextMapPropagator()


def trace_context() -> dict[str, str]:
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


def trace_ids() -> dict[str, str]:
    """Return the current `trace_id` and `span_id` as log lines name them; none without a current span."""
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return {}
    return {"trace_id": trace.format_trace_id(span.trace_id), "span_id": trace.format_span_id(span.span_id)}


_log = logging.getLogger("outbox")


class Recorder(Protocol):
    """Counts metrics, for example `datadog.DogStatsd`. It may raise: the caller of `register` is not affected."""

    def increment(self, metric: str, value: float, tags: list[str]) -> object:
        """Add `value` to the counter `metric`; tags are `key:value`."""


_recorder: Recorder | None = None
_complained = False


def set_metrics(recorder: Recorder | None) -> None:
    """Count registered and processed tasks of this process through `recorder`.

    Args:
        recorder: called in the thread that registers or processes. None, the default, counts nothing. Its first error
            is logged with a traceback, later ones are ignored.

    Raises:
        TypeError: `recorder` is neither None nor an object with such a plain method.
    """
    if recorder is not None and not _can_count(recorder):
        raise TypeError(
            f"recorder is {class_name(recorder)}. It must have a plain method increment(metric, value, tags), as a "
            "DogStatsd of the package datadog has, or be None"
        )
    global _recorder, _complained
    _recorder, _complained = recorder, False


def _can_count(recorder: object) -> bool:
    increment: Any = getattr(recorder, "increment", None)
    if not callable(increment) or inspect.iscoroutinefunction(increment) or inspect.isclass(recorder):
        return False
    try:
        inspect.signature(increment).bind("metric", 1, ["tag:value"])
    except TypeError:
        return False
    except ValueError:
        pass  # a function without a signature, such as one of C
    return True


def count_registered(topic: str, count: int = 1) -> None:
    """Count registered tasks."""
    _count("outbox.registered_task_count", count, f"topic:{topic}")


def count_delivery(consumer: str, outcome: str) -> None:
    """Count a message that `outbox.inbox.Handler` received."""
    _count("outbox.inbox_message_count", 1, f"consumer:{consumer}", f"outcome:{outcome}")


def _count(metric: str, count: int, *tags: str) -> None:
    """Add to a counter. A recorder that fails is logged once and never fails the caller."""
    global _complained
    if _recorder is None:
        return
    try:
        check_finished(_recorder.increment(metric, count, list(tags)), "increment")
    except Exception:  # metrics must not fail a transaction
        if not _complained:
            _complained = True
            _log.warning("The metrics recorder failed; metrics of this process are lost", exc_info=True)
