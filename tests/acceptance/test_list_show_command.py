"""`outbox list` and `outbox show` as processes: which tasks, in which order, and one with all that is in it."""

import json
from base64 import b64encode
from datetime import UTC, datetime, timedelta

import pytest
from google.cloud.spanner_v1.database import Database

import outbox as api
from outbox.emulators import Emulators
from tests.support.commands import HOUR, Commands, fill, row
from tests.support.relays import insert_undecodable

ALL_BYTES = bytes(range(256))


@pytest.fixture
def outbox(emulators: Emulators, database: Database) -> Commands:
    """The commands on a database of the test's own."""
    return Commands(emulators, database)


def ids(outbox: Commands, *words: str) -> list[str]:
    """Return the ids that `outbox list` gives to a program."""
    return [task["id"] for task in outbox.objects("list", "--json", *words)]


def test_each_state_has_its_tasks_in_its_order(outbox: Commands, database: Database):
    """Pending by priority, then age; the last sent first; without a state all that are not sent."""
    due = datetime.now(UTC) - timedelta(minutes=1)
    fill(
        database,
        [
            row("young"), row("old", age=3 * HOUR), row("low", Priority=0, age=9 * HOUR),
            row("high", Priority=100, AvailableAt=due), row("again", "retrying"), row("later", "scheduled"),
            row("dead", "dead"), row("sent-2", "sent", age=HOUR), row("sent-1", "sent", age=2 * HOUR),
        ],
    )  # fmt: skip
    found = {state: ids(outbox, "--state", state) for state in ("pending", "retrying", "scheduled", "dead", "sent")}
    assert found == {
        "pending": ["high", "old", "young", "low"],
        "retrying": ["again"],
        "scheduled": ["later"],
        "dead": ["dead"],
        "sent": ["sent-2", "sent-1"],
    }
    assert ids(outbox) == [*found["pending"], "again", "later", "dead"]


def test_what_narrows_the_list_narrows_it(outbox: Commands, database: Database):
    """Topic, both ends of the time, a part of the error in any case, and a limit that says when there is more."""
    fill(
        database,
        [
            row("new", "dead"), row("old", "dead", age=3 * HOUR), row("older", "dead", age=5 * HOUR),
            row("other", "dead", topic="invoices", age=3 * HOUR, LastError="too_large: 11 MB"),
        ],
    )  # fmt: skip
    assert ids(outbox, "--state", "dead", "--topic", "orders", "--since", "4h", "--until", "120m") == ["old"]
    assert ids(outbox, "--since", "14400s", "--until", "0.1d") == ["old", "other"]
    assert ids(outbox, "--error", "TOO_Large") == ["other"]
    limited = outbox.here("list", "--state", "dead", "--limit", "3", "--json")
    assert (limited.code, limited.stdout.count("\n")) == (0, 3)
    assert "there are more than 3" in limited.stderr
    assert outbox.here("list", "--state", "dead", "--limit", "4").stderr == ""


@pytest.mark.parametrize(("state", "column"), [("dead", "created_at"), ("sent", "sent_at")])
def test_a_time_of_the_output_is_accepted_back(outbox: Commands, database: Database, state: str, column: str):
    """--since of a printed time begins with that task, --until ends before it; whatever the offset."""
    fill(database, [row(f"{number}", state, age=number * HOUR) for number in (3, 2, 1)])
    middle = {task["id"]: task for task in outbox.objects("list", "--state", state, "--json")}["2"][column]
    assert middle.endswith("Z")
    elsewhere = datetime.fromisoformat(middle).astimezone().isoformat(timespec="microseconds")
    assert sorted(ids(outbox, "--state", state, "--since", middle)) == ["1", "2"]
    assert ids(outbox, "--state", state, "--until", elsewhere) == ["3"]
    assert middle in outbox.here("list", "--state", state).stdout


def test_nothing_found_is_said_with_the_topics_that_there_are(outbox: Commands, database: Database):
    """A typing error in a topic is exit 0 and no row, but seen."""
    fill(database, [row("a", topic="orders")])
    told = outbox.here("list", "--topic", "oders")
    assert (told.code, told.stdout) == (0, "")
    assert "no such task" in told.stderr
    assert "exist, for: orders\n" in told.stderr


