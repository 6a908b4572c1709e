"""The clients of `--metrics`. Only this module imports `datadog` and the OpenTelemetry SDK."""

import importlib
import logging
import os
import time
import uuid
from typing import Any
from urllib.parse import urlsplit

from outbox import __version__
from outbox.base.start import install
from outbox.errors import SettingError
from outbox.program.settings import SettingType, one_of
from publishworker.log import log
from publishworker.telemetry.metrics import METRICS, PIPELINE, Client, Metric

#: An agent is configured if any of these is set. The client reads them, and DD_ENV, DD_SERVICE and DD_VERSION as tags.
AGENT_VARIABLES = ("DD_DOGSTATSD_URL", "DD_AGENT_HOST", "DD_DOGSTATSD_PORT")
#: Max packets that wait for a slow agent, and seconds for sending one.
QUEUED_PACKETS, SOCKET_SECONDS = 1000, 1.0
#: Seconds between two log lines about lost metrics.
LOST_SECONDS = 3600.0
#: The instrument of OpenTelemetry for each type of metric.
INSTRUMENTS = {"count": "counter", "gauge": "gauge", "distribution": "histogram"}
#: The standard variable that chooses the exporter of metrics.
EXPORTER = "OTEL_METRICS_EXPORTER"
#: The package of the exporter for each protocol of OTLP. The first one is the default and part of the extra.
EXPORTERS = {"http/protobuf": "http", "grpc": "grpc"}
#: Tags that have an attribute in the semantic conventions. Other attributes begin with `outbox.`.
#: https://opentelemetry.io/docs/specs/semconv/messaging/messaging-metrics
ATTRIBUTES = {"topic": "messaging.destination.name", "reason": "error.type"}
#: Boundaries of the histograms: from one millisecond to an hour, and from one task to the max batch size.
BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3600)
TASKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def client(kind: str, instance: str = "") -> Client | None:
    """Return the client of a kind, or None if no metrics are wanted or no agent is configured. Raises SettingError.

    `instance` is unique to this process, as a worker's ID.
    """
    if kind == "opentelemetry":
        return _opentelemetry(instance or str(uuid.uuid4())) if _chosen(EXPORTER, "otlp", "none") == "otlp" else None
    return _datadog() if kind == "datadog" else None


def _datadog() -> Client | None:
    configured = [name for name in AGENT_VARIABLES if os.environ.get(name)]
    if not configured:
        return None
    # The client warns for every packet that an agent misses, and for an invalid address when it is imported.
    _LostMetrics("the DogStatsD agent", "datadog.dogstatsd").begin()
    try:
        from datadog.dogstatsd.base import DogStatsd  # noqa: PLC0415 - 125 ms, and an extra that not everyone installs
    except ImportError as error:
        raise SettingError(
            f"{configured[0]} is set, but the package `datadog` is missing: {install('worker')}"
        ) from error
    # Packets hold many samples and are sent by a thread of the client, because the socket of a slow agent is full after
    # ten packets. `stop` sends the rest.
    client: Client = DogStatsd(
        disable_buffering=False,
        disable_background_sender=False,
        sender_queue_size=QUEUED_PACKETS,
        socket_timeout=SOCKET_SECONDS,
    )
    return client


def _opentelemetry(instance: str) -> Client:
    """Return a client that exports to OTEL_EXPORTER_OTLP_ENDPOINT over OTLP.

    The standard variables apply: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables. The
    MeterProvider is the worker's own, so that the one of the process is neither used nor changed.
    """
    try:
        from opentelemetry.sdk.metrics import MeterProvider, _Gauge  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.metrics.export import (  # noqa: PLC0415 - the same
            AggregationTemporality,
            PeriodicExportingMetricReader,
        )
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # noqa: PLC0415 - the same
    except ImportError as error:
        raise SettingError(
            f"--metrics opentelemetry: the OpenTelemetry SDK is missing: {install('opentelemetry')}"
        ) from error
    exporter_class = _exporter_class()
    # The exporter logs each failed attempt.
    lost = _LostMetrics("the OTLP endpoint", "opentelemetry.exporter", "opentelemetry.sdk")
    try:
        # The ID of `outbox workers`, not the random one of newer SDKs, unless OTEL_RESOURCE_ATTRIBUTES has another.
        ours = Resource({"service.instance.id": instance, "service.version": __version__})
        resource = Resource.create().merge(ours).merge(OTELResourceDetector().detect())
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "publishworker"}))
        # Otherwise the SDK exports a gauge forever, also the backlog of a worker that another one has replaced.
        exporter = exporter_class(preferred_temporality={_Gauge: AggregationTemporality.DELTA})
        provider = MeterProvider([PeriodicExportingMetricReader(exporter)], resource)
    except Exception as error:  # each variable has its own kind of error
        raise SettingError(f"--metrics opentelemetry: a variable OTEL_* is wrong: {error}") from error
    lost.begin()
    return _OpenTelemetry(provider)


