"""Clients for Spanner and Pub/Sub with limits of our own: no call waits longer than it says here.

The Spanner client leaves some waits open: a Commit retries for an hour, a stream from an unavailable service loops
without end, a channel that lost its peer may look again only after minutes. One place sets them all.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import google.auth
import google.auth.exceptions
import grpc
from google.api_core.exceptions import ResourceExhausted, ServiceUnavailable
from google.api_core.retry import Retry, if_exception_type
from google.auth.credentials import AnonymousCredentials
from google.cloud import spanner
from google.cloud.spanner_v1 import BurstyPool, SpannerClient
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.services.spanner.transports import SpannerGrpcTransport
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport

from outbox.errors import NotReached

#: Seconds for a whole Commit with its retries; its outcome is unknown after that (design: Again).
COMMIT_SECONDS = 10.0
#: Seconds between looks for a peer that was lost; the default grows to 120 s.
RECONNECT_SECONDS = 2.0

_TRANSIENT = if_exception_type(ServiceUnavailable, ResourceExhausted)

#: Passed to every read and query: without it the client repeats an unavailable stream for ever, without a pause.
STREAM_RETRY = Retry(predicate=_TRANSIENT, initial=0.1, maximum=1.0, timeout=3.0)

#: Seconds for each unary call that the client makes by itself, where it takes no argument from us.
_UNARY_SECONDS = {
    "create_session": 5.0,
    "get_session": 5.0,
    "begin_transaction": 5.0,
    "rollback": 2.0,
    "commit": COMMIT_SECONDS,
}

_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", int(RECONNECT_SECONDS * 1000)),
    ("grpc.keepalive_time_ms", 30_000),
)


class LimitedDatabase(Database):
    """A Database whose every call has a time limit."""

    def __init__(self, database_id: str, instance: Any, api: SpannerClient) -> None:
        """Use `api` for all calls."""
        pool = BurstyPool()
        super().__init__(database_id, instance, pool=pool)  # type: ignore[no-untyped-call]  # the client has no types
        self._limited_api = api
        pool.bind(self)

    @property
    def spanner_api(self) -> SpannerClient:
        """Return the client with the limits."""
        return self._limited_api


def open_database(project: str, instance: str, database: str) -> LimitedDatabase:
    """Return the database; nothing is sent yet. SPANNER_EMULATOR_HOST is respected. Raises NotReached."""
    emulator = os.environ.get("SPANNER_EMULATOR_HOST")
    credentials = AnonymousCredentials() if emulator else _credentials("Spanner")
    client = spanner.Client(project=project, credentials=credentials, disable_builtin_metrics=True)
    transport = SpannerGrpcTransport(credentials=client.credentials, channel=_channel(emulator, SpannerGrpcTransport))
    api = SpannerClient(transport=transport)
    for name, limit in _UNARY_SECONDS.items():
        retry = Retry(predicate=_TRANSIENT, initial=0.1, maximum=2.0, timeout=limit)
        setattr(api, name, functools.partial(getattr(api, name), retry=retry, timeout=limit))
    return LimitedDatabase(database, client.instance(instance), api)


def open_pubsub() -> PublisherGrpcTransport:
    """Return the transport of Pub/Sub's publisher; PUBSUB_EMULATOR_HOST is respected. Raises NotReached."""
    emulator = os.environ.get("PUBSUB_EMULATOR_HOST")
    credentials = AnonymousCredentials() if emulator else _credentials("Pub/Sub")
    return PublisherGrpcTransport(credentials=credentials, channel=_channel(emulator, PublisherGrpcTransport))


def _credentials(service: str) -> Any:
    try:
        credentials, _ = google.auth.default()
    except google.auth.exceptions.DefaultCredentialsError as error:
        raise NotReached(
            f"{service}: no credentials were found. Run `gcloud auth application-default login`, give the pod a "
            f"service account, or set the emulators' variables (`outbox emulators` prints them). {error}"
        ) from error
    return credentials


def _channel(emulator: str | None, transport: Any) -> grpc.Channel | Callable[..., grpc.Channel]:
    """Return a channel to the emulator, or a function that makes the service's secure one, with our options."""
    if emulator:
        return grpc.insecure_channel(emulator, options=_CHANNEL_OPTIONS)

    def secure(host: str, **arguments: Any) -> grpc.Channel:
        channel: grpc.Channel = transport.create_channel(host, **{**arguments, "options": _CHANNEL_OPTIONS})
        return channel

    return secure
