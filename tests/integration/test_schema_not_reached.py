"""Databases that are no outbox, do not exist, or are not reached: each ends in one sentence."""

import functools
import uuid
from typing import Any, cast
from unittest import mock

import pytest
from google.cloud.spanner_admin_database_v1 import DatabaseDialect
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.instance import Instance

from outbox.errors import NotReached, OutboxError, SchemaDiffers
from outbox.table import ddl, schema
from outbox.table.layouts import Layout
from publishworker.process import app


def test_a_postgresql_database_is_refused(spanner_instance: Instance) -> None:
    """The dialect is named instead of a syntax error in a statement that the user did not write."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    database = spanner_instance.database(name, database_dialect=DatabaseDialect.POSTGRESQL)
    database.create().result()
    try:
        for call in (schema.apply, schema.differences):
            with pytest.raises(SchemaDiffers, match=f"{name} has the PostgreSQL dialect: use a database"):
                call(database, ddl.statements())
    finally:
        database.drop()


def test_a_missing_database_or_table_is_not_reached(spanner_instance: Instance, empty_database: Database) -> None:
    """The sentence has the name. A relay does not guess how many shards a foreign table has."""
    absent = spanner_instance.database("not-there")
    for call in (schema.apply, schema.differences):
        with pytest.raises(NotReached, match=r"databases/not-there not found. Create it"):
            call(absent, ddl.statements())
    with pytest.raises(NotReached, match="table AsynchronousTasks is missing; run `outbox schema apply`"):
        schema.layout(empty_database)
    table = "CREATE TABLE AsynchronousTasks (Id STRING(64), Shard INT64) PRIMARY KEY (Id)"
    empty_database.update_ddl([table]).result()
    with pytest.raises(SchemaDiffers, match="the number of shards cannot be read from column Shard"):
        schema.layout(empty_database)


def test_an_update_that_spanner_refuses_is_one_sentence(database: Database) -> None:
    """Two deployments that create the tables at once do not end in a traceback."""
    just_before = mock.patch.object(schema, "_read", return_value={})
    with just_before, pytest.raises(OutboxError, match="Duplicate name in schema: AsynchronousTasks") as caught:
        schema.apply(database, ddl.statements())
    assert database.name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_worker_starts_if_the_schema_takes_too_long_to_read(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a database with very many objects. An unavailable Spanner still stops the start."""
    monkeypatch.setattr(schema, "differences", functools.partial(schema.differences, timeout=0.001))
    assert app.verified_layout(cast("Any", database)) == Layout(10)
    assert "The schema was not compared with the DDL" in caplog.text
    unavailable = mock.Mock(side_effect=NotReached("Spanner did not answer"))
    monkeypatch.setattr(schema, "differences", unavailable)
    with pytest.raises(NotReached):
        app.verified_layout(cast("Any", database))
