"""`publishworker --metrics opentelemetry`: what an OTLP collector receives is the table of metrics."""

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from outbox.devtools.emulators import Emulators
from publishworker.telemetry import metrics as m
from publishworker.telemetry.clients import attribute_of, client, unit_of
from publishworker.telemetry.metrics import Metrics
from tests.support.relays import register, wait_until_all_sent, worker
from tests.support.waiting import eventually

KINDS = {"count": "sum", "gauge": "gauge", "distribution": "histogram"}


class Collector:
    """An OTLP endpoint over HTTP that keeps every request."""

    def __init__(self) -> None:
        self.requests: list[ExportMetricsServiceRequest] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.requests.append(ExportMetricsServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_arguments: object) -> None:
                """Write nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def metrics(self) -> dict[str, list[tuple[str, str, frozenset[str]]]]:
        """Return kind, unit and attribute names of all points received so far, by metric."""
        found: dict[str, list[tuple[str, str, frozenset[str]]]] = {}
        for request in list(self.requests):
            for metric in request.resource_metrics[0].scope_metrics[0].metrics:
                kind = str(metric.WhichOneof("data"))
                for point in getattr(metric, kind).data_points:
                    names = frozenset(attribute.key for attribute in point.attributes)
                    found.setdefault(metric.name, []).append((kind, metric.unit, names))
        return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    created = Collector()
    thread = threading.Thread(target=created.server.serve_forever)
    thread.start()
    yield created
    created.server.shutdown()
    thread.join()
    created.server.server_close()


def test_a_collector_receives_the_table_of_metrics(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, units, kinds and attributes, at the stop at the latest."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server.server_port}")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.namespace=shop")
    metrics = Metrics(client("opentelemetry"))
    report: dict[str, Any] = {"count": metrics.count, "gauge": metrics.gauge, "distribution": metrics.sample}
    for metric in m.METRICS:
        report[metric.type](metric, 1, **dict.fromkeys(metric.tags, "x"))
    metrics.stop()
    assert collector.metrics == {
        each.name: [(KINDS[each.type], unit_of(each), frozenset(map(attribute_of, each.tags)))] for each in m.METRICS
    }
    attributes_of = collector.requests[-1].resource_metrics[0].resource.attributes
    resource = {each.key: each.value.string_value for each in attributes_of}
    assert (resource["service.name"], resource["service.namespace"]) == ("publishworker", "shop")


def test_a_gauge_is_exported_only_after_it_was_set(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a worker that no longer counts the backlog would repeat its last count, so an alert would stay."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server.server_port}")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    metrics = Metrics(client("opentelemetry"))
    metrics.gauge(m.OLDEST_AGE, 400)
    metrics.count(m.HEARTBEAT, 1)
    eventually(lambda: len(collector.metrics.get(m.HEARTBEAT.name, ())) >= 3)
    metrics.stop()
    assert len(collector.metrics[m.OLDEST_AGE.name]) == 1


def test_a_missing_collector_delays_no_worker_and_is_logged_once(
    emulators: Emulators, database: Database, topic: str
) -> None:
    register(database, topic, 20)
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_METRIC_EXPORT_INTERVAL": "200",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    }  # fmt: skip
    with worker(emulators, database, "--metrics", "opentelemetry", **variables) as process:
        wait_until_all_sent(database)
        eventually(lambda: "Metrics are lost" in process.stderr, seconds=20)
        process.stop()
        assert process.wait() == 0
        assert process.stderr.count("the OTLP endpoint does not accept them") == 1
