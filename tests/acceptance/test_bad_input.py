"""`publishworker` with a wrong setup: one sentence of advice, and the right exit code."""

import grpc
import pytest
from google.cloud.spanner_v1.database import Database
from google.pubsub_v1 import Topic

from outbox.devtools.emulators import Emulators
from tests.support.commands import TRACE
from tests.support.processes import Finished, run
from tests.support.rpc import PubSubServer, refuse
from tests.support.spanner import INSTANCE, PROJECT, variables

COMMANDS = ("run", "drain", "check")


def publishworker(emulators: Emulators, *arguments: str, **environment: str) -> Finished:
    """Run a command to its end, on the emulators; it writes no stack trace."""
    done = run("publishworker", *arguments, environment=emulators.environment() | environment)
    assert TRACE not in done.stderr
    return done


def on(database: Database | str) -> dict[str, str]:
    name = database if isinstance(database, str) else database.database_id
    return variables(name)


def test_a_wrong_database_or_a_missing_table_is_named(emulators: Emulators, empty_database: Database) -> None:
    """Exit 3, with the full name of the database, or the command that creates the table."""
    for command in COMMANDS:
        done = publishworker(emulators, command, **on("no-such-database"))
        assert done.code == 3
        assert f"projects/{PROJECT}/instances/{INSTANCE}/databases/no-such-database" in done.stdout + done.stderr
    for command in ("run", "drain"):
        done = publishworker(emulators, command, **on(empty_database))
        assert done.code == 3
        for text in ("AsynchronousTasks", "outbox schema apply"):
            assert text in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("status", "code", "verdict"), [("PERMISSION_DENIED", 0, "unknown"), ("UNAVAILABLE", 3, "unreachable")]
)
def test_check_without_permission_to_read_topics_warns(
    emulators: Emulators, database: Database, status: str, code: int, verdict: str
) -> None:
    """Publishing needs fewer permissions than reading a topic; an unavailable service is an error."""
    with PubSubServer() as server:
        server.get_topic = refuse(grpc.StatusCode[status])
        done = publishworker(emulators, "check", "orders", **on(database), PUBSUB_EMULATOR_HOST=server.address)
    assert done.code == code
    [line] = [line for line in done.stdout.splitlines() if " topic projects" in line]
    assert line.startswith(verdict)


def test_check_names_the_message_transforms_of_a_topic(emulators: Emulators, database: Database) -> None:
    """Pub/Sub applies them after a successful publish, so no worker notices what they drop."""
    transforms = [{"javascript_udf": {"function_name": "redact"}}, {"disabled": True}]
    with PubSubServer() as server:
        server.get_topic = lambda request, _context: Topic.pb()(name=request.topic, message_transforms=transforms)
        done = publishworker(emulators, "check", "orders", **on(database), PUBSUB_EMULATOR_HOST=server.address)
    assert done.code == 0
    [line] = [line for line in done.stdout.splitlines() if " topic projects" in line]
    assert line.startswith("warning")
    assert "message transforms (redact)" in line


@pytest.mark.parametrize("words", ["publishworker run", "outbox schema apply"])
def test_missing_credentials_are_reported_with_advice(words: str) -> None:
    """No emulator, no credentials: exit 3 and the ways out."""
    nothing = {"GOOGLE_APPLICATION_CREDENTIALS": "", "NO_GCE_CHECK": "true", "HOME": "/nonexistent"}
    done = run(*words.split(), environment=on("any-database") | nothing)
    assert done.code == 3
    assert "gcloud auth application-default login" in done.stderr.splitlines()[-1]
    assert TRACE not in done.stderr
