"""Pub/Sub's endpoint for ordered tasks: when `check` warns, which values are refused, where the worker connects."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from unittest import mock

import google.auth
import grpc
import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport

from outbox.devtools.emulators import Emulators
from outbox.program.channels import open_pubsub
from publishworker.process import cli
from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.types import LockedRow, Published
from tests.support.commands import here
from tests.support.fakes import serialized
from tests.support.pubsub import PubSub
from tests.support.relays import register
from tests.support.rpc import PubSubServer
from tests.support.spanner import INSTANCE, PROJECT, place

ENDPOINT = "europe-west1-pubsub.googleapis.com"
NAMED = {"project": PROJECT, "instance": INSTANCE, "database": "any-database"}


@pytest.mark.extended
def test_check_warns_of_ordered_tasks_without_an_endpoint(
    emulators: Emulators, database: Database, pubsub: PubSub
) -> None:
    """It names their topics and the setting. With the setting, without ordered tasks or on the emulator: no warning."""

    def warnings(**environment: str) -> list[str]:
        named = {f"OUTBOX_{name.upper()}": value for name, value in NAMED.items()}
        named |= {"OUTBOX_DATABASE": database.database_id, **environment}
        done = here("check", environment=emulators.environment() | named, program=cli.main)
        assert done.code == (3 if "PUBSUB_EMULATOR_HOST" in environment else 0)
        return [line for line in done.stdout.splitlines() if line.startswith("warning")]

    pending, scheduled, loose, done_with = topics = [pubsub.new_topic() for _ in range(4)]
    register(database, loose, 1)
    [sent] = register(database, done_with, 1, ordering_key="a")
    with database.batch() as batch:
        batch.update("AsynchronousTasks", ("Id", "SentAt"), [(sent, COMMIT_TIMESTAMP)])
    assert warnings() == []
    register(database, pending, 2, ordering_key="a")
    register(database, scheduled, 1, ordering_key="a", available_at=datetime(2090, 1, 1, tzinfo=UTC))
    assert warnings() == []
    google_cloud = {"PUBSUB_EMULATOR_HOST": "", "GOOGLE_APPLICATION_CREDENTIALS": "", "NO_GCE_CHECK": "true"}
    [warning] = warnings(**google_cloud, HOME="/nonexistent")
    assert {topic for topic in topics if topic in warning} == {pending}
    assert "--pubsub-endpoint" in warning
    assert warnings(OUTBOX_PUBSUB_ENDPOINT=f"http://{emulators.pubsub_host}") == []


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    monkeypatch.delenv("PUBSUB_EMULATOR_HOST", raising=False)
    opened: list[tuple[str, dict[str, Any]]] = []

    def create_channel(host: str, **options: Any) -> grpc.Channel:
        opened.append((host, options))
        return grpc.insecure_channel("127.0.0.1:1")

    with (
        mock.patch.object(PublisherGrpcTransport, "create_channel", create_channel),
        mock.patch.object(google.auth, "default", return_value=(AnonymousCredentials(), PROJECT)),
    ):
        yield opened


def test_the_channel_connects_to_the_endpoint(
    channels: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same limits as the global one's. The endpoint wins over the emulator's variable."""
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", "127.0.0.1:1")
    for endpoint, target in {
        ENDPOINT: f"{ENDPOINT}:443",
        "pubsub.example.com:8443": "pubsub.example.com:8443",
        "[2001:db8::1]:8443": "[2001:db8::1]:8443",
    }.items():
        open_pubsub(place(pubsub_endpoint=endpoint))
        host, options = channels.pop()
        assert host == target
        assert dict(options["options"])["grpc.max_receive_message_length"] == -1
        assert "grpc.max_reconnect_backoff_ms" in dict(options["options"])
        assert "grpc.enable_http_proxy" not in dict(options["options"])
    with PubSubServer() as server:
        settings = place(pubsub_endpoint=f"http://{server.address}")
        publisher = PubSubPublisher(open_pubsub(settings), PROJECT)
        row = LockedRow("a", "orders", serialized(), "key", datetime.now(UTC), None, None)
        assert isinstance(publisher.publish("orders", [row], 5)["a"], Published)
        assert len(server.requests) == 1
    assert channels == []
    for endpoint in ("[::1]:443", "localhost", "127.0.0.1:8443"):  # no proxy
        open_pubsub(place(pubsub_endpoint=endpoint))
        assert dict(channels.pop()[1]["options"])["grpc.enable_http_proxy"] == 0
    monkeypatch.delenv("PUBSUB_EMULATOR_HOST")
    open_pubsub(place())
    assert channels.pop()[0] == "pubsub.googleapis.com:443"
