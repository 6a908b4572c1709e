"""`outbox pause`, `resume` and `limit` as processes, and the page about them, whose commands and SQL are run."""

import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database

import outbox
from outbox.emulators import Emulators
from tests.support.processes import ROOT, Finished, run
from tests.support.proxy import hanging, refusing
from tests.support.spanner import INSTANCE, PROJECT

PAGE = Path("docs/operations/topics.md")
#: Seconds within which a user must hear that Spanner cannot be reached.
TOLD_WITHIN = 10.0


def outbox_command(emulators: Emulators, database_id: str, *words: str, spanner_host: str = "") -> Finished:
    """Run a command on a database of the emulator."""
    where = {"OUTBOX_PROJECT": PROJECT, "OUTBOX_INSTANCE": INSTANCE, "OUTBOX_DATABASE": database_id}
    reached = {"SPANNER_EMULATOR_HOST": spanner_host} if spanner_host else {}
    return run("outbox", *words, environment=emulators.environment() | where | reached)


def rows(database: Database) -> list[list[Any]]:
    """Return all rows of the control table."""
    columns = ("Topic", "Paused", "RatePerSecond", "Burst", "MaxInFlight")
    with database.snapshot() as snapshot:
        return list(snapshot.read("AsynchronousTaskTopics", columns, KeySet(all_=True)))


def blocks(language: str) -> str:
    """Return the only block of code of that language in the page."""
    [block] = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / PAGE).read_text(), re.MULTILINE | re.DOTALL)
    return str(block)


def have_tasks(database: Database) -> None:
    """Have a task wait for each topic of the page."""
    with database.batch() as batch:
        for topic in ("orders", "invoices"):
            outbox.register(batch, topic, b"")


def test_the_commands_of_the_page_do_and_say_what_it_shows(emulators: Emulators, database: Database):
    """One after the other on the same database; the flags that name it are the test's."""
    have_tasks(database)
    shown = re.findall(r"^\$ outbox (.*?) --project .*\n((?:[^$].*\n)*)", blocks("console"), re.MULTILINE)
    assert [words.split()[0] for words, _ in shown] == ["pause", "resume", "limit", "limit", "limit"]
    for words, says in shown:
        done = outbox_command(emulators, database.database_id, *shlex.split(words))
        assert (done.code, done.stdout) == (0, says)
        assert "the workers follow within 10 seconds" in done.stderr
    assert rows(database) == [["invoices", False, None, None, None], ["orders", False, None, None, None]]


def test_the_sql_of_the_page_does_the_same(database: Database):
    """Each statement as it stands there; what it leaves is what the command would."""
    *statements, look = [re.sub(r"--.*", "", each).strip() for each in blocks("sql").split(";")]
    left = []
    for statement in statements:
        database.run_in_transaction(lambda transaction, sql=statement: transaction.execute_update(sql))
        with database.snapshot() as snapshot:
            left += list(snapshot.execute_sql(look))
    assert left == [
        ["orders", False, None, None, None],
        ["orders", True, None, None, None],
        ["orders", False, None, None, None],
        ["orders", False, 10.0, 20, None],
        ["orders", False, 10.0, 20, 5],
        ["orders", False, None, None, None],
    ]


def test_exit_codes(emulators: Emulators, database: Database):
    """1 for a topic that nobody knows, 2 for a wrong value, 3 for a database that is not there: one sentence each."""
    have_tasks(database)
    unknown = outbox_command(emulators, database.database_id, "pause", "ordres")
    wrong = outbox_command(emulators, database.database_id, "limit", "orders", "--rate", "0", "--burst", "1")
    missing = outbox_command(emulators, "not-there", "pause", "orders")
    assert [each.code for each in (unknown, wrong, missing)] == [1, 2, 3]
    assert "Tasks wait or rows exist for: invoices, orders\n" in unknown.stderr
    assert "databases/not-there is not there" in missing.stderr
    for each in (unknown, wrong, missing):
        assert (each.stdout, each.stderr.count("\n")) == ("", 1)
    assert rows(database) == []


@pytest.mark.parametrize("away", [refusing, hanging])
@pytest.mark.parametrize("words", ["pause orders", "resume orders", "limit orders --off"])
def test_a_spanner_that_does_not_answer_is_exit_code_3_in_time(
    emulators: Emulators, away: Callable[[str], Any], words: str
):
    """Beyond what starting any command takes here and now."""
    start = time.monotonic()
    run("outbox", "schema", "print")
    begun = time.monotonic()
    with away(emulators.spanner_host) as host:
        missed = outbox_command(emulators, "orders", *words.split(), spanner_host=host)
    assert time.monotonic() - begun - (begun - start) < TOLD_WITHIN
    assert (missed.code, missed.stdout) == (3, "")
    assert "Spanner did not answer" in missed.stderr
    assert missed.stderr.count("\n") == 1
