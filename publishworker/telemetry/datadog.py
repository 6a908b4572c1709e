"""DogStatsD, if an agent is configured. The only module that imports `datadog`."""

import logging
import os
import time
from collections.abc import Callable

from outbox.errors import SettingError
from publishworker.telemetry.metrics import Client, Metrics

_log = logging.getLogger("publishworker")

#: Any of these says that there is an agent; the client reads them itself, and DD_ENV, DD_SERVICE, DD_VERSION as tags.
AGENT_VARIABLES = ("DD_DOGSTATSD_URL", "DD_AGENT_HOST", "DD_DOGSTATSD_PORT")
#: Seconds between two lines that say that metrics are lost; how many, the client counts by itself for the agent.
LOST_SECONDS = 3600.0


#: Packets that wait for an agent that is slow, and seconds in which it has to take one.
QUEUED_PACKETS, SOCKET_SECONDS = 1000, 1.0


class _Lost(logging.Handler):
    """Says once what the client would say of each packet that it cannot send."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the client's warnings."""
        super().__init__(logging.WARNING)
        self._clock = clock
        self._said_at = float("-inf")

    def emit(self, record: logging.LogRecord) -> None:
        """Say it, unless it was said."""
        if self._clock() - self._said_at >= LOST_SECONDS:
            self._said_at = self._clock()
            _log.warning(
                "metrics are lost, the relay goes on: the DogStatsD agent takes none (%s)", record.getMessage(),
                extra={"action": "metrics"},
            )  # fmt: skip


def from_environment() -> Metrics:
    """Return metrics that go to the configured agent, or nowhere: no agent means silence. Raises SettingError."""
    return Metrics(client())


def client() -> Client | None:
    """Return a client of the configured agent, or None: no agent means silence. Raises SettingError."""
    configured = [name for name in AGENT_VARIABLES if os.environ.get(name)]
    if not configured:
        return None
    # An agent that is away makes the client warn for every packet, and an address that is none at its import.
    of_client = logging.getLogger("datadog.dogstatsd")
    of_client.handlers = [_Lost()]
    of_client.propagate = False
    try:
        from datadog.dogstatsd.base import DogStatsd  # noqa: PLC0415 - 125 ms, and an extra that not everyone installs
    except ImportError as error:
        raise SettingError(
            f"{configured[0]} is set, but the package `datadog` is missing: pip install 'spanner-outbox[worker]'"
        ) from error
    # Packets of many samples, sent by a thread of the client: the socket of an agent that is slow is full after ten
    # packets, and would refuse the next ones. `stop` sends what is left.
    made: Client = DogStatsd(
        disable_buffering=False,
        disable_background_sender=False,
        sender_queue_size=QUEUED_PACKETS,
        socket_timeout=SOCKET_SECONDS,
    )
    return made
