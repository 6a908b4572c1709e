"""`outbox schema` as a process: what users type, what they read, which exit code a script gets."""

import contextlib
import time
from collections.abc import Iterator

import pytest
from google.cloud.spanner_v1.database import Database

from outbox import schema
from outbox.emulators import Emulators
from tests.support.processes import Finished, run
from tests.support.proxy import Proxy, silent_port
from tests.support.spanner import INSTANCE, PROJECT

MADE = """\
created  table AsynchronousTasks
created  index AsynchronousTasksToSend
created  index AsynchronousTasksInOrder
created  table AsynchronousTaskTopics
created  table AsynchronousTaskWorkers
created  table AsynchronousTaskReplays
"""
#: Seconds within which a user must hear that Spanner cannot be reached.
TOLD_WITHIN = 15.0


def apply(host: str, database_id: str, *flags: str) -> Finished:
    """Run `outbox schema apply` against the Spanner at `host`."""
    where = {"OUTBOX_PROJECT": PROJECT, "OUTBOX_INSTANCE": INSTANCE, "OUTBOX_DATABASE": database_id}
    return run("outbox", "schema", "apply", *flags, environment={"SPANNER_EMULATOR_HOST": host} | where)


def test_print_needs_no_spanner():
    """The DDL comes without a database, credentials or an emulator, and runs as it is."""
    printed = run("outbox", "schema", "print")

    assert (printed.code, printed.stderr) == (0, "")
    assert printed.stdout == ";\n\n".join(schema.statements()) + ";\n"


def test_print_has_the_choices():
    """Shards, retention and the change stream can be chosen before the table is made."""
    printed = run("outbox", "schema", "print", "--shards", "32", "--retention", "none", "--change-stream")

    assert printed.code == 0
    assert "COALESCE(OrderingKey, Id)), 32)" in printed.stdout
    assert "ROW DELETION POLICY" not in printed.stdout
    assert "CREATE CHANGE STREAM AsynchronousTasksInserts" in printed.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("print --shards 0", "argument --shards: '0' is not allowed: it must be a whole number from 1 to 1,000"),
        ("apply --shards ten", "argument --shards: 'ten' is not allowed"),
        ("apply --retention 0", "argument --retention: '0' is not allowed: it must be none, or days, a whole number"),
        ("print --retention 30d", "argument --retention: '30d' is not allowed"),
    ],
)
def test_wrong_choices_are_usage_errors(arguments: str, sentence: str):
    """A wrong value is exit code 2 and names the flag, the value and what is allowed."""
    refused = run("outbox", "schema", *arguments.split())

    assert refused.code == 2
    assert sentence in refused.stderr
    assert refused.stdout == ""


def test_apply_without_a_database_is_a_usage_error():
    """A missing setting is exit code 2 and names the flag and its variable."""
    refused = run("outbox", "schema", "apply", "--project", PROJECT, "--instance", INSTANCE)

    assert refused.code == 2
    assert "--database is missing: give it, or set OUTBOX_DATABASE" in refused.stderr


@pytest.mark.parametrize("action", ["print", "apply"])
def test_help_has_an_example_and_the_defaults(action: str):
    """Help alone is enough to use the command."""
    shown = run("outbox", "schema", action, "--help")

    assert shown.code == 0
    assert f"\n    outbox schema {action} --" in shown.stdout
    assert "1 to 1,000" in " ".join(shown.stdout.split())
    assert "default 30" in " ".join(shown.stdout.split())


def test_apply_makes_the_tables_once(emulators: Emulators, empty_database: Database):
    """The first run makes all, the second finds all; a deployment may run it every time."""
    first = apply(emulators.spanner_host, empty_database.database_id)
    again = apply(emulators.spanner_host, empty_database.database_id)

    assert (first.code, first.stdout, first.stderr) == (0, MADE, "")
    assert (again.code, again.stdout) == (0, MADE.replace("created ", "exists  "))
    assert schema.differences(empty_database, schema.statements(), free=()) == []


def test_apply_keeps_the_choices_of_a_table_unless_they_are_given(emulators: Emulators, empty_database: Database):
    """Without flags a table with other shards and retention is fine; with them it must be as the flags say."""
    choices = ["--shards", "4", "--retention", "none", "--change-stream"]
    made = apply(emulators.spanner_host, empty_database.database_id, *choices)
    kept = apply(emulators.spanner_host, empty_database.database_id)
    same = apply(emulators.spanner_host, empty_database.database_id, *choices)
    other = apply(emulators.spanner_host, empty_database.database_id, "--shards", "10", "--retention", "30")

    assert "created  change stream AsynchronousTasksInserts\n" in made.stdout
    assert schema.shard_count(empty_database) == 4
    assert (kept.code, same.code) == (0, 0)
    assert (other.code, other.stdout) == (1, "")
    assert "table AsynchronousTasks, shard count: the database has 4, expected 10\n" in other.stderr
    assert "retention of sent tasks: the database has for ever, expected 30 days\n" in other.stderr


def test_apply_refuses_another_table(emulators: Emulators, empty_database: Database):
    """A table of our name with another shape is exit code 1, named column by column, and nothing is made."""
    empty_database.update_ddl(["CREATE TABLE AsynchronousTasks (Id STRING(36)) PRIMARY KEY (Id)"]).result()

    refused = apply(emulators.spanner_host, empty_database.database_id)

    assert (refused.code, refused.stdout) == (1, "")
    assert f"databases/{empty_database.database_id}: nothing was made" in refused.stderr
    assert "column Id: the database has STRING(36), expected STRING(64) NOT NULL\n" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert "table AsynchronousTaskTopics is missing" in schema.differences(empty_database, schema.statements())


def test_a_missing_database_is_exit_code_3(emulators: Emulators):
    """A wrong name is said at once and in one line."""
    missed = apply(emulators.spanner_host, "not-there")

    assert (missed.code, missed.stdout) == (3, "")
    assert f"outbox: projects/{PROJECT}/instances/{INSTANCE}/databases/not-there is not there: make it" in missed.stderr
    assert missed.stderr.count("\n") == 1


def test_no_credentials_are_exit_code_3():
    """Without an emulator and without credentials, the sentence says how to get either."""
    # The metadata server of a cloud machine would give credentials.
    environment = {"NO_GCE_CHECK": "true", "CLOUDSDK_CONFIG": "/nonexistent"}

    missed = run(
        "outbox", "schema", "apply", "--project", PROJECT, "--instance", INSTANCE, "--database", "orders",
        environment=environment,
    )  # fmt: skip

    assert missed.code == 3
    assert "gcloud auth application-default login" in missed.stderr
    assert "Traceback" not in missed.stderr


@contextlib.contextmanager
def told_in_time() -> Iterator[None]:
    """Fail if the block takes longer than a user should wait, beyond what starting any command takes here and now."""
    start = time.monotonic()
    run("outbox", "schema", "print")
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun - (begun - start) < TOLD_WITHIN


def test_an_unreachable_spanner_is_exit_code_3_in_time():
    """A host where nothing listens is told within 15 s."""
    with silent_port() as host, told_in_time():
        missed = apply(host, "orders")

    assert missed.code == 3
    assert "Spanner did not answer" in missed.stderr
    assert missed.stderr.count("\n") == 1


def test_a_spanner_that_never_answers_is_exit_code_3_in_time(emulators: Emulators):
    """A host that takes the connection and says nothing is told within 15 s, too."""
    with Proxy(emulators.spanner_host) as proxy:
        proxy.hang()
        with told_in_time():
            missed = apply(proxy.address, "orders")

    assert missed.code == 3
    assert "Spanner did not answer" in missed.stderr
