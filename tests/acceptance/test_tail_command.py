"""`outbox tail` as a process: each task that is sent is one line, whichever worker marks it."""

import functools
import json
import signal
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from tests.support.commands import HOUR, Commands, row
from tests.support.operations import insert
from tests.support.processes import Process
from tests.support.relays import register, worker
from tests.support.waiting import eventually

SECONDS = 40.0


def mark(database: Database, *ids: str) -> None:
    with database.batch() as batch:
        batch.update("AsynchronousTasks", ("Id", "SentAt"), [(id, COMMIT_TIMESTAMP) for id in ids])


def ids(process: Process) -> list[str]:
    """Return the ids of whole lines that were written so far."""
    return [json.loads(line)["id"] for line in process.stdout.splitlines(keepends=True) if line.endswith("}\n")]


def wait_for(process: Process, expected: list[str]) -> None:
    """Return when as many lines are there, and check that they are these, each once."""
    eventually(lambda: len(ids(process)) >= len(expected), seconds=SECONDS, message=f"{len(expected)} lines")
    assert sorted(ids(process)) == sorted(expected)


def grown(process: Process, screens: int) -> bool:
    return process.stdout.count("as of") > screens


def test_two_tails_show_each_task_of_a_worker_once(emulators: Emulators, database: Database, topic: str):
    """Both give the same ids in the same order, none twice, and both end with 0: at Ctrl-C, and at SIGTERM."""
    outbox = Commands(emulators, database)
    with ExitStack() as stack:
        tails = [stack.enter_context(outbox.started("tail", "--json")) for _ in range(2)]
        for each in tails:
            each.wait_for_text("following from")
        sent = register(database, topic, 30)
        with worker(emulators, database, "--batch-size", "7", command="drain") as draining:
            assert draining.wait(SECONDS) == 0
        for each in tails:
            wait_for(each, sent)
        assert ids(tails[0]) == ids(tails[1])
        for each, number in zip(tails, (signal.SIGINT, signal.SIGTERM), strict=True):
            each.end(number)
            assert each.stderr.count("\n") == 1


def test_tail_begins_at_since_and_shows_only_its_topic(emulators: Emulators, database: Database):
    """In the order in which they were sent, from that time on, then those sent meanwhile."""
    insert(
        database,
        [
            row("before", "sent", age=3 * HOUR), row("second", "sent", age=HOUR), row("first", "sent", age=2 * HOUR),
            row("other", "sent", topic="invoices", age=HOUR), row("third"), row("never"),
            row("other-new", topic="invoices"),
            row("task-1", "sent", topic="people", OrderingKey="key", age=timedelta(0)),
        ],
    )  # fmt: skip
    since = (datetime.now(UTC) - timedelta(hours=2.5)).isoformat()
    outbox = Commands(emulators, database)
    with outbox.started("tail", "--topic", "orders", "--since", since, "--json") as process:
        wait_for(process, ["first", "second"])
        mark(database, "third", "other-new")
        wait_for(process, ["first", "second", "third"])
        assert ids(process) == ["first", "second", "third"]
    with outbox.started("tail", "--since", "1h", "--topic", "people") as process:
        process.wait_for_text("key key\n")
        assert " people task-1 priority 50, 0 bytes, sent 0.0s after registration, key key\n" in process.stdout


@pytest.mark.extended
def test_commands_that_follow_continue_after_the_number_of_shards_was_changed(
    emulators: Emulators, own_database: Database
):
    """Also when it is changed again. Nothing is printed twice, and nobody has to start them again."""
    insert(own_database, [row("first"), row("second"), row("third")])
    outbox = Commands(emulators, own_database)
    with outbox.started("tail", "--json") as tail, outbox.started("status", "--watch") as watch:
        tail.wait_for_text("following from")
        mark(own_database, "first")
        wait_for(tail, ["first"])
        watch.wait_for_text("as of")
        for shards, expected in (("32", ["first", "second"]), ("7", ["first", "second", "third"])):
            assert outbox.run("schema", "reshard", "--shards", shards).code == 0
            mark(own_database, expected[-1])
            wait_for(tail, expected)
            eventually(functools.partial(grown, watch, watch.stdout.count("as of")), seconds=SECONDS)
        assert (watch.stderr, tail.stderr.count("\n")) == ("", 1)
