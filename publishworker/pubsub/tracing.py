"""A span for each published batch, linked to the transactions that registered its tasks.

Only the OpenTelemetry API is used. To get spans, start the worker with a tracer provider (docs/guide/tracing.md). A
provider that fails costs only its spans. Attributes: https://opentelemetry.io/docs/specs/semconv/messaging/.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode

from outbox import __version__
from outbox.tracing import span_of
from publishworker.log import log
from publishworker.types import Failed, Outcome

T = TypeVar("T")
_failed: set[str] = set()  # classes of errors that were logged


@contextlib.contextmanager
def sending(topic: str, messages: Sequence[Any], outcomes: Mapping[str, Outcome]) -> Iterator[None]:
    """Open a span for the block, which publishes `messages` to the full name `topic` and fills `outcomes`."""
    span = _guarded(lambda: _started(topic, messages))
    if span is None:
        yield
        return
    try:
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            yield
    finally:
        _guarded(lambda: _end(span, len(messages), outcomes))


def _started(topic: str, messages: Sequence[Any]) -> Span | None:
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):  # no provider is configured
        return None
    links = [Link(span) for message in messages if (span := span_of(message.attributes)) is not None]
    attributes: dict[str, str | int] = {
        "messaging.system": "gcp_pubsub",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": topic,
        "messaging.batch.message_count": len(messages),
    }
    tracer = provider.get_tracer("publishworker", __version__)
    name = f"send {topic.rpartition('/')[2]}"
    return tracer.start_span(name, kind=SpanKind.PRODUCER, attributes=attributes, links=links)


def _end(span: Span, count: int, outcomes: Mapping[str, Outcome]) -> None:
    if failures := Counter(each.reason for each in outcomes.values() if isinstance(each, Failed)):
        reasons = ", ".join(f"{number} {reason}" for reason, number in failures.most_common())
        span.set_attribute("error.type", failures.most_common(1)[0][0])
        span.set_status(Status(StatusCode.ERROR, f"of {count} tasks: {reasons}"))
    span.end()


def _guarded(work: Callable[[], T]) -> T | None:
    """Return the result of `work`, or None if it fails, because a failing span must not cause a duplicate."""
    try:
        return work()
    except Exception as error:
        if (what := type(error).__name__) not in _failed:
            _failed.add(what)
            log.warning("Spans are lost because the tracer provider failed", exc_info=True, extra={"action": "tracing"})
        return None
