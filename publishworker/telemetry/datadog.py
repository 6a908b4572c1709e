"""DogStatsD, if an agent is configured. Only this module imports `datadog`."""

import logging
import os
import time
from collections.abc import Callable

from outbox.errors import SettingError
from publishworker.telemetry.metrics import Client, Metrics

_log = logging.getLogger("publishworker")

#: An agent is configured if any of these is set. The client reads them, and DD_ENV, DD_SERVICE and DD_VERSION as tags.
AGENT_VARIABLES = ("DD_DOGSTATSD_URL", "DD_AGENT_HOST", "DD_DOGSTATSD_PORT")
#: Seconds between two log lines about lost metrics. The client itself counts how many.
LOST_SECONDS = 3600.0


#: Max packets that wait for a slow agent, and seconds for sending one.
QUEUED_PACKETS, SOCKET_SECONDS = 1000, 1.0


class _Lost(logging.Handler):
    """Logs once an hour what the client would log for each packet that it cannot send."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Receive the client's warnings."""
        super().__init__(logging.WARNING)
        self._clock = clock
        self._said_at = float("-inf")

    def emit(self, record: logging.LogRecord) -> None:
        """Log the warning, unless one was logged within LOST_SECONDS."""
        if self._clock() - self._said_at >= LOST_SECONDS:
            self._said_at = self._clock()
            _log.warning(
                "Metrics are lost; the relay continues: the DogStatsD agent does not accept them (%s)",
                record.getMessage(),
                extra={"action": "metrics"},
            )  # fmt: skip


def from_environment() -> Metrics:
    """Return metrics that are sent to the configured agent, or nowhere without one. Raises SettingError."""
    return Metrics(client())


def client() -> Client | None:
    """Return a client of the configured agent, or None. Raises SettingError."""
    configured = [name for name in AGENT_VARIABLES if os.environ.get(name)]
    if not configured:
        return None
    # The client warns for every packet that an agent misses, and for an invalid address when it is imported.
    of_client = logging.getLogger("datadog.dogstatsd")
    of_client.handlers = [_Lost()]
    of_client.propagate = False
    try:
        from datadog.dogstatsd.base import DogStatsd  # noqa: PLC0415 - 125 ms, and an extra that not everyone installs
    except ImportError as error:
        raise SettingError(
            f"{configured[0]} is set, but the package `datadog` is missing: pip install 'spanner-outbox[worker]'"
        ) from error
    # Packets hold many samples and are sent by a thread of the client, because the socket of a slow agent is full after
    # ten packets. `stop` sends the rest.
    made: Client = DogStatsd(
        disable_buffering=False,
        disable_background_sender=False,
        sender_queue_size=QUEUED_PACKETS,
        socket_timeout=SOCKET_SECONDS,
    )
    return made
