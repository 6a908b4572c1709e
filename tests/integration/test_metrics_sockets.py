"""Metrics through the real client to real sockets: UDP, Unix socket, and no agent at all."""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from datadog.dogstatsd.base import DogStatsd

import outbox
from outbox.testing import RecordingTransaction
from publishworker.telemetry import datadog
from publishworker.telemetry import metrics as m
from publishworker.telemetry.metrics import Metrics
from publishworker.telemetry.reporter import Reporter
from publishworker.types import Batch, BatchResult, Sent


@pytest.fixture
def udp(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as agent:
        agent.bind(("127.0.0.1", 0))
        agent.settimeout(5)
        monkeypatch.setenv("DD_DOGSTATSD_URL", f"udp://127.0.0.1:{agent.getsockname()[1]}")
        yield agent


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "dsd.socket"
    monkeypatch.setenv("DD_DOGSTATSD_URL", f"unix://{path}")
    return path


@pytest.fixture
def unix(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(path))
        agent.settimeout(5)
        yield agent


def received(agent: socket.socket, count: int) -> list[str]:
    """Return that many metrics, without the client's own telemetry."""
    lines: list[str] = []
    while len(lines) < count:
        lines += [line for line in agent.recv(65536).decode().splitlines() if line.startswith("outbox.")]
    return lines


@pytest.mark.parametrize("kind", ["udp", "unix"])
def test_counts_and_gauges_arrive_with_their_tags(kind: str, request: pytest.FixtureRequest) -> None:
    """Names, values and tags as in docs/reference/metrics.md."""
    agent = request.getfixturevalue(kind)
    metrics = Metrics(datadog.client())
    metrics.count(m.PUBLISHED, 100, topic="orders")
    metrics.count(m.FAILED, 2, topic="orders", reason="not_found")
    metrics.gauge(m.OLDEST_AGE, 1.5)
    lines = [line.split("|c:")[0].split("|card:")[0] for line in received(agent, 3)]
    metrics.stop()
    assert lines[0] == "outbox.total_published_task_count:100|c|#topic:orders"
    assert lines[1] == "outbox.failed_task_count:2|c|#topic:orders,reason:not_found"
    assert lines[2].startswith("outbox.oldest_task_age:1.5|g")


def test_applications_count_registered_tasks_through_the_same_client(udp: socket.socket, set_metrics: Any) -> None:
    set_metrics(DogStatsd())
    outbox.register(RecordingTransaction(), "orders", b"")
    assert received(udp, 1)[0].startswith("outbox.registered_task_count:1|c|#topic:orders")


@pytest.mark.parametrize("url", ["", "nonsense://nowhere"])
def test_without_an_agent_nothing_is_sent_or_logged(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the URL is wrong, the client logs it. The relay continues."""
    if url:
        monkeypatch.setenv("DD_DOGSTATSD_URL", url)
    with caplog.at_level(logging.INFO if url else logging.DEBUG):
        metrics = Metrics(datadog.client())
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


def test_an_unavailable_agent_is_logged_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its socket appears, disappears and appears again. Samples sent meanwhile are lost, the rest arrives."""
    metrics = Metrics(datadog.client())
    assert isinstance(metrics._client, DogStatsd)

    def send(topic: str) -> None:
        metrics.count(m.PUBLISHED, 1, topic=topic)
        metrics._client.flush()
        metrics._client.wait_for_pending()

    with caplog.at_level(logging.INFO):
        send("too-early")
        for round_ in ("first", "second"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
                agent.bind(str(path))
                agent.settimeout(5)
                send(round_)
                assert f"topic:{round_}" in received(agent, 1)[0]
            path.unlink()
            send("in-vain")
        metrics.stop()
    [record] = caplog.records
    assert record.getMessage().startswith("Metrics are lost, and publishing continues")


def test_buffered_samples_are_sent_at_the_end(udp: socket.socket) -> None:
    """Samples of a whole batch share a packet, and none is left behind."""
    metrics = Metrics(datadog.client())
    for number in range(100):
        metrics.sample(m.LATENCY, number / 10, topic="orders")
    metrics.stop()
    packets: list[list[str]] = []
    while sum(map(len, packets)) < 100:
        packets.append(received(udp, 1))
    assert len(packets) < 20
    assert {line.split("|")[1] for packet in packets for line in packet} == {"d"}


def counted(lines: list[str]) -> int:
    return sum(int(line.split(":")[1].split("|")[0]) for line in lines if line.startswith(m.PUBLISHED.name))


def test_a_slow_agent_gets_every_count(unix: socket.socket) -> None:
    """Its socket holds ten packets: other packets wait, and latencies do not crowd them out."""
    metrics = Metrics(datadog.client())
    reporter = Reporter(metrics)
    lines: list[str] = []

    def listen() -> None:
        while counted(lines) < 25_000:
            lines.extend(unix.recv(65536).decode().splitlines())
            time.sleep(0.005)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    for batch in range(25):
        ids = tuple(f"{batch}-{number}" for number in range(1000))
        sent = BatchResult(Batch("orders", ids), tried=dict.fromkeys(ids, Sent("1")), waited=dict.fromkeys(ids, 0.1))
        reporter.batch(sent)
    metrics.stop()
    listener.join(30)
    assert counted(lines) == 25_000


@pytest.mark.usefixtures("unix")
def test_a_hanging_agent_delays_neither_the_relay_nor_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples for it wait for a while, and are dropped at the end."""
    monkeypatch.setattr(m, "STOP_SECONDS", 0.5)
    metrics = Metrics(datadog.client())
    begin = time.monotonic()
    for _ in range(20_000):
        metrics.count(m.PUBLISHED, 1, topic="orders")
    assert time.monotonic() - begin < 20
    metrics.stop()
    assert time.monotonic() - begin < 30
