"""Wait for a condition, with a limit: the one place where a test may sleep."""

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")

#: Seconds between two checks: short compared with the wait, long compared with one check.
INTERVAL = 0.02


def eventually(
    condition: Callable[[], Value], *, seconds: float = 10.0, message: str = "", interval: float = INTERVAL
) -> Value:
    """Return the first true value of `condition`, which is asked at least once. Raises AssertionError after `seconds`.

    An AssertionError inside `condition` counts as not yet true; the last one is the cause of the final error.
    """
    deadline = time.monotonic() + seconds
    while True:
        value, cause = _ask(condition)
        if value:
            return value
        if time.monotonic() >= deadline:
            what = message or getattr(condition, "__name__", "the condition")
            raise AssertionError(f"not true within {seconds:g} s: {what} (last value: {value!r})") from cause
        time.sleep(interval)


def lasting(seconds: float, act: Callable[[], object] = lambda: None, *, interval: float = 0.5) -> None:
    """Act now, and again after each interval, for so many seconds."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        act()
        time.sleep(min(interval, left))


def _ask(condition: Callable[[], Value]) -> tuple[Value | None, AssertionError | None]:
    try:
        return condition(), None
    except AssertionError as error:
        return None, error
