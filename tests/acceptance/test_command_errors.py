"""Operators' commands with wrong arguments or unavailable services: a sentence and an exit code, no stack trace."""

import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from tests.support.commands import Commands, control_codes, row, table
from tests.support.fakes import serialized
from tests.support.operations import insert
from tests.support.processes import Finished
from tests.support.proxy import hanging, refusing

#: One form of each command; its tasks and topics need not exist.
ALL = [
    "status --exact", "list", "show x", "retry x", "retry --state dead", "purge --state sent --until 30d",
    "cancel x --reason y --yes", "topics", "tail", "pause orders", "resume orders", "topics unset orders rate",
    "resend x --to other", "operations continue x",
]  # fmt: skip
#: A command that reads, one that follows and two that change.
SOME = ["status --exact", "tail", "retry x", "pause orders"]
#: Seconds within which all of them at once must have ended; one alone ends within ten.
ENDED_WITHIN = 40.0
#: Texts of a row or of a person: quotes, line ends, control codes that a terminal obeys, also those of one byte.
HOSTILE = (
    "it's", 'say "no"', "back\\slash \\n", "two\nlines", "\r\n", "\N{GRINNING FACE} \N{FAMILY}", "\x1b[31mred\x1b[0m",
    "\x9b31mred", "\x1b]0;title\x07", "\N{RIGHT-TO-LEFT OVERRIDE}fdp", "\N{LINE SEPARATOR}x", "\t tab", "$(id) `id` %s",
    "{not json", '"', "--yes", "'; DROP TABLE AsynchronousTasks; --",
    # It looks like three lines, or moves the cursor, if it is not escaped.
    "東\nok  faked\r\x1b[2K\x9b2K\u2028\u202e",
)  # fmt: skip


def all_at_once(outbox: Commands, commands: Sequence[str]) -> dict[str, Finished]:
    deadline = time.monotonic() + ENDED_WITHIN
    with ExitStack() as stack:
        running = {words: stack.enter_context(outbox.started(*words.split())) for words in commands}
        return {
            words: Finished(process.wait(max(0.1, deadline - time.monotonic())), process.stdout, process.stderr)
            for words, process in running.items()
        }


def assert_refused(found: dict[str, Finished], code: int, *sentences: str) -> None:
    for words, done in found.items():
        lines = [line for line in done.stderr.splitlines() if "following from" not in line]
        assert (done.code, done.stdout, len(lines)) == (code, "", 1), (words, done)
        assert all(sentence in lines[0] for sentence in sentences), (words, done)


def test_no_control_code_of_a_row_reaches_the_output(outbox: Commands, database: Database):
    """In ids, topics, keys and errors, on stdout and stderr, for people and programs; the ids still come back whole."""
    topics = {each: f"topic {each}" if each in HOSTILE[6:8] else "orders" for each in HOSTILE}
    insert(database, [row(each, "dead", topic=topics[each], OrderingKey=each, LastError=each) for each in HOSTILE])
    listed = [outbox.here(*words.split()) for words in ("list", "list --json", "status --exact", "topics --exact")]
    listed += [outbox.here("show", "--", each) for each in HOSTILE[6:8]]
    listed += [outbox.here("list", "--topic", HOSTILE[6]), outbox.here("show", f"{HOSTILE[6]}{HOSTILE[7]}")]
    for done in listed:
        assert control_codes(done.stdout + done.stderr) == []
        assert not re.search("^ok  faked", done.stdout + done.stderr, re.MULTILINE)
    assert {json.loads(line)["id"] for line in listed[1].stdout.splitlines()} == set(HOSTILE)
    dry = outbox.shell("outbox list --json | outbox retry --ids-file - --dry-run")
    assert (dry.code, control_codes(dry.stdout + dry.stderr)) == (0, [])
    done = outbox.shell("outbox list --json | outbox retry --ids-file -")
    assert (done.code, done.stdout, done.stderr) == (0, f"due now: {len(HOSTILE)} tasks\n", "")
    assert set(table(database, "AvailableAt <= CURRENT_TIMESTAMP()")) == set(HOSTILE)


def test_hostile_ids_are_taken_literally(outbox: Commands, database: Database):
    """None is taken for a flag, a pattern or SQL: exactly these are changed, and an unknown one is named harmlessly."""
    insert(database, [row(each, "dead") for each in (*HOSTILE, "bystander")])
    done = outbox.run("retry", "--", *HOSTILE, "\x1b[2Jnobody")
    assert (done.code, done.stdout) == (1, f"due now: {len(HOSTILE)} tasks\n")
    assert done.stderr.endswith("not in the table: \\x1b[2Jnobody\n")
    assert list(table(database, "AvailableAt > '9999-01-01'")) == ["bystander"]


def test_raw_data_is_each_byte_and_nothing_else(outbox: Commands, database: Database):
    """Not even a line end."""
    every = bytes(range(256))
    insert(database, [row("binary", Data=serialized(every))])
    raw = outbox.shell("outbox show binary --raw | od -An -v -tx1")
    assert (raw.code, bytes.fromhex(raw.stdout), raw.stderr) == (0, every, "")


def test_a_missing_table_is_exit_code_3(emulators: Emulators, empty_database: Database):
    outbox = Commands(emulators, empty_database)
    found = {words: outbox.here(*words.split()) for words in ALL}
    assert_refused(found, 3, "table AsynchronousTasks is missing", "outbox schema apply")


def test_a_missing_database_or_instance_is_exit_code_3(emulators: Emulators, database: Database):
    """Each command says the full name that it looked for."""
    for variable, commands in (("OUTBOX_DATABASE", ALL), ("OUTBOX_INSTANCE", SOME)):
        outbox = Commands(emulators, database, more={variable: "not-there"})
        found = {words: outbox.here(*words.split()) for words in [*commands, "schema apply"]}
        assert_refused(found, 3, "s/not-there", "not found. Create it, or check --project")


@pytest.mark.extended
@pytest.mark.parametrize(("away", "commands"), [(refusing, ALL), (hanging, SOME)])
def test_a_spanner_that_does_not_answer_is_exit_code_3_in_time(
    emulators: Emulators, database: Database, away: Callable[[str], AbstractContextManager[str]], commands: list[str]
):
    """Each command says so and where to look."""
    with away(emulators.spanner_host) as host:
        found = all_at_once(Commands(emulators, database, host), [*commands, "schema apply"])
    assert_refused(found, 3, "Spanner did not answer", "Check the network")
