"""What is owed to lower priorities, and whose turn it is."""

from datetime import UTC, datetime

from publishworker.task import Candidate
from publishworker.turn.fairness import FairShare

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def tasks(*priorities: int) -> list[Candidate]:
    """Return one ready task of each priority."""
    return [Candidate(str(each), "orders", 0, each, NOON, None, None, 1) for each in priorities]


def priorities(found: list[Candidate]) -> list[int]:
    """Return their priorities."""
    return [each.priority for each in found]


def test_the_next_lower_priority_each_time_then_from_the_top_again() -> None:
    """Below the last one, not the lowest of all: each gets its turn."""
    fair, every = FairShare(1.0), tasks(100, 50, 20, 20, 0)
    served = []
    for _ in range(8):
        fair.count(1, 1 if served and served[-1] else 0, top=100)
        served.append(priorities(fair.choose(every)))
    assert served == [[50], [20, 20], [0], [], [50], [20, 20], [0], []]


def test_a_due_task_has_its_own_half_and_no_share() -> None:
    """Only ready tasks are chosen."""
    fair = FairShare(1.0)
    fair.count(1, 0, top=100)
    due = Candidate("due", "orders", 0, 5, NOON, NOON, None, 1)
    assert priorities(fair.choose([due, *tasks(3)])) == [3]


def test_where_nobody_waits_nothing_is_owed() -> None:
    """Asked once in vain from the top, it asks again when the next share has been earned, not at every poll."""
    fair = FairShare(0.5)
    fair.count(4, 0, top=100)
    assert fair.below == 100
    assert fair.choose(tasks(100)) == []
    assert fair.below is None
    fair.count(1, 0, top=100)
    assert fair.below is None
    fair.count(1, 0, top=100)
    assert fair.below == 100


def test_what_is_owed_is_bounded() -> None:
    """A day of urgent tasks alone is not followed by a day of others."""
    fair = FairShare(0.1)
    for _ in range(1000):
        fair.count(8, 0, top=100)
    assert fair.groups == 3


def test_nothing_left_behind_means_nobody_waits() -> None:
    """Whatever is owed: there is no priority to look below."""
    fair = FairShare(1.0)
    fair.count(8, 0, top=None)
    assert fair.below is None
