"""Lines of the log, the trace context of messages, and the export of metrics to OpenTelemetry."""

import json
import logging
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from unittest import mock

import pytest
from google.pubsub_v1.types import PubsubMessage
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags, TraceState

import outbox
from outbox.errors import SettingError
from outbox.message import LONGEST_TOPIC_NAME, RawPublishRequest, RawPubsubMessage
from outbox.observing import processing, span_of
from outbox.program import logs
from outbox.program.logs import JsonFormatter, TextFormatter
from outbox.testing import RecordingTransaction
from publishworker.log import ThrottledLog
from publishworker.pubsub import publisher
from publishworker.pubsub.publisher import publish_span, trace_id
from publishworker.telemetry import clients
from publishworker.types import Failed, Published

TRACE, SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
ORDERS = "projects/p/topics/orders"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def current() -> Iterator[None]:
    context = SpanContext(TRACE, SPAN, True, TraceFlags(TraceFlags.SAMPLED), TraceState([("vendor", "value")]))
    with trace.use_span(NonRecordingSpan(context)):
        yield


def registered(message: object = b"", **options: object) -> PubsubMessage:
    transaction = RecordingTransaction()
    outbox.register(transaction, "orders", message, **options)
    return transaction.tasks[0].message


@pytest.mark.usefixtures("current")
def test_a_context_that_the_message_already_has_is_kept() -> None:
    brought = {"googclient_traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-00"}
    attributes = registered(attributes=brought).attributes
    assert attributes["googclient_traceparent"] == brought["googclient_traceparent"]
    assert "googclient_tracestate" not in attributes


@pytest.mark.usefixtures("current")
def test_a_message_without_room_is_registered_without_a_context() -> None:
    """100 attributes and a request of 10,000,000 bytes are allowed; `register` refuses no message for its context."""
    for given, noted in ((97, True), (98, False), (99, False)):
        attributes = registered(attributes={str(number): "" for number in range(given)}).attributes
        assert len(attributes) == (given + 3 if noted else given + 1)
        assert any(name.startswith("googclient_") for name in attributes) is noted

    def request(data: bytes) -> int:
        message = RawPubsubMessage.FromString(PubsubMessage.serialize(registered(data)))
        return int(RawPublishRequest(topic=LONGEST_TOPIC_NAME, messages=[message]).ByteSize())

    fits = bytes(10_000_000 - 1_000)
    fits += bytes(10_000_000 - request(fits))
    assert request(fits) == 10_000_000
    assert set(registered(fits + b"x").attributes) == {"asynchronous_task_id"}


@pytest.mark.parametrize("characters", [1_024, 1_025])
def test_a_trace_state_that_is_too_long_is_left_out(characters: int) -> None:
    state = TraceState([*((f"v{number}", "x" * 200) for number in range(4)), ("w", "x" * (characters - 818))])
    with trace.use_span(NonRecordingSpan(SpanContext(TRACE, SPAN, True, TraceFlags(1), state))):
        attributes = registered().attributes
    assert attributes["googclient_traceparent"] == TRACEPARENT
    assert len(attributes.get("googclient_tracestate", "")) == (1_024 if characters == 1_024 else 0)


def traced(*parents: str | None) -> list[RawPubsubMessage]:
    return [RawPubsubMessage(attributes={"googclient_traceparent": each} if each else {}) for each in parents]


def test_a_batch_is_one_span_with_links_to_the_spans_of_its_tasks(spans: InMemorySpanExporter) -> None:
    """Messages without a valid context have no link. An error of the block ends the span, too."""
    span_of_batch = publish_span(ORDERS, traced(TRACEPARENT, None, "00-nonsense"), {"a": Published("1")})
    with pytest.raises(ZeroDivisionError), span_of_batch:
        raise ZeroDivisionError
    [span] = spans.get_finished_spans()
    links = [(link.context.trace_id, link.context.span_id) for link in span.links]
    assert (span.name, span.kind, span.parent, links) == ("send orders", SpanKind.PRODUCER, None, [(TRACE, SPAN)])
    assert span.attributes is not None
    assert span.attributes["messaging.destination.name"] == ORDERS
    assert span.attributes["messaging.batch.message_count"] == 3
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("messages", [1, 2])
def test_a_subscriber_continues_one_trace_or_links_several(spans: InMemorySpanExporter, messages: int) -> None:
    received = traced(*[TRACEPARENT] * messages)
    received[0].message_id = "4711"
    with processing("billing", *received):
        pass
    [span] = spans.get_finished_spans()
    assert (span.name, span.kind) == ("process billing", SpanKind.CONSUMER)
    assert (span.parent and span.parent.span_id, len(span.links)) == ((SPAN, 0) if messages == 1 else (None, 2))
    of_messages = {"messaging.message.id": "4711"} if messages == 1 else {"messaging.batch.message_count": messages}
    assert span.attributes == {
        "messaging.system": "gcp_pubsub",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        **of_messages,
    }


