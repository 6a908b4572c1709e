"""The limits of topics: rates over time, parts of the fleet, and rows that make no sense. The clock is ours."""

import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from publishworker.task import TopicLimit
from publishworker.turn.throttle import Throttle, problem

STEP = 0.0625  # a step of time that adds up without rounding


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        """Begin somewhere."""
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@pytest.fixture
def clock() -> Clock:
    """A clock."""
    return Clock()


@pytest.fixture
def throttle(clock: Clock) -> Throttle:
    """A throttle that lives by it."""
    return Throttle(clock)


def allowed(throttle: Throttle, topic: str = "orders", flying: int = 0) -> int | None:
    """Return how many tasks of the topic may be taken, None being any number."""
    return throttle.allowances({topic: flying} if flying else {}).get(topic)


def rate(per_second: float, burst: int, in_flight: int | None = None) -> dict[str, TopicLimit]:
    """Return a limit of the topic."""
    return {"orders": TopicLimit(per_second, burst, in_flight)}


def taken_in(throttle: Throttle, clock: Clock, seconds: float, step: float) -> int:
    """Ask every `step` seconds, take all that is allowed, and return how many that were."""
    total, end = 0, clock.now + seconds
    while clock.now < end:
        tasks = allowed(throttle) or 0
        throttle.take("orders", tasks)
        total += tasks
        clock.now += step
    return total


def test_nothing_is_limited_without_limits(throttle: Throttle) -> None:
    """Neither before the first poll nor for a topic without a row."""
    assert throttle.allowances({"orders": 10**6}) == {}
    throttle.learn({"orders": TopicLimit(1, 1, 1)}, 1)
    throttle.take("invoices", 100)
    assert set(throttle.allowances({"invoices": 100})) == {"orders"}


@pytest.mark.parametrize("step", [0.001, STEP, 0.25, 1.0, 3.0, 9.0])
def test_a_rate_is_kept_however_often_it_is_asked_for(throttle: Throttle, clock: Clock, step: float) -> None:
    """10 a second and a burst of 20: in ten seconds 120 at most, and nearly as many where it is asked for in time."""
    throttle.learn(rate(10, 20), 1)
    total = taken_in(throttle, clock, 10, step)
    assert total <= 120
    if step <= 1:
        assert total >= 100


@given(
    per_second=st.floats(0.01, 1e5),
    burst=st.integers(1, 10**5),
    workers=st.integers(1, 20),
    steps=st.lists(st.tuples(st.floats(0, 20), st.floats(0, 1)), max_size=40),
)
def test_no_asking_gets_more_than_rate_and_burst(
    per_second: float, burst: int, workers: int, steps: list[tuple[float, float]]
) -> None:
    """At any times, with any part of what is allowed taken, and whatever is learned again in between."""
    clock = Clock()
    throttle, total = Throttle(clock), 0
    most = max(1.0, burst / workers)
    for seconds, part in [(0.0, 1.0), *steps]:
        clock.now += seconds
        throttle.learn(rate(per_second, burst), workers)
        tasks = allowed(throttle)
        assert tasks is not None
        assert 0 <= tasks <= most
        throttle.take("orders", int(tasks * part))
        total += int(tasks * part)
    assert total <= most + (clock.now - 1000) * per_second / workers + 1e-6 * (1 + total)


@pytest.mark.parametrize(
    ("per_second", "burst", "saved"),
    [(100.0, 1000, 20), (100.0, 7, 7), (4.0, 1000, 1), (0.5, 3, 1), (50.0, 10, 10), (5.0, 10, 1)],
)
def test_a_fifth_of_a_second_is_saved_before_the_topic_is_asked_for(
    throttle: Throttle, clock: Clock, per_second: float, burst: int, saved: int
) -> None:
    """Or the burst, if that is less, or one: few groups of some size instead of many of one task each."""
    throttle.learn(rate(per_second, burst), 1)
    assert allowed(throttle) == burst
    throttle.take("orders", burst)
    clock.now += (saved - 0.01) / per_second
    assert allowed(throttle) == 0
    clock.now += 0.02 / per_second
    assert allowed(throttle) == saved


def test_what_is_left_of_a_burst_may_go_unless_it_is_too_little(throttle: Throttle) -> None:
    """20 of 100 a second are a fifth of a second's."""
    throttle.learn(rate(100, 50), 1)
    throttle.take("orders", 30)
    assert allowed(throttle) == 20
    throttle.take("orders", 1)
    assert allowed(throttle) == 0


@pytest.mark.parametrize(
    ("workers", "burst", "in_flight"), [(1, 20, 7), (2, 10, 3), (3, 6, 2), (4, 5, 1), (7, 2, 1), (20, 1, 1), (50, 1, 1)]
)
def test_each_worker_has_its_part(throttle: Throttle, clock: Clock, workers: int, burst: int, in_flight: int) -> None:
    """Of the rate, the burst and what flies, and of the latter two at least one."""
    throttle.learn({"orders": TopicLimit(10, 20), "invoices": TopicLimit(None, None, 7)}, workers)
    assert throttle.allowances({}) == {"orders": burst, "invoices": in_flight}
    throttle.take("orders", burst)
    total = taken_in(throttle, clock, 100, STEP)
    assert 1000 / workers - burst - 2 <= total <= 1000 / workers + 1


