"""OpenTelemetry metrics over OTLP. Only this module imports the SDK.

The standard variables apply: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables. The
worker has a MeterProvider of its own, so that it neither uses nor changes the one of the process.
"""

from typing import Any

from outbox import __version__
from outbox.errors import SettingError
from publishworker.telemetry.metrics import METRICS, PIPELINE, Client, LostMetrics, Metric

#: The instrument for each type of metric.
INSTRUMENTS = {"count": "counter", "gauge": "gauge", "distribution": "histogram"}
#: Tags that have an attribute in the semantic conventions. Other attributes begin with `outbox.`.
#: https://opentelemetry.io/docs/specs/semconv/messaging/messaging-metrics
ATTRIBUTES = {"topic": "messaging.destination.name", "reason": "error.type"}
#: Boundaries of the histograms: from one millisecond to an hour, and from one task to the max batch size.
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3600)
TASKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def unit_of(metric: Metric) -> str:
    """Return the unit of a metric as a UCUM code (https://ucum.org): seconds, or an annotation such as `{task}`."""
    return "s" if metric.unit == "second" else f"{{{metric.unit}}}"


def attribute_of(tag: str) -> str:
    """Return the name of the attribute for a tag."""
    return ATTRIBUTES.get(tag, f"outbox.{tag}")


class OpenTelemetry:
    """A client whose instruments are the table of metrics. It satisfies `metrics.Client`."""

    def __init__(self, provider: Any) -> None:
        """Create the instruments in `provider`, which `stop` shuts down."""
        self._provider = provider
        meter = provider.get_meter("publishworker", __version__)
        self._instruments = {metric.name: _instrument(meter, metric) for metric in (*METRICS, *PIPELINE)}

    def increment(self, metric: str, value: float, tags: list[str]) -> None:
        """Add to a counter."""
        self._instruments[metric].add(value, _attributes(tags))

    def gauge(self, metric: str, value: float, tags: list[str]) -> None:
        """Set a gauge."""
        self._instruments[metric].set(value, _attributes(tags))

    def distribution(self, metric: str, value: float, tags: list[str], sample_rate: float = 1) -> None:
        """Record a value in a histogram. Every value is recorded, because a histogram is aggregated in this process."""
        self._instruments[metric].record(value, _attributes(tags))

    def stop(self, timeout: float) -> None:
        """Export the last values within `timeout` seconds, and close."""
        self._provider.shutdown(timeout_millis=timeout * 1000)


def client() -> Client:
    """Return a client that exports to OTEL_EXPORTER_OTLP_ENDPOINT. Raises SettingError."""
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import (  # noqa: PLC0415 - an extra
            OTLPMetricExporter,
        )
        from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415 - the same
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # noqa: PLC0415 - the same
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - the same
    except ImportError as error:
        raise SettingError(
            "--metrics opentelemetry: the OpenTelemetry SDK is missing: pip install 'spanner-outbox[opentelemetry]'"
        ) from error
    # The exporter logs each failed attempt.
    LostMetrics("the OTLP endpoint", "opentelemetry.exporter", "opentelemetry.sdk")
    resource = Resource.create()
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "publishworker"}))
    return OpenTelemetry(MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], resource))


def _instrument(meter: Any, metric: Metric) -> Any:
    described: dict[str, Any] = {"name": metric.name, "unit": unit_of(metric), "description": metric.meaning}
    if metric.type == "distribution":
        described["explicit_bucket_boundaries_advisory"] = SECONDS if metric.unit == "second" else TASKS
    return getattr(meter, f"create_{INSTRUMENTS[metric.type]}")(**described)


def _attributes(tags: list[str]) -> dict[str, str]:
    return {attribute_of(name): value for name, _, value in (tag.partition(":") for tag in tags)}
