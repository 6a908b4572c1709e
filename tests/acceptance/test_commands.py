"""Operators' commands as processes and at a terminal: bad input, hostile rows, secrets, outages, signals, questions."""

import json
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, ExecuteBatchDmlRequest, ExecuteSqlRequest, PartitionQueryRequest
from google.cloud.spanner_v1.database import Database

import outbox as library
from outbox.devtools.emulators import Emulators
from outbox.message import MAX_REQUEST_BYTES, RawPubsubMessage
from outbox.table import ddl, schema
from outbox_admin.changes import change_commands, execution
from outbox_admin.tasks import lookup, task_commands
from tests.support.commands import HOUR, SECONDS, TRACE, Commands, control_codes, here, row, table
from tests.support.fakes import serialized
from tests.support.operations import insert, rows_of, update
from tests.support.processes import Finished, Process, run
from tests.support.proxy import hanging, silent_port
from tests.support.pubsub import PubSub
from tests.support.relays import register, unsent, worker
from tests.support.rpc import Forwarding
from tests.support.spanner import count
from tests.support.waiting import eventually

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
@pytest.mark.parametrize(("away", "commands"), [(silent_port, ALL), (hanging, SOME)])
def test_a_spanner_that_does_not_answer_is_exit_code_3_in_time(
    emulators: Emulators, database: Database, away: Callable[[], AbstractContextManager[str]], commands: list[str]
):
    """Each command says so and where to look."""
    with away() as host:
        found = all_at_once(Commands(emulators, database, host), [*commands, "schema apply"])
    assert_refused(found, 3, "Spanner did not answer", "Check the network")


DAY = timedelta(days=1)


def test_a_retry_of_many_tasks_asks_first(outbox: Commands, database: Database):
    insert(database, [row(f"{n}", "dead") for n in range(3)])
    with mock.patch.object(change_commands, "CONFIRM_ABOVE", 2):
        many = outbox.here("retry", "--state", "dead", "--topic", "orders")
    assert many.code == 2
    assert "3 tasks will become due now. This is not a terminal, so pass --yes to confirm" in many.stderr


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
    with mock.patch.object(execution, "change", return_value=iter(())) as change:
        outbox.here("cancel", "--state", "pending", "--until", "2090-01-01T00:00:00Z", "--reason", "why", "--yes")
    _, _, selection, _ = change.call_args.args
    assert selection.until < datetime.now(UTC) + HOUR


def test_cancel_asks_at_a_terminal(outbox: Commands, database: Database):
    """Enter cancels nothing, and y cancels."""
    insert(database, [row("dead", "dead"), row("other")])
    for answer, code in (("", 1), ("y", 0)):
        assert len(table(database, "CancelledBy IS NULL")) == 2
        with outbox.terminal("cancel", "dead", "--reason", "no order") as terminal:
            terminal.wait_for_text("[y/N] ")
            terminal.type(answer + "\n")
            assert terminal.wait() == code, terminal.seen
            assert ("cancelled the task dead: no order" in terminal.seen) == (answer == "y")
    assert [*table(database, "CancelledBy IS NOT NULL")] == ["dead"]


def test_errors_that_are_not_all_read_are_lower_bounds(
    outbox: Commands, database: Database, monkeypatch: pytest.MonkeyPatch
):
    """At most ERRORS_READ tasks of a state are read, the oldest and the newest. At most SHOWN errors are shown."""
    insert(
        database,
        [row(f"dead-{n}", "dead", LastError=f"error {'ab'[n % 2]}") for n in range(5)] + [row("r", "retrying")],
    )
    monkeypatch.setattr(lookup, "ERRORS_READ", 4)
    monkeypatch.setattr(task_commands, "SHOWN", 2)
    lines = outbox.here("status", "--exact").stdout.partition("TASKS")[2].splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [[">=", "2", "dead"]] * 2
    assert lines[3:] == ["... and 1 more", lookup.OF_PART]


def test_print_needs_no_spanner():
    """It prints DDL that runs as it is, without a database; shards, retention and the change stream can be chosen."""
    printed = run("outbox", "schema", "print")
    assert (printed.code, printed.stderr) == (0, "")
    assert printed.stdout == ";\n\n".join(ddl.statements()) + ";\n"
    chosen = here("schema", "print", "--shards", "32", "--retention", "none", "--change-stream")
    assert chosen.code == 0
    assert "COALESCE(OrderingKey, Id)), 32)" in chosen.stdout
    assert "OLDER_THAN(SentAt" not in chosen.stdout
    assert "CREATE CHANGE STREAM AsynchronousTasksInserts" in chosen.stdout


