"""`outbox retry` as a process: sent and dead tasks arrive again, and the printed commands and DML do the same."""

import json
import re
import signal
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database

import outbox as api
from outbox.emulators import Emulators
from outbox.errors import NotReached
from outbox.operations import changes
from outbox.operations.table import TaskTable
from tests.support.commands import HOUR, SECONDS, TRACE, Commands, count, fill, row, table
from tests.support.pubsub import Subscription
from tests.support.relays import execute, register, wait_until_all_sent, worker
from tests.support.waiting import eventually

MAKE_DEAD = """
UPDATE AsynchronousTasks SET AvailableAt = TIMESTAMP '9999-12-31T00:00:00Z', Attempts = 16 WHERE """
RETRIED = "SentAt IS NULL AND Attempts = 0 AND AvailableAt <= CURRENT_TIMESTAMP()"


@pytest.fixture
def outbox(emulators: Emulators, database: Database) -> Commands:
    """The commands on a database of the test's own."""
    return Commands(emulators, database)


def test_tasks_arrive_again_with_their_id_and_data(
    outbox: Commands, emulators: Emulators, database: Database, topic: str, subscription: Subscription
):
    """A worker sends a sent task a second time and a dead one at last, and leaves their neighbours.

    SentAt = NULL by plain DML is enough, whatever stood in AvailableAt and Attempts before the task was sent.
    """
    again, failed = register(database, topic, 2, b"sent data")
    [delayed] = register(database, topic, 1, available_at=datetime.now(UTC) + timedelta(seconds=1))
    failing = "SET Attempts = 3, LastError = 'unavailable: away', AvailableAt = CURRENT_TIMESTAMP()"
    execute(database, f"UPDATE AsynchronousTasks {failing} WHERE Id = '{failed}'")
    with worker(emulators, database) as process:
        wait_until_all_sent(database)
        for id in (failed, delayed):
            assert execute(database, f"UPDATE AsynchronousTasks SET SentAt = NULL WHERE Id = '{id}'") == 1
        wait_until_all_sent(database)
        process.stop()
        assert process.wait() == 0
    dead, stays = register(database, topic, 2, b"dead data")
    execute(database, f"{MAKE_DEAD} SentAt IS NULL")
    done = outbox.run("retry", again, dead)
    assert (done.code, done.stdout, done.stderr) == (0, "will be sent again: 2 tasks\n", "")
    with worker(emulators, database, command="drain") as process:
        assert process.wait(SECONDS) == 0
    received = subscription.pull_until(7) + subscription.drain()
    ids = Counter(message.attributes[api.TASK_ID_ATTRIBUTE] for message in received)
    assert ids == {again: 2, failed: 2, delayed: 2, dead: 1}
    data = {message.attributes[api.TASK_ID_ATTRIBUTE]: message.data for message in received}
    assert (data[again], data[dead]) == (b"sent data", b"dead data")
    assert list(table(database, "SentAt IS NULL")) == [stays]


def test_a_selection_is_these_tasks_only_and_its_dml_does_the_same(outbox: Commands, database: Database):
    """A dry run changes nothing, its count is exact, and its statement, run by any client, changes the same rows.

    The end of a selection of sent tasks is at most now: the command would otherwise select what it sends again.
    """
    quoted = "it's \"\\ \N{GRINNING FACE}\n"
    fill(
        database,
        [
            *[row(f"a-{n}", "dead", LastError=f"x {quoted} y") for n in range(3)],
            row("too-old", "dead", LastError=quoted, age=9 * HOUR), row("other-error", "dead"), row("pending"),
            row("other", "dead", topic="invoices", LastError=quoted),
            row("sent", "sent"),
        ],
    )  # fmt: skip
    before = table(database)
    words = ("retry", "--state", "dead", "--topic", "orders", "--since", "8h", "--error", quoted)
    dry = outbox.run(*words, "--dry-run")
    first, _, statement = dry.stdout.partition("\n")
    assert (dry.code, first) == (0, "3 tasks would be sent again, as by:")
    assert table(database) == before
    for change in (lambda: execute(database, statement) == 3, lambda: "again: 3 tasks" in outbox.run(*words).stdout):
        assert change()
        assert sorted(table(database, RETRIED)) == ["a-0", "a-1", "a-2"]
        execute(database, f"{MAKE_DEAD} STARTS_WITH(Id, 'a-')")
    for until in ([], ["--until", "2090-01-01T00:00:00Z"]):
        dry = outbox.here("retry", "--state", "sent", *until, "--dry-run")
        [end] = re.findall(r"SentAt < TIMESTAMP '(.+)'", dry.stdout)
        assert abs(datetime.fromisoformat(end) - datetime.now(UTC)) < HOUR


