"""The client of `--metrics`."""

from publishworker.telemetry import datadog, opentelemetry
from publishworker.telemetry.metrics import Client


def client(kind: str) -> Client | None:
    """Return the client of a kind, or None if no metrics are wanted. Raises SettingError."""
    if kind == "opentelemetry":
        return opentelemetry.client()
    return datadog.client() if kind == "datadog" else None