def test_what_was_not_sent_is_given_back_but_never_beyond_the_burst(throttle: Throttle) -> None:
    """Tasks that others had sent cost no part of the rate."""
    throttle.learn(rate(1, 10), 1)
    throttle.take("orders", 10)
    assert allowed(throttle) == 0
    throttle.take("orders", -4)
    assert allowed(throttle) == 4
    throttle.take("orders", -400)
    assert allowed(throttle) == 10
    throttle.take("orders", -400)
    throttle.take("orders", 10)
    assert allowed(throttle) == 0


def test_more_than_was_allowed_is_paid_back(throttle: Throttle, clock: Clock) -> None:
    """A group that was started all the same counts in full."""
    throttle.learn(rate(1, 5), 1)
    throttle.take("orders", 8)
    clock.now += 3.5
    assert allowed(throttle) == 0
    clock.now += 1
    assert allowed(throttle) == 1


def test_changed_limits_are_followed_and_keep_what_was_saved(throttle: Throttle, clock: Clock) -> None:
    """Reading the limits again gives no burst for nothing; a smaller burst cuts what was saved."""
    throttle.learn(rate(1, 100), 1)
    throttle.take("orders", 70)
    throttle.learn(rate(1, 1000), 1)
    assert allowed(throttle) == 30
    clock.now += 5
    throttle.learn(rate(50, 1000), 1)  # the five seconds before were at 1 a second
    assert allowed(throttle) == 35
    clock.now += 1
    assert allowed(throttle) == 85
    throttle.learn(rate(50, 15), 1)
    throttle.take("orders", 3)
    assert allowed(throttle) == 12
    throttle.learn(rate(50, 1000), 1)
    assert allowed(throttle) == 12
    throttle.learn(rate(50, 1000), 100)
    assert allowed(throttle) == 10
    clock.now += 1000
    assert allowed(throttle) == 10


def test_a_debt_survives_a_change(throttle: Throttle, clock: Clock) -> None:
    """A topic that has had its tasks gets no others by a new row."""
    throttle.learn(rate(1, 5), 1)
    throttle.take("orders", 5)
    throttle.learn(rate(2, 50), 1)
    assert allowed(throttle) == 0
    clock.now += 0.5
    assert allowed(throttle) == 1


def test_a_removed_limit_limits_no_more(throttle: Throttle) -> None:
    """Either of them, or both; and what is limited again begins with a full burst."""
    throttle.learn(rate(1, 5, 2), 1)
    throttle.take("orders", 5)
    throttle.learn({"orders": TopicLimit(None, None, 2)}, 1)
    assert allowed(throttle) == 2
    throttle.learn({}, 1)
    assert allowed(throttle) is None
    assert throttle.seconds_to_next() is None
    throttle.take("orders", 5)
    throttle.learn(rate(1, 5), 1)
    assert allowed(throttle, flying=100) == 5


def test_what_flies_counts(throttle: Throttle) -> None:
    """Up to the limit, never below nothing, and each topic for itself."""
    throttle.learn({"orders": TopicLimit(None, None, 5), "invoices": TopicLimit(None, None, 5)}, 1)
    assert [allowed(throttle, flying=flying) for flying in (0, 1, 4, 5, 6, 100)] == [5, 4, 1, 0, 0, 0]
    assert throttle.allowances({"orders": 5, "others": 3}) == {"orders": 0, "invoices": 5}
    assert throttle.seconds_to_next() is None


@pytest.mark.parametrize(
    ("burst", "in_flight", "flying", "expected"), [(10, 4, 0, 4), (10, 4, 1, 3), (3, 40, 0, 3), (3, 40, 39, 1)]
)
def test_of_two_limits_the_smaller_holds(
    throttle: Throttle, burst: int, in_flight: int, flying: int, expected: int
) -> None:
    """The rate and what flies."""
    throttle.learn(rate(1, burst, in_flight), 1)
    assert allowed(throttle, flying=flying) == expected
    throttle.take("orders", burst)
    assert allowed(throttle) == 0


@given(per_second=st.floats(1e-6, 1e6), burst=st.integers(1, 10**6), taken=st.floats(0, 1), waited=st.floats(0, 1))
def test_after_the_seconds_to_the_next_the_topic_is_allowed_and_not_before(
    per_second: float, burst: int, taken: float, waited: float
) -> None:
    """The worker sleeps as long and wakes for something."""
    clock = Clock()
    throttle = Throttle(clock)
    throttle.learn(rate(per_second, burst), 1)
    throttle.take("orders", math.ceil(burst * taken))
    seconds = throttle.seconds_to_next()
    if seconds is None:
        assert allowed(throttle)
        return
    assert allowed(throttle) == 0
    clock.now += seconds * waited * (1 - 1e-6)
    left = throttle.seconds_to_next()
    if left is not None:
        assert left == pytest.approx(seconds * (1 - waited), rel=1e-3, abs=1e-3 * seconds + 1e-9)
        clock.now += left * (1 + 1e-6) + 1e-9
    assert allowed(throttle)
    assert throttle.seconds_to_next() is None


