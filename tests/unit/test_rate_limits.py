"""The limits of topics: rates over time, each worker's part, and rows that make no sense."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.table.controls import TopicControls
from publishworker.topics.availability import RateLimits

BEGIN = 1000.0


class Timed(RateLimits):
    def __init__(self) -> None:
        self.now = BEGIN
        super().__init__(lambda: self.now)

    def limit(self, per_second: float, burst: int, in_flight: int | None = None, workers: int = 1) -> None:
        self.apply({"orders": TopicControls(False, per_second, burst, in_flight)}, workers)

    def allowed(self, in_flight: int = 0) -> int | None:
        return self.allowances({"orders": in_flight} if in_flight else {}).get("orders")


@pytest.fixture
def throttle() -> Timed:
    return Timed()


@given(
    per_second=st.floats(1e-9, 1.79769313486e308),
    burst=st.integers(1, 10**9),
    workers=st.integers(1, 20),
    steps=st.lists(st.tuples(st.floats(0, 20), st.floats(0, 1)), max_size=40),
)
def test_no_history_of_requests_exceeds_rate_and_burst(
    per_second: float, burst: int, workers: int, steps: list[tuple[float, float]]
) -> None:
    """At any times, with any part of the allowance used, whatever limits are read again in between."""
    throttle, total = Timed(), 0
    max_tasks = max(1.0, burst / workers)
    for seconds, part in [(0.0, 1.0), *steps]:
        throttle.now += seconds
        throttle.limit(per_second, burst, workers=workers)
        tasks = throttle.allowed()
        assert tasks is not None
        assert 0 <= tasks <= max_tasks
        throttle.take("orders", int(tasks * part))
        total += int(tasks * part)
    assert total <= max_tasks + (throttle.now - BEGIN) * per_second / workers + 1e-6 * (1 + total)


def test_unsent_tasks_return_their_tokens_and_overdrafts_are_repaid(throttle: Timed) -> None:
    """Tasks that other workers sent use none of the rate, but never raise the tokens above the burst."""
    throttle.limit(1, 10)
    for tasks, allowed in ((10, 0), (-4, 4), (-400, 10), (-400, 10), (10, 0), (-10, 10), (13, 0)):
        throttle.take("orders", tasks)
        assert throttle.allowed() == allowed
    throttle.now += 3.5
    assert throttle.allowed() == 0
    throttle.now += 1
    assert throttle.allowed() == 1
