"""Ask Pub/Sub whether a topic exists, before messages go to it."""

from google.api_core.exceptions import GoogleAPICallError, NotFound
from google.auth.exceptions import GoogleAuthError
from google.pubsub_v1 import PublisherClient

from outbox.errors import NotReached, OutboxError
from outbox.program.pubsub import create_topic_command, open_pubsub
from outbox.program.settings import PubSubSettings

#: Seconds for one request.
SECONDS = 5.0


def check(settings: PubSubSettings, name: str) -> str | None:
    """Return why it is unknown whether the topic exists, or None if it does. Raises OutboxError if it does not.

    `name` is a full name.
    """
    try:
        with PublisherClient(transport=open_pubsub(settings)) as client:
            client.get_topic(topic=name, timeout=SECONDS, retry=None)
    except NotFound:
        command = create_topic_command(settings, name)
        raise OutboxError(
            f"topic {name} does not exist. Create it: `{command}`, or pass --force. Nothing was changed"
        ) from None
    except (GoogleAPICallError, GoogleAuthError, NotReached) as error:
        return f"Pub/Sub does not say whether {name} exists: {getattr(error, 'message', error)}"
    return None
