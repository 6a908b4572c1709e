"""The commands of operators, and the traces of workers, for the tests of this directory."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
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
def outbox(emulators: Emulators, database: Database) -> Commands:
    return Commands(emulators, database)
