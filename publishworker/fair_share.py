"""A share of the batches for lower priorities, so that an endless stream of urgent tasks starves nobody."""

from collections.abc import Sequence

from publishworker.types import Candidate


class FairShare:
    """Keeps account of the batches that are owed to lower priorities, and of whose turn it is.

    The next lower priority each time, then from the top again.
    """

    def __init__(self, share: float) -> None:
        """Give `share` (0 to 1) of the batches away; 0 is strict priority."""
        self._share = share
        self._owed = 0.0
        self._top: int | None = None
        self._last: int | None = None

    @property
    def batches(self) -> int:
        """Return how many batches are owed."""
        return int(self._owed)

    @property
    def below(self) -> int | None:
        """Return the priority below which the next poll has to look for ready tasks as well, or None."""
        if not self.batches or self._top is None:
            return None
        return self._top if self._last is None else self._last

    def choose(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the ready tasks of the priority whose turn it is, or none if there is nothing to give."""
        below = self.below
        if below is None:
            return []
        lower = [each for each in candidates if each.available_at is None and each.priority < below]
        if not lower:
            if self._last is None:
                self._owed = 0.0  # nobody waits; ask again when the next share is due
            self._last = None
            return []
        self._last = max(each.priority for each in lower)
        return [each for each in lower if each.priority == self._last]

    def count(self, batches: int, given: int, top: int | None) -> None:
        """Note a poll: how many batches were taken, how many of them given away, and the highest priority there was.

        `top` is None if nothing was left behind: then no task waits, of whatever priority. What is owed is bounded: a
        poll in vain, below the lowest priority, is made good, a time without any lower task is not.
        """
        earned = self._share * batches
        self._owed = min(self._owed + earned - given, 1 + 3 * earned)
        self._top = top
