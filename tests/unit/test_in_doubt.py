"""Tasks in doubt: which facts a worker remembers, and for how long."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from publishworker.batching import Limits
from publishworker.in_doubt import MAX_TASKS, InDoubt
from publishworker.types import Batch, BatchResult, LockedRow, Version

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def memory(limits: Limits | None = None, clock: Callable[[], float] = lambda: 0.0) -> InDoubt:
    return InDoubt(lambda batch, _decide: BatchResult(batch), limits or Limits(1000, 1, 4), clock)


ROW = LockedRow("a", "orders", b"", None, NOON, None, None)
AT_NOON = Version.of(ROW)


def test_tasks_in_doubt_are_bounded_and_stay_until_they_are_marked() -> None:
    """The oldest beyond 10,000 are forgotten. Batches keep the limits of a turn and have one topic each."""
    doubts = memory()
    doubts.remember("orders", {str(n): AT_NOON for n in range(MAX_TASKS + 5)})
    assert len(doubts.ids()) == MAX_TASKS
    batches = doubts.batches()
    assert [len(batch.ids) for batch in batches] == [1000] * 4
    assert batches[0].ids[0] == "5"
    for batch in batches:
        doubts.forget(batch.ids)
    assert len(doubts.ids()) == MAX_TASKS - 4000
    doubts = memory(Limits(10, 1, 9))
    doubts.remember("orders", {"a": AT_NOON})
    doubts.remember("invoices", {"b": AT_NOON})
    assert doubts.batches() == [Batch("orders", ("a",)), Batch("invoices", ("b",))]


def test_a_task_is_in_doubt_for_a_minute() -> None:
    """After that it is published again. Forgetting a task twice is no error."""
    seconds = [0.0]
    doubts = memory(clock=lambda: seconds[0])
    doubts.remember("orders", {"a": AT_NOON})
    seconds[0] = 60.0
    assert doubts.ids() == {"a"}
    seconds[0] = 60.001
    assert doubts.ids() == frozenset()
    doubts.forget(["a"])
    assert doubts.ids() == frozenset()


@pytest.mark.parametrize(
    "columns",
    [
        {"id": "b"}, {"created_at": NOON + timedelta(seconds=1)}, {"available_at": NOON}, {"attempts": 1},
        {"available_at": NOON + timedelta(days=1)}, {"deferred": True}, {"topic": "invoices"}, {"ordering_key": "k"},
        {"expires_at": NOON},
    ],
)  # fmt: skip
def test_a_task_in_doubt_matches_only_its_unchanged_row(columns: dict[str, Any]) -> None:
    """A task that was registered again under its ID was not sent; one whose row was written since may not have been."""
    doubts = memory()
    doubts.remember("orders", {"a": AT_NOON})
    assert doubts.is_about(ROW)
    assert not doubts.is_about(replace(ROW, **columns))
