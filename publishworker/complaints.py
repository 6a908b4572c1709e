"""What goes wrong again and again: the first lines at once, then a line a minute with the count of the others."""

import logging
import time
from collections.abc import Callable, Mapping

_log = logging.getLogger("publishworker")

#: Seconds between two lines about the same thing.
INTERVAL = 60.0


class Complaints:
    """Remembers what was said when; what is quiet for an interval is forgotten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Measure by `clock`, in seconds."""
        self._clock = clock
        self._said: dict[tuple[str, str], tuple[float, int]] = {}  # since when, and how often there was reason to

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
        since, said = self._said.get((action, about), (float("-inf"), 0))
        if now - since < INTERVAL:
            self._said[action, about] = (since, said + 1)
            if said >= most:
                return False
            kept_back = 0
        else:
            kept_back = said - most
            self._said = {key: entry for key, entry in self._said.items() if now - entry[0] < INTERVAL}
            self._said[action, about] = (now, 1)
        if kept_back > 0:
            sentence += f" [and {kept_back} times more since the last such line]"
        _log.log(level, "%s", sentence, extra={"action": action, "fields": fields or {}})
        return True
