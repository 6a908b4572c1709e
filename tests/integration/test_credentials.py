"""Credentials that give no token: an outage of the worker's own, which costs no task anything."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest
from google.auth.credentials import Credentials
from google.auth.exceptions import RefreshError
from google.auth.transport.grpc import AuthMetadataPlugin
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport

from outbox.program import logs
from publishworker.pubsub.errors import FailureKind, kind_of
from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.types import Failed, LockedRow
from tests.support.fakes import serialized
from tests.support.pubsub_server import PubSubServer


class Account(Credentials):
    def refresh(self, request: Any) -> None:
        raise RefreshError("the key was deleted")


@pytest.fixture
def server() -> Iterator[PubSubServer]:
    """A server that accepts everything, on a channel that may carry tokens."""
    served = PubSubServer()
    with ThreadPoolExecutor(4) as pool:
        running = grpc.server(pool)
        running.add_generic_rpc_handlers((served.handlers(),))
        port = running.add_secure_port("127.0.0.1:0", grpc.local_server_credentials())
        served.address = f"127.0.0.1:{port}"
        running.start()
        yield served
        running.stop(0).wait(5)


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Restore pytest's handlers, which `logs.configure` replaces."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = []
    yield
    root.handlers = handlers
    root.setLevel(level)
    for name in ("publishworker", "datadog.dogstatsd", "grpc._plugin_wrapping"):
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.mark.usefixtures("own_logging")
def test_a_call_without_a_token_is_distinguished_from_an_outage(
    server: PubSubServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its reason is `credentials`, an outage; gRPC's stack trace for each such call is not written."""
    logs.configure("json", "info")
    # As google.auth makes a channel, but to a server of ours.
    credentials = grpc.composite_channel_credentials(
        grpc.local_channel_credentials(), grpc.metadata_call_credentials(AuthMetadataPlugin(Account(), None))
    )
    row = LockedRow("a", "orders", serialized(), None, datetime.now(UTC), None, None)
    with grpc.secure_channel(server.address, credentials) as channel:
        publisher = PubSubPublisher(PublisherGrpcTransport(channel=channel), "project")
        failure = publisher.publish("orders", [row], 5)["a"]
    assert isinstance(failure, Failed)
    assert failure.reason == "credentials"
    assert kind_of(failure.reason) is FailureKind.OUTAGE
    assert "the key was deleted" in failure.error
    assert not server.requests
    assert capfd.readouterr().err == ""
