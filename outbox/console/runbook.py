"""The section of the runbook for an error of a task. Pure."""

#: As in pyproject.toml, where my-org stands for the owner of the repository.
_RUNBOOK = "https://github.com/my-org/outbox/blob/main/docs/operations/runbook.md"
#: The reasons of docs/reference/errors.md by section.
_SECTIONS = {
    "a-poison-message": "undecodable too_large invalid_topic topic_not_allowed expired invalid_argument",
    "a-topic-was-deleted": "not_found",
    "a-circuit-is-open": "permission_denied failed_precondition unimplemented",
    "pubsub-is-unavailable": "unavailable deadline_exceeded resource_exhausted internal aborted cancelled unknown "
    "unauthenticated credentials",
}
_SECTION_OF = {reason: section for section, reasons in _SECTIONS.items() for reason in reasons.split()}


def advice(error: str | None) -> str:
    """Return the address of the section for LastError, which begins with a reason, or of the whole runbook."""
    section = _SECTION_OF.get((error or "").partition(":")[0])
    return f"{_RUNBOOK}#{section}" if section else _RUNBOOK
