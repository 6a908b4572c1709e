"""`--metrics opentelemetry`: the values of the standard variables, or a sentence. No collector."""

import logging
import sys
from types import SimpleNamespace

import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter

from outbox.errors import SettingError
from publishworker.telemetry import clients

EXPORTER = "OTEL_METRICS_EXPORTER"
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
        ({ALL: "grpc"}, "exporter for grpc is missing. Install it: pip install opentelemetry-exporter-otlp-proto-grpc"),
    ],
)
def test_a_protocol_that_cannot_be_used_is_a_sentence(
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
    monkeypatch.setattr(clients, "_opentelemetry", lambda: created)
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
