"""The connection to Pub/Sub's publisher service."""

import os

from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport

from outbox.shared.channels import channel, credentials
from outbox.shared.settings import PubSubSettings


def open_pubsub(settings: PubSubSettings) -> PublisherGrpcTransport:
    """Return the transport to --pubsub-endpoint. Sends nothing. Raises NotReached.

    Without this setting, PUBSUB_EMULATOR_HOST is respected.
    """
    endpoint = settings.pubsub_endpoint
    emulator = None if endpoint else os.environ.get("PUBSUB_EMULATOR_HOST")
    plaintext = endpoint if settings.pubsub_plaintext else emulator
    return PublisherGrpcTransport(
        host=endpoint or PublisherGrpcTransport.DEFAULT_HOST,
        credentials=credentials("Pub/Sub", plaintext=plaintext),
        channel=channel(PublisherGrpcTransport, plaintext),
    )
