"""The metrics of a worker, as DogStatsD agents and OTLP collectors receive them, on real sockets."""

import contextlib
import gzip
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from datadog.dogstatsd.base import DogStatsd
from google.cloud.spanner_v1.database import Database
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from outbox import __version__
from outbox.devtools.emulators import Emulators
from publishworker.telemetry import metrics as m
from publishworker.telemetry.clients import attribute_of, client, unit_of
from publishworker.telemetry.metrics import Metrics
from publishworker.telemetry.reporter import Reporter
from publishworker.types import Delivered, Published
from tests.support.container import altered, settings
from tests.support.parts import claim_of
from tests.support.relays import insert_undecodable, register, wait_until_all_sent, worker
from tests.support.waiting import eventually

#: DogStatsD's names for the types in the table of metrics.
TYPES = {"c": "count", "g": "gauge", "d": "distribution"}


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    value: float
    type: str
    tags: frozenset[str]

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(tag.partition(":")[0] for tag in self.tags)


def samples(packet: str) -> Iterator[Sample]:
    for line in packet.splitlines():
        name, _, rest = line.partition(":")
        value, kind, *fields = rest.split("|")
        tags = next((each[1:] for each in fields if each.startswith("#")), "")
        if name.startswith("outbox."):
            # Several values of one name in one line are divided by colons.
            for each in value.split(":"):
                yield Sample(name, float(each), TYPES[kind], frozenset(tags.split(",") if tags else ()))


