"""Random bad input: few cases in the short form, together more than 100,000 with `--long`."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

Check = Callable[..., None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each its limit, in seconds, for the long form."""
    for item in items:
        if item.path.parent.name == "fuzz":
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture
def check(long: bool) -> Check:
    """Return a function that plays a `@given` function so many times: always the same cases in the short form."""

    def play(test: Callable[[], Any], cases: int, cases_if_long: int) -> None:
        settings(
            max_examples=cases_if_long if long else cases,
            derandomize=not long,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )(test)()

    return play
