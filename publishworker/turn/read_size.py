"""How many index ranges one read asks for. A read that timed out is never repeated unchanged."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from publishworker.spanner.errors import TimedOut
from publishworker.spanner.store import READ_SECONDS

#: A read that takes longer than this part of its time limit does not become larger.
QUICK_SECONDS = READ_SECONDS / 6
#: For this long after a read timed out, each read asks for at most half as many ranges as that read.
CAUTIOUS_SECONDS = 600.0


class ReadSize:
    """Limits reads to `limit` ranges: a quarter of a read that timed out, and twice as many after each quick read."""

    def __init__(self, max_ranges: int, clock: Callable[[], float]) -> None:
        self.limit = self._max_ranges = self._ceiling = max_ranges
        self._clock = clock
        self._timed_out_at = float("-inf")

    @contextmanager
    def reading(self, ranges: int) -> Iterator[None]:
        """Return a context for one read of this many ranges, which adapts the limit to the time that the read takes."""
        began = self._clock()
        try:
            yield
        except TimedOut:
            self._timed_out_at = self._clock()
            self._ceiling, self.limit = max(1, ranges // 2), max(1, ranges // 4)
            raise
        if self._clock() - self._timed_out_at > CAUTIOUS_SECONDS:
            self._ceiling = self._max_ranges
        if ranges > self.limit // 2 and self._clock() - began < QUICK_SECONDS:
            self.limit = max(self.limit, min(2 * self.limit, self._ceiling))