def test_apply_creates_the_tables_once(emulators: Emulators, empty_database: Database):
    """The first run creates all, the second finds all; a deployment may run it every time."""
    first, again = (Commands(emulators, empty_database).run("schema", "apply") for _ in range(2))
    created = "".join(f"created  {title}\n" for title, _ in map(ddl.parse, ddl.statements()))
    assert (first.code, first.stdout, first.stderr) == (0, created, "")
    assert (again.code, again.stdout) == (0, created.replace("created ", "exists  "))
    assert schema.differences(empty_database, ddl.statements(), free=()) == []


def test_apply_keeps_shards_and_retention_unless_they_are_given(emulators: Emulators, empty_database: Database):
    """Without flags a table with other shards and retention is fine; with them it must be as the flags say."""
    outbox, choices = Commands(emulators, empty_database), ("--shards", "4", "--retention", "none", "--change-stream")
    created = outbox.here("schema", "apply", *choices)
    assert "created  change stream AsynchronousTasksInserts\n" in created.stdout
    assert schema.layout(empty_database).shards == 4
    assert [outbox.here("schema", "apply", *words).code for words in ((), choices)] == [0, 0]
    other = outbox.here("schema", "apply", "--shards", "10", "--retention", "30")
    assert (other.code, other.stdout, TRACE in other.stderr) == (1, "", False)
    assert f"databases/{empty_database.database_id}: nothing is missing" in other.stderr
    assert "table AsynchronousTasks, shard count: the database has 4, expected 10\n" in other.stderr
    assert "retention of sent tasks: the database has for ever, expected 30 days\n" in other.stderr


def ids(process: Process) -> list[str]:
    """Return the ids of whole lines that were written so far."""
    return [json.loads(line)["id"] for line in process.stdout.splitlines(keepends=True) if line.endswith("}\n")]


def wait_for(process: Process, expected: list[str]) -> None:
    """Return when as many lines are there, and check that they are these, each once."""
    eventually(lambda: len(ids(process)) >= len(expected), seconds=SECONDS, message=f"{len(expected)} lines")
    assert sorted(ids(process)) == sorted(expected)


def test_two_tails_show_each_task_of_a_worker_once(emulators: Emulators, database: Database, topic: str):
    """Both give the same ids in the same order, none twice, and both end with 0: at Ctrl-C, and at SIGTERM.

    One has begun at `--since`, and shows only its topic.
    """
    outbox, of_topic = Commands(emulators, database), ("--topic", topic, "--since", "2h")
    before = [row("other", "sent", topic="invoices"), row("third", "sent", topic=topic, age=3 * HOUR)]
    insert(database, [row("first", "sent", topic=topic), *before])
    with ExitStack() as stack:
        tails = [stack.enter_context(outbox.started("tail", "--json", *flags)) for flags in ((), of_topic)]
        for each in tails:
            each.wait_for_text("following from")
        sent = register(database, topic, 30)
        with worker(emulators, database, "--batch-size", "7", command="drain") as draining:
            assert draining.wait(SECONDS) == 0
        wait_for(tails[0], sent)
        wait_for(tails[1], ["first", *sent])
        assert ["first", *ids(tails[0])] == ids(tails[1])
        for each, number in zip(tails, (signal.SIGINT, signal.SIGTERM), strict=True):
            each.end(number)
            assert each.stderr.count("\n") == 1


@pytest.mark.extended
def test_commands_that_follow_continue_after_the_number_of_shards_was_changed(
    emulators: Emulators, own_database: Database
):
    """Also when it is changed again. Nothing is printed twice, and nobody has to start them again."""
    insert(own_database, [row("first"), row("second"), row("third")])
    outbox = Commands(emulators, own_database)
    with outbox.started("tail", "--json") as tail, outbox.started("status", "--watch") as watch:
        tail.wait_for_text("following from")
        update(own_database, "first", SentAt=COMMIT_TIMESTAMP)
        wait_for(tail, ["first"])
        watch.wait_for_text("as of")
        for shards, expected in (("32", ["first", "second"]), ("7", ["first", "second", "third"])):
            assert outbox.run("schema", "reshard", "--shards", shards).code == 0
            update(own_database, expected[-1], SentAt=COMMIT_TIMESTAMP)
            wait_for(tail, expected)
            screens = watch.stdout.count("as of")
            eventually(lambda seen=screens: watch.stdout.count("as of") > seen, seconds=SECONDS)
        assert (watch.stderr, tail.stderr.count("\n")) == ("", 1)


