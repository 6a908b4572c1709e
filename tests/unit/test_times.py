"""Durations and times, as users write them and as commands write them back."""

from datetime import UTC, datetime, timedelta, timezone
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.base.schedules import Backoff, Schedule
from outbox.base.times import shown, spoken
from outbox.program.settings import MOMENT, SECONDS, resolved

NOW = datetime(2026, 11, 21, 13, tzinfo=UTC)
#: In seconds. SECONDS and MOMENT read these alike.
DURATIONS = {
    "90s": 90, "15m": 900, "2h": 7_200, "7d": 604_800, "0s": 0, "0d": 0, "007m": 420, "0.5m": 30, "1.25d": 108_000,
    "0.000001s": 0.000001, "36500d": 3_153_600_000, "876000h": 3_153_600_000,
}  # fmt: skip
#: SECONDS and MOMENT refuse these alike.
NO_DURATIONS = (
    "", " ", "s", "m", "5S", "5 s", " 5s", "5s ", "5s\n", "-5s", "+5s", "1e3s", ".5s", "5.s", "5,5s", "1m1s", "5w",
    "five", "nan", "inf", "infs", "0x10s", "1_000s", "36501d", "36500.1d", "876001h", "3153600001s", "9" * 15 + "d",
    "9" * 15 + "s", "9" * 16 + "s", "9" * 5_000 + "s", "0.1234567891s", "5s5", "\ud8005s", "5\x00s",
    "\uff11h", "\u0669\u0660s",
)  # fmt: skip
#: MOMENT reads these, to the microsecond: more digits are cut.
TIMES = {
    "2026-11-21T13:00:00Z": NOW,
    "2026-11-21T13:00:00.000000Z": NOW,
    "2026-11-21T14:00:00+01:00": NOW,
    "2026-11-21T02:30:00-10:30": NOW,
    "2026-11-21T13:00:00-00:00": NOW,
    "2026-11-21T13:00Z": NOW,
    "2026-11-21T13:00:00.123456Z": NOW + timedelta(microseconds=123_456),
    "2026-11-21T13:00:00.123456999Z": NOW + timedelta(microseconds=123_456),
    "0002-01-01T00:00:00+23:59": datetime(1, 12, 31, 0, 1, tzinfo=UTC),
    "9998-12-31T23:59:59-23:59": datetime(9999, 1, 1, 23, 58, 59, tzinfo=UTC),
}
#: Without an offset, in another form, or at times that are outside of the years 1 to 9999 in UTC.
NO_TIMES = (
    "2026-11-21T13:00:00", "2026-11-21", "2026-11-21 13:00:00Z", "2026-11-21T", "2026-11-21T13:00:00z",
    "2026-11-21T13:00:00Z\n", " 2026-11-21T13:00:00Z", "2026-11-21T13:00:00+24:00", "2026-11-21T24:00:01Z",
    "2026-02-30T00:00:00Z", "2026-13-01T00:00:00Z", "0000-01-01T00:00:00Z", "0001-01-01T00:00:00Z",
    "0001-01-01T00:00:00+23:59", "9999-12-31T00:00:00Z", "9999-12-31T23:59:59-23:59", "10000-01-01T00:00:00Z",
    "-2026-11-21T13:00:00Z", "2026-11-21T13:00:00Z tomorrow", "\u0662\u0660\u0662\u0666-11-21T13:00:00Z", "now",
)  # fmt: skip
SPOKEN = {
    -5: "0.0s", 0: "0.0s", 0.04: "0.0s", 0.44: "0.4s", 9.94: "9.9s", 10: "10s", 59.4: "59s", 59.6: "1m", 60: "1m",
    904: "15m 4s", 3_599.6: "1h", 3_600: "1h", 3_605: "1h", 3_660: "1h 1m", 36_000: "10h", 86_399: "23h 59m",
    86_399.6: "1d", 2 * 86_400 + 3 * 3_600 + 59: "2d 3h", 2 * 86_400 + 59: "2d", 100 * 86_400: "100d",
    36_500 * 86_400: "36500d",
}  # fmt: skip


@pytest.mark.parametrize(("text", "seconds"), DURATIONS.items())
def test_a_duration_has_one_unit(text: str, seconds: float):
    assert MOMENT.parse(text) == timedelta(seconds=seconds)
    assert SECONDS.parse(text) == seconds


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("0", 0.0), ("1.5", 1.5), ("999999999", 999_999_999.0)])
def test_seconds_need_no_unit(text: str, seconds: float):
    """A number alone is seconds. A time ago needs a unit, because it would be too easy to forget."""
    assert SECONDS.parse(text) == seconds
    with pytest.raises(ValueError, match=text):
        MOMENT.parse(text)


@pytest.mark.parametrize(("text", "time"), TIMES.items())
def test_a_time_has_an_offset(text: str, time: datetime):
    value = MOMENT.parse(text)
    assert value == time
    assert value.tzinfo is UTC


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((kind, text) for kind in (MOMENT, SECONDS) for text in NO_DURATIONS),
        *((SECONDS, text) for text in ("9999999999", "-1", "+1", "1e5", "1.", ".5", "1 ", "1\n", *TIMES)),
        *((MOMENT, text) for text in NO_TIMES),
    ],
)
def test_an_invalid_duration_or_time_is_a_value_error(kind: type, text: str):
    """Nothing else is raised, so the user gets the sentence of a wrong value."""
    with pytest.raises(ValueError):  # noqa: PT011 - the sentence is that of the kind
        kind.parse(text)


@given(
    st.datetimes(datetime(2, 1, 2), datetime(9998, 12, 30)),  # noqa: DTZ001 - the offset is drawn
    st.integers(-14 * 60, 14 * 60),
)
def test_a_printed_time_can_be_read_back(naive: datetime, minutes: int):
    """`--until` of the printed command is the same time: to the microsecond, from any offset, with a Z."""
    time = naive.replace(tzinfo=timezone(timedelta(minutes=minutes)))
    text = shown(time)
    assert text.endswith("Z")
    assert len(text) == len("2026-11-21T13:00:00.000000Z")
    assert resolved(MOMENT.parse(text), NOW) == MOMENT.parse(text) == time


@pytest.mark.parametrize(("seconds", "text"), SPOKEN.items())
def test_a_duration_is_printed_in_its_two_largest_units(seconds: float, text: str):
    assert spoken(seconds) == text


def test_waits_grow_up_to_the_longest_one() -> None:
    schedule = Schedule(0.5, 4.0)
    assert [schedule.nth(number) for number in (0, 1, 2, 3, 4, 10**6)] == [0.5, 1, 2, 4, 4, 4]
    assert (schedule.after(0.5), schedule.after(3.0)) == (1.0, 4.0)
    backoff = Backoff(schedule, Random(1))
    for longest in (0.5, 1.0, 2.0, 4.0, 4.0):
        assert 0.85 * longest <= backoff.next() <= longest
    assert 0.85 <= backoff.next(1.0) <= 1.0  # a shorter max, from which the waits grow again
    assert 1.7 <= backoff.next() <= 2.0
    backoff.reset()
    assert backoff.next() <= 0.5
