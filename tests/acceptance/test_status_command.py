"""`outbox status` and `workers`: bounds, and running workers."""

from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database

from outbox import __version__
from outbox.admin import tasks
from outbox.cli import error_tables
from outbox.devtools.emulators import Emulators
from tests.support.commands import Commands, row
from tests.support.operations import insert
from tests.support.relays import divided, worker
from tests.support.waiting import eventually


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
