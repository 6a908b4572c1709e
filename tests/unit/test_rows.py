"""From protobuf values to tasks: NULL, and times at the edges. And the state of an unsent task."""

from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from google.protobuf.struct_pb2 import ListValue, Value

from outbox.table.states import LEFT_TO_SEND, NEVER, RANGES, STATES, UNSENT, arrow_states, is_dead
from publishworker.spanner import relay_sql
from publishworker.types import LockedRow

AT = "2026-01-01T12:00:00.123456Z"
NOON = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def values(*row: Any) -> list[Value]:
    created = ListValue()
    created.extend([each if each is None or isinstance(each, bool) else str(each) for each in row])
    return list(created.values)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-01T12:00:00Z", datetime(2026, 1, 1, 12, tzinfo=UTC)),
        ("2026-01-01T12:00:00.1Z", datetime(2026, 1, 1, 12, 0, 0, 100_000, tzinfo=UTC)),
        ("2026-01-01T12:00:00.123456789Z", NOON),  # nanoseconds are cut on both sides of a comparison
        ("0001-01-01T00:00:00Z", datetime(1, 1, 1, tzinfo=UTC)),
        ("9999-12-31T23:59:59.999999999Z", datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)),
    ],
)
def test_every_time_that_spanner_has_is_read(text: str, expected: datetime) -> None:
    [found] = relay_sql.candidates([values("a", "orders", 0, 0, text, text, None, 0)]).values()
    assert (found.created_at, found.available_at) == (expected, expected)


def test_a_task_in_two_ranges_is_one_candidate() -> None:
    task = values("a", "orders", 7, 50, AT, None, None, 1)
    assert [*relay_sql.candidates([task, task], 32_000)] == ["a"]


def test_a_task_is_due_or_expired_exactly_at_its_time() -> None:
    before = NOON - MICROSECOND
    task = LockedRow("a", "orders", b"", None, NOON, available_at=NOON, sent_at=None, expires_at=NOON)
    assert (task.is_due(before), task.is_due(NOON), task.is_expired(before), task.is_expired(NOON)) == (False, True) * 2
    always = task._replace(available_at=None, expires_at=None)
    assert (always.is_due(before), always.is_expired(NOON)) == (True, False)


class Row(NamedTuple):
    available_at: datetime | None
    attempts: int = 0
    is_blocked: bool = False


@pytest.mark.parametrize(
    ("row", "state"),
    [
        (Row(None), "pending"),
        (Row(NOON, attempts=3), "pending"),
        (Row(NOON, is_blocked=True), "pending"),
        (Row(NOON + MICROSECOND), "scheduled"),
        (Row(NOON + MICROSECOND, attempts=-1), "scheduled"),
        (Row(NOON + MICROSECOND, attempts=1), "retrying"),
        (Row(NEVER - MICROSECOND, attempts=1), "retrying"),
        (Row(NOON + MICROSECOND, attempts=1, is_blocked=True), "blocked"),
        (Row(NOON + MICROSECOND, is_blocked=True), "blocked"),
        (Row(NEVER, attempts=1, is_blocked=True), "dead"),
        (Row(NEVER + MICROSECOND), "dead"),
    ],
)
def test_a_task_is_in_one_state(row: Row, state: str) -> None:
    """The rule for Arrow. Tests with the emulator check that of SQL."""
    time = pa.timestamp("us", "UTC")
    columns = {
        "SentAt": pa.array([None], time),
        "AvailableAt": pa.array([row.available_at], time),
        "Attempts": pa.array([row.attempts]),
        "BlockedBy": pa.array(["head" if row.is_blocked else None], pa.string()),
    }
    assert arrow_states(pc, columns, NOON).to_pylist() == [state]
    assert is_dead(row.available_at) == (state == "dead")


def test_all_lists_name_the_same_states() -> None:
    assert STATES == ("pending", "retrying", "scheduled", "blocked", "dead", "sent")
    assert tuple(RANGES) == UNSENT
    assert set(LEFT_TO_SEND) < set(UNSENT)
