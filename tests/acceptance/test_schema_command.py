"""`outbox schema` as a process: the flags, the output, and the exit code that a script gets."""

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from outbox.table import ddl, schema
from tests.integration.test_schema_apply import ALL
from tests.support.commands import TRACE, Commands, here
from tests.support.processes import run

MADE = "".join(f"created  {name}\n" for name in ALL)


@pytest.fixture
def outbox(emulators: Emulators, empty_database: Database) -> Commands:
    return Commands(emulators, empty_database)


def test_print_needs_no_spanner():
    """It prints DDL that runs as it is, without a database; shards, retention and the change stream can be chosen."""
    printed = run("outbox", "schema", "print")
    assert (printed.code, printed.stderr) == (0, "")
    assert printed.stdout == ";\n\n".join(ddl.statements()) + ";\n"
    chosen = here("schema", "print", "--shards", "32", "--retention", "none", "--change-stream")
    assert chosen.code == 0
    assert "COALESCE(OrderingKey, Id)), 32)" in chosen.stdout
    assert "OLDER_THAN(SentAt" not in chosen.stdout
    assert "CREATE CHANGE STREAM AsynchronousTasksInserts" in chosen.stdout


def test_apply_creates_the_tables_once(outbox: Commands, empty_database: Database):
    """The first run creates all, the second finds all; a deployment may run it every time."""
    first, again = outbox.run("schema", "apply"), outbox.run("schema", "apply")
    assert (first.code, first.stdout, first.stderr) == (0, MADE, "")
    assert (again.code, again.stdout) == (0, MADE.replace("created ", "exists  "))
    assert schema.differences(empty_database, ddl.statements(), free=()) == []


def test_apply_keeps_shards_and_retention_unless_they_are_given(outbox: Commands, empty_database: Database):
    """Without flags a table with other shards and retention is fine; with them it must be as the flags say."""
    choices = ("--shards", "4", "--retention", "none", "--change-stream")
    created = outbox.here("schema", "apply", *choices)
    assert "created  change stream AsynchronousTasksInserts\n" in created.stdout
    assert schema.layout(empty_database).shards == 4
    assert [outbox.here("schema", "apply", *words).code for words in ((), choices)] == [0, 0]
    other = outbox.here("schema", "apply", "--shards", "10", "--retention", "30")
    assert (other.code, other.stdout, TRACE in other.stderr) == (1, "", False)
    assert f"databases/{empty_database.database_id}: nothing was created" in other.stderr
    assert "table AsynchronousTasks, shard count: the database has 4, expected 10\n" in other.stderr
    assert "retention of sent tasks: the database has for ever, expected 30 days\n" in other.stderr
