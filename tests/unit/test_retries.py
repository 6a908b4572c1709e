"""What a failure costs: waits, deaths and the text of LastError, by the database's time alone."""

from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.states import NEVER
from publishworker.task import Charged, Failed, Group, Row
from publishworker.turn.retries import Retries, is_charged, last_error

#: Far from the machine's clock.
NOW = datetime(2055, 5, 5, 5, 5, 5, 123456, tzinfo=UTC)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)

CONTENT = Failed("invalid_argument", "no")
TARGET = Failed("not_found", "no")
OUTAGE = Failed("unavailable", "no")
UNKNOWN = Failed("data_loss", "no")


def retries(seed: int = 1, **changes: Any) -> Retries:
    """Return the defaults of the worker but for `changes`."""
    values = {"initial": 1.0, "longest": 3600.0, "max_attempts": 10, "dead_after": 86_400.0, **changes}
    return Retries(random=Random(seed), **values)


def row(attempts: int = 0, age: timedelta = timedelta(0), expires_at: datetime | None = None) -> Row:
    """Return a row under the lock, `age` old at NOW."""
    return Row("a", "orders", b"", None, NOW - age, None, None, attempts=attempts, expires_at=expires_at)


def wait(charged: Charged) -> float:
    """Return the seconds until the next attempt."""
    return (charged.available_at - NOW).total_seconds()


class Fixed(Random):
    """Randomness that always draws the same place of a range: 0 is its beginning, 1 its end."""

    def __init__(self, place: float) -> None:
        """Draw that place."""
        super().__init__()
        self._place = place

    def random(self) -> float:
        """Return it."""
        return self._place


@pytest.mark.parametrize(
    ("attempts", "full"),
    [(0, 2), (1, 4), (2, 8), (3, 16), (6, 100), (7, 100), (59, 100), (61, 100), (1100, 100), (2**62, 100), (-5, 2)],
)
def test_waits_double_up_to_the_longest_each_between_half_and_full(attempts: int, full: float) -> None:
    """Over many seeds: never outside, and spread over all of it; no number of attempts overflows."""
    options = {"initial": 2, "longest": 100, "max_attempts": 2**63}
    waits = [wait(retries(seed, **options).charge(row(attempts), UNKNOWN, NOW)) for seed in range(300)]
    assert full / 2 <= min(waits) < full * 0.52
    assert full * 0.98 < max(waits) <= full
    assert sum(waits) / 300 == pytest.approx(full * 0.75, rel=0.05)


def test_a_first_wait_longer_than_the_longest_is_cut() -> None:
    """The longest is the longest."""
    charged = retries(initial=500, longest=3).charge(row(), UNKNOWN, NOW)
    assert 1.5 <= wait(charged) <= 3


def test_waits_of_one_worker_differ() -> None:
    """Tasks that failed together do not come back together."""
    one = retries()
    assert len({wait(one.charge(row(5), UNKNOWN, NOW)) for _ in range(20)}) == 20


def test_an_attempt_is_added_to_those_of_the_row() -> None:
    """What is read under the lock counts, whoever made those attempts."""
    assert [retries().charge(row(before), UNKNOWN, NOW).attempts for before in (0, 1, 8, 9, 500)] == [1, 2, 9, 10, 501]


@pytest.mark.parametrize("attempts", [0, 5, 500])
@pytest.mark.parametrize("age", [timedelta(0), 400 * DAY])
def test_a_content_error_is_dead_at_once(attempts: int, age: timedelta) -> None:
    """No attempt will change the message."""
    charged = retries().charge(row(attempts, age), CONTENT, NOW)
    assert (charged.available_at, charged.dead) == (NEVER, True)
    assert charged.attempts == attempts + 1


@pytest.mark.parametrize("failure", [OUTAGE, UNKNOWN, Failed("not in the table", "no")])
@pytest.mark.parametrize("age", [timedelta(0), 400 * DAY])
@pytest.mark.parametrize("most", [1, 2, 10])
def test_a_tasks_own_error_is_dead_exactly_at_the_last_attempt(failure: Failed, age: timedelta, most: int) -> None:
    """Its age says nothing."""
    deaths = [retries(max_attempts=most).charge(row(before, age), failure, NOW).dead for before in range(most + 1)]
    assert deaths == [False] * (most - 1) + [True, True]


@pytest.mark.parametrize("reason", ["not_found", "permission_denied", "failed_precondition"])
@pytest.mark.parametrize(
    ("before", "age", "dead"),
    [
        (0, 400 * DAY, False),
        (8, 400 * DAY, False),
        (9, 400 * DAY, True),
        (9, HOUR, True),
        (9, HOUR - timedelta(microseconds=1), False),
        (8, HOUR, False),
        (500, HOUR - timedelta(microseconds=1), False),
        (500, HOUR, True),
        (500, -HOUR, False),
    ],
)
def test_a_missing_topic_makes_no_task_dead_that_is_young(reason: str, before: int, age: timedelta, dead: bool) -> None:
    """Both must be: the attempts used up, and the age by the database's clock."""
    charged = retries(dead_after=3600).charge(row(before, age), Failed(reason, "no"), NOW)
    assert charged.dead is dead
    assert dead or 0 < wait(charged) <= 3600


