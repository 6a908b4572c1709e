"""The states of a task, and what of them stands in its columns.

A task is pending (ready or due), retrying, scheduled, dead or sent; docs/guide/schema.md says how each looks.
"""

from datetime import UTC, datetime, timedelta

#: An AvailableAt from here on means that the task is dead.
NEVER = datetime(9999, 12, 31, tzinfo=UTC)
#: How LastError begins in a task that is deferred: held by nothing but the head of its ordering key. It is *scheduled*.
DEFERRED = "deferred: "

#: At most this long a task that is sent at most once may be marked and not yet published.
MIN_AGE = timedelta(minutes=1)

UNSENT = ("pending", "retrying", "scheduled", "dead")
STATES = (*UNSENT, "sent")
