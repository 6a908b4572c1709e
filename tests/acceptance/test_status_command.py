"""`outbox status`, `topics` and `workers`: current rows, bounds, running workers, and the exit code for a pager."""

from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database

from outbox import __version__
from outbox.admin import tasks
from outbox.cli import error_tables
from outbox.devtools.emulators import Emulators
from tests.support.commands import HOUR, Commands, row
from tests.support.operations import insert
from tests.support.relays import divided, worker
from tests.support.waiting import eventually


def pause(database: Database, *topics: str) -> None:
    with database.batch() as batch:
        rows = [(topic, True, 5) for topic in topics]
        batch.insert("AsynchronousTaskTopics", ("Topic", "Paused", "MaxInFlight"), rows)


def test_a_change_shows_at_once_in_every_command(outbox: Commands, database: Database):
    """Commands that read the past would contradict each other right after a retry or a pause."""
    insert(database, [row("dead", "dead"), row("other", topic="invoices")])
    for words in (("retry", "dead"), ("pause", "invoices")):
        assert outbox.here(*words).code == 0
    [status], [topics] = outbox.objects("status", "--json"), outbox.objects("topics", "--json")
    assert {(task["id"], task["state"]) for task in outbox.objects("list", "--json")} == {
        ("other", "pending"), ("dead", "pending"),
    }  # fmt: skip
    for whole in (status, topics):
        seen = [(line["topic"], line["paused"], line["pending"], line["dead"]) for line in whole["topics"]]
        assert seen == [("invoices", True, 1, 0), ("orders", False, 1, 0)]


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


def test_an_exceeded_age_or_count_is_exit_code_1(outbox: Commands, database: Database):
    """A sentence says which limit and by how much, otherwise it is 0. In paused topics, only dead tasks count."""
    insert(database, [row("a"), row("b", age=2 * HOUR), row("p", topic="paused", age=9 * HOUR)])
    insert(database, [row("d", "dead"), row("e", "dead", topic="paused")])
    pause(database, "paused")
    oldest = "the oldest task has waited 2h (topic orders, priority 50), more than --max-age 1h 30m"
    for words, sentence in {
        ("--max-age", "90m"): oldest,
        ("--max-age", "3h"): "",
        ("--max-pending", "1"): "2 tasks are pending, more than --max-pending 1",
        ("--max-pending", "2"): "",
        ("--max-dead", "1"): "2 tasks are dead, more than --max-dead 1",
        ("--max-dead", "2"): "",
    }.items():
        done = outbox.here("status", "--exact", *words)
        assert (done.code, sentence in done.stderr) == (1 if sentence else 0, True), (words, done)
        assert bool(done.stderr) == bool(sentence)
        assert "paused (paused)" in done.stdout


@pytest.mark.extended
def test_workers_say_what_they_poll_and_how_they_are_set(
    emulators: Emulators, database: Database, outbox: Commands
) -> None:
    with worker(emulators, database) as first, worker(emulators, database, "--batch-size", "50") as second:
        eventually(lambda: divided([first, second]), seconds=30, message="both divide the shards")

        def settled() -> bool:
            [found] = outbox.objects("workers", "--json")
            return polled(found) == list(range(10))

        eventually(settled, seconds=30, message="both have written a heartbeat since")
        done = outbox.here("workers", "--check")
        assert (done.code, done.stderr.splitlines()) == (
            1, ["outbox: --batch-size differs between live workers: 50, default"],
        )  # fmt: skip
        [found] = outbox.objects("workers", "--json")
        assert {each["version"] for each in found["workers"]} == {__version__}
        assert {each["settings"].get("batch_size") for each in found["workers"]} == {50, None}
        first.end()
        second.end()
    assert outbox.objects("workers", "--json")[0]["workers"] == []


def polled(found: Any) -> list[int]:
    return sorted(shard for each in found["workers"] for shard in each["shards"])
