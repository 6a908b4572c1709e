"""`outbox list` and `outbox show`: the tasks of a list and their order, and all columns and the message of one task."""

import re
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.instance import Instance

import outbox as api
from outbox.devtools.emulators import Emulators
from tests.support.commands import HOUR, Commands, row
from tests.support.operations import insert
from tests.support.relays import insert_undecodable
from tests.support.spanner import outbox_database, query

ALL_BYTES = bytes(range(256))


@pytest.fixture(scope="module")
def filled(emulators: Emulators, spanner_instance: Instance) -> Iterator[Commands]:
    """The commands on a table with tasks of each state, which no test changes."""
    with outbox_database(spanner_instance) as created:
        due = datetime.now(UTC) - timedelta(minutes=1)
        insert(
            created,
            [
                row("young"), row("old", age=3 * HOUR), row("low", Priority=0, age=9 * HOUR),
                row("high", Priority=100, AvailableAt=due), row("again", "retrying"), row("later", "scheduled"),
                row("behind", "blocked"),
                row("dead", "dead"), row("dead-3", "dead", age=3 * HOUR), row("dead-5", "dead", age=5 * HOUR),
                row("other", "dead", topic="invoices", age=3 * HOUR, LastError="too_large: 11 MB"),
                *(row(f"sent-{n}", "sent", age=n * HOUR) for n in (3, 1, 2)),
            ],
        )  # fmt: skip
        yield Commands(emulators, created)


def ids(filled: Commands, *words: str) -> list[str]:
    return [task["id"] for task in filled.objects("list", "--json", *words)]


