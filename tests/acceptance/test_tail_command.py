"""`outbox tail` as a process: each task that is sent is one line, whichever worker marks it."""

import functools
import json
import signal
from contextlib import ExitStack

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
        mark(own_database, "first")
        wait_for(tail, ["first"])
        watch.wait_for_text("as of")
        for shards, expected in (("32", ["first", "second"]), ("7", ["first", "second", "third"])):
            assert outbox.run("schema", "reshard", "--shards", shards).code == 0
            mark(own_database, expected[-1])
            wait_for(tail, expected)
            eventually(functools.partial(grown, watch, watch.stdout.count("as of")), seconds=SECONDS)
        assert (watch.stderr, tail.stderr.count("\n")) == ("", 1)
