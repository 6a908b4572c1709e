"""Which attributes of a message were registered, and the digest of a message that certificates have."""

import hashlib
from collections.abc import Mapping

from outbox.message import TASK_ID_ATTRIBUTE

#: Attributes that were not registered, because the relay, Pub/Sub or a subscription adds them: the task ID; the
#: ordering key, which subscriptions write into the attributes; Google's own and tracing attributes; the attributes of a
#: dead-letter topic, see https://cloud.google.com/pubsub/docs/handling-failures#track-delivery-attempts
ADDED = (TASK_ID_ATTRIBUTE, "ordering_key")
ADDED_PREFIXES = ("goog", "CloudPubSubDeadLetter")


def sha256_of(data: bytes, attributes: Mapping[str, str]) -> str:
    """Return the digest of a message, as `received.sha256` computes it with Spark (docs/pipeline/certificate.md)."""
    registered = {name: attributes[name] for name in attributes if name not in ADDED}
    lines = [
        f"{_hex(name.encode())} {_hex(text.encode())}"
        for name, text in registered.items()
        if not name.startswith(ADDED_PREFIXES)
    ]
    return _hex("".join(f"{each}\n" for each in [_hex(data), *sorted(lines)]).encode())


def _hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
