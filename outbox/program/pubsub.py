"""The connection to Pub/Sub's publisher service, or to its emulator, and whether a topic exists there."""

from google.api_core.exceptions import GoogleAPICallError, NotFound
from google.auth.exceptions import GoogleAuthError
from google.pubsub_v1 import PublisherClient
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport

from outbox.errors import NotReached, OutboxError
from outbox.program.channels import channel, credentials
from outbox.program.settings import PubSubSettings, address_of, emulator_address

#: Seconds for the answer whether a topic exists.
TOPIC_SECONDS = 5.0


def open_pubsub(settings: PubSubSettings) -> PublisherGrpcTransport:
    """Return the transport to --pubsub-endpoint or PUBSUB_EMULATOR_HOST. Raises NotReached, SettingError."""
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


def check_topic(settings: PubSubSettings, name: str, otherwise: str) -> str | None:
    """Return why it is unknown whether the topic of a full name exists, or None. Raises OutboxError if it does not.

    The error says to create the topic, and what the caller can do `otherwise`.
    """
    try:
        with PublisherClient(transport=open_pubsub(settings)) as client:
            client.get_topic(topic=name, timeout=TOPIC_SECONDS, retry=None)
    except NotFound:
        command = create_topic_command(settings, name)
        raise OutboxError(
            f"topic {name} does not exist. Create it: `{command}`{otherwise}. Nothing was changed"
        ) from None
    except (GoogleAPICallError, GoogleAuthError, NotReached) as error:
        return f"Pub/Sub does not say whether {name} exists: {getattr(error, 'message', error)}"
    return None