def test_the_span_reports_failures(spans: InMemorySpanExporter) -> None:
    outcomes = {"a": Failed("not_found", "x"), "b": Failed("too_large", "x"), "c": Failed("not_found", "x")}
    with publish_span(ORDERS, traced(*[None] * 4), outcomes):
        pass
    [span] = spans.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["error.type"] == "not_found"
    assert span.status.description == "of 4 tasks: 2 not_found, 1 too_large"


def broken(step: str) -> TracerProvider:
    processor = mock.Mock(**{f"on_{step}.side_effect": RuntimeError("broken")})
    provider = TracerProvider()
    provider.add_span_processor(processor)
    return provider


@pytest.mark.parametrize("step", ["start", "end", "make"])
def test_a_failing_provider_loses_only_its_spans(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    """Above all no messages after Pub/Sub has them. A provider that cannot be created is an invalid variable."""
    monkeypatch.setattr(publisher, "_logged_errors", set())
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None if step == "make" else broken(step))
    monkeypatch.setenv("OTEL_PYTHON_TRACER_PROVIDER", "nonsense")
    done = 0
    for _ in range(3):
        with publish_span(ORDERS, traced(TRACEPARENT), {}):
            done += 1
    assert done == 3
    logged = [record.__dict__["action"] for record in caplog.records if record.name == "publishworker"]
    assert logged == ["tracing"]


@pytest.fixture
def configured() -> Iterator[None]:
    root = logging.getLogger()
    loggers = [root, *map(logging.getLogger, ("outbox", "publishworker", "opentelemetry", "grpc._plugin_wrapping"))]
    handlers, levels = root.handlers[:], [each.level for each in loggers]
    logs.configure("json", "debug")
    yield
    root.handlers[:] = handlers
    for each, level in zip(loggers, levels, strict=True):
        each.setLevel(level)


@pytest.mark.usefixtures("configured")
def test_a_failed_task_is_logged_with_its_trace(capfd: pytest.CaptureFixture[str]) -> None:
    """Invalid attributes have none, and reach no log, in which OpenTelemetry would quote them."""
    [message] = traced(TRACEPARENT)
    message.attributes["googclient_tracestate"] = "card=4111 1111,\u00e9"
    assert trace_id(message.SerializeToString()) == f"{TRACE:032x}"
    assert "4111" not in capfd.readouterr().err
    for none in traced(None, "00-nonsense"):
        assert trace_id(none.SerializeToString()) is None
    assert trace_id(b"\xff") is None
    # A state longer than Pub/Sub accepts is not read: its time would grow with the square of its size.
    full = ",".join(f"v{number}={'x' * 200}" for number in range(4))
    for state, known in ((f"{full},w={'x' * 206}", True), (f"{full},w={'x' * 207}", False)):
        message = RawPubsubMessage(attributes={"googclient_traceparent": TRACEPARENT, "googclient_tracestate": state})
        span = span_of(message.attributes)
        assert span is not None
        assert ("w" in span.trace_state) is known


