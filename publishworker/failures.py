"""What each failure means for its task and its topic: one table, made to be read and changed.

docs/reference/errors.md is generated from it.
"""

import enum
from dataclasses import dataclass
from typing import Any

#: How gRPC begins the details of a call that never left because the credentials gave no token; its status, UNAVAILABLE,
#: is that of a service that is away (grpc/src/core/lib/security/credentials/plugin/plugin_credentials.cc).
_NO_CREDENTIALS = "Getting metadata from plugin failed"


class Kind(enum.Enum):
    """What a failure is about, which decides who pays for it."""

    CONTENT = "content"
    TARGET = "target"
    OUTAGE = "outage"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Reason:
    """A row of the table. `name` is a metric's tag and the beginning of LastError; `source` is what raises it."""

    name: str
    kind: Kind
    source: str
    meaning: str


REASONS = (
    Reason("undecodable", Kind.CONTENT, "`DecodeError`", "Data is not a serialized PubsubMessage."),
    Reason("too_large", Kind.CONTENT, "size", "The publish request would exceed Pub/Sub's 10,000,000 bytes."),
    Reason("invalid_topic", Kind.CONTENT, "`InvalidMessage`", "No topic can have the name in the column Topic."),
    Reason("topic_not_allowed", Kind.CONTENT, "`--allowed-topics`", "The worker may not publish to this topic."),
    Reason("expired", Kind.CONTENT, "`ExpiresAt`", "The time until which the message was worth sending has passed."),
    Reason("invalid_argument", Kind.CONTENT, "INVALID_ARGUMENT", "Pub/Sub refused this message, sent on its own."),
    Reason("not_found", Kind.TARGET, "NOT_FOUND", "The topic does not exist."),
    Reason("permission_denied", Kind.TARGET, "PERMISSION_DENIED", "The worker may not publish to the topic."),
    Reason("failed_precondition", Kind.TARGET, "FAILED_PRECONDITION", "The topic's state forbids it, as a lost key."),
    Reason("unavailable", Kind.OUTAGE, "UNAVAILABLE", "Pub/Sub cannot be reached."),
    Reason("deadline_exceeded", Kind.OUTAGE, "DEADLINE_EXCEEDED", "No answer in time; it may have been published."),
    Reason("resource_exhausted", Kind.OUTAGE, "RESOURCE_EXHAUSTED", "A quota is used up."),
    Reason("internal", Kind.OUTAGE, "INTERNAL", "Pub/Sub failed."),
    Reason("aborted", Kind.OUTAGE, "ABORTED", "Pub/Sub gave up the request."),
    Reason("cancelled", Kind.OUTAGE, "CANCELLED", "The request was cancelled on its way."),
    Reason("unknown", Kind.OUTAGE, "UNKNOWN", "Pub/Sub, or something on the way to it, failed without saying how."),
    Reason("unauthenticated", Kind.OUTAGE, "UNAUTHENTICATED", "The worker's credentials are not accepted."),
    Reason("credentials", Kind.OUTAGE, "`google.auth` errors", "The worker's credentials give no token."),
    Reason("already_exists", Kind.UNKNOWN, "ALREADY_EXISTS", "Pub/Sub does not answer so to a publish request."),
    Reason("out_of_range", Kind.UNKNOWN, "OUT_OF_RANGE", "Pub/Sub does not answer so to a publish request."),
    Reason("unimplemented", Kind.UNKNOWN, "UNIMPLEMENTED", "The endpoint is not Pub/Sub's, or too old."),
    Reason("data_loss", Kind.UNKNOWN, "DATA_LOSS", "Pub/Sub does not answer so to a publish request."),
)

_KINDS = {each.name: each.kind for each in REASONS}


def kind_of(reason: str) -> Kind:
    """Return the kind of a reason; of one that is not in the table: unknown."""
    return _KINDS.get(reason, Kind.UNKNOWN)


def reason_of(error: Any) -> str:
    """Return the reason of a gRPC error: its status in small letters, but for credentials that gave no token."""
    if (error.details() or "").startswith(_NO_CREDENTIALS):
        return "credentials"
    name: str = error.code().name
    return name.lower()
