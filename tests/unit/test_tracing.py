"""The trace context of messages: what `register` notes, what the worker's span links to, and what it costs nobody."""

import json
import logging
from collections.abc import Iterator, Sequence

import pytest
from google.pubsub_v1.types import PubsubMessage
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags, TraceState

import outbox
from outbox import logs
from outbox._tracing import span_of
from outbox.message import LONGEST_TOPIC_NAME, RawPublishRequest, RawPubsubMessage
from outbox.testing import RecordingTransaction
from publishworker.pubsub.messages import trace_id
from publishworker.task import Failed, Sent
from publishworker.telemetry import tracing
from tests.support.spans import provided

TRACE, SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """A tracer provider, and what it exports."""
    return provided(monkeypatch)


@pytest.fixture
def current() -> Iterator[None]:
    """A span of the application, with a state of some vendor."""
    context = SpanContext(TRACE, SPAN, True, TraceFlags(TraceFlags.SAMPLED), TraceState([("vendor", "value")]))
    with trace.use_span(NonRecordingSpan(context)):
        yield


def registered(message: object = b"", **options: object) -> PubsubMessage:
    """Return the message of a task."""
    transaction = RecordingTransaction()
    outbox.register(transaction, "orders", message, **options)
    return transaction.tasks[0].message


@pytest.mark.usefixtures("current")
def test_register_notes_the_current_trace() -> None:
    """Where Google's subscriber client looks for it."""
    attributes = dict(registered(attributes={"kind": "placed"}).attributes)
    del attributes["asynchronous_task_id"]
    assert attributes == {
        "kind": "placed",
        "googclient_traceparent": TRACEPARENT,
        "googclient_tracestate": "vendor=value",
    }


def test_without_a_span_nothing_is_noted() -> None:
    """A message is as it was."""
    assert set(registered().attributes) == {"asynchronous_task_id"}


@pytest.mark.usefixtures("current")
def test_a_context_that_the_message_brings_along_is_kept() -> None:
    """Whoever forwards a message may want its trace to go on."""
    brought = {"googclient_traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-00"}
    attributes = registered(attributes=brought).attributes
    assert attributes["googclient_traceparent"] == brought["googclient_traceparent"]
    assert "googclient_tracestate" not in attributes


@pytest.mark.usefixtures("current")
@pytest.mark.parametrize(
    ("message", "attributes"),
    [
        (b"x" * (10_000_000 - 450), {}),
        (b"", {str(number): "" for number in range(98)}),
        (b"", {str(number): "" for number in range(99)}),
    ],
    ids=["almost too large", "one place left", "no place left"],
)
def test_what_has_no_room_for_it_is_registered_without(message: bytes, attributes: dict[str, str]) -> None:
    """A message must not be refused because somebody traces."""
    assert not any(name.startswith("googclient_") for name in registered(message, attributes=attributes).attributes)


@pytest.mark.usefixtures("current")
def test_what_has_just_the_room_for_it_notes_it() -> None:
    """100 attributes, a request of 10,000,000 bytes, a state of 1,024: these are allowed."""
    assert len(registered(attributes={str(number): "" for number in range(97)}).attributes) == 100

    def request(data: bytes) -> int:
        message = RawPubsubMessage.FromString(PubsubMessage.serialize(registered(data)))
        return int(RawPublishRequest(topic=LONGEST_TOPIC_NAME, messages=[message]).ByteSize())

    fits = bytes(10_000_000 - 1_000)
    fits += bytes(10_000_000 - request(fits))
    assert request(fits) == 10_000_000
    assert "googclient_traceparent" not in registered(fits + b"x").attributes


def test_a_state_of_1024_characters_is_noted() -> None:
    """An attribute's value may be as long."""
    state = TraceState([*((f"v{number}", "x" * 200) for number in range(4)), ("w", "x" * 206)])
    with trace.use_span(NonRecordingSpan(SpanContext(TRACE, SPAN, True, TraceFlags(1), state))):
        assert len(registered().attributes["googclient_tracestate"]) == 1_024


def test_a_state_that_is_too_long_for_an_attribute_is_left_out() -> None:
    """The parent is what counts."""
    state = TraceState([(f"v{number}", "x" * 200) for number in range(10)])
    with trace.use_span(NonRecordingSpan(SpanContext(TRACE, SPAN, True, TraceFlags(1), state))):
        attributes = registered().attributes
    assert attributes["googclient_traceparent"] == TRACEPARENT
    assert "googclient_tracestate" not in attributes


def messages(*parents: str | None) -> list[RawPubsubMessage]:
    """Return messages with these contexts."""
    return [
        RawPubsubMessage(attributes={} if parent is None else {"googclient_traceparent": parent}) for parent in parents
    ]


