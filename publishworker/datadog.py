"""DogStatsD, if an agent is configured. The only module that imports `datadog`."""

import os

from outbox.errors import SettingError
from publishworker.metrics import Metrics

#: Any of these says that there is an agent; the client reads them itself, and DD_ENV, DD_SERVICE, DD_VERSION as tags.
AGENT_VARIABLES = ("DD_DOGSTATSD_URL", "DD_AGENT_HOST", "DD_DOGSTATSD_PORT")


def from_environment() -> Metrics:
    """Return metrics that go to the configured agent, or nowhere: no agent means silence. Raises SettingError."""
    configured = [name for name in AGENT_VARIABLES if os.environ.get(name)]
    if not configured:
        return Metrics()
    try:
        from datadog.dogstatsd.base import DogStatsd  # noqa: PLC0415 - 125 ms, and an extra that not everyone installs
    except ImportError as error:
        raise SettingError(
            f"{configured[0]} is set, but the package `datadog` is missing: pip install 'spanner-outbox[worker]'"
        ) from error
    return Metrics(DogStatsd())
