"""Workers and commands as containers and Kubernetes run them: process 1, without rights, probes, and limits of memory.

Linux namespaces do it, without an engine. An engine without root needs them, too. With `--long` ages and limits are
those of production.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.base.schedules import OUTAGE_PROBE
from outbox.devtools.emulators import Emulators
from tests.support.container import (
    GRACE_SECONDS,
    MEMORY_LIMIT,
    NAMESPACES,
    NOTICE_SECONDS,
    Probe,
    altered,
    container,
    need_namespaces,
    peak_memory,
    settings,
)
from tests.support.processes import ROOT, children, clean_environment
from tests.support.proxy import LOOPBACK, Proxy
from tests.support.pubsub import Subscription
from tests.support.relays import EACH_ONCE, account, register, unsent, wait_until_all_sent, worker
from tests.support.spanner import count
from tests.support.trial import cpu_seconds, log_count, recorded, seconds_until
from tests.support.waiting import eventually

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


@pytest.mark.extended
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


BACKLOG = 10_000
#: Seconds of the short forms: an age that a busy machine does not reach by itself.
SHORT_AGE = 6.0
BLOCKED_LOOP = """
import threading
from publishworker.turn.relay import Relay
turn, turns = Relay.turn, []
def blocked(self, stopping):
    turns.append(turn(self, stopping))
    return turns[0] if len(turns) == 1 else threading.Event().wait()
Relay.turn = blocked
"""
#: A tenth of the limits that add up to the max time between two heartbeats.
SHORT_LIMITS = """
from publishworker.turn import worker
from publishworker.delivery import delivery
from publishworker.spanner import store
delivery.PUBLISH_SECONDS = 0.4
store.READ_SECONDS, store.HEARTBEAT_TIMEOUT_SECONDS, worker.OUTAGE = 3.0, 0.5, worker.OUTAGE._replace(most=0.5)
"""


@pytest.fixture
def heartbeat(tmp_path: Path) -> Path:
    return tmp_path / "heartbeat"


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_a_blocked_loop_fails_its_probe(emulators: Emulators, database: Database, heartbeat: Path, long: bool) -> None:
    """A process that lives and does nothing is bad: other threads of it do not touch the file."""
    probe = Probe(heartbeat, None if long else SHORT_AGE)
    with altered(BLOCKED_LOOP, settings(emulators, database.database_id, heartbeat)) as process:
        eventually(probe.is_good, seconds=30)
        seconds_until(probe.is_bad, NOTICE_SECONDS, "the probe sees a blocked loop")
        assert process.child.poll() is None


@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.parametrize("silent", ["Spanner", "Pub/Sub"])
def test_a_probe_stays_good_while_a_service_is_silent(
    emulators: Emulators, database: Database, topic: str, heartbeat: Path, *, long: bool, silent: str
) -> None:
    """A service that accepts and never answers, under load: an outage must neither restart workers nor use a core.

    It is logged once, records no attempt, and the first task is sent within 10 s of its end, or of the next probe.
    """
    seconds, max_seconds = 60 if long else 12, 10.0 if silent == "Spanner" else OUTAGE_PROBE.most + 10
    probe = Probe(heartbeat, None if long else SHORT_AGE)
    host = emulators.spanner_host if silent == "Spanner" else emulators.pubsub_host
    variable = "SPANNER_EMULATOR_HOST" if silent == "Spanner" else "PUBSUB_EMULATOR_HOST"
    with Proxy(host) as proxy:
        environment = settings(emulators, database.database_id, heartbeat, **{variable: proxy.address})
        with altered("" if long else SHORT_LIMITS, environment, "--batch-size", "10") as process:
            eventually(probe.is_good, seconds=30)
            register(database, topic, 120)
            eventually(lambda: len(unsent(database)) < 120, seconds=30)
            proxy.hang()
            before = cpu_seconds(process.pid)
            gap = probe.max_gap(seconds, lambda: check(probe))
            share = (cpu_seconds(process.pid) - before) / seconds
            assert recorded(database) == 0
            waiting = len(unsent(database))
            proxy.forward()
            first = seconds_until(lambda: len(unsent(database)) < waiting, max_seconds, "a task is sent")
            wait_until_all_sent(database)
            if silent == "Spanner":
                eventually(
                    lambda: log_count(process, "spanner_unavailable") == log_count(process, "spanner_available") == 1
                )
            process.end()
    print(f"{silent} silent: {gap:.1f} s between two heartbeats, {share:.1%} of a core, first sent after {first:.1f} s")
    assert share < 0.05


def check(probe: Probe) -> None:
    assert probe.is_good(), probe.output


@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.long("10,000 tasks")
def test_the_memory_of_a_worker_with_a_backlog_of_10_000_tasks(
    emulators: Emulators, database: Database, topic: str, heartbeat: Path
) -> None:
    register(database, topic, BACKLOG)
    with worker(emulators, database, OUTBOX_HEARTBEAT_FILE=str(heartbeat)) as process:
        eventually(lambda: count(database, "SentAt IS NULL") == 0, seconds=200)
        peak = peak_memory(process)
        process.end()
    print(f"a backlog of {BACKLOG:,} tasks: {peak / 2**20:.0f} MiB")
    assert peak < MEMORY_LIMIT


PLACE = {"OUTBOX_PROJECT": "my-project", "OUTBOX_INSTANCE": "main", "OUTBOX_DATABASE": "shop"}
#: A command ends within this time, although a request may last for 30 s.
PROMPT_SECONDS = 3.0


@contextlib.contextmanager
def process_1(*words: str, environment: Mapping[str, str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start `python -m words` as process 1 of a namespace; yield the one that waits for it, and its ID out here."""
    command = [*NAMESPACES, sys.executable, "-m", *words]
    variables = clean_environment() | PLACE | environment
    with subprocess.Popen(command, cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True) as outer:
        try:
            yield outer, eventually(lambda: children(outer.pid), message="process 1")[0]
        finally:
            outer.kill()


