"""`outbox retry` as a process, with real workers and a subscriber: sent tasks come again, dead ones at last."""

import json
import re
import signal
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from google.cloud.spanner_v1.database import Database
from google.pubsub_v1.types import PubsubMessage

import outbox as api
from outbox.emulators import Emulators
from outbox.states import NEVER
from tests.support.commands import HOUR, SECONDS, TRACE, Commands, count, fill, row, table
from tests.support.pubsub import Subscription
from tests.support.relays import execute, register, wait_until_all_sent, worker
from tests.support.waiting import eventually

MAKE_DEAD = """
UPDATE AsynchronousTasks
SET AvailableAt = TIMESTAMP '9999-12-31T00:00:00Z', Attempts = 16, LastError = 'gave_up: NOT_FOUND' WHERE """
RETRIED = "SentAt IS NULL AND Attempts = 0 AND AvailableAt <= CURRENT_TIMESTAMP()"


@pytest.fixture
def outbox(emulators: Emulators, database: Database) -> Commands:
    """The commands on a database of the test's own."""
    return Commands(emulators, database)


def drain(emulators: Emulators, database: Database) -> None:
    """Have a worker send all that is ready."""
    with worker(emulators, database, command="drain") as process:
        assert process.wait(SECONDS) == 0


def arrived(messages: Sequence[PubsubMessage]) -> dict[str, bytes]:
    """Return the data of messages by the id of the task; none may have come twice."""
    found = {message.attributes[api.TASK_ID_ATTRIBUTE]: message.data for message in messages}
    assert len(found) == len(messages)
    return found


def test_a_sent_task_and_a_dead_one_arrive_with_their_id_and_data(
    outbox: Commands, emulators: Emulators, database: Database, topic: str, subscription: Subscription
):
    """The sent one a second time and the dead one at last, each once; their neighbours stay as they are."""
    again, other = register(database, topic, 2, b"sent data")
    drain(emulators, database)
    assert arrived(subscription.pull_until(2)) == {again: b"sent data", other: b"sent data"}
    [dead, stays] = register(database, topic, 2, b"dead data")
    execute(database, f"{MAKE_DEAD} SentAt IS NULL")
    done = outbox.run("retry", again, dead)
    assert (done.code, done.stdout, done.stderr) == (0, "will be sent again: 2 tasks\n", "")
    drain(emulators, database)
    assert arrived(subscription.pull_until(2)) == {again: b"sent data", dead: b"dead data"}
    assert subscription.drain() == []
    assert list(table(database, "SentAt IS NULL")) == [stays]


def test_plain_dml_sends_a_task_again_that_had_failed_or_been_delayed(
    emulators: Emulators, database: Database, topic: str, subscription: Subscription
):
    """SentAt = NULL is enough, whatever stood in AvailableAt and Attempts before it was sent."""
    [failed] = register(database, topic, 1)
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
    ids = Counter(message.attributes[api.TASK_ID_ATTRIBUTE] for message in subscription.pull_until(4))
    assert ids == {failed: 2, delayed: 2}


@pytest.mark.parametrize("until", [[], ["--until", "2090-01-01T00:00:00Z"]])
def test_a_retry_ends_with_what_was_sent_before_it_began(outbox: Commands, database: Database, until: list[str]):
    """Whatever end is given: else it would send again, without end, what it sends."""
    fill(database, [row("sent", "sent", age=HOUR)])
    began = datetime.now(UTC)
    told = outbox.here("retry", "--state", "sent", *until, "--dry-run")
    [end] = re.findall(r"SentAt < TIMESTAMP '(.+)'", told.stdout)
    assert abs(datetime.fromisoformat(end) - began) < HOUR


def test_a_dry_run_changes_nothing_and_its_dml_is_what_retry_does(outbox: Commands, database: Database):
    """The count is exact, no row is touched, and the statement, run by any client, changes the same rows alike."""
    quoted = "it's \"\\ \N{GRINNING FACE}\n"
    fill(
        database,
        [
            *[row(f"a-{n}", "dead", LastError=f"x {quoted} y") for n in range(3)],
            row("too-old", "dead", LastError=quoted, age=9 * HOUR), row("other-error", "dead"),
            row("sent", "sent"), row("pending"), row("other", "dead", topic="invoices", LastError=quoted),
        ],
    )  # fmt: skip
    before = table(database)
    words = ("retry", "--state", "dead", "--topic", "orders", "--since", "8h", "--error", quoted)
    told = outbox.run(*words, "--dry-run")
    assert told.code == 0
    first, _, statement = told.stdout.partition("\n")
    assert first == "3 tasks would be sent again, as by:"
    assert table(database) == before
    assert execute(database, statement) == 3
    by_dml = table(database, RETRIED)
    assert sorted(by_dml) == ["a-0", "a-1", "a-2"]
    dead_again = "AvailableAt = TIMESTAMP '9999-12-31T00:00:00Z', Attempts = 16"
    execute(database, f"UPDATE AsynchronousTasks SET {dead_again} WHERE STARTS_WITH(Id, 'a-')")
    assert outbox.run(*words).stdout == "will be sent again: 3 tasks\n"
    assert sorted(table(database, RETRIED)) == sorted(by_dml)


