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

from outbox import logs
from publishworker.failures import Kind, kind_of
from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.task import Failed, Row
from tests.support.fakes import FakeStore, serialized
from tests.support.parts import relay_of
from tests.support.pubsub_server import PubSubServer


class Account(Credentials):
    """A service account whose key may be `lost`. A token of it is good for one call, so that each call wants one."""

    def __init__(self) -> None:
        """Begin with a key."""
        super().__init__()
        self.lost = False

    def refresh(self, request: Any) -> None:
        """Get a token."""
        if self.lost:
            raise RefreshError("the key was deleted")
        self.token = "token"
        self.expiry = datetime(2000, 1, 1)  # noqa: DTZ001 - google.auth's times are naive


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
def account() -> Account:
    """Whose calls they are."""
    return Account()


@pytest.fixture
def publisher(server: PubSubServer, account: Account) -> Iterator[PubSubPublisher]:
    """A publisher on a channel made as google.auth makes it, but to a server of ours."""
    credentials = grpc.composite_channel_credentials(
        grpc.local_channel_credentials(), grpc.metadata_call_credentials(AuthMetadataPlugin(account, None))
    )
    with grpc.secure_channel(server.address, credentials) as channel:
        yield PubSubPublisher(PublisherGrpcTransport(channel=channel), "project")


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Give back to pytest what `logs.configure` takes."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = []
    yield
    root.handlers = handlers
    root.setLevel(level)
    for name in ("publishworker", "datadog.dogstatsd", "grpc._plugin_wrapping"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def row(id: str) -> Row:
    """Return a row under the lock."""
    return Row(id, "orders", serialized(), None, datetime.now(UTC), None, None)


@pytest.mark.usefixtures("own_logging")
def test_a_call_without_a_token_is_told_from_a_service_that_is_away(
    publisher: PubSubPublisher, server: PubSubServer, account: Account, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its reason is `credentials`, an outage, and the sentence is that of google.auth.

    The logger of gRPC writes a stack trace for each such call; the worker does not, because it reports the topic.
    """
    logs.configure("json", "info")
    account.lost = True
    failure = publisher.publish("orders", [row("a")], 5)["a"]
    assert isinstance(failure, Failed)
    assert failure.reason == "credentials"
    assert kind_of(failure.reason) is Kind.OUTAGE
    assert "the key was deleted" in failure.error
    assert not server.requests
    assert capfd.readouterr().err == ""


def test_lost_credentials_charge_no_task(publisher: PubSubPublisher, server: PubSubServer, account: Account) -> None:
    """The circuit of the topic opens; when the credentials are back one probe goes out, then the others."""
    store, now = FakeStore(), 1000.0
    for n in range(30):
        store.insert(str(n), "orders", serialized())
    relay = relay_of(store, publisher, clock=lambda: now)
    account.lost = True
    failed = 0
    for now in range(1000, 1060):  # noqa: B007 - the clock reads it
        failed += relay.turn().failed
    assert 0 < failed < 30  # two batches at first, then single probes, in the end every ten seconds
    assert all((each.attempts, each.available_at, each.last_error) == (0, None, None) for each in store.rows.values())
    account.lost = False
    for now in range(1060, 1075):  # noqa: B007 - the clock reads it
        relay.turn()
    assert all(each.sent_at and not each.attempts for each in store.rows.values())
    assert len(server.requests[0].messages) == 1
