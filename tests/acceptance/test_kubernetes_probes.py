"""Workers as Kubernetes treats them: probes, and the 512 MB that the manifest allows.

With `--long` ages and limits are those of production.
"""

from pathlib import Path

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.base.schedules import OUTAGE_PROBE
from outbox.devtools.emulators import Emulators
from tests.support.container import MEMORY_LIMIT, NOTICE_SECONDS, Probe, altered, peak_memory, settings
from tests.support.proxy import Proxy
from tests.support.relays import register, unsent, wait_until_all_sent, worker
from tests.support.spanner import count
from tests.support.trial import cpu_seconds, log_count, recorded, seconds_until
from tests.support.waiting import eventually

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

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


def test_a_blocked_loop_fails_its_probe(emulators: Emulators, database: Database, heartbeat: Path, long: bool) -> None:
    """A process that lives and does nothing is bad: other threads of it do not touch the file."""
    probe = Probe(heartbeat, None if long else SHORT_AGE)
    with altered(BLOCKED_LOOP, settings(emulators, database.database_id, heartbeat)) as process:
        eventually(probe.is_good, seconds=30)
        seconds_until(probe.is_bad, NOTICE_SECONDS, "the probe sees a blocked loop")
        assert process.child.poll() is None


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