@pytest.mark.usefixtures("current")
def test_log_lines_carry_the_current_trace(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field of the line itself goes first."""
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "shop")
    log = logging.getLogger("publishworker")
    log.warning("of the span")
    log.warning("of a task", extra={"fields": {"trace_id": "1" * 32}})
    first, second = (json.loads(logs.JsonFormatter().format(record)) for record in caplog.records)
    assert (first["trace_id"], first["span_id"]) == (f"{TRACE:032x}", f"{SPAN:016x}")
    of_google = (first["logging.googleapis.com/trace"], first["logging.googleapis.com/spanId"])
    assert of_google == (f"projects/shop/traces/{TRACE:032x}", f"{SPAN:016x}")
    assert second["trace_id"] == "1" * 32
    assert "span_id" not in second  # it is of another trace


def test_a_log_line_is_one_json_object_without_empty_fields() -> None:
    record = logging.LogRecord("publishworker", logging.WARNING, __file__, 1, "%d tasks\nfailed", (3,), None)
    record.action = "delivery_failed"
    line = JsonFormatter().format(record)
    entry = json.loads(line)
    assert "\n" not in line
    assert (entry["status"], entry["message"], entry["action"]) == ("warning", "3 tasks\nfailed", "delivery_failed")
    assert entry["logger.name"] == "publishworker"
    assert (entry["severity"], entry["severity_number"], entry["time"]) == ("WARNING", 13, entry["timestamp"])
    try:
        1 // 0  # noqa: B018 - raises
    except ZeroDivisionError:
        record.exc_info = sys.exc_info()
    entry = json.loads(JsonFormatter().format(record))
    assert entry["error.kind"] == "ZeroDivisionError"
    assert "1 // 0" in entry["error.stack"]


def test_the_time_of_a_text_line_is_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the times that commands print."""
    record = logging.LogRecord("outbox", logging.WARNING, "", 0, "late", (), None)
    record.created = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        line = TextFormatter().format(record)
    time.tzset()
    assert line == "03:04:05Z WARNING late"


def test_a_text_line_is_one_line() -> None:
    record = logging.LogRecord("publishworker", logging.INFO, "", 0, "task %s", ("a\n12:00:00 CRITICAL \x1b[2J",), None)
    line = TextFormatter().format(record)
    assert line.endswith("task a\\n12:00:00 CRITICAL \\u001b[2J")
    assert line.isprintable()


def test_a_repeated_warning_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Another topic or reason is another warning."""
    seconds = [0.0]
    throttled = ThrottledLog(lambda: seconds[0])
    for now in (0.0, 0.0, 59.9, 60.0, 61.0):
        seconds[0] = now
        throttled.log("delivery_failed", "orders", f"orders fail at {now:g}")
        throttled.log("delivery_failed", "invoices", "invoices fail", max_lines=2)
    assert [line for line in caplog.messages if "orders" in line] == ["orders fail at 0", "orders fail at 60"]
    assert caplog.messages.count("invoices fail") == 4


EXPORTER = "OTEL_METRICS_EXPORTER"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
ALL, METRICS = "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"
OF_GRPC = "opentelemetry.exporter.otlp.proto.grpc.metric_exporter"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, OTLPMetricExporter), ({ALL: "", METRICS: ""}, OTLPMetricExporter),
        ({ALL: "http/protobuf"}, OTLPMetricExporter), ({ALL: "grpc"}, "grpc"), ({METRICS: "grpc"}, "grpc"),
        ({ALL: "grpc", METRICS: "http/protobuf"}, OTLPMetricExporter),
        ({ALL: "http/protobuf", METRICS: "grpc"}, "grpc"),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, OTLPMetricExporter),
    ],
)  # fmt: skip
def test_the_exporter_has_the_protocol_of_the_variables(
    variables: dict[str, str], expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable of the metrics wins over that of all signals, and those of other signals do not matter."""
    monkeypatch.setitem(sys.modules, OF_GRPC, SimpleNamespace(OTLPMetricExporter="grpc"))  # type: ignore[arg-type]  # no module
    for name in (ALL, METRICS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert clients._exporter_class() == expected


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({METRICS: "http/json"}, f"{METRICS}: 'http/json' is not allowed. It must be http/protobuf or grpc"),
        ({ALL: "gprc"}, f"{ALL}: 'gprc' is not allowed. It must be http/protobuf or grpc. Did you mean 'grpc'"),
        ({EXPORTER: "console"}, f"{EXPORTER}: 'console' is not allowed. It must be otlp or none"),
        ({ENDPOINT: "collector:4318"}, f"{ENDPOINT}: 'collector:4318' is not allowed. It must be http:// or https://"),
        ({ENDPOINT: "http://collector:x"}, f"{ENDPOINT}: 'http://collector:x' is not allowed"),
        ({ENDPOINT: "http://:4318"}, f"{ENDPOINT}: 'http://:4318' is not allowed"),
        ({ALL: "grpc"}, "exporter for grpc is missing. Install it: pip install opentelemetry-exporter-otlp-proto-grpc"),
    ],
)
def test_a_protocol_or_an_endpoint_that_cannot_be_used_is_a_sentence(
    variables: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, OF_GRPC, None)
    monkeypatch.setattr(clients, "_LostMetrics", lambda *_names: None)  # it would take the loggers of this process
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match=sentence):
        clients.client("opentelemetry")


@pytest.mark.parametrize(("value", "exports"), [("none", False), ("None", False), ("otlp", True), ("", True)])
def test_the_variable_of_the_exporter_turns_metrics_off(
    value: str, exports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is imported or started then, and no value of another variable matters."""
    created = object()
    monkeypatch.setattr(clients, "_opentelemetry", lambda _instance: created)
    monkeypatch.setenv(EXPORTER, value)
    assert clients.client("opentelemetry") is (created if exports else None)


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("OTEL_METRIC_EXPORT_INTERVAL", "60s", "invalid value for export interval, using default"),
        ("OTEL_RESOURCE_ATTRIBUTES", "shop", "Invalid key value resource attribute pair shop"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0", "interval value 0.0 is invalid"),
    ],
)
def test_a_wrong_variable_is_refused_or_logged_and_metrics_are_not_called_lost(
    variable: str, value: str, sentence: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A client replaces most wrong values by a default. Nobody must believe that its metrics do not arrive."""
    for name in ("opentelemetry", "opentelemetry.exporter", "opentelemetry.sdk"):
        logger = logging.getLogger(name)
        for attribute in ("handlers", "propagate", "level"):
            monkeypatch.setattr(logger, attribute, getattr(logger, attribute))
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # as in the worker
    monkeypatch.setattr(clients, "_exporter_class", lambda: ConsoleMetricExporter)
    monkeypatch.setenv(variable, value)
    try:
        made = clients.client("opentelemetry")
    except SettingError as error:
        said = str(error)
    else:
        [said] = {record.getMessage() for record in caplog.records}
        assert made is not None
        made.stop(1)
        assert said.startswith("A variable of the metrics is wrong: ")
    assert sentence in said