def test_the_first_of_several_topics_says_how_long_to_wait(throttle: Throttle) -> None:
    """Topics that need not wait say nothing."""
    throttle.learn({"slow": TopicLimit(0.1, 1), "faster": TopicLimit(2, 1), "full": TopicLimit(9, 9)}, 1)
    assert throttle.seconds_to_next() is None
    throttle.take("slow", 1)
    assert throttle.seconds_to_next() == pytest.approx(10)
    throttle.take("faster", 1)
    assert throttle.seconds_to_next() == pytest.approx(0.5)
    throttle.learn({"slow": TopicLimit(0.1, 1)}, 4)
    assert throttle.seconds_to_next() == pytest.approx(40)


@pytest.mark.parametrize("workers", [1, 1000])
def test_a_tiny_rate_lets_exactly_the_burst_through(throttle: Throttle, clock: Clock, workers: int) -> None:
    """One task in eleven days."""
    throttle.learn(rate(1e-6, 1), workers)
    assert taken_in(throttle, clock, 100_000, 97) == 1
    seconds = throttle.seconds_to_next()
    assert seconds == pytest.approx(1e6 * workers - 100_000, rel=0.01)


LEAST = "it must be 1e-09 or more; to send nothing, pause the topic"
PAIR = "RatePerSecond and Burst come together: set both, or both to NULL"


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        (TopicLimit(5.0, None), PAIR),
        (TopicLimit(None, 5), PAIR),
        (TopicLimit(None, 5, 3), PAIR),
        (TopicLimit(0.0, 5), f"RatePerSecond is 0, {LEAST}"),
        (TopicLimit(-2.5, 5), f"RatePerSecond is -2.5, {LEAST}"),
        (TopicLimit(math.nan, 5), f"RatePerSecond is nan, {LEAST}"),
        (TopicLimit(math.inf, 5), f"RatePerSecond is inf, {LEAST}"),
        (TopicLimit(-math.inf, 5), f"RatePerSecond is -inf, {LEAST}"),
        (TopicLimit(5e-324, 5), f"RatePerSecond is 4.94066e-324, {LEAST}"),
        (TopicLimit(5.0, 0), "Burst is 0, it must be 1 or more"),
        (TopicLimit(5.0, -(2**63)), "Burst is -9223372036854775808, it must be 1 or more"),
        (TopicLimit(None, None, 0), "MaxInFlight is 0, it must be 1 or more"),
        (TopicLimit(5.0, 5, -7), "MaxInFlight is -7, it must be 1 or more"),
    ],
)
def test_a_row_that_makes_no_sense_limits_nothing_and_is_complained_about(
    throttle: Throttle, clock: Clock, caplog: pytest.LogCaptureFixture, limit: TopicLimit, says: str
) -> None:
    """Once a minute, with the topic, the column and the value; its neighbours are followed all the same."""
    assert problem(limit) == says
    line = f"the limits of wrong in AsynchronousTaskTopics are not followed: {says}"
    with caplog.at_level(logging.WARNING, "publishworker"):
        for seconds in (0.0, 1.0, 58.9):
            clock.now += seconds
            throttle.learn({"wrong": limit, "right": TopicLimit(1, 3)}, 2)
            assert throttle.allowances({"wrong": 10**6}) == {"right": 1}
            assert throttle.seconds_to_next() is None
        assert caplog.messages == [line]
        clock.now += 0.2
        throttle.learn({"wrong": limit, "also wrong": limit}, 2)
        assert caplog.messages[1:] == [
            f"{line} [and 2 times more since the last such line]",
            line.replace("of wrong", "of also wrong"),
        ]


def test_a_row_that_was_right_and_is_wrong_now_limits_no_more(throttle: Throttle) -> None:
    """It does not stay as it was: what holds is what the table says."""
    throttle.learn(rate(1, 5, 2), 1)
    throttle.learn(rate(-1, 5, 2), 1)
    assert allowed(throttle) is None
    throttle.learn(rate(1, 5, 2), 1)
    assert allowed(throttle) == 2


@pytest.mark.parametrize(
    "limit",
    [TopicLimit(), TopicLimit(1e-9, 1), TopicLimit(1e308, 2**63 - 1, 2**63 - 1), TopicLimit(None, None, 1)],
)
def test_a_row_that_makes_sense_has_no_problem(
    throttle: Throttle, clock: Clock, caplog: pytest.LogCaptureFixture, limit: TopicLimit
) -> None:
    """From one task in thirty years to more than there will ever be."""
    assert problem(limit) == ""
    throttle.learn({"orders": limit}, 3)
    clock.now += 1
    assert allowed(throttle) != 0
    assert caplog.messages == []
