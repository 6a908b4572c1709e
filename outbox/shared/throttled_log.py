"""What goes wrong again and again: the first lines at once, then a line a minute with the count of the others."""

import logging
import time
from collections.abc import Callable, Mapping

_log = logging.getLogger("publishworker")

#: Seconds between two lines about the same thing.
INTERVAL = 60.0


class ThrottledLog:
    """Remembers what was said when; what is quiet for an interval is forgotten, once its count is told."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Measure by `clock`, in seconds."""
        self._clock = clock
        # Since when, how often there was reason to, how often it was said at most.
        self._said: dict[tuple[str, str], tuple[float, int, int]] = {}

    def say(
        self,
        action: str,
        about: str,
        sentence: str,
        *,
        most: int = 1,
        level: int = logging.WARNING,
        fields: Mapping[str, object] | None = None,
    ) -> bool:
        """Log `sentence`, unless the same `action` was logged `about` the same `most` times within the interval.

        Returns whether it was logged. `fields` are members of the line in JSON.
        """
        now = self._clock()
        since, said, _ = self._said.pop((action, about), (float("-inf"), 0, 0))
        self._forget(now)
        if now - since < INTERVAL:
            self._said[action, about] = (since, said + 1, most)
            if said >= most:
                return False
        else:
            self._said[action, about] = (now, 1, most)
            if said > most:
                sentence += f" [and {said - most} times more since the last such line]"
        _log.log(level, "%s", sentence, extra={"action": action, "fields": fields or {}})
        return True

    def _forget(self, now: float) -> None:
        """Forget what is quiet, and tell how often it was not told."""
        for (action, about), (since, said, most) in list(self._said.items()):
            if now - since >= INTERVAL:
                del self._said[action, about]
                if said > most:
                    times = f"{said - most} times more than was logged"
                    _log.warning("%s: %s, %s", action, about, times, extra={"action": action})