def handles_sigterm(pid: int) -> bool:
    """Return whether a process is the Python of a command, with a handler for SIGTERM. Python itself has none."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return status["Name"].strip() != "unshare" and bool(int(status["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize(
    ("words", "number", "code"),
    [
        ("publishworker run", signal.SIGTERM, 0),
        ("publishworker drain", signal.SIGTERM, 4),
        ("outbox_admin list", signal.SIGINT, 130),
        ("outbox_pipeline drain", signal.SIGTERM, 143),
    ],
)
def test_a_signal_during_the_imports_ends_a_command(words: str, number: signal.Signals, code: int) -> None:
    """The handlers are there before the clients are loaded, which takes most of the time."""
    with process_1(*words.split(), environment={}) as (outer, pid):
        eventually(lambda: handles_sigterm(pid))
        assert "cygrpc" not in Path(f"/proc/{pid}/maps").read_text()
        os.kill(pid, number)
        assert outer.wait(PROMPT_SECONDS) == code
        assert outer.stderr is not None
        assert outer.stderr.read() == ""


@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize(
    ("words", "number", "code"),
    [
        ("publishworker run", signal.SIGTERM, 0),
        pytest.param("publishworker drain", signal.SIGINT, 4, marks=pytest.mark.extended),
        pytest.param("outbox_admin tail", signal.SIGTERM, 0, marks=pytest.mark.extended),
        ("outbox_admin retry an-id", signal.SIGTERM, 143),
    ],
)
def test_a_signal_ends_a_command_whose_first_request_hangs(words: str, number: signal.Signals, code: int) -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:
        silent.settimeout(30)
        host = f"{LOOPBACK}:{silent.getsockname()[1]}"
        with process_1(*words.split(), environment={"SPANNER_EMULATOR_HOST": host}) as (outer, pid), silent.accept()[0]:
            os.kill(pid, number)
            assert outer.wait(PROMPT_SECONDS) == code
