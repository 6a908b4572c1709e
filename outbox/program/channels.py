"""Connections to Spanner and Pub/Sub: the service, an endpoint, or an emulator. And whether a topic exists.

The client of Pub/Sub is imported at its first use, because most commands of operators need Spanner only.
"""

from collections.abc import Callable
from typing import Any

import google.auth
import google.auth.exceptions
import grpc
import grpc.experimental
from google.api_core.exceptions import GoogleAPICallError, NotFound
from google.auth.credentials import AnonymousCredentials

from outbox.base.schedules import RECONNECT
from outbox.errors import NotReached, OutboxError
from outbox.program.settings import PubSubSettings, address_of, emulator_address, host_and_port, is_loopback

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
#: Seconds for the answer whether a topic exists.
TOPIC_SECONDS = 5.0


def credentials(service: str, *, plaintext: object) -> Any:
    """Return the default credentials, or none for a plaintext endpoint. Raises NotReached."""
    if plaintext:
        return AnonymousCredentials()
    try:
        default, _ = google.auth.default()
    except (google.auth.exceptions.GoogleAuthError, OSError, ValueError) as error:  # also of a file that is none
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


def open_pubsub(settings: PubSubSettings) -> Any:
    """Return the transport to --pubsub-endpoint or PUBSUB_EMULATOR_HOST. Raises NotReached, SettingError."""
    from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport  # noqa: PLC0415 - see above

    host, plaintext = address_of(settings.pubsub_endpoint, "PUBSUB_EMULATOR_HOST")
    return PublisherGrpcTransport(
        host=host or PublisherGrpcTransport.DEFAULT_HOST,
        credentials=credentials("Pub/Sub", plaintext=plaintext),
        channel=channel(PublisherGrpcTransport, plaintext),
    )


def emulator_host(settings: PubSubSettings) -> str | None:
    """Return the address of the Pub/Sub emulator, or None if it is not used. Raises SettingError."""
    return None if settings.pubsub_endpoint else emulator_address("PUBSUB_EMULATOR_HOST")


def create_topic_command(settings: PubSubSettings, topic: str) -> str:
    """Return the command that creates the topic of a full name. `gcloud` ignores the emulator's variable."""
    if emulator_host(settings) is None:
        return f"gcloud pubsub topics create {topic}"
    _, project, _, topic_id = topic.split("/")
    return f"outbox emulators --create {project}/{settings.instance}/{settings.database} --topic {topic_id}"


def check_topic_exists(settings: PubSubSettings, name: str, otherwise: str) -> str | None:
    """Return why it is unknown whether the topic of a full name exists, or None. Raises OutboxError if it does not.

    The error says to create the topic, and what the caller can do `otherwise`.
    """
    from google.pubsub_v1 import PublisherClient  # noqa: PLC0415 - see above

    try:
        with PublisherClient(transport=open_pubsub(settings)) as client:
            client.get_topic(topic=name, timeout=TOPIC_SECONDS, retry=None)
    except NotFound:
        command = create_topic_command(settings, name)
        raise OutboxError(
            f"topic {name} does not exist. Create it: `{command}`{otherwise}. Nothing was changed"
        ) from None
    except (GoogleAPICallError, google.auth.exceptions.GoogleAuthError, NotReached) as error:
        return f"Pub/Sub does not say whether {name} exists: {getattr(error, 'message', error)}"
    return None
