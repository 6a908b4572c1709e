"""The memory of a worker with default settings, against the 512 MB that the manifest allows."""

from pathlib import Path

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from tests.support.container import MEMORY_LIMIT, peak_memory
from tests.support.relays import register, worker
from tests.support.spanner import count
from tests.support.waiting import eventually

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

BACKLOG = 10_000


def test_a_backlog_of_10_000_tasks(
    emulators: Emulators, database: Database, topic: str, tmp_path: Path, long: bool
) -> None:
    """The first tenth of it is sent within the limit; all of it with `--long`."""
    register(database, topic, BACKLOG)
    left = 0 if long else BACKLOG * 9 // 10
    with worker(emulators, database, OUTBOX_HEARTBEAT_FILE=str(tmp_path / "heartbeat")) as process:
        eventually(lambda: count(database, "SentAt IS NULL") <= left, seconds=200)
        peak = peak_memory(process)
        process.end()
    print(f"a backlog of {BACKLOG:,} tasks: {peak / 2**20:.0f} MiB")
    assert peak < MEMORY_LIMIT
