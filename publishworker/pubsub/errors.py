"""What each failure means for its task and its topic: one table, made to be read and changed.

docs/reference/errors.md is generated from it.
"""

import enum
from dataclasses import dataclass
from typing import Any

#: How gRPC begins the details of a call that never left because the credentials gave no token; its status, UNAVAILABLE,
#: is that of a service that is away (grpc/src/core/lib/security/credentials/plugin/plugin_credentials.cc).
_NO_CREDENTIALS = "Getting metadata from plugin failed"


class FailureKind(enum.Enum):
    """What a failure is about, which decides who pays for it."""

    CONTENT = "content"
    TARGET = "target"
    OUTAGE = "outage"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Reason:
    """A row of the table.

    `name` is a metric's tag and the beginning of LastError; `source` is what raises it. `refused` says that Pub/Sub has
    certainly not accepted the message.
    """

    name: str
    kind: FailureKind
    source: str
    meaning: str
    refused: bool


_CONTENT, _TARGET, _OUTAGE, _UNKNOWN = FailureKind.CONTENT, FailureKind.TARGET, FailureKind.OUTAGE, FailureKind.UNKNOWN

REASONS = (
    Reason("undecodable", _CONTENT, "`DecodeError`", "Data is not a PubsubMessage, or has over 200 fields.", True),
    Reason("too_large", _CONTENT, "size", "The publish request would exceed Pub/Sub's 10,000,000 bytes.", True),
    Reason("invalid_topic", _CONTENT, "`InvalidMessage`", "The column Topic holds an invalid topic name.", True),
    Reason(
        "topic_not_allowed", _CONTENT, "`--allowed-topics`", "The topic matches no pattern of --allowed-topics.", True
    ),
    Reason("expired", _CONTENT, "`ExpiresAt`", "ExpiresAt passed before the task was sent.", True),
    Reason(
        "invalid_argument", _CONTENT, "INVALID_ARGUMENT", "Pub/Sub refuses this message, even alone in a request.", True
    ),
    Reason("not_found", _TARGET, "NOT_FOUND", "The topic does not exist.", True),
    Reason(
        "permission_denied", _TARGET, "PERMISSION_DENIED", "The worker's account may not publish to the topic.", True
    ),
    Reason(
        "failed_precondition",
        _TARGET,
        "FAILED_PRECONDITION",
        "The topic cannot accept messages, for example because its encryption key is disabled.",
        True,
    ),
    Reason("unimplemented", _TARGET, "UNIMPLEMENTED", "The endpoint is not Pub/Sub.", True),
    Reason("unavailable", _OUTAGE, "UNAVAILABLE", "Pub/Sub cannot be reached.", False),
    Reason("deadline_exceeded", _OUTAGE, "DEADLINE_EXCEEDED", "No answer in time; perhaps published.", False),
    Reason("resource_exhausted", _OUTAGE, "RESOURCE_EXHAUSTED", "A quota is used up.", True),
    Reason("internal", _OUTAGE, "INTERNAL", "Pub/Sub failed.", False),
    Reason("aborted", _OUTAGE, "ABORTED", "Pub/Sub aborted the request.", False),
    Reason("cancelled", _OUTAGE, "CANCELLED", "The request was cancelled on its way.", False),
    Reason("unknown", _OUTAGE, "UNKNOWN", "Something failed without details.", False),
    Reason("unauthenticated", _OUTAGE, "UNAUTHENTICATED", "The worker's credentials are not accepted.", True),
    Reason(
        "credentials", _OUTAGE, "`google.auth` errors", "The worker gets no access token from its credentials.", True
    ),
    Reason(
        "already_exists",
        _UNKNOWN,
        "ALREADY_EXISTS",
        "Pub/Sub does not return this for a publish request.",
        False,
    ),
    Reason("out_of_range", _UNKNOWN, "OUT_OF_RANGE", "Pub/Sub does not return this for a publish request.", False),
    Reason("data_loss", _UNKNOWN, "DATA_LOSS", "Pub/Sub does not return this for a publish request.", False),
)

_BY_NAME = {each.name: each for each in REASONS}


def kind_of(reason: str) -> FailureKind:
    """Return the kind of a reason. A reason that is not in the table is unknown."""
    return _BY_NAME[reason].kind if reason in _BY_NAME else FailureKind.UNKNOWN


def is_refused(reason: str) -> bool:
    """Tell whether Pub/Sub has certainly not accepted the message. False if the reason is not in the table."""
    return reason in _BY_NAME and _BY_NAME[reason].refused


def reason_of(error: Any) -> str:
    """Return the reason of a gRPC error: its status in lower case, or `credentials` if there was no token."""
    if (error.details() or "").startswith(_NO_CREDENTIALS):
        return "credentials"
    name: str = error.code().name
    return name.lower()
