"""Spanner instances and databases on an emulator.

Nothing here calls `Database.close()`: it joins a thread that sleeps for ten minutes at a time.
"""

import contextlib
import os
import uuid
from collections.abc import Iterator, Sequence
from unittest import mock

from google.auth.credentials import AnonymousCredentials
from google.cloud import spanner
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.instance import Instance

PROJECT = "test-project"
INSTANCE = "test-instance"

#: Seconds for a change of the schema or of the instance; the emulator takes milliseconds.
ADMIN_SECONDS = 30.0


def client(host: str) -> spanner.Client:
    """Return a client of the emulator at `host`, whatever SPANNER_EMULATOR_HOST says."""
    # The client reads the variable, and only while it is made.
    with mock.patch.dict(os.environ, {"SPANNER_EMULATOR_HOST": host}):
        return spanner.Client(
            project=PROJECT,
            credentials=AnonymousCredentials(),
            disable_builtin_metrics=True,  # they want Cloud Monitoring
        )


def instance(host: str, instance_id: str = INSTANCE) -> Instance:
    """Return the instance of that id on the emulator at `host`, made if it is not there."""
    made: Instance = client(host).instance(
        instance_id, configuration_name=f"projects/{PROJECT}/instanceConfigs/emulator-config"
    )
    if not made.exists():
        made.create().result(timeout=ADMIN_SECONDS)
    return made


@contextlib.contextmanager
def fresh_database(of: Instance, statements: Sequence[str] = ()) -> Iterator[Database]:
    """Make a database with `statements` for the time of the block; the emulator allows 100 in an instance."""
    database = of.database(f"test-{uuid.uuid4().hex[:12]}", ddl_statements=statements)
    database.create().result(timeout=ADMIN_SECONDS)
    try:
        yield database
    finally:
        database.drop()


@contextlib.contextmanager
def outbox_database(of: Instance) -> Iterator[Database]:
    """Make a database with the outbox's tables for the time of the block."""
    from outbox import schema

    with fresh_database(of, schema.statements()) as database:
        yield database
