"""Operators' commands used wrongly, and on what is broken: a sentence and an exit code, in time, and no stack trace."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.emulators import Emulators
from tests.support.commands import TRACE, Commands, control_codes, fill, here, row, table
from tests.support.processes import Finished
from tests.support.proxy import hanging, refusing

NAMES = ("status", "list", "show", "tail", "retry", "purge", "discard", "topics")
#: One form of each command; what they name need not exist.
ALL = [
    "status --exact", "list", "show x", "retry x", "retry --state dead", "purge --sent-before 30d",
    "discard x --reason y --yes", "topics", "tail",
]  # fmt: skip
#: A command that reads, one that follows and one that changes.
SOME = ["status --exact", "tail", "retry x"]
#: Seconds within which all of them at once, on one core, must have ended: one alone ends within ten.
TOLD_WITHIN = 40.0
#: What a row or a person may bring along: quotes, ends of lines, codes that a terminal obeys, also those of one byte.
HOSTILE = (
    "it's", 'say "no"', "back\\slash \\n", "two\nlines", "\r\n", "\N{GRINNING FACE} \N{FAMILY}", "\x1b[31mred\x1b[0m",
    "\x9b31mred", "\x1b]0;title\x07", "\N{RIGHT-TO-LEFT OVERRIDE}fdp", "\N{LINE SEPARATOR}x", "\t tab", "$(id) `id` %s",
    "{not json", '"', "--yes", "'; DROP TABLE AsynchronousTasks; --",
)  # fmt: skip


@pytest.fixture
def outbox(emulators: Emulators, database: Database) -> Commands:
    """The commands on a database of the test's own."""
    return Commands(emulators, database)


def all_at_once(outbox: Commands, commands: Sequence[str]) -> dict[str, Finished]:
    """Run commands side by side; each must end in time."""
    deadline = time.monotonic() + TOLD_WITHIN
    with ExitStack() as stack:
        running = {words: stack.enter_context(outbox.started(*words.split())) for words in commands}
        return {
            words: Finished(process.wait(max(0.1, deadline - time.monotonic())), process.stdout, process.stderr)
            for words, process in running.items()
        }


def assert_told(found: dict[str, Finished], code: int, *sentences: str) -> None:
    """See that each command ended with `code`, nothing on stdout, and one line that has all `sentences`."""
    for words, done in found.items():
        lines = [line for line in done.stderr.splitlines() if "following from" not in line]
        assert (done.code, done.stdout, len(lines)) == (code, "", 1), (words, done)
        assert all(sentence in lines[0] for sentence in sentences), (words, done)


@pytest.mark.parametrize("name", NAMES)
def test_help_has_an_example_and_needs_no_database(name: str):
    """Of each command, without any variable: what it is for, and a line to copy."""
    told = here(name, "--help")
    assert (told.code, told.stderr) == (0, "")
    assert f"\n    outbox {name}" in told.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("show", "x" * 65), "1 to 64 characters"),
        (("show", ""), "1 to 64 characters"),
        (
            ("list", "--state", "lost"),
            "'lost' is not allowed: it must be pending or retrying or scheduled or dead or sent",
        ),
        (("retry", "--state", "pending"), "it must be dead or sent or retrying"),
        (("retry",), "which tasks? Give ids"),
        (("discard", "--reason", "x"), "which tasks? Give ids"),
        (("list", "--since", "1 week"), "90s, 15m, 2h or 7d"),
        (("list", "--until", "2026-11-21T13:00:00"), "a time with its offset"),
        (("purge", "--sent-before", "30"), "90s, 15m, 2h or 7d"),
        (("status", "--max-age", "-1h"), "--max-age"),
        (("status", "--max-pending", "many"), "a whole number"),
        (("status", "--watch", "--max-age", "1h"), "--watch has no end"),
        (("list", "--limit", "0"), "a whole number from 1"),
        (("tail", "--since", "yesterday"), "90s, 15m, 2h or 7d"),
    ],
)
def test_a_wrong_value_is_exit_code_2_before_anything_is_asked(words: tuple[str, ...], sentence: str):
    """It says what was given and what is allowed."""
    database = {"OUTBOX_PROJECT": "my-project", "OUTBOX_INSTANCE": "main", "OUTBOX_DATABASE": "shop"}
    told = here(*words, environment=database)
    assert (told.code, told.stdout) == (2, "")
    assert sentence in told.stderr
    assert TRACE not in told.stderr


