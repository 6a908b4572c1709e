"""What a person meets who gets it wrong: one sentence that says what to do, and the right exit code."""

from collections.abc import Iterator

import pytest
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.instance import Instance

from outbox import schema
from outbox.emulators import Emulators
from tests.support.processes import Finished, run
from tests.support.relays import register
from tests.support.spanner import INSTANCE, PROJECT, fresh_database

COMMANDS = ("run", "drain", "check")


def publishworker(emulators: Emulators, *arguments: str, **environment: str) -> Finished:
    """Run a command to its end, on the emulators."""
    return run("publishworker", *arguments, environment=emulators.environment() | environment, seconds=30)


def on(database: Database | str) -> dict[str, str]:
    """Return the variables that name a database."""
    name = database if isinstance(database, str) else database.database_id
    return {"OUTBOX_PROJECT": PROJECT, "OUTBOX_INSTANCE": INSTANCE, "OUTBOX_DATABASE": name}


def sentence(done: Finished) -> str:
    """Return the last line of stderr; there is no stack trace before it."""
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_setting_is_named(emulators: Emulators, command: str) -> None:
    """Exit 2, with the flag and its twin."""
    done = publishworker(emulators, command, "--project", PROJECT)
    assert done.code == 2
    assert sentence(done).startswith("publishworker: --instance is missing: give it, or set OUTBOX_INSTANCE")


def test_a_wrong_value_is_named_with_what_is_allowed(emulators: Emulators) -> None:
    """Exit 2: the flag or the variable, the value, the range."""
    done = publishworker(emulators, "run", "--group-size", "0", **on("any-database"))
    assert (done.code, sentence(done)) == (
        2,
        "publishworker: --group-size: '0' is not allowed: it must be a whole number from 1 to 1,000",
    )
    done = publishworker(emulators, "run", **on("any-database"), OUTBOX_PUBLISH_TIMEOUT="60")
    assert (done.code, sentence(done)) == (
        2,
        "publishworker: OUTBOX_PUBLISH_TIMEOUT: '60' is not allowed: it must be seconds from 0.1 to 8",
    )
    done = publishworker(emulators, "drain", "--deadline", "soon", **on("any-database"))
    assert done.code == 2
    assert "--deadline" in sentence(done)
    assert "'soon'" in sentence(done)


def test_an_unknown_flag_and_an_unknown_command_are_usage(emulators: Emulators) -> None:
    """Exit 2, argparse's own words."""
    assert publishworker(emulators, "run", "--no-such-flag").code == 2
    assert publishworker(emulators, "fly").code == 2
    assert publishworker(emulators).code == 2


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("spanner_instance")
def test_a_wrong_database_is_named(emulators: Emulators, command: str) -> None:
    """Exit 3, with its full name."""
    done = publishworker(emulators, command, **on("no-such-database"))
    assert done.code == 3
    assert f"projects/{PROJECT}/instances/{INSTANCE}/databases/no-such-database" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def without_table(spanner_instance: Instance) -> Iterator[Database]:
    """A database without the outbox."""
    with fresh_database(spanner_instance) as database:
        yield database


@pytest.fixture(scope="module")
def with_another_shape(spanner_instance: Instance) -> Iterator[Database]:
    """A database whose table has another column type and lacks one."""
    statements = schema.statements()
    other = [
        each.replace("Priority    INT64  ", "Priority    STRING(9)").replace("Sequence    INT64,", "")
        for each in statements
    ]
    other = [each.replace(", Sequence)", ")") for each in other]
    assert other != statements
    with fresh_database(spanner_instance, other) as database:
        yield database


@pytest.mark.parametrize("command", ["run", "drain"])
def test_a_missing_table_says_how_to_make_it(emulators: Emulators, without_table: Database, command: str) -> None:
    """Exit 3, and the command to run."""
    done = publishworker(emulators, command, **on(without_table))
    assert done.code == 3
    assert "AsynchronousTasks" in sentence(done)
    assert "outbox schema apply" in sentence(done)


def test_a_table_with_another_shape_names_the_column(emulators: Emulators, with_another_shape: Database) -> None:
    """Exit 3 from run, 1 from check, and both shapes."""
    done = publishworker(emulators, "run", **on(with_another_shape))
    assert done.code == 3
    assert "Priority" in sentence(done)
    assert "Sequence" in sentence(done)
    checked = publishworker(emulators, "check", **on(with_another_shape))
    assert checked.code == 1
    assert "Priority" in checked.stdout