class Agent:
    """`heard` is every sample that came while the agent was there."""

    def __init__(self, url: str) -> None:
        self.environment = {"DD_DOGSTATSD_URL": url}
        self.heard: list[Sample] = []
        self.packets = 0

    @property
    def counts(self) -> Counter[str]:
        """Return the sums of all counters by name."""
        sums: Counter[str] = Counter()
        for each in list(self.heard):
            if each.type == "count":
                sums[each.name] += int(each.value)
        return sums

    def named(self, name: str) -> list[Sample]:
        return [each for each in list(self.heard) if each.name == name]

    @contextlib.contextmanager
    def _served(self, end: socket.socket) -> Iterator[None]:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        thread = threading.Thread(target=self._listen, args=(end,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.sendto(b"stop", end.getsockname())
            thread.join(5)

    def _listen(self, end: socket.socket) -> None:
        while (packet := end.recv(1 << 20)) != b"stop":
            self.packets += 1
            self.heard.extend(samples(packet.decode()))


class UnixAgent(Agent):
    """An agent on a Unix socket, which appears and disappears."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"unix://{path}")
        self.path = path

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Be there for the time of the block; the socket's file is gone afterwards, as with a pod of an agent."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.bind(str(self.path))
            try:
                with self._served(end):
                    yield
            finally:
                self.path.unlink()


@contextlib.contextmanager
def listening() -> Iterator[Agent]:
    """Yield an agent on a UDP port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.bind(("127.0.0.1", 0))
        agent = Agent(f"udp://127.0.0.1:{end.getsockname()[1]}")
        with agent._served(end):
            yield agent


def use(monkeypatch: pytest.MonkeyPatch, agent: Agent) -> None:
    for name, value in agent.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def unix_agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> UnixAgent:
    agent = UnixAgent(tmp_path / "dsd.socket")
    use(monkeypatch, agent)
    return agent


@pytest.fixture(params=["udp", "unix"])
def agent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    if request.param == "udp":
        with listening() as agent:
            use(monkeypatch, agent)
            yield agent
    else:
        agent = request.getfixturevalue("unix_agent")
        with agent.listening():
            yield agent


@pytest.fixture
def silent_socket(unix_agent: UnixAgent) -> Iterator[socket.socket]:
    """The socket of an agent that reads nothing by itself."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(unix_agent.path))
        yield end


@pytest.mark.parametrize("url", ["", "nonsense://nowhere"])
def test_without_an_agent_nothing_is_sent_or_logged(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the URL is wrong, the client logs it. The relay continues."""
    if url:
        monkeypatch.setenv("DD_DOGSTATSD_URL", url)
    with caplog.at_level(logging.INFO if url else logging.DEBUG):
        metrics = Metrics(client("datadog"))
        metrics.count(m.PUBLISHED, 1, topic="orders")
        metrics.gauge(m.OLDEST_AGE, 1)
        metrics.stop()
    assert "nonsense" in caplog.text if url else not caplog.records


def test_a_client_that_raises_is_logged_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    broken = mock.Mock(side_effect=OSError("no"))
    metrics = Metrics(mock.Mock(increment=broken, gauge=broken, stop=broken))
    with caplog.at_level(logging.WARNING):
        metrics.count(m.PUBLISHED, 1, topic="orders")
        metrics.gauge(m.OLDEST_AGE, 1)
        metrics.stop()
    assert [each.getMessage() for each in caplog.records if each.name == "publishworker"] == [
        "Metrics are lost because the client failed",
        "The last metrics could not be sent",
    ]


def test_an_unavailable_agent_is_logged_once(unix_agent: UnixAgent, caplog: pytest.LogCaptureFixture) -> None:
    """Its socket appears, disappears and appears again. Samples sent meanwhile are lost, the rest arrives."""
    metrics = Metrics(client("datadog"))
    assert isinstance(metrics._client, DogStatsd)

    def send() -> None:
        metrics.count(m.PUBLISHED, 1, topic="orders")
        metrics._client.flush()
        metrics._client.wait_for_pending()

    with caplog.at_level(logging.INFO):
        send()
        for count in (1, 2):
            with unix_agent.listening():
                send()
                eventually(lambda count=count: unix_agent.counts[m.PUBLISHED.name] == count)
            send()
        metrics.stop()
    assert unix_agent.counts[m.PUBLISHED.name] == 2
    [record] = caplog.records
    assert record.getMessage().startswith("Metrics are lost, and publishing continues")


def test_buffered_samples_are_sent_at_the_end(agent: Agent) -> None:
    """Samples of a whole batch share a packet, and none is left behind."""
    metrics = Metrics(client("datadog"))
    for number in range(100):
        metrics.sample(m.LATENCY, number / 10, topic="orders")
    metrics.stop()
    eventually(lambda: len(agent.named(m.LATENCY.name)) == 100)
    assert agent.packets < 20
    assert {each.type for each in agent.heard} == {"distribution"}


def counted(lines: list[str]) -> int:
    return sum(int(line.split(":")[1].split("|")[0]) for line in lines if line.startswith(m.PUBLISHED.name))


def test_a_slow_agent_gets_every_count(silent_socket: socket.socket) -> None:
    """Its socket holds ten packets: other packets wait, and latencies do not crowd them out."""
    metrics = Metrics(client("datadog"))
    reporter = Reporter(metrics, time.monotonic)
    lines: list[str] = []

    def listen() -> None:
        while counted(lines) < 25_000:
            lines.extend(silent_socket.recv(65536).decode().splitlines())
            time.sleep(0.005)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    for batch in range(25):
        ids = tuple(f"{batch}-{number}" for number in range(1000))
        sent = Delivered(
            claim_of("orders", *ids), answers=dict.fromkeys(ids, Published("1")), latencies=dict.fromkeys(ids, 0.1)
        )
        reporter.report_batch(sent)
    metrics.stop()
    listener.join(30)
    assert counted(lines) == 25_000


@pytest.mark.usefixtures("silent_socket")
def test_a_hanging_agent_delays_neither_the_relay_nor_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples for it wait for a while, and are dropped at the end."""
    monkeypatch.setattr(m, "STOP_SECONDS", 0.5)
    metrics = Metrics(client("datadog"))
    begin = time.monotonic()
    for _ in range(20_000):
        metrics.count(m.PUBLISHED, 1, topic="orders")
    assert time.monotonic() - begin < 20
    metrics.stop()
    assert time.monotonic() - begin < 30


#: Reports come every 15 s; here every second.
OFTEN = "from publishworker.process import gauges; gauges.REPORT_SECONDS = 1.0"
SERVICE = {"DD_ENV": "test", "DD_SERVICE": "publishworker", "DD_VERSION": "1.2.3"}
TABLE = {metric.name: metric for metric in m.METRICS}
#: The metrics of every worker that sends tasks and polls shard 0.
USUAL = {
    m.HEARTBEAT, m.WORKERS, m.PENDING, m.TOPIC_TASKS, m.OLDEST_AGE, m.TOPIC_OLDEST_AGE,
    m.PHASE_DURATION, m.LATENCY, m.IN_FLIGHT, m.PUBLISHED,
}  # fmt: skip


@pytest.mark.extended
def test_every_sent_metric_is_documented_with_its_tags(
    emulators: Emulators, database: Database, topic: str, tmp_path: Path
) -> None:
    """Names, types and tags of a run with failures match the table. Each metric that every worker sends was sent."""
    agent = UnixAgent(tmp_path / "dsd.socket")
    environment = settings(emulators, database.database_id, tmp_path / "heartbeat", **agent.environment, **SERVICE)
    with agent.listening(), altered(OFTEN, environment, "--batch-size", "10") as process:
        insert_undecodable(database, "garbage", topic, "key")
        register(database, "missing-topic", 2)
        register(database, topic, 40)
        wanted = {metric.name for metric in USUAL} | {m.FAILED.name, m.DEAD.name, m.CIRCUIT_STATE.name}
        eventually(lambda: wanted <= {each.name for each in list(agent.heard)}, seconds=40)
        eventually(lambda: agent.counts[m.PUBLISHED.name] == 40, seconds=30)
        process.end()
        assert "Traceback" not in process.stderr
    for each in agent.heard:
        metric = TABLE[each.name]
        assert each.type == metric.type, each
        without = {"topic"} if each.name == m.PHASE_DURATION.name and "phase:publish" not in each.tags else set()
        assert each.keys == {*metric.tags, "env", "service", "version"} - without, each
        assert {"env:test", "service:publishworker", "version:1.2.3"} <= each.tags
    phases = {tag for each in agent.named(m.PHASE_DURATION.name) for tag in each.tags if tag.startswith("phase:")}
    assert phases == {f"phase:{phase}" for phase in m.PHASES}
    states = {tag for each in agent.named(m.TOPIC_TASKS.name) for tag in each.tags if tag.startswith("state:")}
    assert states <= {f"state:{state}" for state in m.TASK_STATES}
    assert len(agent.named(m.LATENCY.name)) == 40


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
    metrics = Metrics(client("opentelemetry", "worker-1"))
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
    assert (resource["service.instance.id"], resource["service.version"]) == ("worker-1", __version__)


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
