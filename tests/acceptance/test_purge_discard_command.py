"""`outbox purge` and `outbox discard` as processes: they delete what they are for, and nothing else."""

import json
import re
from datetime import UTC, datetime, timedelta

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.emulators import Emulators
from tests.support.commands import HOUR, SECONDS, Commands, count, fill, row, table
from tests.support.waiting import eventually

DAY = timedelta(days=1)
UNSENT = ("pending", "retrying", "scheduled", "dead")


@pytest.fixture
def outbox(emulators: Emulators, database: Database) -> Commands:
    """The commands on a database of the test's own."""
    return Commands(emulators, database)


def test_purge_leaves_what_may_just_have_been_marked(outbox: Commands, database: Database):
    """A task to be sent at most once is marked before it is published, and gets its row back if it was refused."""
    fill(database, [row("sent", "sent", age=timedelta(0))])
    for time in ("0s", "59s", datetime.now(UTC).isoformat()):
        refused = outbox.run("purge", "--sent-before", time)
        assert (refused.code, refused.stdout) == (2, "")
        assert "is less than a minute ago" in refused.stderr
    assert set(table(database)) == {"sent"}


def test_purge_deletes_old_sent_tasks_only(outbox: Commands, database: Database):
    """Of every state and of ages around the limit, also what is dead or due since long, only the old sent ones go."""
    long_ago = datetime.now(UTC) - 40 * DAY
    old_and_unsent = [row(f"{state}-{age}", state, age=age * DAY) for state in UNSENT for age in (0, 29, 31, 400)]
    kept = [
        *old_and_unsent,
        row("due", age=400 * DAY, AvailableAt=long_ago, Attempts=4),
        row("expired", age=400 * DAY, ExpiresAt=long_ago),
        row("just-young-enough", "sent", age=30 * DAY - HOUR),
        row("sent-late", "sent", age=DAY, CreatedAt=long_ago),
        row("sent-now", "sent", age=timedelta(0)),
    ]
    fill(database, kept)
    fill(
        database,
        [
            row("just-too-old", "sent", age=30 * DAY + HOUR),
            row("had-been-dead", "sent", age=31 * DAY, Attempts=16, LastError="gave_up"),
            row("other-topic", "sent", topic="invoices", age=900 * DAY),
            *[row(f"old-{n}", "sent", age=(31 + n) * DAY, Priority=n, OrderingKey=f"key-{n}") for n in range(30)],
        ],
    )
    before = table(database)
    dry = outbox.run("purge", "--sent-before", "30d", "--topic", "orders", "--dry-run")
    assert dry.stdout.startswith("32 tasks would be deleted, as by:\nDELETE FROM AsynchronousTasks\nWHERE SentAt")
    assert table(database) == before
    narrowed = outbox.run("purge", "--sent-before", "30d", "--topic", "orders")
    assert (narrowed.code, narrowed.stdout, narrowed.stderr) == (0, "deleted: 32 tasks\n", "")
    whole = outbox.run("purge", "--sent-before", f"{(datetime.now(UTC) - 30 * DAY).isoformat()}")
    assert (whole.code, whole.stdout) == (0, "deleted: 1 task\n")
    left = {values[0] for values in kept}
    assert table(database) == {id: values for id, values in before.items() if id in left}


def test_a_purge_of_the_future_is_refused(outbox: Commands, database: Database):
    """A typing error in the year deletes nothing."""
    fill(database, [row("a", "sent")])
    told = outbox.run("purge", "--sent-before", "2090-01-01T00:00:00Z")
    assert (told.code, told.stdout) == (2, "")
    assert "--sent-before 2090-01-01T00:00:00.000000Z" in told.stderr
    assert list(table(database)) == ["a"]


def test_a_purge_goes_on_after_sigterm(outbox: Commands, database: Database):
    """Exit 1 with the number, and the command that it prints deletes the rest and nothing that became old meanwhile."""
    fill(database, [row(f"old-{n}", "sent", age=2 * DAY) for n in range(900)] + [row("young", "sent"), row("unsent")])
    with outbox.started("purge", "--sent-before", "1d", "--topic", "orders") as process:
        eventually(lambda: count(database, "TRUE") < 902, seconds=SECONDS)
        process.stop()
        assert process.wait() == 1
        assert process.stdout == ""
        said = re.search(
            r"stopped by SIGTERM\. (\d+) tasks changed so far.*; go on with: (outbox purge .*)\n", process.stderr
        )
        assert said, process.stderr
    assert 2 < (left := count(database, "TRUE")) == 902 - int(said[1])
    rest = outbox.shell(said[2])
    assert (rest.code, rest.stdout) == (0, f"deleted: {left - 2} tasks\n")
    assert sorted(table(database)) == ["unsent", "young"]


def test_discard_deletes_dead_tasks_and_logs_ids_and_reason(outbox: Commands, database: Database):
    """One line of the log for each, with the reason; what is not dead is named and stays, and the exit code is 1."""
    fill(database, [*[row(state, state) for state in (*UNSENT, "sent")], row("dead-2", "dead"), row("dead-3", "dead")])
    before = table(database)
    done = outbox.run("discard", *before, "nobody", "--yes", "--reason", "cancelled, ticket 4711")
    assert (done.code, done.stdout) == (1, "deleted: 3 tasks\n")
    logged = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert sorted(line["task_id"] for line in logged) == ["dead", "dead-2", "dead-3"]
    assert {(line["reason"], line["action"]) for line in logged} == {("cancelled, ticket 4711", "discarded")}
    for state in ("pending", "retrying", "scheduled", "sent"):
        assert f"{state}: {state}\n" in done.stderr
    assert "not in the table: nobody\n" in done.stderr
    assert table(database) == {id: values for id, values in before.items() if not id.startswith("dead")}


def test_discard_of_what_is_not_dead_is_refused(outbox: Commands, database: Database):
    """Before it asks: exit 1, nothing deleted, nothing logged as discarded."""
    fill(database, [row(state, state) for state in ("pending", "retrying", "scheduled", "sent")])
    told = outbox.run("discard", "pending", "retrying", "scheduled", "sent", "--yes", "--reason", "none")
    assert (told.code, told.stdout) == (1, "")
    assert told.stderr == "outbox: none of the 4 ids is of a dead task: nothing was deleted\n"
    assert len(table(database)) == 4


def test_discard_asks_first(outbox: Commands, database: Database):
    """Without a terminal it refuses with 2; at one, Enter deletes nothing and y deletes; a reason is needed."""
    fill(database, [row("dead", "dead")])
    unasked = outbox.run("discard", "dead", "--reason", "x")
    assert (unasked.code, unasked.stdout) == (2, "")
    assert "1 task, dead, will be deleted for good" in unasked.stderr
    assert "--yes" in unasked.stderr
    unreasoned = outbox.run("discard", "dead", "--yes")
    assert unreasoned.code == 2
    assert "--reason" in unreasoned.stderr
    for answer, code, left in (("", 1, 1), ("y", 0, 0)):
        with outbox.terminal("discard", "dead", "--reason", "cancelled") as terminal:
            terminal.wait_for_text("[y/N] ")
            terminal.type(answer + "\n")
            assert terminal.wait() == code, terminal.seen
            assert len(table(database)) == left
            assert ("discarded the dead task dead: cancelled" in terminal.seen) == (answer == "y")