def test_check_of_a_good_set_up_is_all_ok(emulators: Emulators, database: Database, topic: str) -> None:
    """Exit 0: settings, table and the topics of pending rows and of the arguments, a line each."""
    register(database, topic, 1)
    done = publishworker(emulators, "check", **on(database))
    assert done.code == 0
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["ok", "settings:"], ["ok", "table:"], ["ok", "topic"]]
    assert "group_size=100" in lines[0]
    assert "10 shards" in lines[1]
    assert lines[2].endswith(topic)


def test_check_finds_missing_topics_and_says_how_to_make_them(emulators: Emulators, database: Database) -> None:
    """Exit 1: of a pending row and of an argument; a name that no topic can have is said, too."""
    register(database, "pending-and-missing", 1)
    done = publishworker(emulators, "check", "named-and-missing", "no", **on(database))
    assert done.code == 1
    wrong = [line for line in done.stdout.splitlines() if line.startswith("wrong")]
    assert len(wrong) == 3
    for name in ("named-and-missing", "pending-and-missing"):
        assert any(f"gcloud pubsub topics create projects/{PROJECT}/topics/{name}" in line for line in wrong)


def test_check_looks_at_the_topics_that_are_paused_and_limited(emulators: Emulators, database: Database) -> None:
    """Exit 1: a topic that is nowhere, a rate without burst; a pause is said, and is no fault."""
    with database.batch() as batch:
        columns = ("Topic", "Paused", "RatePerSecond", "Burst")
        rows = [("held", True, None, None), ("ordrs", False, 5.0, 5), ("half", False, 5.0, None)]
        batch.insert("AsynchronousTaskTopics", columns, rows)
    done = publishworker(emulators, "check", **on(database))
    assert done.code == 1
    lines = done.stdout.splitlines()
    assert any(line.startswith("ok") and "held is paused" in line and "outbox resume held" in line for line in lines)
    assert any(line.startswith("wrong") and "half" in line and "Burst" in line for line in lines)
    assert any(line.startswith("wrong") and "topics/ordrs does not exist" in line for line in lines)


def test_check_names_the_topics_that_the_worker_may_not_publish_to(
    emulators: Emulators, database: Database, topic: str
) -> None:
    """They would be dead at the first attempt."""
    register(database, topic, 1)
    done = publishworker(emulators, "check", "--allowed-topics", "orders,projects/other/topics/*", **on(database))
    assert done.code == 1
    [line] = [line for line in done.stdout.splitlines() if line.startswith("wrong")]
    assert topic in line
    assert "--allowed-topics" in line


@pytest.mark.parametrize(
    ("status", "code", "verdict"), [("PERMISSION_DENIED", 0, "unknown"), ("UNAVAILABLE", 3, "unreachable")]
)
def test_check_without_the_permission_to_look_says_so_and_does_not_fail(
    emulators: Emulators, database: Database, status: str, code: int, verdict: str
) -> None:
    """Publishing needs less than looking; a service that is away is another matter."""
    import grpc

    from tests.support.pubsub_server import pubsub_server, refuse

    with pubsub_server() as server:
        server.get_topic = refuse(grpc.StatusCode[status])
        done = publishworker(emulators, "check", "orders", **on(database), PUBSUB_EMULATOR_HOST=server.address)
    assert done.code == code
    [line] = [line for line in done.stdout.splitlines() if " topic projects" in line]
    assert line.startswith(verdict)


def test_the_service_without_credentials_says_how_to_get_them() -> None:
    """No emulator, no credentials: exit 3 and the ways out."""
    environment = on("any-database") | {
        "GOOGLE_APPLICATION_CREDENTIALS": "",
        "NO_GCE_CHECK": "true",
        "HOME": "/nonexistent",
    }
    done = run("publishworker", "run", environment=environment, seconds=30)
    assert done.code == 3
    assert "gcloud auth application-default login" in sentence(done)


def test_help_shows_examples() -> None:
    """And every command."""
    done = run("publishworker", "--help")
    assert done.code == 0
    for word in ("examples:", "run", "drain", "check", "healthcheck"):
        assert word in done.stdout
