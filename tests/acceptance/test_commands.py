"""Operators' commands as processes and at a terminal: signals, questions, bounds, and tasks that arrive again."""

import re
from datetime import UTC, datetime, timedelta
from unittest import mock

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.admin import changes, tasks
from outbox.cli import bulk, error_tables
from outbox.devtools.emulators import Emulators
from tests.support.commands import HOUR, SECONDS, Commands, row, table
from tests.support.operations import insert
from tests.support.spanner import count
from tests.support.waiting import eventually

DAY = timedelta(days=1)


def test_a_retry_of_many_tasks_asks_first(outbox: Commands, database: Database):
    insert(database, [row(f"{n}", "dead") for n in range(3)])
    with mock.patch.object(bulk, "CONFIRM_ABOVE", 2):
        many = outbox.here("retry", "--state", "dead", "--topic", "orders")
    assert (many.code, "Pass --yes to confirm: 3 tasks will become due now" in many.stderr) == (2, True)


def test_a_purge_can_be_continued_after_sigterm(emulators: Emulators, own_database: Database):
    """Exit 1 with the number, and the command that it prints deletes the rest."""
    outbox = Commands(emulators, own_database)
    insert(own_database, [row(f"old-{n}", "sent", age=2 * DAY) for n in range(600)])
    insert(own_database, [row("young", "sent"), row("unsent")])
    with outbox.started("purge", "--state", "sent", "--until", "1d", "--topic", "orders") as process:
        eventually(lambda: count(own_database, "TRUE") < 602, seconds=SECONDS)
        process.stop()
        assert process.wait() == 1
        assert process.stdout == ""
        printed = re.search(
            r"stopped by SIGTERM\. (\d+) tasks changed so far.* To continue, run: (outbox operations .*)\n",
            process.stderr,
        )
        assert printed, process.stderr
    assert 2 < (left := count(own_database, "TRUE")) == 602 - int(printed[1])
    rest = outbox.shell(printed[2])
    assert (rest.code, rest.stdout) == (0, f"deleted: {left - 2} tasks\n")
    assert sorted(table(own_database)) == ["unsent", "young"]


def test_a_cancel_selects_no_task_that_is_registered_meanwhile(outbox: Commands, database: Database):
    """Whatever --until is."""
    insert(database, [row("a")])
    with mock.patch.object(changes, "change", return_value=iter(())) as change:
        outbox.here("cancel", "--state", "pending", "--until", "2090-01-01T00:00:00Z", "--reason", "why", "--yes")
    _, _, selection, _ = change.call_args.args
    assert selection.until < datetime.now(UTC) + HOUR


def test_cancel_asks_at_a_terminal(outbox: Commands, database: Database):
    """Enter cancels nothing, and y cancels."""
    insert(database, [row("dead", "dead"), row("other")])
    for answer, code in (("", 1), ("y", 0)):
        assert len(table(database)) == 2
        with outbox.terminal("cancel", "dead", "--reason", "no order") as terminal:
            terminal.wait_for_text("[y/N] ")
            terminal.type(answer + "\n")
            assert terminal.wait() == code, terminal.seen
            assert ("cancelled the task dead: no order" in terminal.seen) == (answer == "y")
    assert [*table(database)] == ["other"]


def test_errors_that_are_not_all_read_are_lower_bounds(
    outbox: Commands, database: Database, monkeypatch: pytest.MonkeyPatch
):
    """At most ERRORS_READ tasks of a state are read, and at most ROWS errors are shown."""
    insert(
        database,
        [row(f"dead-{n}", "dead", LastError=f"error {'ab'[n % 2]}") for n in range(5)] + [row("r", "retrying")],
    )
    monkeypatch.setattr(tasks, "ERRORS_READ", 4)
    monkeypatch.setattr(error_tables, "SHOWN", 2)
    lines = outbox.here("status", "--exact").stdout.partition("\n\n")[2].splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [[">=", "2", "dead"]] * 2
    assert lines[3] == "... and 1 more"
