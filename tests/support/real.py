"""Tests on another Spanner than the emulator: `make test-real` names it (CONTRIBUTING.md).

Its endpoint is plaintext, so that proxies can stand before it. An instance of Google Cloud gets one from `endpoint`.
The product then gets the endpoint as a setting, and does nothing that it does for emulators only.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping

import google.auth
from google.auth.transport.grpc import secure_authorized_channel
from google.auth.transport.requests import Request

from publishworker.spanner.emulator import EmulatorStore
from publishworker.spanner.store import SpannerStore
from tests.support.rpc import UNLIMITED, Forwarding

#: HOST:PORT of a plaintext endpoint, or CLOUD; empty for the emulator.
NAMED = os.environ.get("TEST_SPANNER", "")
CLOUD = "cloud"
SERVICE = "spanner.googleapis.com:443"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
MULTIPLEXED = "GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW"
#: The store that a worker has there.
Store = SpannerStore if NAMED else EmulatorStore


class _Cloud(Forwarding):
    """Forwards to Spanner with the default credentials."""

    def __init__(self, target: str) -> None:
        found, _ = google.auth.default(scopes=[SCOPE])
        self._channel = secure_authorized_channel(found, Request(), target, options=UNLIMITED)


@contextlib.contextmanager
def endpoint() -> Iterator[str]:
    """Yield HOST:PORT of the plaintext endpoint of the named Spanner."""
    with _Cloud(SERVICE) if NAMED == CLOUD else contextlib.nullcontext() as cloud:
        yield cloud.address if cloud else NAMED


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a command on that Spanner in place of the emulator's; none for the emulator."""
    host = environment.get("SPANNER_EMULATOR_HOST")
    if not NAMED or not host:
        return {}
    sessions = {MULTIPLEXED: os.environ.get(MULTIPLEXED, "true")}
    return {"OUTBOX_SPANNER_ENDPOINT": f"http://{host}"} | sessions
