"""Fixtures for operators' commands: a table whose every request is checked."""

from collections.abc import Iterator

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.admin.table import TaskTable
from tests.support.operations import Watch


@pytest.fixture
def watch(database: Database) -> Iterator[Watch]:
    """The table. Every request has LOW priority and a tag, and only changes take locks."""
    created = Watch(database)
    yield created
    created.check()


@pytest.fixture
def table(watch: Watch) -> TaskTable:
    return watch.table
