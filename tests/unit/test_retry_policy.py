"""The backoff of a failure, dead tasks and the text of LastError, by the database's time alone."""

from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest

from publishworker.delivery.rules import should_record
from publishworker.types import Failed, LockedRow, NotSent
from tests.support.parts import claim_of, policy

#: Far from the machine's clock.
NOW = datetime(2055, 5, 5, 5, 5, 5, 123456, tzinfo=UTC)
HOUR = timedelta(hours=1)
MICROSECOND = timedelta(microseconds=1)
OLD = timedelta(days=400)

CONTENT = Failed("invalid_argument", "no")
TARGET = Failed("not_found", "no")
OUTAGE = Failed("unavailable", "no")
UNKNOWN = Failed("data_loss", "no")


def record(
    failure: Failed,
    attempts: int = 0,
    age: timedelta = timedelta(0),
    *,
    now: datetime = NOW,
    expires_at: datetime | None = None,
    **changes: Any,
) -> NotSent:
    row = LockedRow("a", "orders", b"", None, now - age, None, None, attempts=attempts, expires_at=expires_at)
    return policy(**changes).failed_attempt(row, failure, now)


def wait(recorded: NotSent) -> float:
    return (recorded.available_at - NOW).total_seconds()


@pytest.mark.parametrize(
    ("attempts", "full"),
    [(0, 2), (1, 4), (2, 8), (3, 16), (6, 100), (7, 100), (59, 100), (61, 100), (1100, 100), (2**62, 100), (-5, 2)],
)
def test_backoff_doubles_up_to_its_max_with_jitter(attempts: int, full: float) -> None:
    """Over many seeds: between half and full, spread over all of it. No number of attempts overflows."""
    options: dict[str, Any] = {"initial": 2, "longest": 100, "max_attempts": 2**63}
    waits = [wait(record(UNKNOWN, attempts, random=Random(seed), **options)) for seed in range(300)]
    assert full / 2 <= min(waits) < full * 0.52
    assert full * 0.98 < max(waits) <= full
    assert sum(waits) / 300 == pytest.approx(full * 0.75, rel=0.05)


@pytest.mark.parametrize("failure", [OUTAGE, UNKNOWN, Failed("not in the table", "no")])
@pytest.mark.parametrize("max_attempts", [1, 2, 10])
def test_a_tasks_own_error_is_dead_exactly_at_the_last_attempt(failure: Failed, max_attempts: int) -> None:
    for age in (timedelta(0), OLD):
        recorded = [record(failure, before, age, max_attempts=max_attempts) for before in range(max_attempts + 1)]
        assert [each.dead for each in recorded] == [False] * (max_attempts - 1) + [True, True]
        assert [each.attempts for each in recorded] == [*range(1, max_attempts + 2)]


@pytest.mark.parametrize("reason", ["not_found", "permission_denied", "failed_precondition"])
def test_a_missing_topic_makes_no_young_task_dead(reason: str) -> None:
    """Both must hold: the attempts used up, and the age by the database's clock. Until then the max backoff applies."""
    for before, age, dead in (
        (0, OLD, False), (8, OLD, False), (9, OLD, True), (9, HOUR, True), (9, HOUR - MICROSECOND, False),
        (8, HOUR, False), (500, HOUR - MICROSECOND, False), (500, HOUR, True), (500, -HOUR, False),
    ):  # fmt: skip
        recorded = record(Failed(reason, "no"), before, age, dead_after=3600)
        assert recorded.dead is dead
        assert dead or 0 < wait(recorded) <= 3600
    assert 1800 <= wait(record(Failed(reason, "no"), 500)) <= 3600


def test_a_task_keeps_the_time_at_which_it_should_first_have_been_sent() -> None:
    """Through any number of failures. It is the schedule that the application asked for, and young tasks do not die."""
    asked = NOW - MICROSECOND
    row = LockedRow("a", "orders", b"", None, NOW - OLD, asked, None)
    for attempts in (1, 500):
        recorded = policy(max_attempts=1).failed_attempt(row, TARGET, NOW)
        assert (recorded.due_at, recorded.dead) == (asked, False)
        row = row._replace(available_at=recorded.available_at, attempts=attempts, due_at=recorded.due_at)
    assert policy(max_attempts=1, dead_after=3600).failed_attempt(row, TARGET, asked + HOUR).dead
    assert record(UNKNOWN, age=HOUR).due_at == NOW - HOUR


@pytest.mark.parametrize("failure", [CONTENT, TARGET, OUTAGE, UNKNOWN])
def test_the_expiry_is_carried_over(failure: Failed) -> None:
    """A mark before publishing removed it from the row; a failure restores it."""
    for expires_at in (None, NOW + HOUR, NOW - HOUR):
        assert record(failure, expires_at=expires_at).expires_at == expires_at


@pytest.mark.parametrize("character", ["x", "ü", "\U0001f600", "\ud800"])
@pytest.mark.parametrize(("length", "expected"), [(988, 999), (989, 1000), (990, 1000), (100_000, 1000)])
def test_last_error_has_at_most_a_thousand_characters(character: str, length: int, expected: int) -> None:
    """Cut by characters of any width, and halves of one. It begins with the reason, for which operators search."""
    text = record(Failed("not_found", character * length)).error or ""
    assert len(text) == expected
    assert text.startswith("not_found: ")
    assert len(text.encode()) <= 4 * expected


@pytest.mark.parametrize("probe", [False, True])
@pytest.mark.parametrize("suspect", [False, True])
def test_which_failures_are_recorded_on_the_task(probe: bool, suspect: bool) -> None:
    """The other failures open the circuit. Another task that is suspect changes nothing."""
    claim = claim_of("orders", "a", probe=probe, suspects=frozenset({"b", *(["a"] if suspect else [])}))
    # A missing or closed topic costs its probes. An outage costs a task that has met one, if its batch
    # is no probe. A failure that no message can cause is recorded on no task.
    met_again = suspect and not probe
    expected = {"invalid_argument": True, "data_loss": True, "not_found": probe}
    expected |= dict.fromkeys(("unavailable", "deadline_exceeded", "internal"), met_again)
    expected |= dict.fromkeys(("resource_exhausted", "unauthenticated", "credentials"), False)
    recorded = {reason: should_record(claim, "a", Failed(reason, "?")) for reason in expected}
    assert recorded == expected
