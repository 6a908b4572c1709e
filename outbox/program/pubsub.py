"""The connection to Pub/Sub's publisher service, or to its emulator."""

from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport

from outbox.program.channels import channel, credentials
from outbox.program.settings import PubSubSettings, emulator_address


def open_pubsub(settings: PubSubSettings) -> PublisherGrpcTransport:
    """Return the transport to --pubsub-endpoint or PUBSUB_EMULATOR_HOST. Raises NotReached, SettingError."""
    endpoint = settings.pubsub_endpoint
    plaintext = endpoint if settings.pubsub_plaintext else emulator_host(settings)
    return PublisherGrpcTransport(
        host=endpoint or PublisherGrpcTransport.DEFAULT_HOST,
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
