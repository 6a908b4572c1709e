"""Metrics through the real client to real sockets: UDP, Unix socket, and no agent at all."""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from datadog.dogstatsd.base import DogStatsd

from publishworker.telemetry import metrics as m
from publishworker.telemetry.clients import client
from publishworker.telemetry.metrics import Metrics
from publishworker.telemetry.reporter import Reporter
from publishworker.types import Delivered, Published
from tests.support.dogstatsd import Agent, UnixAgent, listening
from tests.support.parts import claim_of
from tests.support.waiting import eventually


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
