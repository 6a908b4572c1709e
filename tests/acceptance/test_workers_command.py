"""Real workers and a topic that does not exist: operators see the reason at once, and who does what."""

from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database

from outbox import __version__
from outbox.devtools.emulators import Emulators
from tests.support.commands import Commands
from tests.support.relays import divided, worker
from tests.support.waiting import eventually


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
