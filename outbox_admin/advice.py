"""What to do about a LastError, by the reason with which it begins (docs/reference/errors.md)."""

#: The reasons after which no retry can succeed, because they are about the message.
HOPELESS = ("undecodable", "too_large")
#: A section of the runbook, the reasons that it is about, and what it says in short.
SECTIONS = (
    (
        "a-poison-message",
        " ".join(HOPELESS),
        "No retry can succeed, because the message itself is refused. Cancel the task, and register a correct one.",
    ),
    (
        "a-poison-message",
        "invalid_topic topic_not_allowed expired invalid_argument",
        "Fix the cause, and then retry the task. If the task must never be sent, cancel it.",
    ),
    (
        "a-topic-was-deleted",
        "not_found",
        "Pause the topic. Create it and its subscriptions, grant the workers roles/pubsub.publisher, and resume it.",
    ),
    (
        "a-circuit-is-open",
        "permission_denied failed_precondition unimplemented",
        "Grant the workers roles/pubsub.publisher on the topic, or change the topic as the error says. Then probe it.",
    ),
    (
        "pubsub-is-unavailable",
        (
            "unavailable deadline_exceeded resource_exhausted internal aborted cancelled unknown credentials "
            "unauthenticated"
        ),
        "Workers try again by themselves. If the error stays, run publishworker check with the account of the workers.",
    ),
)


def section(error: str) -> tuple[str, str]:
    """Return the section of the runbook, or an empty text, and what to do in a sentence."""
    found = ((name, text) for name, reasons, text in SECTIONS if _reason(error) in reasons.split())
    return next(found, ("", "The error says why. Fix the cause, and then retry the task."))


def is_hopeless(error: str | None) -> bool:
    """Tell whether no retry after this error can succeed."""
    return _reason(error or "") in HOPELESS


def _reason(error: str) -> str:
    return error.partition(":")[0]
