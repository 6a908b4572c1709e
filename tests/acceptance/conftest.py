"""The commands of operators, for the tests of this directory."""

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from tests.support.commands import Commands


@pytest.fixture
def outbox(emulators: Emulators, database: Database) -> Commands:
    return Commands(emulators, database)
