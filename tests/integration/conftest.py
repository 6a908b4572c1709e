"""Fixtures for operators' commands and pages, a table whose every request is checked, and for asyncio."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.instance import Instance
from starlette.testclient import TestClient

from outbox.devtools.emulators import Emulators
from outbox.rows.task_table import TaskTable
from outbox.table import ddl
from outbox_admin.web import visits
from tests.support.commands import Commands
from tests.support.console import console
from tests.support.drivers import ACCOUNTS, ORDERS, STACKS, DbApi
from tests.support.operations import Watch
from tests.support.spanner import INSTANCE, PROJECT, fresh_database


@pytest.fixture
def watch(database: Database) -> Iterator[Watch]:
    """The table. Every request has LOW priority and a tag, and only changes take locks."""
    created = Watch(database)
    yield created
    created.check()


@pytest.fixture
def table(watch: Watch) -> TaskTable:
    return watch.table


@pytest.fixture
def outbox(emulators: Emulators, database: Database) -> Commands:
    return Commands(emulators, database)


@pytest.fixture(autouse=True)
def _patient_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pages wait for current figures, however slow the machine is."""
    monkeypatch.setattr(visits, "PATIENCE_SECONDS", 60.0)


@pytest.fixture
def jane(database: Database) -> TestClient:
    """A person at a console, who may do everything."""
    return console(database)


@pytest.fixture(scope="session")
def shop(spanner_instance: Instance) -> Iterator[Database]:
    """A database with tables of an application, which many tests share, so that each has keys of its own."""
    with fresh_database(spanner_instance, [*ddl.statements(), ORDERS, ACCOUNTS]) as created:
        yield created


@pytest.fixture(params=STACKS)
def stack(request: pytest.FixtureRequest, shop: Database) -> Iterator[DbApi]:
    with contextlib.closing(STACKS[request.param](shop)) as created:
        yield created


@pytest.fixture
def run_async(emulators: Emulators, database: Database, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run an asynchronous function with the database of an AsyncClient."""
    monkeypatch.setenv("SPANNER_EMULATOR_HOST", emulators.spanner_host)
    pytest.importorskip("outbox.aio", reason="a client without AsyncClient, as in the run `floor` of tools/versions.py")
    from google.cloud.spanner_v1 import AsyncClient

    async def main(work: Callable[[Any], Awaitable[Any]], database_id: str) -> Any:
        client = AsyncClient(project=PROJECT, credentials=AnonymousCredentials(), disable_builtin_metrics=True)
        return await work(await client.instance(INSTANCE).database(database_id))

    return lambda work, other="": asyncio.run(main(work, other or database.database_id))
