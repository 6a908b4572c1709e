"""The states of a task: pending (ready or due), retrying, scheduled, blocked, dead or sent.

docs/guide/schema.md shows the columns in each state.
"""

from datetime import UTC, datetime, timedelta

#: A task whose AvailableAt is this time or later is dead.
NEVER = datetime(9999, 12, 31, tzinfo=UTC)

#: Max time for which an at-most-once task may be marked and not yet published.
MARKS_FINAL_AFTER = timedelta(minutes=1)

UNSENT = ("pending", "retrying", "scheduled", "blocked", "dead")
STATES = (*UNSENT, "sent")
