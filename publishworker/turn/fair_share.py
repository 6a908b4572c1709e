"""A share of the batches for lower priorities, so that a stream of urgent tasks does not starve them."""

from collections.abc import Sequence

from publishworker.types import Candidate


class FairShare:
    """Counts the batches owed to lower priorities, which take turns from the second highest to the lowest."""

    def __init__(self, share: float) -> None:
        self._share = share  # 0 to 1, the part of the batches for lower priorities; 0 is strict priority
        self._owed = 0.0
        self._top: int | None = None
        self._last: int | None = None

    @property
    def batches(self) -> int:
        """Return the number of batches owed."""
        return int(self._owed)

    @property
    def below(self) -> int | None:
        """Return the priority below which the next poll has to read ready tasks as well, or None."""
        if not self.batches or self._top is None:
            return None
        return self._top if self._last is None else self._last

    def choose(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the tasks of the priority that is next, or none if nothing is owed."""
        below = self.below
        if below is None:
            return []
        lower = [each for each in candidates if each.priority < below]
        if not lower:
            if self._last is None:
                self._owed = 0.0  # no lower task waits; try again when the next share is due
            self._last = None
            return []
        self._last = max(each.priority for each in lower)
        return [each for each in lower if each.priority == self._last]

    def count(self, batches: int, given: int, top: int | None) -> None:
        """Note a selection: how many `batches` start, how many are `given` to lower priorities, the highest priority.

        `top` is None if no task was left, so no priority waits. The debt is bounded: it outlasts one poll below the
        lowest priority, which finds nothing, but a long time without lower tasks does not add up.
        """
        earned = self._share * batches
        self._owed = min(self._owed + earned - given, 1 + 3 * earned)
        self._top = top
