"""The states of a task, and what of them stands in its columns.

A task is pending (ready or due), retrying, scheduled, dead or sent; docs/guide/schema.md says how each looks.
"""

from datetime import UTC, datetime

#: An AvailableAt from here on means that the task is dead.
NEVER = datetime(9999, 12, 31, tzinfo=UTC)
#: How LastError begins in a task that is parked: held by nothing but the head of its ordering key. It is *scheduled*.
PARKED = "parked: "

UNSENT = ("pending", "retrying", "scheduled", "dead")
STATES = (*UNSENT, "sent")
