"""Warnings about what goes wrong again and again: the first at once, then one a minute with the count."""

import logging
import time
from collections.abc import Callable

_log = logging.getLogger("publishworker")

#: Seconds between two lines about the same thing.
INTERVAL = 60.0


class Complaints:
    """Remembers what was said when; what is quiet for an interval is forgotten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Measure by `clock`, in seconds."""
        self._clock = clock
        self._said: dict[tuple[str, str], tuple[float, int]] = {}  # when, and how often it was kept back since

    def say(self, action: str, about: str, sentence: str) -> bool:
        """Log `sentence` as a warning, unless the same `action` was logged `about` the same within the interval.

        Returns whether it was logged.
        """
        now = self._clock()
        at, kept_back = self._said.get((action, about), (float("-inf"), 0))
        if now - at < INTERVAL:
            self._said[action, about] = (at, kept_back + 1)
            return False
        self._said = {key: entry for key, entry in self._said.items() if now - entry[0] < INTERVAL}
        self._said[action, about] = (now, 0)
        if kept_back:
            sentence += f" [and {kept_back} times more since the last such line]"
        _log.warning("%s", sentence, extra={"action": action})
        return True
