"""Finds the facts that make a certificate UNCERTAIN: sent tasks may have been deleted before the archive read them."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from outbox.base.values import counted, shown
from outbox.errors import OutboxError
from outbox.table.states import CANCELLED, MARKS_FINAL_AFTER
from outbox_admin.operations import Operation
from outbox_admin.tasks.selections import TaskSelection


class Read(NamedTuple):
    """A read, as of `at`, of the tasks that were sent from `since` on and before `until`."""

    since: datetime
    until: datetime
    at: datetime


def uncertainties(reads: Sequence[Read], purges: Iterable[Operation], kept: timedelta | None) -> list[str]:
    """Return the facts that can hide a loss. `kept` is how long Spanner keeps a sent task, None is for ever.

    `purges` are those that did not delete archived tasks only.
    """
    found = []
    if before := [purge for purge in purges if any(_may_include(purge, read) for read in reads)]:
        named = min(before, key=lambda purge: purge.started_at)
        found.append(
            f"{counted(len(before), 'purge')} may have deleted tasks before the archive read them, such as operation "
            f"{named.id} at {shown(named.started_at)}"
        )
    if late := [read for read in reads if read.at > read.until + MARKS_FINAL_AFTER]:
        found.append(
            f"the archive read the tasks sent from {shown(late[0].since)} to {shown(late[-1].until)} late, without "
            "those that were sent again or deleted before"
        )
    if kept is not None and (old := [read for read in reads if read.at - read.since >= kept]):
        found.append(
            f"tasks are deleted {counted(kept.days, 'day')} after they were sent, but those sent from "
            f"{shown(old[0].since)} on were read at {shown(old[0].at)}"
        )
    return found


def _may_include(purge: Operation, read: Read) -> bool:
    """Tell whether a purge may have deleted sent tasks that the read should have found."""
    if purge.started_at >= read.at or (purge.finished_at and (purge.finished_at <= read.since or purge.tasks == 0)):
        return False
    try:
        selection = TaskSelection.recorded(purge.selection)
    except OutboxError:  # the record does not say which tasks
        return True
    begins_before = selection.since is None or selection.since < read.until
    ends_after = selection.until is None or selection.until > read.since
    return selection.state != CANCELLED and begins_before and ends_after