def links(span: ReadableSpan) -> Sequence[tuple[int, int]]:
    """Return what a span is linked to."""
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def test_a_group_is_one_span_with_links_to_where_its_tasks_come_from(spans: InMemorySpanExporter) -> None:
    """Messages without a context, or with one that is none, have no link."""
    with tracing.sending("projects/p/topics/orders", messages(TRACEPARENT, None, "00-nonsense"), {"a": Sent("1")}):
        pass
    [span] = spans.get_finished_spans()
    assert (span.name, span.kind, span.parent, links(span)) == (
        "send orders",
        SpanKind.PRODUCER,
        None,
        [(TRACE, SPAN)],
    )
    assert span.attributes is not None
    assert span.attributes["messaging.destination.name"] == "projects/p/topics/orders"
    assert span.attributes["messaging.batch.message_count"] == 3
    assert span.status.status_code is StatusCode.UNSET


def test_the_span_says_what_failed(spans: InMemorySpanExporter) -> None:
    """The most frequent reason is the type of its error; never a payload."""
    outcomes = {"a": Failed("not_found", "x"), "b": Failed("too_large", "x"), "c": Failed("not_found", "x")}
    with tracing.sending("projects/p/topics/orders", messages(*[None] * 4), outcomes):
        pass
    [span] = spans.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["error.type"] == "not_found"
    assert span.status.description == "of 4 tasks: 2 not_found, 1 too_large"


class Broken(TracerProvider):
    """A provider that fails at one of its steps."""

    def __init__(self, step: str) -> None:
        """Work but for `step`."""
        super().__init__()
        self.step = step

        class Fails(SimpleSpanProcessor):
            def on_start(self, *arguments: object, **keywords: object) -> None:
                if step == "start":
                    raise RuntimeError("broken")

            def on_end(self, *arguments: object, **keywords: object) -> None:
                if step == "end":
                    raise RuntimeError("broken")

        self.add_span_processor(Fails(InMemorySpanExporter()))


@pytest.mark.parametrize("step", ["start", "end"])
def test_a_provider_that_fails_costs_its_spans_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    """Above all not after Pub/Sub has the messages; said once."""
    monkeypatch.setattr(tracing, "_failed", set())
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", Broken(step))
    done = 0
    for _ in range(3):
        with tracing.sending("projects/p/topics/orders", messages(TRACEPARENT), {}):
            done += 1
    assert done == 3
    assert [record.__dict__["action"] for record in caplog.records] == ["tracing"]


def test_a_provider_that_cannot_be_made_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that names none."""
    monkeypatch.setattr(tracing, "_failed", set())
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setenv("OTEL_PYTHON_TRACER_PROVIDER", "nonsense")
    with tracing.sending("projects/p/topics/orders", messages(TRACEPARENT), {}):
        pass


def test_what_the_block_raises_is_raised_and_the_span_ends(spans: InMemorySpanExporter) -> None:
    """A defect stays a defect."""
    with pytest.raises(ZeroDivisionError), tracing.sending("projects/p/topics/orders", messages(None), {}):
        raise ZeroDivisionError
    assert len(spans.get_finished_spans()) == 1


@pytest.fixture
def configured() -> Iterator[None]:
    """Logs as a command has them, and afterwards as they were."""
    root = logging.getLogger()
    loggers = [root, *map(logging.getLogger, ("outbox", "publishworker", "opentelemetry", "grpc._plugin_wrapping"))]
    handlers, levels = root.handlers[:], [each.level for each in loggers]
    logs.configure("json", "debug")
    yield
    root.handlers[:] = handlers
    for each, level in zip(loggers, levels, strict=True):
        each.setLevel(level)


@pytest.mark.usefixtures("configured")
def test_attributes_that_are_no_context_reach_no_log(capfd: pytest.CaptureFixture[str]) -> None:
    """OpenTelemetry would quote them."""
    [message] = messages(TRACEPARENT)
    message.attributes["googclient_tracestate"] = "card=4111 1111,\u00e9"
    assert trace_id(message.SerializeToString()) is not None
    assert "4111" not in capfd.readouterr().err


def test_a_failed_task_is_logged_with_its_trace() -> None:
    """What cannot be read has none."""
    [message] = messages(TRACEPARENT)
    assert trace_id(message.SerializeToString()) == f"{TRACE:032x}"
    assert trace_id(messages(None)[0].SerializeToString()) is None
    assert trace_id(messages("00-nonsense")[0].SerializeToString()) is None
    assert trace_id(b"\xff") is None
    # What is longer than Pub/Sub takes is not looked at: megabytes of it would be read in the square of their time.
    most = ",".join(f"v{number}={'x' * 200}" for number in range(4))
    for state, known in ((f"{most},w={'x' * 206}", True), (f"{most},w={'x' * 207}", False)):
        message = RawPubsubMessage(attributes={"googclient_traceparent": TRACEPARENT, "googclient_tracestate": state})
        span = span_of(message.attributes)
        assert span is not None
        assert ("w" in span.trace_state) is known


@pytest.mark.usefixtures("current")
def test_log_lines_carry_the_current_trace(caplog: pytest.LogCaptureFixture) -> None:
    """A field of the line itself goes first."""
    log = logging.getLogger("publishworker")
    log.warning("of the span")
    log.warning("of a task", extra={"fields": {"trace_id": "1" * 32}})
    first, second = (json.loads(logs.JsonFormatter().format(record)) for record in caplog.records)
    assert (first["trace_id"], first["span_id"]) == (f"{TRACE:032x}", f"{SPAN:016x}")
    assert second["trace_id"] == "1" * 32