@pytest.mark.parametrize(
    ("content", "code", "sentence"),
    [
        (b"", 1, "holds no id: nothing was changed"),
        (b"\n \n\r\n", 1, "holds no id: nothing was changed"),
        (b"fine\n\xff\xfe\n", 2, "is no UTF-8"),
        (b"fine\n" + b"x" * 65, 2, "line 2: "),
        (b'{"task": 1}', 2, "line 1: 'None' is no id"),
        (b'{"id": 7}', 2, "line 1: '7' is no id"),
        (b'{"id": "a"', 2, "line 1: "),
        (b'{"a":' * 100_000, 2, "is no JSON"),
        (None, 2, "cannot be read: No such file or directory"),
    ],
)
def test_an_ids_file_that_is_none_changes_nothing(tmp_path: Path, content: bytes | None, code: int, sentence: str):
    """It names the file and the line, for retry and discard alike, and nothing is contacted."""
    file = tmp_path / "ids"
    if content is not None:
        file.write_bytes(content)
    database = {"OUTBOX_PROJECT": "my-project", "OUTBOX_INSTANCE": "main", "OUTBOX_DATABASE": "shop"}
    told = here("retry", "--ids-file", str(file), environment=database)
    assert (told.code, told.stdout) == (code, "")
    assert str(file) in told.stderr
    assert sentence in told.stderr
    assert TRACE not in told.stderr


def test_no_control_code_of_a_row_reaches_the_output(outbox: Commands, database: Database):
    """In ids, topics, keys and errors, on stdout and stderr, for people and programs; the ids still come back whole."""
    topics = {each: f"topic {each}" if each in HOSTILE[6:8] else "orders" for each in HOSTILE}
    fill(database, [row(each, "dead", topic=topics[each], OrderingKey=each, LastError=each) for each in HOSTILE])
    listed = [outbox.here(*words.split()) for words in ("list", "list --json", "status --exact", "topics --exact")]
    listed += [outbox.here("show", "--", each) for each in HOSTILE[6:8]]
    listed += [outbox.here("list", "--topic", HOSTILE[6]), outbox.here("show", f"{HOSTILE[6]}{HOSTILE[7]}")]
    for done in listed:
        assert control_codes(done.stdout + done.stderr) == []
    assert {json.loads(line)["id"] for line in listed[1].stdout.splitlines()} == set(HOSTILE)
    dry = outbox.shell("outbox list --json | outbox retry --ids-file - --dry-run")
    assert (dry.code, control_codes(dry.stdout + dry.stderr)) == (0, [])
    done = outbox.shell("outbox list --json | outbox retry --ids-file -")
    assert (done.code, done.stdout, done.stderr) == (0, f"will be sent again: {len(HOSTILE)} tasks\n", "")
    assert set(table(database, "AvailableAt <= CURRENT_TIMESTAMP()")) == set(HOSTILE)


def test_hostile_ids_as_arguments_are_ids(outbox: Commands, database: Database):
    """None is taken for a flag, a pattern or SQL: exactly these are changed, the unknown one is named harmlessly."""
    fill(database, [row(each, "dead") for each in (*HOSTILE, "bystander")])
    done = outbox.run("retry", "--", *HOSTILE, "\x1b[2Jnobody")
    assert (done.code, done.stdout) == (1, f"will be sent again: {len(HOSTILE)} tasks\n")
    assert done.stderr.endswith("not in the table: \\x1b[2Jnobody\n")
    assert list(table(database, "AvailableAt > '9999-01-01'")) == ["bystander"]


def test_a_missing_table_is_exit_code_3(emulators: Emulators, empty_database: Database):
    """Each command names the table, and the command that makes it."""
    found = all_at_once(Commands(emulators, empty_database), ALL)
    assert_told(found, 3, "table AsynchronousTasks is missing", "outbox schema apply")


@pytest.mark.parametrize(("variable", "commands"), [("OUTBOX_DATABASE", ALL), ("OUTBOX_INSTANCE", SOME)])
def test_a_missing_database_or_instance_is_exit_code_3(
    emulators: Emulators, database: Database, variable: str, commands: list[str]
):
    """Each command says the full name that it looked for."""
    outbox = Commands(emulators, database, more={variable: "not-there"})
    assert_told(all_at_once(outbox, commands), 3, "s/not-there", "is not there: make it, or look at the names")


def test_a_dropped_index_is_exit_code_3(outbox: Commands, database: Database):
    """Whatever reads it names it and ends; `show` and `retry ID`, which do not need it, still work."""
    fill(database, [row("x", "dead")])
    database.update_ddl(["DROP INDEX AsynchronousTasksToSend"]).result(30)
    needing = ["status --exact", "status --exact --watch", "tail", "list", "topics --exact", "purge --sent-before 30d"]
    found = all_at_once(outbox, [*needing, "retry --state dead"])
    assert_told(found, 3, "index AsynchronousTasksToSend is missing", "outbox schema apply")
    assert [outbox.run(*words).code for words in (("show", "x"), ("retry", "x"))] == [0, 0]


@pytest.mark.parametrize(("away", "commands"), [(refusing, ALL), (hanging, SOME)])
def test_a_spanner_that_does_not_answer_is_exit_code_3_in_time(
    emulators: Emulators,
    database: Database,
    away: Callable[[str], AbstractContextManager[str]],
    commands: list[str],
):
    """Each command says so and where to look."""
    with away(emulators.spanner_host) as host:
        found = all_at_once(Commands(emulators, database, host), commands)
    assert_told(found, 3, "Spanner did not answer", "look at the network")