def test_ids_come_from_arguments_files_and_pipes(outbox: Commands, database: Database, tmp_path: Path):
    """A plain line, a JSON string and an object in one file; `list --json` into stdin; pending ones are left alone."""
    fill(database, [row(id, "dead") for id in "abcdefg"] + [row("ready")])
    file = tmp_path / "ids"
    file.write_text('a\n\n"b"\r\n{"id": "c", "state": "dead"}\na\nmissing\n')
    done = outbox.run("retry", "d", "ready", "--ids-file", str(file))
    assert (done.code, done.stdout) == (1, "will be sent again: 4 tasks\n")
    assert re.search("because they are pending.*: ready\n", done.stderr)
    assert "not in the table: missing\n" in done.stderr
    assert sorted(table(database, RETRIED)) == ["a", "b", "c", "d"]
    piped = outbox.shell("outbox list --state dead --json | outbox retry --ids-file -")
    assert (piped.code, piped.stdout, piped.stderr) == (0, "will be sent again: 3 tasks\n", "")
    assert sorted(table(database, RETRIED)) == list("abcdefg")
    assert table(database, "Id = 'ready'")["ready"] == (None, None, 0)


@pytest.mark.extended
def test_ctrl_c_in_the_middle_and_the_printed_command_send_each_task_once(emulators: Emulators, own_database: Database):
    """Exit 1, whole rows, the number and a command that does the rest, even if a worker has sent the first part."""
    outbox = Commands(emulators, own_database)
    fill(own_database, [row(f"{n}", "sent", age=HOUR / 2, Attempts=2) for n in range(600)])
    with outbox.started("retry", "--state", "sent", "--topic", "orders", "--since", "1h", "--yes") as process:
        eventually(lambda: count(own_database, "SentAt IS NULL"), seconds=SECONDS)
        process.stop(signal.SIGINT)
        assert process.wait() == 1
        assert (process.stdout, TRACE in process.stderr) == ("", False)
        said = re.search(r"stopped by SIGINT\. (\d+) tasks changed so far.*; go on with: (outbox .*)\n", process.stderr)
        assert said, process.stderr
    changed = int(said[1])
    assert 0 < changed < 600
    assert count(own_database, RETRIED) == changed
    assert count(own_database, "SentAt IS NOT NULL AND Attempts = 2") == 600 - changed
    # As a worker does it.
    sent = execute(own_database, "UPDATE AsynchronousTasks SET SentAt = CURRENT_TIMESTAMP() WHERE SentAt IS NULL")
    rest = outbox.shell(said[2])
    assert (sent, rest.code, rest.stdout) == (changed, 0, f"will be sent again: {600 - changed} tasks\n")
    assert count(own_database, RETRIED) == 600 - changed


@pytest.mark.extended
def test_an_outage_with_ids_prints_a_command_that_goes_on(
    outbox: Commands, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It names the file again, leaves what is done alone, and changes nothing in a second run."""
    names = [f"{'-' if n == 0 else ''}it's {n}" for n in range(30)]
    fill(database, [row(name, "dead") for name in names])
    file = tmp_path / "ids of today"
    file.write_text("\n".join(json.dumps(name) for name in names[1:]))
    transact = TaskTable.transact
    with monkeypatch.context() as patch:

        def change_ten(*arguments: Any) -> Any:
            if count(database, "Attempts = 0") >= 10:
                raise NotReached("Spanner did not answer")
            return transact(*arguments)

        patch.setattr(changes, "CHUNK", 5)
        patch.setattr(TaskTable, "transact", change_ten)
        stopped = outbox.here("retry", "--ids-file", str(file), "--yes", "--", names[0])
    assert (stopped.code, stopped.stdout) == (3, "")
    assert "10 tasks changed so far" in stopped.stderr
    _, _, command = stopped.stderr.strip().partition("go on with: ")
    before = table(database, RETRIED)
    assert len(before) == 10
    assert outbox.shell(command).stdout == "will be sent again: 20 tasks\n"
    after = table(database, RETRIED)
    assert len(after) == len(names)
    assert {id: after[id] for id in before} == before
    assert outbox.shell(command).stdout == "will be sent again: 0 tasks\n"
