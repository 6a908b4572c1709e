"""Log lines about a repeating problem: the first at once, then one a minute with the count of the others."""

import logging
import time
from collections.abc import Callable, Mapping

_log = logging.getLogger("publishworker")

#: Seconds between two lines about the same thing.
INTERVAL = 60.0


class ThrottledLog:
    """Logs each problem a few times per interval, and counts the other times."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By problem: when its interval began, how often it has occurred, and how often it may be logged.
        self._seen: dict[tuple[str, str], tuple[float, int, int]] = {}

    def log(
        self,
        action: str,
        about: str,
        sentence: str,
        *,
        max_lines: int = 1,
        fields: Mapping[str, object] | None = None,
    ) -> bool:
        """Log `sentence`, unless this `action` was logged `max_lines` times `about` this subject within the interval.

        Returns whether it was logged. `fields` are members of the JSON line.
        """
        now = self._clock()
        since, times, _ = self._seen.pop((action, about), (float("-inf"), 0, 0))
        self._forget(now)
        if now - since < INTERVAL:
            self._seen[action, about] = (since, times + 1, max_lines)
            if times >= max_lines:
                return False
        else:
            self._seen[action, about] = (now, 1, max_lines)
            if times > max_lines:
                sentence += f" [and {times - max_lines} more times since the last such line]"
        _log.warning("%s", sentence, extra={"action": action, "fields": fields or {}})
        return True

    def _forget(self, now: float) -> None:
        """Forget problems that did not occur for an interval, and log how often they were not logged."""
        for (action, about), (since, times, max_lines) in list(self._seen.items()):
            if now - since >= INTERVAL:
                del self._seen[action, about]
                if times > max_lines:
                    more = f"occurred {times - max_lines} more times without being logged"
                    _log.warning("%s: %s, %s", action, about, more, extra={"action": action})
