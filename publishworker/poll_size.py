"""How many rows a poll reads from each range of the index."""

from collections.abc import Mapping


class PollSize:
    """Keeps a poll near `target` rows, whether one range holds the backlog or hundreds do.

    Doubles while ranges are cut off and the poll is short of the target, halves when it brought twice the target.
    """

    def __init__(self, target: int, shards: int) -> None:
        """Aim at `target` rows; begin as if one topic had all of them, spread over the shards."""
        self._target = target
        self.per_range = max(1, -(-target // max(1, shards)))
        #: The topics of which the last poll left rows behind in some range.
        self.cut_off: frozenset[str] = frozenset()

    def adapt(self, found: Mapping[tuple[str, int, bool], int]) -> None:
        """Learn from the last poll: how many rows each range gave, or more if another part of the poll read it, too.

        A range is a topic, a shard, and whether its tasks are ready or due.
        """
        total = sum(min(count, self.per_range) for count in found.values())
        self.cut_off = frozenset(topic for (topic, *_), count in found.items() if count >= self.per_range)
        if total > 2 * self._target:
            self.per_range = max(1, self.per_range // 2)
        elif self.cut_off and total < self._target:
            self.per_range = min(self._target, self.per_range * 2)
