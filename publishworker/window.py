"""How many rows a poll reads from each range of the index."""

from collections.abc import Mapping


class Window:
    """Keeps a poll near `target` rows, whether one range holds the backlog or hundreds do.

    Doubles while ranges are cut off and the poll is short of the target, halves when it brought twice the target.
    """

    def __init__(self, target: int, shards: int) -> None:
        """Aim at `target` rows; begin as if one topic had all of them, spread over the shards."""
        self._target = target
        self.per_range = max(1, -(-target // max(1, shards)))
        #: Whether the last poll left rows behind in some range.
        self.cut_off = False

    def adapt(self, found: Mapping[object, int]) -> None:
        """Learn from the last poll: how many rows each range gave, or more if another part of the poll read it, too."""
        total = sum(min(count, self.per_range) for count in found.values())
        self.cut_off = any(count >= self.per_range for count in found.values())
        if total > 2 * self._target:
            self.per_range = max(1, self.per_range // 2)
        elif self.cut_off and total < self._target:
            self.per_range = min(self._target, self.per_range * 2)
