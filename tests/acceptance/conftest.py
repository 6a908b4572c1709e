"""The commands of operators, and the traces of workers, for the tests of this directory."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import PUBSUB, SPANNER, Emulators, check_installed
from outbox.errors import NotReached
from tests.support import relays
from tests.support.commands import Commands


@pytest.fixture(autouse=True)
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compare what the workers of each test do with the specification."""
    trace = tmp_path / "trace.jsonl"
    monkeypatch.setattr(relays, "traces", trace)
    yield
    if trace.exists():
        relays.compare(trace)


@pytest.fixture
def installed() -> None:
    """Skip a test that starts emulators of its own where there are none. Those that a variable names are not enough."""
    try:
        check_installed(SPANNER, PUBSUB)
    except NotReached as error:
        if "INSTALLED" in os.environ or (os.environ.get("CI") and not os.environ.get(SPANNER.variable)):
            raise
        pytest.skip(str(error))


@pytest.fixture
def outbox(emulators: Emulators, database: Database) -> Commands:
    return Commands(emulators, database)
