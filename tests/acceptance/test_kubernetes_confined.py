"""A worker in a container: process 1, an ordinary user without rights, one small directory that can be written.

Linux namespaces do it, without an engine. An engine without root needs them, too.
"""

import json
import os
import signal
from pathlib import Path

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from tests.support.container import GRACE_SECONDS, Probe, container, need_namespaces, settings
from tests.support.processes import children
from tests.support.pubsub import Subscription
from tests.support.relays import EACH_ONCE, account, register, wait_until_all_sent
from tests.support.waiting import eventually

pytestmark = pytest.mark.extended

#: Reports the worker's process from inside, and tries to write in its own folders and next to them.
LOOK = """
import json, os
from pathlib import Path
import publishworker
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
refused = []
for directory in ("/", "/tmp", "/etc", os.getcwd(), os.path.dirname(publishworker.__file__)):
    try:
        Path(directory, "written-by-a-worker").touch()
    except OSError as error:
        refused.append(error.strerror)
print(json.dumps({
    "pid": os.getpid(), "user": os.getuid(), "group": os.getgid(), "rights": int(status["CapEff"], 16),
    "no new rights": int(status["NoNewPrivs"]), "refused": refused,
}), flush=True)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where the only file system is mounted that a worker can write."""
    need_namespaces(tmp_path)
    return tmp_path


def test_a_worker_runs_as_process_1_without_rights_on_a_read_only_file_system(
    emulators: Emulators, database: Database, subscription: Subscription, directory: Path
) -> None:
    """It sends tasks, writes its heartbeat and nothing else, starts no process, and ends with 0 at SIGTERM.

    Process 1 has no default handlers: a signal without a handler would be lost.
    """
    ids = register(database, subscription.topic, 60)
    environment = settings(emulators, database.database_id, directory / "heartbeat")
    with container(directory, environment, LOOK) as (process, worker):
        process.wait_for_text("refused")
        inside = Path(f"/proc/{worker}/root{directory}")
        probe = Probe(inside / "heartbeat")
        eventually(probe.is_good, seconds=30)
        wait_until_all_sent(database)
        assert [each.name for each in inside.iterdir()] == ["heartbeat"]
        assert children(worker) == []
        os.kill(worker, signal.SIGTERM)
        assert process.wait(GRACE_SECONDS) == 0
        assert json.loads(process.stdout) == {
            "pid": 1, "user": 65532, "group": 65532, "rights": 0, "no new rights": 1,
            "refused": ["Read-only file system"] * 5,
        }  # fmt: skip
        warnings = [line for line in process.stderr.splitlines() if json.loads(line)["status"] != "info"]
    assert warnings == []
    assert not any(directory.iterdir())  # the files were written in the namespace
    assert account(ids, subscription) == EACH_ONCE
