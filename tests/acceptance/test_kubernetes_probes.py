"""Workers as Kubernetes treats them: probes, and a batch that does not end.

With `--long` ages and limits are those of production.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from publishworker.process.healthcheck import MAX_AGE
from publishworker.telemetry import metrics as m
from publishworker.topics.circuit_breaker import MAX_OUTAGE_PROBE_SECONDS
from tests.support.container import NOTICE_SECONDS, Probe, altered, settings
from tests.support.dogstatsd import listening
from tests.support.outages import cpu_seconds, log_count, log_lines, recorded, seconds_until
from tests.support.processes import Process
from tests.support.proxy import Proxy
from tests.support.pubsub import PubSub
from tests.support.relays import EACH_ONCE, account, register, unsent, wait_until_all_sent, worker
from tests.support.waiting import eventually

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]

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
from publishworker.spanner import store
store.READ_SECONDS, store.HEARTBEAT_TIMEOUT_SECONDS, worker.MAX_OUTAGE_WAIT_SECONDS = 3.0, 0.5, 0.5
"""


#: Batches of one topic never end, and a batch is stuck after 3 s.
STUCK = """
import threading
from publishworker.delivery import delivery
from publishworker.turn import in_flight
in_flight.STUCK_SECONDS = 3.0
deliver = delivery.Delivery.deliver
def hang(self, batch):
    return threading.Event().wait() if batch.topic.endswith("never-ends") else deliver(self, batch)
delivery.Delivery.deliver = hang
"""


@pytest.fixture
def heartbeat(tmp_path: Path) -> Path:
    return tmp_path / "heartbeat"


@contextmanager
def frozen(process: Process) -> Iterator[None]:
    process.stop(signal.SIGSTOP)
    try:
        yield
    finally:
        process.stop(signal.SIGCONT)


def test_a_stopped_process_fails_its_probe_and_a_continued_one_does_not(
    emulators: Emulators, database: Database, heartbeat: Path, long: bool
) -> None:
    """SIGSTOP: bad within 60 s with the default age, and not before that age; SIGCONT: good."""
    probe = Probe(heartbeat, None if long else SHORT_AGE)
    with worker(emulators, database, OUTBOX_HEARTBEAT_FILE=str(heartbeat)) as process:
        assert probe.is_bad()  # nothing has been touched yet
        assert "No heartbeat" in probe.output
        eventually(probe.is_good, seconds=30)
        with frozen(process):
            after = seconds_until(probe.is_bad, NOTICE_SECONDS, "the probe sees a stopped process")
            assert probe.is_bad()
            assert "--max-age is" in probe.output
        eventually(probe.is_good)
    assert after > (MAX_AGE if long else SHORT_AGE) - 2


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
    seconds, max_seconds = 60 if long else 12, 10.0 if silent == "Spanner" else MAX_OUTAGE_PROBE_SECONDS + 10
    probe = Probe(heartbeat, None if long else SHORT_AGE)
    host = emulators.spanner_host if silent == "Spanner" else emulators.pubsub_host
    variable = "SPANNER_EMULATOR_HOST" if silent == "Spanner" else "PUBSUB_EMULATOR_HOST"
    with Proxy(host) as proxy:
        environment = settings(emulators, database.database_id, heartbeat, **{variable: proxy.address})
        arguments = ("--batch-size", "10", *(() if long else ("--publish-timeout", "0.4")))
        with altered("" if long else SHORT_LIMITS, environment, *arguments) as process:
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


def test_a_stuck_batch_is_counted_and_logged_and_ends_the_worker(
    emulators: Emulators, database: Database, pubsub: PubSub, heartbeat: Path
) -> None:
    """Exit 1, `outbox.stuck_batch_count`, a line; other tasks are sent meanwhile, and another worker sends these."""
    topics = pubsub.new_topic("never-ends"), pubsub.new_topic()
    subscriptions = [pubsub.new_subscription(topic) for topic in topics]
    with listening() as agent:
        environment = settings(emulators, database.database_id, heartbeat, **agent.environment)
        with altered(STUCK, environment, "--batch-size", "10") as process:
            process.wait_for_text('"start"')
            ids = [register(database, topic, 20) for topic in topics]
            assert process.wait(60) == 1
            [line] = [line for line in log_lines(process) if line["action"] == "stuck"]
            assert line["status"] == "critical"
            assert topics[0] in line["message"]
            assert "Traceback" not in process.stderr
        eventually(lambda: agent.counts[m.STUCK.name] == 2)
    assert set(unsent(database)) == set(ids[0])
    with worker(emulators, database, command="drain") as other:
        assert other.wait(60) == 0
    for registered, subscription in zip(ids, subscriptions, strict=True):
        assert account(registered, subscription) == EACH_ONCE
