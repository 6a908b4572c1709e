"""A span for each batch that is published, linked to the transactions that registered its tasks.

By the OpenTelemetry API alone: whoever wants spans starts the worker with a tracer provider (docs/guide/tracing.md).
One that fails costs its spans and nothing else. Attributes: https://opentelemetry.io/docs/specs/semconv/messaging/.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode

from outbox import __version__
from outbox.tracing import span_of
from publishworker.types import Failed, Outcome

_log = logging.getLogger("publishworker")
T = TypeVar("T")
_failed: set[str] = set()  # what was told of


@contextlib.contextmanager
def sending(topic: str, messages: Sequence[Any], outcomes: Mapping[str, Outcome]) -> Iterator[None]:
    """Make a span of the block, in which `messages` are sent to the full name `topic`, and `outcomes` are filled."""
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
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):  # nobody wants spans
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
    """Return what `work` returns, or None if it fails: spans are no reason to publish a task twice."""
    try:
        return work()
    except Exception as error:
        if (what := type(error).__name__) not in _failed:
            _failed.add(what)
            _log.warning("spans are lost: the tracer provider failed", exc_info=True, extra={"action": "tracing"})
        return None
