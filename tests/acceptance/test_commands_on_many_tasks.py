"""Operators' commands on a large table: what is counted, what is asked, who stops to read. Nothing here changes it."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from google.api_core.exceptions import GoogleAPIError
from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.instance import Instance

from outbox.emulators import Emulators
from tests.support.commands import HOUR, Commands, fill, row, table
from tests.support.spanner import outbox_database
from tests.support.waiting import eventually

pytestmark = pytest.mark.xdist_group("many-tasks")  # the table is filled once

#: Where a status stops to count in one shard and topic.
STOP = 10_000
DEAD = 1_500


@pytest.fixture(scope="module")
def large(spanner_instance: Instance) -> Iterator[Database]:
    """A database whose pending tasks have one key, so one shard, and with more dead ones than are changed unasked."""
    with outbox_database(spanner_instance) as made:
        fill(made, [row(f"pending-{n:05}", OrderingKey="key", age=HOUR) for n in range(STOP)])
        fill(made, [row(f"dead-{n:05}", "dead", topic="invoices") for n in range(DEAD)])
        eventually(lambda: is_old(made), seconds=30)
        yield made


def is_old(database: Database) -> bool:
    """Tell whether all was there ten seconds ago, as a status sees it."""
    keys = KeySet(keys=[[f"dead-{DEAD - 1:05}"]])
    try:
        with database.snapshot(exact_staleness=timedelta(seconds=10)) as snapshot:
            return bool(list(snapshot.read("AsynchronousTasks", ("Id",), keys)))
    except GoogleAPIError:  # nor were the tables
        return False


@pytest.fixture
def outbox(emulators: Emulators, large: Database) -> Commands:
    """The commands on the large table."""
    return Commands(emulators, large)


@pytest.mark.parametrize(("number", "code", "stopped"), [("9999", 1, ["pending"]), ("10000", 0, [])])
def test_a_count_stops_unless_a_limit_must_be_decided(outbox: Commands, number: str, code: int, stopped: list[str]):
    """A count that stopped is named; --max-pending means what it says, also where counts would stop."""
    told = outbox.run("status", "--json", "--max-pending", number)
    [line] = [line for line in json.loads(told.stdout)["topics"] if line["topic"] == "orders"]
    assert (told.code, line["pending"], line["at_least"]) == (code, STOP, stopped)
    assert (">= 10,000 tasks are pending, more than --max-pending 9,999\n" in told.stderr) == bool(code)


@pytest.mark.parametrize(
    "command",
    [
        "outbox list --limit 2000 --json",
        "outbox retry --ids-file <(outbox list --limit 2000 --json) --dry-run", "outbox --help",
    ],
)  # fmt: skip
def test_a_reader_that_has_enough_is_no_stack_trace(outbox: Commands, command: str):
    """`| head` closes the pipe in the middle of the output: the command ends and says nothing about it."""
    done = outbox.shell(f"{command} | head -n 1 | wc -l")
    assert (done.code, done.stdout.strip()) == (0, "1"), done
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_more_than_a_thousand_are_not_changed_unasked(outbox: Commands, large: Database):
    """Without a terminal it refuses with exit 2, the number and the flag; nothing is changed, and no bar is drawn."""
    told = outbox.run("retry", "--state", "dead")
    assert (told.code, told.stdout) == (2, "")
    assert told.stderr == (
        "outbox: 1,500 tasks will be sent again. Nobody can be asked here: give --yes. Nothing was changed\n"
    )
    assert len(table(large, "AvailableAt > '9999-01-01' AND Attempts = 16")) == DEAD


def test_a_dry_run_of_ten_thousand_ids_counts_those_that_exist(outbox: Commands, large: Database, tmp_path: Path):
    """Dead ones are counted, pending and unknown ones are not; nothing is changed."""
    file = tmp_path / "ids"
    kinds = ("pending", "dead", "unknown", "nobody's")
    file.write_text("\n".join(f"{kind}-{n:05}" for kind in kinds for n in range(2_500)))
    told = outbox.run("retry", "--ids-file", str(file), "--dry-run")
    assert told.code == 0
    assert told.stdout.startswith("1,500 tasks would be sent again, as by:\nUPDATE ")
    assert told.stdout.count("'nobody\\'s-") == 2_500
    assert len(table(large, "AvailableAt > '9999-01-01' AND Attempts = 16")) == DEAD


def test_ten_thousand_ids_that_are_not_there_are_told_in_a_line(outbox: Commands, tmp_path: Path):
    """Exit 1, ten of them by name."""
    file = tmp_path / "ids"
    file.write_text("\n".join(f"x-{n}" for n in range(10_000)))
    told = outbox.run("retry", "--ids-file", str(file))
    assert (told.code, told.stdout) == (1, "will be sent again: 0 tasks\n")
    assert "not in the table: x-0, x-1, x-2, " in told.stderr
    assert told.stderr.count("x-") == 10
