"""One log line an hour about metrics that cannot be sent, in place of one for each attempt of a client."""

import logging
import time
from collections.abc import Callable

_log = logging.getLogger("publishworker")

#: Seconds between two log lines about lost metrics.
LOST_SECONDS = 3600.0


class LostMetrics(logging.Handler):
    """Receives the warnings of a client's loggers."""

    def __init__(self, receiver: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Name the `receiver` that does not accept metrics."""
        super().__init__(logging.WARNING)
        self._receiver = receiver
        self._clock = clock
        self._logged_at = float("-inf")

    def emit(self, record: logging.LogRecord) -> None:
        """Log the warning, unless one was logged within LOST_SECONDS."""
        if self._clock() - self._logged_at >= LOST_SECONDS:
            self._logged_at = self._clock()
            _log.warning(
                "Metrics are lost; the relay continues: %s does not accept them (%s)",
                self._receiver, record.getMessage().partition("\n")[0], extra={"action": "metrics"},
            )  # fmt: skip

    def replace(self, *loggers: str) -> None:
        """Be the only handler of these loggers."""
        for name in loggers:
            logger = logging.getLogger(name)
            logger.handlers = [self]
            logger.propagate = False
