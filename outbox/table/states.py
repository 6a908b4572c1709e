"""The states of a task. Only this file defines them: in SQL and for Arrow.

docs/reference/schema.md shows the columns in each state.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

#: A task whose AvailableAt is this time or later is dead.
NEVER = datetime(9999, 12, 31, tzinfo=UTC)
#: No task is older.
LONG_AGO = datetime(1, 1, 1, tzinfo=UTC)
#: Sorts a task without Sequence before the others, as Spanner does.
NO_SEQUENCE = -(2**63)
NEVER_SQL = f"TIMESTAMP '{NEVER:%Y-%m-%dT%H:%M:%SZ}'"

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


def _are_later(pc: Any, columns: Mapping[str, Any], now: datetime) -> Any:
    return pc.greater(columns["AvailableAt"], now)


@dataclass(frozen=True, slots=True)
class State:
    """A state of unsent tasks. `arrow` may be true for several: the last in `UNSENT_STATES` counts."""

    name: str
    #: The SQL of its ranges in the index AsynchronousTasksToSend, for each shard and topic, without other states.
    ranges: tuple[str, ...]
    #: Tells for columns by name which rows are in the state. The first argument is `pyarrow.compute`, which only the
    #: Spark jobs install.
    arrow: Callable[[Any, Mapping[str, Any], datetime], Any]


UNSENT_STATES = (
    State(
        "pending",
        ("AvailableAt IS NULL", "AvailableAt <= CURRENT_TIMESTAMP()"),
        lambda pc, columns, _now: pc.is_null(columns["SentAt"]),
    ),
    State("retrying", (f"{LATER_SQL} AND Attempts > 0 AND BlockedBy IS NULL",), _are_later),
    State(
        "scheduled",
        (f"{LATER_SQL} AND Attempts <= 0 AND BlockedBy IS NULL",),
        lambda pc, columns, now: pc.and_(pc.less_equal(columns["Attempts"], 0), _are_later(pc, columns, now)),
    ),
    State(
        "blocked",
        (f"{LATER_SQL} AND BlockedBy IS NOT NULL",),
        lambda pc, columns, now: pc.and_(pc.is_valid(columns["BlockedBy"]), _are_later(pc, columns, now)),
    ),
    State(
        "dead",
        (f"AvailableAt >= {NEVER_SQL}",),
        lambda pc, columns, _now: pc.greater_equal(columns["AvailableAt"], NEVER),
    ),
)
UNSENT = tuple(state.name for state in UNSENT_STATES)
STATES = (*UNSENT, "sent")
#: The state of the tasks that operators have cancelled. They are in a table of their own.
CANCELLED = "cancelled"
#: The states of the tasks that an operator may change or resend. Pending tasks need no retry.
CHANGED = {
    "retry": ("dead", "sent", "retrying", "scheduled"),
    "resend": ("sent",),
    "cancel": UNSENT,
    "purge": ("sent", CANCELLED),
    "restore": (CANCELLED,),
}
#: The states in which workers send a task as soon as they can, without an operator.
LEFT_TO_SEND = ("pending", "retrying")

#: The SQL of the ranges of each state, and the SQL that selects the rows of each state in the whole table.
RANGES = {state.name: state.ranges for state in UNSENT_STATES}
CONDITIONS = {name: f"SentAt IS NULL AND ({' OR '.join(ranges)})" for name, ranges in RANGES.items()}
CONDITIONS["sent"] = "SentAt IS NOT NULL"
STATE_SQL = "CASE {} END".format(" ".join(f"WHEN {sql} THEN '{name}'" for name, sql in CONDITIONS.items()))


def arrow_states(pc: Any, columns: Mapping[str, Any], now: datetime) -> Any:
    """Return the states of tasks as an Arrow array. `pc` is `pyarrow.compute`."""
    masks = (pc.is_valid(columns["SentAt"]), *(state.arrow(pc, columns, now) for state in reversed(UNSENT_STATES)))
    return pc.case_when(pc.make_struct(*masks), *reversed(STATES))