def test_a_young_task_waits_as_long_as_its_attempts_say() -> None:
    """Beyond the last attempt the wait stays the longest."""
    assert 1800 <= wait(retries().charge(row(500), TARGET, NOW)) <= 3600


@pytest.mark.parametrize("now", [datetime(1, 1, 2, tzinfo=UTC), NOW, datetime(9990, 1, 1, tzinfo=UTC)])
@pytest.mark.parametrize("failure", [TARGET, OUTAGE, UNKNOWN])
def test_times_follow_the_databases_clock_alone(now: datetime, failure: Failed) -> None:
    """A worker with a wrong clock delays nothing and hurries nothing."""
    young = Row("a", "orders", b"", None, now - timedelta(seconds=59), None, None, attempts=1)
    old = Row("a", "orders", b"", None, now - timedelta(seconds=60), None, None, attempts=1)
    fixed = {"initial": 8, "longest": 8, "max_attempts": 2, "dead_after": 60}
    assert retries(**{**fixed, "max_attempts": 3}).charge(old, failure, now).available_at - now <= timedelta(seconds=8)
    assert retries(**fixed).charge(young, failure, now).dead is (failure is not TARGET)
    assert retries(**fixed).charge(old, failure, now).dead


def test_the_wait_is_exact() -> None:
    """The drawn part of the full wait, counted from the given time."""
    for place, seconds in ((0.0, 4), (0.5, 6), (1.0, 8)):
        made = Retries(initial=2, longest=3600, max_attempts=10, dead_after=0, random=Fixed(place))
        assert made.charge(row(attempts=2), UNKNOWN, NOW).available_at == NOW + timedelta(seconds=seconds)


@pytest.mark.parametrize("failure", [CONTENT, TARGET, OUTAGE, UNKNOWN])
@pytest.mark.parametrize("expires_at", [None, NOW + HOUR, NOW - HOUR])
def test_the_expiry_is_carried_over(failure: Failed, expires_at: datetime | None) -> None:
    """A mark before publishing has taken it from the row; a failure gives it back."""
    assert retries().charge(row(expires_at=expires_at), failure, NOW).expires_at == expires_at


def test_the_text_begins_with_the_reason() -> None:
    """A person searches for it; the rest is what the service said."""
    charged = retries().charge(row(), Failed("not_found", "projects/p/topics/t: no such topic"), NOW)
    assert charged.error == "not_found: projects/p/topics/t: no such topic"


@pytest.mark.parametrize("character", ["x", "ü", "\U0001f600", "\ud800"])
@pytest.mark.parametrize(("length", "expected"), [(988, 999), (989, 1000), (990, 1000), (100_000, 1000)])
def test_the_text_has_a_thousand_characters_at_most(character: str, length: int, expected: int) -> None:
    """Cut by characters, the reason included; characters of any width, and halves of one."""
    text = last_error(Failed("not_found", character * length))
    assert len(text) == expected
    assert text.startswith("not_found: ")
    assert len(text.encode()) <= 4 * expected


@given(st.text(st.characters(), max_size=30), st.integers(0, 40))
def test_the_text_is_what_a_column_can_hold(error: str, copies: int) -> None:
    """Lone surrogates are replaced, everything else is kept."""
    text = last_error(Failed("internal", error * copies))
    expected = "".join("?" if 0xD800 <= ord(each) < 0xE000 else each for each in f"internal: {error * copies}")
    assert text == expected[:1000]
    assert text.encode().decode() == text


@pytest.mark.parametrize(
    ("failure", "probe", "suspect", "works", "charged"),
    [
        # A content error is its task's own, wherever it is met.
        *((CONTENT, probe, suspect, works, True) for probe in (0, 1) for suspect in (0, 1) for works in (0, 1)),
        # And so is one that nobody knows.
        *((UNKNOWN, probe, suspect, works, True) for probe in (0, 1) for suspect in (0, 1) for works in (0, 1)),
        # A missing or closed topic is charged to its probes.
        *((TARGET, 0, suspect, works, False) for suspect in (0, 1) for works in (0, 1)),
        *((TARGET, 1, suspect, works, True) for suspect in (0, 1) for works in (0, 1)),
        # An outage is charged to a task that has met one, while its topic works; a probe does not know that it does.
        (OUTAGE, 0, 1, 1, True),
        (OUTAGE, 0, 1, 0, False),
        (OUTAGE, 0, 0, 1, False),
        (OUTAGE, 0, 0, 0, False),
        *((OUTAGE, 1, suspect, works, False) for suspect in (0, 1) for works in (0, 1)),
        # What no message can cause is charged to none.
        *((Failed(reason, "?"), 0, 1, 1, False) for reason in ("resource_exhausted", "unauthenticated", "credentials")),
        *((Failed(reason, "?"), 0, 1, 1, True) for reason in ("unavailable", "deadline_exceeded", "internal")),
    ],
)
def test_who_pays(failure: Failed, probe: int, suspect: int, works: int, charged: bool) -> None:
    """The task, or its topic, which rests then; another task that is suspect changes nothing."""
    suspects = frozenset({"b", *(["a"] if suspect else [])})
    group = Group("orders", ("a", "b"), suspects, probe=bool(probe))
    assert is_charged(group, "a", failure, works=bool(works)) is charged