def _exporter_class() -> Any:
    names = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = _chosen(next(filter(os.environ.get, names), names[1]), *EXPORTERS)
    package = EXPORTERS[protocol]
    for name in ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        if text := os.environ.get(name):  # the exporter would fail at each export
            SettingType(_url, "http:// or https://, a host, and perhaps a port and a path").value(text, name)
    try:
        module = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{package}.metric_exporter")
    except ImportError as error:
        raise SettingError(
            f"--metrics opentelemetry: the exporter for {protocol} is missing. Install it: pip install "
            f"opentelemetry-exporter-otlp-proto-{package}. Another protocol can be set in {names[0]}"
        ) from error
    return module.OTLPMetricExporter


def _url(text: str) -> None:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.port == 0:  # a wrong port raises ValueError
        raise ValueError(text)


def _chosen(name: str, *choices: str) -> str:
    """Return the value of a variable, whose case does not matter, by default the first choice. Raises SettingError."""
    value: str = one_of(*choices).value((os.environ.get(name) or choices[0]).lower(), name)
    return value


class _OpenTelemetry:
    """A client whose instruments are the table of metrics."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        meter = provider.get_meter("publishworker", __version__)
        self._instruments = {metric.name: _instrument(meter, metric) for metric in (*METRICS, *PIPELINE)}

    def increment(self, metric: str, value: float, tags: list[str]) -> None:
        self._instruments[metric].add(value, _attributes(tags))

    def gauge(self, metric: str, value: float, tags: list[str]) -> None:
        self._instruments[metric].set(value, _attributes(tags))

    def distribution(self, metric: str, value: float, tags: list[str], sample_rate: float = 1) -> None:
        """Record a value, whatever the rate, because a histogram is aggregated in this process."""
        self._instruments[metric].record(value, _attributes(tags))

    def stop(self, timeout: float) -> None:
        self._provider.shutdown(timeout_millis=timeout * 1000)


def _instrument(meter: Any, metric: Metric) -> Any:
    described: dict[str, Any] = {"name": metric.name, "unit": unit_of(metric), "description": metric.meaning}
    if metric.type == "distribution":
        described["explicit_bucket_boundaries_advisory"] = BUCKETS if metric.unit == "second" else TASKS
    return getattr(meter, f"create_{INSTRUMENTS[metric.type]}")(**described)


def unit_of(metric: Metric) -> str:
    """Return the unit of a metric as a UCUM code (https://ucum.org): seconds, or an annotation such as `{task}`."""
    return "s" if metric.unit == "second" else f"{{{metric.unit}}}"


def _attributes(tags: list[str]) -> dict[str, str]:
    return {attribute_of(name): value for name, _, value in (tag.partition(":") for tag in tags)}


def attribute_of(tag: str) -> str:
    return ATTRIBUTES.get(tag, f"outbox.{tag}")


class _LostMetrics(logging.Handler):
    """Replaces the handlers of a client's loggers, which warn for each failed request, by one line per LOST_SECONDS.

    Before `begin`, the client reads its variables, and warns of each value that it replaces by a default.
    """

    def __init__(self, receiver: str, *loggers: str) -> None:
        super().__init__(logging.WARNING)
        self._receiver = receiver
        self._logged_at = float("-inf")
        self._loggers = [logging.getLogger(name) for name in loggers]
        self._begun = False
        for logger in self._loggers:
            logger.handlers = [self]
            logger.propagate = False
            logger.setLevel(logging.WARNING)

    def begin(self) -> None:
        self._begun = True
        for logger in self._loggers:
            logger.setLevel(logging.NOTSET)

    def emit(self, record: logging.LogRecord) -> None:
        if not self._begun:
            text = "A variable of the metrics is wrong: %s"
            log.warning(text, record.getMessage(), extra={"action": "metrics"})
        elif time.monotonic() - self._logged_at >= LOST_SECONDS:
            self._logged_at = time.monotonic()
            log.warning(
                "Metrics are lost, and publishing continues: %s does not accept them: %s",
                self._receiver, record.getMessage().partition("\n")[0], extra={"action": "metrics"},
            )  # fmt: skip
