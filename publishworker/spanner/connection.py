"""Clients for Spanner and Pub/Sub in which every call has a time limit.

The Spanner client leaves some waits open: a Commit retries for an hour, a stream from an unavailable service loops
forever, and a channel that lost its peer may reconnect only after minutes. This module limits all of them.
"""

import os
import queue
import time
from collections.abc import Callable
from typing import Any

import google.auth
import google.auth.exceptions
import grpc
from google.api_core.exceptions import DeadlineExceeded, InternalServerError, ResourceExhausted, ServiceUnavailable
from google.api_core.retry import Retry, if_exception_type
from google.auth.credentials import AnonymousCredentials
from google.cloud import spanner
from google.cloud.spanner_v1 import BurstyPool, SpannerClient
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.services.spanner.transports import SpannerGrpcTransport
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport

from outbox.errors import NotReached

#: Seconds for a whole Commit with its retries. After that its outcome is unknown.
COMMIT_SECONDS = 10.0
#: Seconds between attempts to reconnect. The default grows to 120 s.
RECONNECT_SECONDS = 2.0

_TRANSIENT = if_exception_type(ServiceUnavailable, ResourceExhausted)

#: For every read and query: without it the client restarts an unavailable stream forever, without a pause.
STREAM_RETRY = Retry(predicate=_TRANSIENT, initial=0.1, maximum=1.0, timeout=3.0)


class Deadline:
    """A limit for a whole read or query, passed to the client as its `timeout`.

    The client restarts a broken stream without a pause and each time with the full timeout. A Deadline counts from its
    creation, and pauses before each restart. It raises DeadlineExceeded.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock."""
        self._clock = clock
        self._end = clock() + seconds
        self._calls = 0

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with the remaining time as its timeout, like the client's own decorators."""

        def limited(*arguments: Any, **keywords: Any) -> Any:
            remaining = self._end - self._clock()
            if self._calls and remaining > 0:
                time.sleep(min(0.02 * 2**self._calls, 1.0, remaining))
                remaining = self._end - self._clock()
            self._calls = min(self._calls + 1, 10)
            if remaining <= 0:
                raise DeadlineExceeded("no answer in time")
            return function(*arguments, timeout=remaining, **keywords)

        return limited


#: Seconds for each unary call that the client makes without arguments from us.
_UNARY_SECONDS = {
    "create_session": 5.0,
    "get_session": 5.0,
    "begin_transaction": 5.0,
    "delete_session": 5.0,
    "rollback": 2.0,
    "commit": COMMIT_SECONDS,
}

_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", int(RECONNECT_SECONDS * 1000)),
    ("grpc.keepalive_time_ms", 30_000),
)


#: Max sessions in the pool if they are not multiplexed: one for each batch in flight, and some for other requests.
SESSIONS = 110


class _Sessions(BurstyPool):
    """The client's pool without its check of the session before each transaction, which costs one request in four.

    A lost session is noticed when it is used; see `LimitedDatabase.renewed`.
    """

    def get(self) -> Any:
        """Return an unused session, or a new one."""
        try:
            return self._sessions.get(block=False)
        except queue.Empty:
            session: Any = self._new_session()  # type: ignore[no-untyped-call]  # the client has no types
            session.create()
            return session


class LimitedDatabase(Database):
    """A Database whose every call has a time limit."""

    def __init__(self, database_id: str, instance: Any, api: SpannerClient, role: str = "") -> None:
        """Use `api` for all calls, with the database role `role` if it is not empty."""
        pool: Any = _Sessions(target_size=SESSIONS)  # type: ignore[no-untyped-call]  # the client has no types
        super().__init__(database_id, instance, pool=pool, database_role=role or None)  # type: ignore[no-untyped-call]  # the same
        self._role = role
        self._limited_api = api
        pool.bind(self)

    def renewed(self) -> "LimitedDatabase":
        """Return the same database with new sessions, because the client never replaces a lost one."""
        return LimitedDatabase(self.database_id, self._instance, self._limited_api, self._role)

    @property
    def spanner_api(self) -> SpannerClient:
        """Return the client with time limits."""
        return self._limited_api


def open_relay_database(project: str, instance: str, database: str, role: str = "") -> LimitedDatabase:
    """Return the database, with the database role `role` if it is not empty. Sends nothing. Raises NotReached.

    SPANNER_EMULATOR_HOST is respected.
    """
    emulator = os.environ.get("SPANNER_EMULATOR_HOST")
    credentials = AnonymousCredentials() if emulator else _credentials("Spanner")
    client = spanner.Client(project=project, credentials=credentials, disable_builtin_metrics=True)
    transport = SpannerGrpcTransport(credentials=client.credentials, channel=_channel(emulator, SpannerGrpcTransport))
    api = SpannerClient(transport=transport)
    for name, seconds in _UNARY_SECONDS.items():
        setattr(api, name, _limited(getattr(api, name), seconds))
    return LimitedDatabase(database, client.instance(instance), api, role)


class _Broken(InternalServerError):
    """INTERNAL as a class that the client's own retry does not know. It would retry for up to two minutes."""


def _limited(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    retry = Retry(predicate=_TRANSIENT, initial=0.1, maximum=2.0, timeout=seconds)

    def limited(*arguments: Any, **keywords: Any) -> Any:
        try:
            return call(*arguments, **{**keywords, "retry": retry, "timeout": seconds})
        except InternalServerError as error:
            raise _Broken(error.message, errors=error.errors) from error  # type: ignore[no-untyped-call]  # as its base

    return limited


def open_pubsub(endpoint: str = "") -> PublisherGrpcTransport:
    """Return the transport of Pub/Sub's publisher, at `endpoint` if it is not empty. Raises NotReached.

    PUBSUB_EMULATOR_HOST has precedence.
    """
    emulator = os.environ.get("PUBSUB_EMULATOR_HOST")
    credentials = AnonymousCredentials() if emulator else _credentials("Pub/Sub")
    host = endpoint or PublisherGrpcTransport.DEFAULT_HOST
    channel = _channel(emulator, PublisherGrpcTransport)
    return PublisherGrpcTransport(host=host, credentials=credentials, channel=channel)


def _credentials(service: str) -> Any:
    try:
        credentials, _ = google.auth.default()
    except google.auth.exceptions.DefaultCredentialsError as error:
        raise NotReached(
            f"{service}: no credentials found. Run `gcloud auth application-default login`, give the pod a service "
            f"account, or set the emulators' variables (`outbox emulators` prints them). {error}"
        ) from error
    return credentials


def _channel(emulator: str | None, transport: Any) -> grpc.Channel | Callable[..., grpc.Channel]:
    """Return a channel to the emulator, or a function that opens a secure channel to the service, with our options."""
    if emulator:
        return grpc.insecure_channel(emulator, options=_CHANNEL_OPTIONS)

    def secure(host: str, **arguments: Any) -> grpc.Channel:
        channel: grpc.Channel = transport.create_channel(host, **{**arguments, "options": _CHANNEL_OPTIONS})
        return channel

    return secure