def test_a_state_with_a_topic_and_times_is_these_tasks_only(outbox: Commands, database: Database):
    """Sent ones by SentAt, since inclusive and until exclusive; times as `list` prints them."""
    fill(
        database,
        [
            *[row(f"{n}h", "sent", age=n * HOUR) for n in (1, 2, 3, 4)],
            row("other", "sent", topic="invoices", age=3 * HOUR), row("dead", "dead", age=3 * HOUR),
        ],
    )  # fmt: skip
    sent = {task["id"]: task["sent_at"] for task in outbox.objects("list", "--state", "sent", "--json")}
    words = ("--state", "sent", "--topic", "orders", "--since", sent["3h"], "--until", sent["1h"])
    done = outbox.run("retry", *words)
    assert (done.code, done.stdout, done.stderr) == (0, "will be sent again: 2 tasks\n", "")
    assert sorted(table(database, RETRIED)) == ["2h", "3h"]
    assert list(table(database, "AvailableAt > '9999-01-01'")) == ["dead"]


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


def test_ctrl_c_in_the_middle_and_the_printed_command_send_each_task_once(
    outbox: Commands, emulators: Emulators, database: Database, topic: str, subscription: Subscription
):
    """Exit 1, whole rows, the number and a command that does the rest, even if a worker has sent the first part."""
    ids = register(database, topic, 600)
    execute(database, "UPDATE AsynchronousTasks SET SentAt = CURRENT_TIMESTAMP(), Attempts = 2 WHERE TRUE")
    with outbox.started("retry", "--state", "sent", "--topic", topic, "--since", "1h", "--yes") as process:
        eventually(lambda: count(database, "SentAt IS NULL"), seconds=SECONDS)
        process.stop(signal.SIGINT)
        assert process.wait() == 1
        assert process.stdout == ""
        said = re.search(r"stopped by SIGINT\. (\d+) tasks changed so far.*; go on with: (outbox .*)\n", process.stderr)
        assert said, process.stderr
        assert TRACE not in process.stderr
    changed = int(said[1])
    assert 0 < changed < 600
    assert (count(database, RETRIED), count(database, "SentAt IS NOT NULL AND Attempts = 2")) == (
        changed,
        600 - changed,
    )
    drain(emulators, database)
    rest = outbox.shell(said[2])
    assert (rest.code, rest.stdout) == (0, f"will be sent again: {600 - changed} tasks\n")
    drain(emulators, database)
    assert set(arrived(subscription.pull_until(600))) == set(ids)
    assert subscription.drain() == []


def test_sigterm_with_ids_prints_a_command_that_goes_on(outbox: Commands, database: Database, tmp_path: Path):
    """The file is named again, what is done is left alone, and a second run of the command changes nothing."""
    names = [f"{'-' if n == 0 else ''}it's {n}" for n in range(1_200)]
    fill(database, [row(name, "dead") for name in names])
    file = tmp_path / "ids of today"
    file.write_text("\n".join(json.dumps(name) for name in names[1:]))
    with outbox.started("retry", "--ids-file", str(file), "--yes", "--", names[0]) as process:
        eventually(lambda: count(database, "Attempts = 0"), seconds=SECONDS)
        process.stop(signal.SIGTERM)
        assert process.wait() == 1
        _, _, command = process.stderr.strip().partition("go on with: ")
    before = table(database, RETRIED)
    assert 0 < len(before) < len(names)
    assert outbox.shell(command).stdout == f"will be sent again: {1_200 - len(before):,} tasks\n"
    after = table(database, RETRIED)
    assert len(after) == len(names)
    assert {id: after[id] for id in before} == before
    assert outbox.shell(command).stdout == "will be sent again: 0 tasks\n"


def test_at_a_terminal_it_asks_and_draws_a_bar(outbox: Commands, database: Database):
    """More than 1,000: n is exit 1 and changes nothing, y goes on under a bar and says the number."""
    fill(database, [row(f"{n}", "dead") for n in range(1_001)])
    with outbox.terminal("retry", "--state", "dead") as terminal:
        terminal.wait_for_text("1,001 tasks will be sent again. [y/N] ")
        terminal.type("n\n")
        assert terminal.wait() == 1
        assert "not confirmed: nothing was changed" in terminal.seen
    assert count(database, f"AvailableAt = '{NEVER.isoformat()}'") == 1_001
    with outbox.terminal("retry", "--state", "dead") as terminal:
        terminal.wait_for_text("[y/N] ")
        terminal.type("y\n")
        assert terminal.wait() == 0
        assert "will be sent again: 1,001 tasks" in terminal.seen
        assert re.search(r"100%\|.*\| 1001/1001 \[.* tasks/s\]", terminal.seen)
        assert TRACE not in terminal.seen
    assert count(database, RETRIED) == 1_001
