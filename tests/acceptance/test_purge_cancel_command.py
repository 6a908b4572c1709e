"""`outbox purge` and `cancel` as processes: the tasks that they take, the questions and the log."""

import re
from datetime import UTC, datetime, timedelta
from unittest import mock

from google.cloud.spanner_v1.database import Database

from outbox.admin import changes
from outbox.devtools.emulators import Emulators
from tests.support.commands import HOUR, SECONDS, Commands, row, table
from tests.support.operations import insert
from tests.support.spanner import count
from tests.support.waiting import eventually

DAY = timedelta(days=1)


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
