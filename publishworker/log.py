"""The log of the worker, and lines about a repeating problem: the first at once, and then only some a minute."""

import logging
import time
from collections.abc import Callable, Mapping

log = logging.getLogger("publishworker")

#: Seconds between two lines about the same thing, and between two summaries.
LINE_SECONDS = 60.0


class ThrottledLog:
    """Logs each problem a few times per interval. Metrics count the other times."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: By problem: when its interval began, and how often it has been logged.
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def log(
        self, action: str, about: str, sentence: str, *, max_lines: int = 1, fields: Mapping[str, object] | None = None
    ) -> bool:
        """Log `sentence` unless this `action` was logged `max_lines` times `about` this subject; tell whether."""
        now = self._clock()
        self._seen = {problem: seen for problem, seen in self._seen.items() if now - seen[0] < LINE_SECONDS}
        since, times = self._seen.get((action, about), (now, 0))
        if times >= max_lines:
            return False
        self._seen[action, about] = since, times + 1
        log.warning("%s", sentence, extra={"action": action, "fields": fields or {}})
        return True