def test_show_has_every_column_and_the_message(outbox: Commands, database: Database):
    """Attributes one a line, the ordering key, and JSON data over several lines."""
    with database.batch() as batch:
        id = api.register(
            batch, "orders", b'{"order": {"cents": 1999}}', attributes={"kind": "order"}, ordering_key="customer-7",
            priority=90, expires_at=datetime(2090, 1, 1, tzinfo=UTC),
        )  # fmt: skip
    told = outbox.run("show", id)
    lines = {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[-1] for line in told.stdout.splitlines()}
    with database.snapshot() as snapshot:
        statement = "SELECT column_name FROM information_schema.columns WHERE table_name = 'AsynchronousTasks'"
        columns = {name for (name,) in snapshot.execute_sql(statement)}
    assert columns <= set(lines)
    assert [lines[name] for name in ("Id", "State", "Topic", "Priority", "OrderingKey", "ExpiresAt", "SentAt")] == [
        id, "pending", "orders", "90", "customer-7", "2090-01-01T00:00:00.000000Z", "NULL",
    ]  # fmt: skip
    assert "  kind = order\n" in told.stdout
    assert told.stdout.endswith('26 bytes, JSON\n  {\n    "order": {\n      "cents": 1999\n    }\n  }\n')
    [whole] = outbox.objects("show", id, "--json")
    attributes = {"kind": "order", api.TASK_ID_ATTRIBUTE: id}
    assert whole["message"] == {"attributes": attributes, "data": '{"order": {"cents": 1999}}'}


def test_raw_is_every_byte_and_nothing_else(outbox: Commands, database: Database):
    """All 256 values, told from the console's text and from a line end; shown as hex, and as base64 in JSON."""
    with database.batch() as batch:
        id = api.register(batch, "orders", ALL_BYTES)
    done = outbox.shell(f"outbox show {id} --raw | od -An -v -tx1")
    assert (done.code, done.stderr) == (0, "")
    assert bytes.fromhex(done.stdout) == ALL_BYTES
    shown = outbox.run("show", id).stdout
    hexadecimal = shown.partition("256 bytes, hex\n")[2]
    assert bytes.fromhex(hexadecimal) == ALL_BYTES
    [whole] = outbox.objects("show", id, "--json")
    assert whole["message"]["data_base64"] == b64encode(ALL_BYTES).decode()


def test_data_that_is_text_is_shown_as_text(outbox: Commands, database: Database):
    """Line by line, with letters of any language."""
    with database.batch() as batch:
        id = api.register(batch, "orders", "first\nzweite — 三".encode())
    assert outbox.run("show", id).stdout.endswith("bytes, text\n  first\n  zweite — 三\n")


def test_a_row_that_holds_no_message_is_shown_as_it_is(outbox: Commands, database: Database):
    """Another writer's bytes: exit 0, the bytes, and a sentence about them."""
    insert_undecodable(database, "garbage", "orders", "key")
    told = outbox.run("show", "garbage")
    assert told.code == 0
    assert told.stdout.endswith("3 bytes, hex\n  ff ff ff\n")
    assert "is no serialized google.pubsub.v1.PubsubMessage" in told.stderr


def test_show_of_an_id_that_is_not_there_is_exit_code_1(outbox: Commands):
    """It says that the task may have been purged or discarded."""
    told = outbox.run("show", "nobody")
    assert (told.code, told.stdout, told.stderr.count("\n")) == (1, "", 1)
    assert "there is no task with the id 'nobody'" in told.stderr


def test_every_line_for_programs_is_an_object_of_the_same_names(outbox: Commands, database: Database):
    """Of each state alike, so that jq needs no exceptions."""
    fill(database, [row(state, state) for state in ("pending", "retrying", "scheduled", "dead")])
    names = {tuple(json.loads(line)) for line in outbox.run("list", "--json").stdout.splitlines()}
    [columns] = names
    assert columns[:4] == ("id", "state", "topic", "priority")
