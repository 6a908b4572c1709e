"""Waits that grow, so that what fails is tried less and less often."""

from collections.abc import Callable
from random import Random


class Backoff:
    """Waits that double from `first` to `longest` seconds, with jitter, so that workers do not act in step."""

    def __init__(self, first: float, longest: float | Callable[[], float], random: Random) -> None:
        self._first = first
        self._longest = longest if callable(longest) else lambda: longest
        self._random = random
        self._next = first

    def reset(self) -> None:
        """Begin again with the shortest wait."""
        self._next = self._first

    def next(self) -> float:
        """Return the current wait less a random part: at most 15 % of it, and at most 0.5 s. Then double it."""
        nominal = min(self._next, self._longest())
        self._next = nominal * 2
        return nominal - self._random.uniform(0, min(0.15 * nominal, 0.5))
