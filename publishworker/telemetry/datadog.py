"""DogStatsD, if an agent is configured. Only this module imports `datadog`."""

import os

from outbox.errors import SettingError
from publishworker.telemetry.metrics import Client, LostMetrics

#: An agent is configured if any of these is set. The client reads them, and DD_ENV, DD_SERVICE and DD_VERSION as tags.
AGENT_VARIABLES = ("DD_DOGSTATSD_URL", "DD_AGENT_HOST", "DD_DOGSTATSD_PORT")
#: Max packets that wait for a slow agent, and seconds for sending one.
QUEUED_PACKETS, SOCKET_SECONDS = 1000, 1.0


def client() -> Client | None:
    """Return a client of the configured agent, or None. Raises SettingError."""
    configured = [name for name in AGENT_VARIABLES if os.environ.get(name)]
    if not configured:
        return None
    # The client warns for every packet that an agent misses, and for an invalid address when it is imported.
    LostMetrics("the DogStatsD agent", "datadog.dogstatsd")
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
