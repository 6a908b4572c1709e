"""Channels and credentials for Spanner and Pub/Sub: the service, an endpoint, or an emulator."""

from collections.abc import Callable
from typing import Any

import google.auth
import google.auth.exceptions
import grpc
import grpc.experimental
from google.auth.credentials import AnonymousCredentials

from outbox.base.schedules import RECONNECT
from outbox.errors import NotReached
from outbox.program.settings import host_and_port, is_loopback

_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", int(RECONNECT.most * 1000)),  # by default 120 s
    ("grpc.keepalive_time_ms", 30_000),
    # A connection for each channel. By default, gRPC uses one connection for all channels to a host.
    ("grpc.use_local_subchannel_pool", 1),
    # The thread that reads a query's result also waits for it. By default gRPC hands each message over from a thread of
    # the channel, which costs a tenth of the relay's CPU (docs/decisions.md, 0009).
    (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
)
#: https://grpc.github.io/grpc/core/group__grpc__arg__keys.html
_NO_PROXY = ("grpc.enable_http_proxy", 0)


def credentials(service: str, *, plaintext: object) -> Any:
    """Return the default credentials, or none for a plaintext endpoint. Raises NotReached."""
    if plaintext:
        return AnonymousCredentials()
    try:
        default, _ = google.auth.default()
    except google.auth.exceptions.DefaultCredentialsError as error:
        raise NotReached(
            f"{service}: no credentials found. Run `gcloud auth application-default login`, give the pod a service "
            f"account, or set the emulators' variables (`outbox emulators` prints them). {error}"
        ) from error
    return default


def channel(transport: Any, plaintext: str | None) -> grpc.Channel | Callable[..., grpc.Channel]:
    """Return a channel to the host `plaintext`, or a function that opens a secure channel for `transport`.

    Only TLS to another machine uses the proxy of `https_proxy` or `http_proxy`. An emulator is not reached through it.
    """
    if plaintext:
        return grpc.insecure_channel(plaintext, options=(*_OPTIONS, _NO_PROXY))

    def secure(host: str, **arguments: Any) -> grpc.Channel:
        options = (*_OPTIONS, _NO_PROXY) if is_loopback(host_and_port(host)[0]) else _OPTIONS
        opened: grpc.Channel = transport.create_channel(host, **{**arguments, "options": options})
        return opened

    return secure
