"""What each failure means for its task and its topic, as one table. docs/reference/errors.md is generated from it."""

import enum
from dataclasses import dataclass
from typing import Any

#: How gRPC begins the details of a call that was not sent because the credentials gave no token. The status is
#: UNAVAILABLE, as for an unavailable service (grpc/src/core/lib/security/credentials/plugin/plugin_credentials.cc).
NO_CREDENTIALS = "Getting metadata from plugin failed"


class FailureKind(enum.Enum):
    """Whether a failure is about the task, its topic or the service. docs/reference/errors.md says what follows."""

    CONTENT = "content"
    TARGET = "target"
    OUTAGE = "outage"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Reason:
    """A row of the table.

    `name` is a metric's tag and the beginning of LastError. `source` is the gRPC status, exception or setting that
    causes it. `refused` says that Pub/Sub has certainly not accepted the message.
    """

    name: str
    kind: FailureKind
    refused: bool
    source: str
    meaning: str


_CONTENT, _TARGET, _OUTAGE, _ = FailureKind

# fmt: off
REASONS = (
    Reason("undecodable", _CONTENT, True, "`DecodeError`", "Data is not a PubsubMessage, or has over 200 fields."),
    Reason("too_large", _CONTENT, True, "size", "The publish request would exceed Pub/Sub's 10,000,000 bytes."),
    Reason("invalid_topic", _CONTENT, True, "`InvalidMessage`", "The column Topic holds an invalid topic name."),
    Reason("topic_not_allowed", _CONTENT, True, "`--allowed-topics`",
           "The topic matches no pattern of --allowed-topics."),
    Reason("expired", _CONTENT, True, "`ExpiresAt`", "ExpiresAt passed before the task was sent."),
    Reason("invalid_argument", _CONTENT, True, "INVALID_ARGUMENT",
           "Pub/Sub refuses this message, even alone in a request."),
    Reason("not_found", _TARGET, True, "NOT_FOUND", "The topic does not exist."),
    Reason("permission_denied", _TARGET, True, "PERMISSION_DENIED",
           "The worker's account may not publish to the topic."),
    Reason("failed_precondition", _TARGET, True, "FAILED_PRECONDITION",
           "The topic cannot accept messages, for example because its encryption key is disabled."),
    Reason("unimplemented", _TARGET, True, "UNIMPLEMENTED", "The endpoint is not Pub/Sub."),
    Reason("unavailable", _OUTAGE, False, "UNAVAILABLE", "Pub/Sub cannot be reached."),
    Reason("deadline_exceeded", _OUTAGE, False, "DEADLINE_EXCEEDED",
           "No answer in time. Pub/Sub may have published the message."),
    Reason("resource_exhausted", _OUTAGE, True, "RESOURCE_EXHAUSTED", "A quota is used up."),
    Reason("internal", _OUTAGE, False, "INTERNAL", "Pub/Sub failed."),
    Reason("aborted", _OUTAGE, False, "ABORTED", "Pub/Sub aborted the request."),
    Reason("cancelled", _OUTAGE, False, "CANCELLED", "The request was cancelled before an answer arrived."),
    Reason("unknown", _OUTAGE, False, "UNKNOWN", "Pub/Sub failed without details."),
    Reason("unauthenticated", _OUTAGE, True, "UNAUTHENTICATED", "The worker's credentials are not accepted."),
    Reason("credentials", _OUTAGE, True, "`google.auth` errors",
           "The worker gets no access token from its credentials."),
)
# fmt: on

_BY_NAME = {each.name: each for each in REASONS}


def failure_kind(reason: str) -> FailureKind:
    """Return the kind of a reason. A reason that is not in the table is unknown."""
    return _BY_NAME[reason].kind if reason in _BY_NAME else FailureKind.UNKNOWN


def is_refused(reason: str) -> bool:
    """Tell whether Pub/Sub has certainly not accepted the message. False if the reason is not in the table."""
    return reason in _BY_NAME and _BY_NAME[reason].refused


def reason_of(error: Any) -> str:
    """Return the reason of a gRPC error: its status in lower case, or `credentials` if there was no token."""
    if (error.details() or "").startswith(NO_CREDENTIALS):
        return "credentials"
    name: str = error.code().name
    return name.lower()
