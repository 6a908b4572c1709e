"""Operators' commands on a large table: counts, questions, output, and a reader that closes the pipe."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.instance import Instance

from outbox.admin import backlog
from outbox.devtools.emulators import Emulators
from tests.support.commands import TRACE, Commands, row
from tests.support.operations import insert
from tests.support.spanner import count, outbox_database

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("many-tasks")]  # the table is filled once

PENDING, DEAD = 100, 1_001
IS_DEAD = "AvailableAt = TIMESTAMP '9999-12-31T00:00:00Z' AND Attempts = 16"


@pytest.fixture(scope="module")
def large(spanner_instance: Instance) -> Iterator[Database]:
    """A database with more dead tasks than a command changes without a question; one test makes them pending."""
    with outbox_database(spanner_instance) as created:
        insert(created, [row(f"pending-{n:05}") for n in range(PENDING)])
        insert(created, [row(f"dead-{n:05}", "dead", topic="invoices") for n in range(DEAD)])
        yield created


@pytest.fixture
def outbox(emulators: Emulators, large: Database) -> Commands:
    return Commands(emulators, large)


def test_counts_stop_early_unless_max_pending_needs_them(
    emulators: Emulators, database: Database, monkeypatch: pytest.MonkeyPatch
):
    """The output marks a count that stopped. --max-pending is decided also above the number where counts stop."""
    monkeypatch.setattr(backlog, "COUNT_LIMIT", PENDING)
    insert(database, [row(f"{n}", OrderingKey="key") for n in range(PENDING)])  # one key, so one shard
    for number, code, stopped in (("99", 1, ["pending"]), ("100", 0, [])):
        done = Commands(emulators, database).here("status", "--json", "--max-pending", number)
        [line] = json.loads(done.stdout)["topics"]
        assert (done.code, line["pending"], line["at_least"]) == (code, PENDING, stopped)
        assert (">= 100 tasks are pending, more than --max-pending 99\n" in done.stderr) == bool(code)


@pytest.mark.parametrize(
    "command",
    [
        "outbox list --limit 2000 --json",
        "outbox retry --ids-file <(outbox list --limit 2000 --json) --dry-run", "outbox --help",
    ],
)  # fmt: skip
def test_a_closed_pipe_causes_no_stack_trace(outbox: Commands, command: str):
    """`| head` closes the pipe in the middle of the output; the command ends without a message."""
    done = outbox.shell(f"{command} | head -n 1 | wc -l")
    assert (done.code, done.stdout.strip()) == (0, "1"), done
    assert TRACE not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_changing_more_than_a_thousand_tasks_asks_first(outbox: Commands, large: Database, tmp_path: Path):
    """A dry run counts existing tasks. Without a terminal it refuses; `n` changes nothing, `y` changes them."""
    file = tmp_path / "ids"
    kinds = {"pending": PENDING, "dead": DEAD, "unknown": 100, "not there's": 100}
    file.write_text("\n".join(f"{kind}-{n:05}" for kind, number in kinds.items() for n in range(number)))
    dry = outbox.run("retry", "--ids-file", str(file), "--dry-run")
    assert (dry.code, dry.stdout) == (0, "1,001 tasks would become due now\n")
    unasked = outbox.run("retry", "--state", "dead", "--topic", "invoices")
    assert (unasked.code, unasked.stdout, unasked.stderr) == (
        2, "", "outbox: Not a terminal. Pass --yes to confirm: 1,001 tasks will become due now. Nothing was changed\n",
    )  # fmt: skip
    for answer, code in (("n", 1), ("y", 0)):
        assert count(large, IS_DEAD) == DEAD
        with outbox.terminal("retry", "--state", "dead") as terminal:
            terminal.wait_for_text("1,001 tasks will become due now. [y/N] ")
            terminal.type(f"{answer}\n")
            assert terminal.wait() == code, terminal.seen
            seen = terminal.seen
        assert ("not confirmed. Nothing was changed" in seen) == (answer == "n")
    assert "due now: 1,001 tasks" in seen
    assert TRACE not in seen
    assert count(large, "SentAt IS NULL AND Attempts = 0 AND AvailableAt <= CURRENT_TIMESTAMP()") == DEAD
