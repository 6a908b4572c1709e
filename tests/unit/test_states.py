"""The rule in Python for the state of an unsent task. Other tests compare SQL and Arrow with it."""

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pytest

from outbox.table.states import LEFT_TO_SEND, NEVER, RANGES, STATES, UNSENT, is_dead, unsent_state

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
TICK = timedelta(microseconds=1)


class Row(NamedTuple):
    available_at: datetime | None
    attempts: int = 0
    is_blocked: bool = False


@pytest.mark.parametrize(
    ("row", "state"),
    [
        (Row(None), "pending"),
        (Row(NOW, attempts=3), "pending"),
        (Row(NOW, is_blocked=True), "pending"),
        (Row(NOW + TICK), "scheduled"),
        (Row(NOW + TICK, attempts=-1), "scheduled"),
        (Row(NOW + TICK, attempts=1), "retrying"),
        (Row(NEVER - TICK, attempts=1), "retrying"),
        (Row(NOW + TICK, attempts=1, is_blocked=True), "blocked"),
        (Row(NOW + TICK, is_blocked=True), "blocked"),
        (Row(NEVER, attempts=1, is_blocked=True), "dead"),
        (Row(NEVER + TICK), "dead"),
    ],
)
def test_a_task_is_in_one_state(row: Row, state: str) -> None:
    assert unsent_state(row, NOW) == state
    assert is_dead(row.available_at) == (state == "dead")


def test_all_lists_name_the_same_states() -> None:
    assert STATES == ("pending", "retrying", "scheduled", "blocked", "dead", "sent")
    assert tuple(RANGES) == UNSENT
    assert set(LEFT_TO_SEND) < set(UNSENT)