@pytest.mark.extended
def test_a_terminal_shows_a_progress_bar(outbox: Commands, database: Database, pubsub: PubSub):
    to = pubsub.new_topic()
    insert(database, [row(f"{n}", "sent", Data=serialized(b"x")) for n in range(4)])
    with outbox.terminal("resend", "--topic", "orders", "--to", to, "--rate", "2") as terminal:
        terminal.wait_for_text("of 4 tasks, ")
        assert terminal.wait() == 0
        assert re.search(r"\r\[#{1,30} *\] [1-4] of 4 tasks, [\d.]+s left", terminal.seen)
        assert terminal.seen.endswith("\r\x1b[Kpublished: 4 tasks\r\n")


#: In everything that must not be logged, and in every value that must not become a part of a statement.
SECRET = "s3cr3t'\"`;--"
_STATEMENTS: dict[str, Any] = {
    "ExecuteSql": ExecuteSqlRequest,
    "ExecuteStreamingSql": ExecuteSqlRequest,
    "PartitionQuery": PartitionQueryRequest,
}


class Reading(Forwarding):
    """Keeps the statements that go to Spanner."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.statements: set[str] = set()

    def forward(self, method: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        name = method.rpartition("/")[2]
        if name in _STATEMENTS:
            message: Any = _STATEMENTS[name].pb().FromString(request)
            self.statements.add(message.sql)
        elif name == "ExecuteBatchDml":
            batch: Any = ExecuteBatchDmlRequest.pb().FromString(request)
            self.statements |= {each.sql for each in batch.statements}
        return super().forward(method, request, context)


def listening(pid: int) -> set[str]:
    inodes = {str(link.readlink()) for link in (Path("/proc") / str(pid) / "fd").iterdir() if link.is_symlink()}
    found = set()
    for kind in ("tcp", "tcp6"):
        for line in (Path("/proc") / str(pid) / "net" / kind).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1])
    return found


def test_a_worker_opens_no_port_and_logs_no_secret(emulators: Emulators, database: Database, topic: str) -> None:
    """While it sends and while messages fail in each way, at the level DEBUG; nor does it log its credentials."""
    with database.batch() as batch:
        library.register(batch, topic, SECRET.encode(), {"card": SECRET})
    message = RawPubsubMessage(data=SECRET.encode(), attributes={"card": SECRET})
    data = message.SerializeToString()
    message.data += bytes(MAX_REQUEST_BYTES)
    wrong = {
        "undecodable": row("cut", Topic=topic, Data=data[:-2]),
        "too_large": row("large", Topic=topic, Data=message.SerializeToString()),
        "invalid_topic": row("no topic", Topic="no topic", Data=data),
        "topic_not_allowed": row("not allowed", Topic="another", Data=data),
        "expired": row("expired", Topic=topic, Data=data, ExpiresAt=datetime(2026, 1, 1, tzinfo=UTC)),
        "not_found": row("missing", Topic="a-missing-topic", Data=data),
    }
    insert(database, list(wrong.values()))
    flags = ("--log-level", "debug", "--backoff-initial", "0.05", "--allowed-topics", f"{topic},a-missing-topic")
    with worker(emulators, database, *flags, SOME_TOKEN=SECRET, DD_API_KEY=SECRET) as process:
        eventually(lambda: len(unsent(database)) == len(wrong), seconds=30, message="one is sent")

        def failed() -> bool:
            errors = {str(each["LastError"]).partition(":")[0] for each in rows_of(database).values()}
            return errors >= wrong.keys() and all(reason in process.stderr for reason in wrong)

        eventually(failed, seconds=30)
        assert listening(process.pid) == set()
        process.end()
        output = process.stdout + process.stderr
    assert "s3cr3t" not in output
    assert not [each for each in rows_of(database).values() if "s3cr3t" in str(each["LastError"])]


def test_no_value_becomes_a_part_of_a_statement(emulators: Emulators, database: Database) -> None:
    """Values of users and of rows are sent as parameters and keys."""
    insert(database, [row(SECRET, Topic=SECRET, OrderingKey=SECRET)])
    for words in (
        ("list", "--topic", SECRET),
        ("list", "--error", SECRET),
        ("show", SECRET),
        ("retry", SECRET),
        ("retry", "--state", "dead", "--topic", SECRET, "--yes"),
        ("purge", "--topic", SECRET, "--state", "sent", "--until", "1d", "--yes"),
        ("status",),
        ("topics",),
        ("cancel", SECRET, "--reason", SECRET),
    ):
        with Reading(emulators.spanner_host) as proxy:
            done = Commands(emulators, database, proxy.address).here(*words)
        assert "Traceback" not in done.stderr
        assert proxy.statements, done
        assert not [each for each in proxy.statements if "s3cr3t" in each], words