def test_a_list_continues_after_its_end(filled: Commands):
    """The cursor is printed if there is more. A cursor of another order is refused in a sentence."""
    words, pages = ["list", "--state", "dead", "--state", "sent", "--newest", "--json"], list[str]()
    page = filled.here(*words, "--limit", "3")
    while found := re.search(r"more tasks match. Add --after (\S+) for the next page", page.stderr):
        pages += page.stdout.splitlines()
        page = filled.here(*words, "--limit", "3", "--after", cursor := found[1])
    pages += page.stdout.splitlines()
    assert pages == filled.here(*words).stdout.splitlines()
    refused = filled.here("list", "--oldest", "--after", cursor)
    assert (refused.code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "is from a list of the newest" in refused.stderr


def test_a_blocked_task_is_listed_with_the_head_that_blocks_it(filled: Commands):
    """A list without blocked tasks has no column for it."""
    _, head, line = filled.here("list", "--state", "blocked").stdout.splitlines()
    assert (head.rstrip().endswith("KEY  BLOCKED BY"), line.split()[-2:]) == (True, ["key", "head"])
    assert "BLOCKED BY" not in filled.here("list", "--state", "dead").stdout


def test_an_empty_list_says_why(filled: Commands):
    """Times are ages, too."""
    assert ids(filled, "--since", "14400s", "--until", "0.1d") == ["old", "dead-3", "other"]
    assert filled.here("list", "--state", "dead", "--limit", "4").stderr == ""
    misspelled = filled.here("list", "--topic", "oders")
    assert (misspelled.code, misspelled.stdout.partition("Z\n")[2]) == (0, "No matching tasks.\n")
    assert misspelled.stderr == (
        "outbox: unknown topic 'oders' (no row in AsynchronousTaskTopics, no unsent task, and none sent in the last "
        "minute). Did you mean 'orders'? Known topics: invoices, orders\n"
    )
    excluded = filled.here("list", "--state", "dead", "--since", "1s", "--error", "x", "--json")
    assert (excluded.code, excluded.stdout) == (0, "")
    assert excluded.stderr == (
        "No matching tasks.\noutbox: 4 tasks in the state dead, but none matches --since and --error\n"
    )


def test_equal_errors_are_counted_below_the_list(filled: Commands):
    """Those of the tasks in the list; a list in which all errors differ ends with its last task."""
    listed = filled.here("list", "--state", "dead").stdout
    assert [line.split(maxsplit=3) for line in listed.partition("\n\n")[2].splitlines()] == [
        ["TASKS", "STATE", "TOPIC", "ERROR"],
        ["3", "dead", "orders", "not_found: no such topic"],
        ["1", "dead", "invoices", "too_large: 11 MB"],
    ]
    assert "TASKS" not in filled.here("list", "--state", "dead", "--topic", "invoices").stdout


def test_a_unique_prefix_is_an_id(filled: Commands):
    """From four characters on; the task with exactly this ID comes before longer ones, and `show` changes nothing."""
    for given, id in {"youn": "young", "agai": "again", "dead": "dead", "sent-3": "sent-3"}.items():
        first, second, *_ = filled.here("show", given).stdout.splitlines()
        assert (first[:8], second) == ("as of 20", f"Id           {id}")
    ambiguous, short = filled.here("show", "dead-"), filled.here("show", "you")
    assert (ambiguous.code, short.code) == (1, 1)
    assert ambiguous.stderr == "outbox: 2 task IDs begin with 'dead-': dead-3, dead-5. Give more characters\n"
    assert short.stderr.endswith("outbox: task 'you' does not exist\n")
    for done in (short, filled.here("retry", "you", "--dry-run")):
        assert "outbox: 'you' is too short for the beginning of young. Give at least 4 characters\n" in done.stderr
    dry = filled.here("retry", "dead-5", "late", "--dry-run")
    assert dry.stdout == "2 tasks would become due now\n"
    assert "outbox: late is task later\n" in dry.stderr


def test_show_has_every_column_and_the_message(outbox: Commands, database: Database):
    """Attributes one a line, the ordering key, and JSON data over several lines."""
    with database.batch() as batch:
        id = api.register(
            batch, "orders", b'{"order": {"cents": 1999}}', attributes={"kind": "order"}, ordering_key="customer-7",
            priority=90, expires_at=datetime(2090, 1, 1, tzinfo=UTC),
        )  # fmt: skip
    shown = outbox.here("show", id)
    lines = {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[-1] for line in shown.stdout.splitlines()}
    statement = "SELECT column_name FROM information_schema.columns WHERE table_name = 'AsynchronousTasks'"
    assert {name for [name] in query(database, statement)} <= set(lines)
    assert [lines[name] for name in ("Id", "State", "Topic", "Priority", "OrderingKey", "ExpiresAt", "SentAt")] == [
        id, "pending", "orders", "90", "customer-7", "2090-01-01T00:00:00.000000Z", "NULL",
    ]  # fmt: skip
    assert "  kind = order\n" in shown.stdout
    assert shown.stdout.endswith('26 bytes, JSON\n  {\n    "order": {\n      "cents": 1999\n    }\n  }\n')
    [whole] = outbox.objects("show", id, "--json")
    attributes = {"kind": "order", api.TASK_ID_ATTRIBUTE: id}
    assert whole["message"] == {"attributes": attributes, "data": '{"order": {"cents": 1999}}'}


def test_data_is_shown_as_text_as_hex_or_raw(outbox: Commands, database: Database):
    """All byte values as hex, and as base64 in JSON; --raw writes each byte and nothing else, not even a line end."""
    with database.batch() as batch:
        binary, text = (api.register(batch, "orders", data) for data in (ALL_BYTES, "first\nzweite — 三".encode()))
    insert_undecodable(database, "garbage", "orders", "key")
    raw = outbox.shell(f"outbox show {binary} --raw | od -An -v -tx1")
    assert (raw.code, bytes.fromhex(raw.stdout), raw.stderr) == (0, ALL_BYTES, "")
    assert bytes.fromhex(outbox.here("show", binary).stdout.partition("256 bytes, hex\n")[2]) == ALL_BYTES
    [whole] = outbox.objects("show", binary, "--json")
    assert whole["message"]["data_base64"] == b64encode(ALL_BYTES).decode()
    assert outbox.run("show", text).stdout.endswith("bytes, text\n  first\n  zweite — 三\n")
    garbage = outbox.here("show", "garbage")
    assert garbage.code == 0
    assert garbage.stdout.endswith("3 bytes, hex\n  ff ff ff\n")
    assert "is not a serialized google.pubsub.v1.PubsubMessage" in garbage.stderr
    missing = outbox.here("show", "missing")
    assert (missing.code, missing.stdout, missing.stderr.count("\n")) == (1, "", 1)
    assert "task 'missing' does not exist" in missing.stderr
