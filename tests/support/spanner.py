"""Spanner instances and databases on an emulator.

Nothing here calls `Database.close()`: it joins a thread that sleeps for ten minutes at a time.
"""

import collections
import contextlib
import functools
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from google.api_core.exceptions import AlreadyExists, GoogleAPICallError
from google.auth.credentials import AnonymousCredentials
from google.cloud import spanner
from google.cloud.spanner_v1 import KeySet, param_types
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.instance import Instance

from outbox.devtools.emulators import Emulators
from outbox.program.settings import PubSubSettings
from tests.support import real

PROJECT = os.environ.get("TEST_PROJECT", "test-project")
INSTANCE = os.environ.get("TEST_INSTANCE", "test-instance")

#: Seconds for a change of the schema or of the instance; the emulator takes milliseconds.
ADMIN_SECONDS = 300.0 if real.NAMED else 30.0
#: Seconds to empty a database of the pool, if another transaction holds the emulator's lock.
EMPTY_SECONDS = 5.0
#: Seconds until an emptied database is lent again: commands that read ten seconds back must not see its old rows.
STALE_SECONDS = 10.5
#: Seconds until a transaction of a test is tried again. A killed process leaves one open, and the emulator, which runs
#: one at a time, aborts it at each fifth try only: with the client's doubling delays, 30 s are then too few.
RETRY_DELAY = 0.02
#: Rows from which another database is cheaper than an empty one.
MANY_ROWS = 300
#: Databases that wait to be lent again; the emulator allows 100 in an instance.
POOL_SIZE = 25


def place(database: str = "unused", *, project: str = PROJECT, instance: str = INSTANCE, **more: str) -> PubSubSettings:
    """Return the settings of a database of the tests, independent of variables except the emulator's."""
    named = {"project": project, "instance": instance, "database": database, **more}
    return PubSubSettings.read(named, real.settings(os.environ))


def variables(database: str, emulators: Emulators | None = None) -> dict[str, str]:
    """Return the variables of a command for a database of the tests, with the hosts of `emulators`."""
    hosts = (
        {"SPANNER_EMULATOR_HOST": emulators.spanner_host, "PUBSUB_EMULATOR_HOST": emulators.pubsub_host}
        if emulators
        else {}
    )
    return hosts | {"OUTBOX_PROJECT": PROJECT, "OUTBOX_INSTANCE": INSTANCE, "OUTBOX_DATABASE": database}


def record_requests(database: Database, *methods: str) -> list[tuple[str, Any]]:
    """Return a list that gets the method and the request of each later call of these methods of the client.

    A call without a request gives its fields as keywords.
    """
    requests: list[tuple[str, Any]] = []
    api: Any = database.spanner_api

    def record(name: str, original: Any, *arguments: Any, **keywords: Any) -> Any:
        requests.append((name, keywords.get("request") or (arguments[0] if arguments else keywords)))
        return original(*arguments, **keywords)

    for name in methods:
        setattr(api, name, functools.partial(record, name, getattr(api, name)))
    return requests


def client(host: str, project: str = PROJECT) -> spanner.Client:
    # The client reads the variables, and only while it is created. Its metrics want Cloud Monitoring.
    with mock.patch.dict(os.environ, {"SPANNER_EMULATOR_HOST": host, "SPANNER_DISABLE_BUILTIN_METRICS": "true"}):
        return spanner.Client(project=project, credentials=AnonymousCredentials())


def instance(host: str, instance_id: str = INSTANCE, project: str = PROJECT) -> Instance:
    created: Instance = client(host, project).instance(
        instance_id, configuration_name=f"projects/{project}/instanceConfigs/emulator-config"
    )
    if real.NAMED:
        return created  # it exists
    with contextlib.suppress(AlreadyExists):  # another process of this test run was first
        created.create().result(timeout=ADMIN_SECONDS)
    return created


@contextlib.contextmanager
def fresh_database(of: Instance, statements: Sequence[str] = ()) -> Iterator[Database]:
    database = of.database(f"test-{uuid.uuid4().hex[:12]}", ddl_statements=statements)
    database.create().result(timeout=ADMIN_SECONDS)
    try:
        yield _persistent(database)
    finally:
        database.drop()


@contextlib.contextmanager
def outbox_database(of: Instance) -> Iterator[Database]:
    from outbox.table import ddl

    with fresh_database(of, ddl.statements()) as database:
        yield database


def query(database: Database, sql: str, **ids: list[str]) -> list[list[Any]]:
    """Return the rows of a strong read; parameters are lists of texts."""
    types = {name: param_types.Array(param_types.STRING) for name in ids}
    with database.snapshot() as snapshot:
        return [list(row) for row in snapshot.execute_sql(sql, params=ids or None, param_types=types or None)]


def count(database: Database, condition: str) -> int:
    [[number]] = query(database, f"SELECT COUNT(*) FROM AsynchronousTasks WHERE {condition}")
    return int(number)


class Pool:
    """Databases with the outbox's tables that tests use in turn: emptying one is cheaper than creating one."""

    def __init__(self, of: Instance) -> None:
        self._instance = of
        self._ddl: list[str] = []
        self._emptied: collections.deque[tuple[float, str]] = collections.deque()

    @contextlib.contextmanager
    def database(self) -> Iterator[Database]:
        """Lend an empty database for the time of the block. Raises AssertionError if its schema was changed then."""
        # A client of its own, because tests set options on it.
        database = _persistent(self._instance.database(self._take()))
        yield database
        self._give_back(database.database_id)

    def drop(self) -> None:
        for _, each in self._emptied:
            self._instance.database(each).drop()

    def _take(self) -> str:
        from outbox.table import ddl

        if self._emptied and self._emptied[0][0] + STALE_SECONDS < time.monotonic():
            return self._emptied.popleft()[1]
        created = self._instance.database(f"pool-{uuid.uuid4().hex[:12]}", ddl_statements=ddl.statements())
        created.create().result(timeout=ADMIN_SECONDS)
        self._ddl = self._ddl or _ddl(created)
        return str(created.database_id)

    def _give_back(self, database_id: str) -> None:
        database = _persistent(self._instance.database(database_id))
        changed = _ddl(database) != self._ddl
        try:
            if not changed and len(self._emptied) < POOL_SIZE:
                tables = re.findall(r"^CREATE TABLE (\w+)", "\n".join(self._ddl), re.MULTILINE)
                database.run_in_transaction(_empty, tables, timeout_secs=EMPTY_SECONDS)
                self._emptied.append((time.monotonic(), database_id))
                return
        except (_ManyRows, GoogleAPICallError):  # or the test has left a transaction open
            pass
        database.drop()
        assert not changed, "the test has changed the schema of a shared database: use the fixture own_database"


def _persistent(database: Database) -> Database:
    """Return the database, whose transactions are tried again soon."""
    for name in ("batch", "run_in_transaction"):
        setattr(database, name, functools.partial(getattr(database, name), default_retry_delay=RETRY_DELAY))
    return database


class _ManyRows(Exception):
    """Emptying the database takes longer than creating another one: a commit's time is quadratic in its rows."""


def _empty(transaction: Any, tables: Sequence[str]) -> None:
    everything = KeySet(all_=True)
    if len(list(transaction.read("AsynchronousTasks", ("Id",), everything, limit=MANY_ROWS))) == MANY_ROWS:
        raise _ManyRows
    for table in tables:
        transaction.delete(table, everything)


def _ddl(database: Database) -> list[str]:
    database.reload()
    return list(database.ddl_statements)
