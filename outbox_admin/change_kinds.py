"""The changes of tasks: one description of each, for commands, pages, and the record of operations."""

import dataclasses
from collections.abc import Mapping

from outbox.table.states import CANCELLED, STATES, UNSENT

#: As the state of a selection by IDs: all unsent states.
ANY_UNSENT = "unsent"
#: As the reason of an unchanged task: it matches now, but did not at the preview.
MATCHED_LATER = "matched_later"
#: As the state of an unchanged task: another program has set the SentAt of a cancelled task to NULL. No worker
#: publishes it.
MADE_UNSENT = "cancelled_and_made_unsent"


@dataclasses.dataclass(frozen=True, slots=True)
class ChangeKind:
    """A change of many tasks, which is executed in chunks, so that any process can continue it."""

    #: The states of the tasks that it is for. Pending tasks need no retry.
    states: tuple[str, ...]
    #: The state that a selection by IDs has if it names none.
    of_ids: str | None
    #: What would become of tasks, and what has become of them.
    effect: str
    done: str
    verb: str = "changed"
    #: What follows for the tasks, as a sentence.
    consequence: str = ""
    #: Whether a task does not match any more after it was changed. What a resend or a restore refuses matches still.
    ends_match: bool = True
    #: Why a preview leaves out tasks, by state, if that is no error.
    no_error: Mapping[str, str] = dataclasses.field(default_factory=dict)


KINDS: Mapping[str, ChangeKind] = {
    "retry": ChangeKind(
        ("dead", "sent", "retrying", "scheduled"),
        None,
        "become due now",
        "due now",
        consequence="They begin again with 0 failed attempts.",
        no_error={
            "pending": "because pending tasks need no retry",
            "expired": "because ExpiresAt has passed",
            "blocked": "because blocked tasks wait for the head of their ordering key",
        },
    ),
    "resend": ChangeKind(
        ("sent",), "sent", "be published again, only to another topic", "published", "published", ends_match=False
    ),
    "cancel": ChangeKind(
        UNSENT,
        ANY_UNSENT,
        "be cancelled",
        "cancelled",
        consequence="No worker publishes them, until they are restored.",
    ),
    "purge": ChangeKind(("sent", CANCELLED), "sent", "be deleted", "deleted", consequence="They cannot be sent again."),
    "restore": ChangeKind(
        (CANCELLED,),
        CANCELLED,
        "be restored",
        "restored",
        consequence="Their other columns are as they were before the cancel.",
        ends_match=False,
        no_error=dict.fromkeys(
            (*UNSENT, "sent"), "because they are not cancelled: restored before, or never cancelled"
        ),
    ),
}
_REASONS = {
    "missing": "not in the table",
    MADE_UNSENT: "because they are cancelled and another program set SentAt to NULL. Restore them, or "
    "cancel them again",
    MATCHED_LATER: "because they match only since the preview. Run the command again",
    **{each: f"because of a filter or the state, which is {each}" for each in (*STATES, "expired")},
}


def why_unchanged(name: str, reason: str) -> str:
    """Return the reason why a change leaves out tasks, for people. It is a state, or a text."""
    return KINDS[name].no_error.get(reason) or _REASONS.get(reason, reason)
