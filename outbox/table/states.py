"""The states of a task. Only this file defines them: in SQL and for Arrow.

docs/guide/delivery.md shows the columns in each state.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

#: The table of tasks.
TASKS_TABLE = "AsynchronousTasks"

#: A task whose AvailableAt is this time or later is dead.
NEVER = datetime(9999, 12, 31, tzinfo=UTC)
#: No task is older.
LONG_AGO = datetime(1, 1, 1, tzinfo=UTC)
#: Sorts a task without Sequence before the others, as Spanner does.
NO_SEQUENCE = -(2**63)
NEVER_SQL = f"TIMESTAMP '{NEVER:%Y-%m-%dT%H:%M:%SZ}'"

#: A key that nothing holds is read again within this many seconds, also after its first tasks were taken out by SQL.
KEY_CHECK_SECONDS = 60.0
#: A mark that is older than this is final. A newer one may be undone: an at-most-once task is marked first.
MARKS_FINAL_AFTER = timedelta(minutes=1)

LATER_SQL = f"AvailableAt > CURRENT_TIMESTAMP() AND AvailableAt < {NEVER_SQL}"
#: When a task should first have been sent: the start of its age. If a task was moved without a DueAt, its AvailableAt
#: does not say when the application wanted it.
FIRST_DUE_SQL = """COALESCE(DueAt,
    IF(Attempts > 0 OR BlockedBy IS NOT NULL, CreatedAt, GREATEST(CreatedAt, AvailableAt)), CreatedAt)"""


def is_dead(available_at: datetime | None) -> bool:
    """Tell whether an unsent task with this AvailableAt is dead."""
    return available_at is not None and available_at >= NEVER


def first_due(row: Any) -> datetime:
    """Return FIRST_DUE_SQL of a row with `due_at`, `created_at`, `available_at`, `attempts` and `deferred`."""
    asked = None if row.attempts > 0 or row.deferred else row.available_at
    due: datetime = row.due_at or max(row.created_at, asked or row.created_at)
    return due


#: The states of unsent tasks: the SQL of their ranges in the index AsynchronousTasksToSend, for each shard and topic,
#: without other states.
RANGES: dict[str, tuple[str, ...]] = {
    "pending": ("AvailableAt IS NULL", "AvailableAt <= CURRENT_TIMESTAMP()"),
    "retrying": (f"{LATER_SQL} AND Attempts > 0 AND BlockedBy IS NULL",),
    "scheduled": (f"{LATER_SQL} AND Attempts <= 0 AND BlockedBy IS NULL",),
    "blocked": (f"{LATER_SQL} AND BlockedBy IS NOT NULL",),
    "dead": (f"AvailableAt >= {NEVER_SQL}",),
}
UNSENT = tuple(RANGES)
#: The state of the tasks that operators or applications have taken out.
CANCELLED = "cancelled"
STATES = (*UNSENT, "sent", CANCELLED)
#: The states in which workers send a task as soon as they can, without an operator.
LEFT_TO_SEND = ("pending", "retrying")

#: The SQL that selects the rows of each state in the whole table.
CONDITIONS = {name: f"SentAt IS NULL AND ({' OR '.join(ranges)})" for name, ranges in RANGES.items()}
CONDITIONS["sent"] = "SentAt IS NOT NULL AND CancelledBy IS NULL"
CONDITIONS[CANCELLED] = "SentAt IS NOT NULL AND CancelledBy IS NOT NULL"
STATE_SQL = "CASE {} END".format(" ".join(f"WHEN {sql} THEN '{name}'" for name, sql in CONDITIONS.items()))


def arrow_states(pc: Any, columns: Mapping[str, Any], now: datetime) -> Any:
    """Return the states of tasks as an Arrow array. `pc` is `pyarrow.compute`, which only the Spark jobs install."""
    available = columns["AvailableAt"]
    is_later = pc.greater(available, now)
    masks = {  # the first that is true counts
        CANCELLED: pc.and_(pc.is_valid(columns["SentAt"]), pc.is_valid(columns["CancelledBy"])),
        "sent": pc.is_valid(columns["SentAt"]),
        "dead": pc.greater_equal(available, NEVER),
        "blocked": pc.and_(pc.is_valid(columns["BlockedBy"]), is_later),
        "scheduled": pc.and_(pc.less_equal(columns["Attempts"], 0), is_later),
        "retrying": is_later,
        "pending": pc.is_null(columns["SentAt"]),
    }
    return pc.case_when(pc.make_struct(*masks.values()), *masks)
