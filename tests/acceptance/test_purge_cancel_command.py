"""`outbox purge`, `cancel` and `restore` as processes: the tasks that they move, the questions and the log."""

import json
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
UNSENT = ("pending", "retrying", "scheduled", "blocked", "dead")


def test_a_purge_of_tasks_whose_marks_may_not_be_final_is_refused(outbox: Commands, database: Database):
    """A task to be sent at most once is marked before it is published, and gets its row back if Pub/Sub refuses it."""
    insert(database, [row("sent-now", "sent", age=timedelta(0))])
    before = table(database)
    for time in ("0s", "59s", datetime.now(UTC).isoformat(), "2090-01-01T00:00:00Z"):
        refused = outbox.here("purge", "--sent-before", time)
        assert (refused.code, refused.stdout) == (2, "")
        assert "is less than a minute ago" in refused.stderr
    assert "--sent-before 2090-01-01T00:00:00.000000Z" in refused.stderr
    assert table(database) == before


def test_a_purge_can_be_continued_after_sigterm(emulators: Emulators, own_database: Database):
    """Exit 1 with the number, and the command that it prints deletes the rest."""
    outbox = Commands(emulators, own_database)
    insert(own_database, [row(f"old-{n}", "sent", age=2 * DAY) for n in range(600)])
    insert(own_database, [row("young", "sent"), row("unsent")])
    with outbox.started("purge", "--sent-before", "1d", "--topic", "orders") as process:
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
    assert (rest.code, rest.stdout) == (0, f"changed: {left - 2} tasks\n")
    assert sorted(table(own_database)) == ["unsent", "young"]


def test_a_cancel_selects_no_task_that_is_registered_meanwhile(outbox: Commands, database: Database):
    """Whatever --until is."""
    insert(database, [row("a")])
    with mock.patch.object(changes, "change", return_value=iter(())) as change:
        outbox.here("cancel", "--state", "pending", "--until", "2090-01-01T00:00:00Z", "--reason", "why", "--yes")
    _, _, selection, _ = change.call_args.args
    assert selection.until < datetime.now(UTC) + HOUR


def test_cancel_asks_and_takes_unsent_tasks_only(outbox: Commands, database: Database):
    """Without a terminal it refuses; at one, Enter cancels nothing and y cancels. Each is logged with the reason."""
    insert(database, [*[row(state, state) for state in (*UNSENT, "sent")], row("dead-2", "dead")])
    before = table(database)
    refused = outbox.here("cancel", "sent", "missing", "--yes")
    assert (refused.code, refused.stdout) == (1, "")
    assert refused.stderr == "outbox: no unsent task among the 2 given IDs. Nothing was changed\n"
    unasked = outbox.run("cancel", "dead", "--reason", "x")
    assert (unasked.code, unasked.stdout) == (2, "")
    assert "1 task (unsent) will be cancelled" in unasked.stderr
    assert "--yes" in unasked.stderr
    for answer, code in (("", 1), ("y", 0)):
        assert table(database) == before
        with outbox.terminal("cancel", "dead", "--reason", "no order") as terminal:
            terminal.wait_for_text("[y/N] ")
            terminal.type(answer + "\n")
            assert terminal.wait() == code, terminal.seen
            assert ("cancelled the task dead: no order" in terminal.seen) == (answer == "y")
    del before["dead"]
    assert table(database) == before
    prefix = outbox.here("cancel", "pend", "dead-2", "--yes", "--reason", "x")
    assert (prefix.code, prefix.stdout) == (2, "")
    assert "'pend' is only a prefix of task pending. With --yes, pass full IDs" in prefix.stderr
    assert table(database) == before
    done = outbox.run("cancel", *before, "missing", "--yes", "--reason", "cancelled, ticket 4711")
    assert (done.code, done.stdout) == (1, "cancelled: 5 tasks\n")
    logged = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert sorted(line["task_id"] for line in logged) == ["blocked", "dead-2", "pending", "retrying", "scheduled"]
    assert {(line["reason"], line["action"]) for line in logged} == {("cancelled, ticket 4711", "cancelled")}
    assert "1 task not changed, because the state is sent: sent\n" in done.stderr
    assert "not in the table: missing\n" in done.stderr
    assert table(database) == {"sent": before["sent"]}


def test_a_restore_takes_back_the_cancel_that_printed_it(outbox: Commands, database: Database):
    """Without those whose IDs exist again, which it refuses and counts, also in the dry run and as JSON."""
    insert(database, [*[row(state, state) for state in UNSENT if state != "blocked"], row("again")])
    before = table(database)
    done = outbox.here("cancel", *before, "--yes", "--reason", "wrong topic, ticket 4711")
    [command] = re.findall(r"to take it back, run `outbox (restore \S+)`", done.stderr)
    assert (done.code, table(database)) == (0, {})
    shown = outbox.here("show", "dead")
    assert "State        cancelled" in shown.stdout
    assert "`outbox restore dead` puts it back" in shown.stderr
    assert {each["operation_id"] for each in outbox.objects("list", "--state", "cancelled", "--json")} == {
        command.split()[1]
    }
    insert(database, [row("again", topic="new")])
    dry = outbox.here(*command.split(), "--dry-run")
    assert (dry.code, dry.stdout) == (1, "4 tasks would be restored\n")
    assert "1 task would not be restored, because a task with the same ID exists again" in dry.stderr
    dry = outbox.here(*command.split(), "--dry-run", "--json")
    assert {**json.loads(dry.stdout), "as_of": ""} == {
        "dry_run": True, "as_of": "", "tasks": 4, "refused": {"exists": 1}, "overtaken": 0,
    }  # fmt: skip
    assert sorted(table(database)) == ["again"]
    restored = outbox.here(*command.split(), "--reason", "the topic is right")
    assert (restored.code, restored.stdout) == (1, "restored: 4 tasks\n")
    assert "1 task not changed, because a task with the same ID exists again: again" in restored.stderr
    assert table(database, "Id != 'again'") == {id: each for id, each in before.items() if id != "again"}
    of_state = outbox.here("restore", "--state", "cancelled")
    assert (of_state.code, of_state.stdout) == (1, "restored: 0 tasks\n")
    assert of_state.stderr == "outbox: 1 task not changed, because a task with the same ID exists again: again\n"
    purged = outbox.here("purge", "--state", "cancelled")
    assert (purged.code, purged.stdout) == (0, "deleted: 1 task\n")
    again = outbox.here("restore", "again", "--json")
    assert (again.code, json.loads(again.stdout)["refused"]) == (0, {"not_cancelled": 1})
    outbox.here("cancel", "dead", "--yes")
    excluded = outbox.here("restore", "dead", "--topic", "bills")
    assert (excluded.code, excluded.stdout) == (1, "restored: 0 tasks\n")
    assert excluded.stderr == "outbox: 1 task not changed, excluded by --topic, --since, --until or --error: dead\n"


def test_a_purge_says_of_which_state_its_time_is(outbox: Commands):
    for words, reason in (
        ((), "--sent-before is missing"),
        (("--state", "cancelled", "--sent-before", "1d"), "--sent-before needs --state sent"),
        (("--cancelled-before", "1d"), "--cancelled-before needs --state cancelled"),
    ):
        refused = outbox.here("purge", *words)
        assert (refused.code, reason in refused.stderr) == (2, True)
