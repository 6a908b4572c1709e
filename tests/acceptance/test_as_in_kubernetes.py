"""Workers as Kubernetes treats them: probes, a group that does not end, a stop under load, a start without Spanner.

With `--long` ages and limits are those of production.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.emulators import Emulators, running_spanner
from publishworker.healthcheck import MAX_AGE
from publishworker.telemetry import metrics as m
from tests.support.agent import listening
from tests.support.container import GRACE_SECONDS, NOTICE_SECONDS, Probe, altered, settings
from tests.support.outages import lasting, log_lines, seconds_until, told
from tests.support.processes import Process
from tests.support.proxy import Proxy, hanging, refusing
from tests.support.pubsub import PubSub, Subscription
from tests.support.relays import account, divided, register, unsent, wait_until_all_sent, worker
from tests.support.spanner import instance, outbox_database
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
#: A tenth of the limits that together make the longest time between two beats.
SHORT_LIMITS = """
from publishworker import worker
from publishworker.spanner import store
store.POLL_SECONDS, store.HEARTBEAT_SECONDS, worker.LONGEST_OUTAGE_WAIT = 3.0, 0.5, 0.5
"""
#: Of a group in an outage the lock, the commit and the aborts have their limits, 15 s together where connections are
#: refused; but not on the emulator, where a worker's groups wait for one another as well.
SHORT_STUCK = """
from publishworker import process
from publishworker.turn import flights
flights.STUCK_SECONDS = 16.0
store = process.SpannerStore
process.SpannerStore = lambda database, shards, *, emulator: store(database, shards)
"""
OUTAGE_SECONDS = 30.0
#: Groups of one topic never end, and stuck is what lasts for more than 3 s.
STUCK = """
import threading
from publishworker.turn import delivery, flights
flights.STUCK_SECONDS = 3.0
deliver = delivery.Delivery.deliver
def hang(self, group):
    return threading.Event().wait() if group.topic.endswith("never-ends") else deliver(self, group)
delivery.Delivery.deliver = hang
"""


@pytest.fixture
def heartbeat(tmp_path: Path) -> Path:
    """The file that a worker touches."""
    return tmp_path / "heartbeat"


@contextmanager
def frozen(process: Process) -> Iterator[None]:
    """Stop a process for the time of the block, as a node does that hangs."""
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
        assert "no heartbeat" in probe.said
        eventually(probe.is_good, seconds=30)
        with frozen(process):
            after = seconds_until(probe.is_bad, NOTICE_SECONDS, "the probe sees a stopped process")
            assert probe.is_bad()
            assert "s are allowed" in probe.said
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
    """A service that accepts and never answers, under load: an outage must not restart the fleet."""
    probe = Probe(heartbeat, None if long else SHORT_AGE)
    host = emulators.spanner_host if silent == "Spanner" else emulators.pubsub_host
    variable = "SPANNER_EMULATOR_HOST" if silent == "Spanner" else "PUBSUB_EMULATOR_HOST"
    with Proxy(host) as proxy:
        environment = settings(emulators, database.database_id, heartbeat, **{variable: proxy.address})
        arguments = ("--group-size", "10", *(() if long else ("--publish-timeout", "0.4")))
        with altered("" if long else SHORT_LIMITS, environment, *arguments) as process:
            eventually(probe.is_good, seconds=30)
            register(database, topic, 120)
            eventually(lambda: len(unsent(database)) < 120, seconds=30)
            proxy.hang()
            gap = probe.longest_gap(60 if long else 12, lambda: check(probe))
            proxy.forward()
            wait_until_all_sent(database)
            process.stop()
            assert process.wait() == 0
            if silent == "Spanner":
                assert told(process, "spanner_away") == told(process, "spanner_back") == 1
    print(f"{silent} silent: the longest time between two beats is {gap:.1f} s")


def test_an_outage_longer_than_a_group_may_last_makes_none_stuck(
    emulators: Emulators, database: Database, topic: str, heartbeat: Path, *, long: bool
) -> None:
    """Spanner is gone, with groups in flight, for longer than stuck is: no worker ends for that."""
    if not long:
        pytest.skip("--long; the short form is tests/unit/test_relay.py::test_what_landed_is_told_though_polls_fail")
    with Proxy(emulators.spanner_host) as proxy:
        environment = settings(emulators, database.database_id, heartbeat, SPANNER_EMULATOR_HOST=proxy.address)
        with altered(SHORT_STUCK, environment, "--group-size", "10") as process:
            process.wait_for_text('"start"')
            register(database, topic, 300)
            eventually(lambda: len(unsent(database)) < 300, seconds=30)
            proxy.refuse()
            lasting(OUTAGE_SECONDS)
            proxy.forward()
            eventually(lambda: process.child.poll() is not None or not unsent(database), seconds=60)
            assert told(process, "stuck") == 0
            assert process.child.poll() is None


def check(probe: Probe) -> None:
    """Say what a probe that is not good has said."""
    assert probe.is_good(), probe.said


def test_a_stuck_group_is_counted_and_said_and_ends_the_worker(
    emulators: Emulators, database: Database, pubsub: PubSub, heartbeat: Path
) -> None:
    """Exit 1, `outbox.stuck_group_count`, a line; other tasks go on meanwhile, another worker sends the stuck ones."""
    topics = pubsub.new_topic("never-ends"), pubsub.new_topic()
    subscriptions = [pubsub.new_subscription(topic) for topic in topics]
    with listening() as agent:
        environment = settings(emulators, database.database_id, heartbeat, **agent.environment)
        with altered(STUCK, environment, "--group-size", "10") as process:
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
        result = account(registered, subscription)
        assert (result.lost, result.unexpected, result.duplicates) == (frozenset(), frozenset(), 0)


@pytest.fixture
def patient_database() -> Iterator[tuple[str, Database]]:
    """The host of an emulator on which, as on Spanner, nobody who holds a lock is aborted; and a database on it."""
    flags = ["--abort_current_transaction_probability=0"]
    with running_spanner(flags=flags) as host, outbox_database(instance(host)) as made:
        yield host, made


def test_sigterm_under_full_load_loses_and_repeats_nothing(
    emulators: Emulators, patient_database: tuple[str, Database], topic: str, subscription: Subscription
) -> None:
    """One of two workers is stopped in the middle: exit 0 within the grace period, the other one sends the rest."""
    host, database = patient_database
    ids = register(database, topic, 600)
    arguments, environment = ("--group-size", "10"), {"SPANNER_EMULATOR_HOST": host}
    with (
        worker(emulators, database, *arguments, **environment) as first,
        worker(emulators, database, *arguments, **environment) as second,
    ):
        eventually(lambda: len(unsent(database)) < 500 and divided([first, second]), seconds=60)
        first.stop()
        took = seconds_until(lambda: first.child.poll() is not None, GRACE_SECONDS, "a stop within the grace period")
        assert first.wait() == 0
        left = len(unsent(database))
        wait_until_all_sent(database)
        second.stop()
        assert second.wait() == 0
        sent = [sum(line.get("published", 0) for line in log_lines(each)) for each in (first, second)]
    print(f"stopped within {took:.1f} s with {left} of {len(ids)} tasks left; the workers sent {sent}")
    assert left
    assert all(sent)
    result = account(ids, subscription)
    assert (result.lost, result.unexpected, result.duplicates) == (frozenset(), frozenset(), 0)


@pytest.mark.parametrize("absent", [refusing, hanging])
def test_a_start_without_spanner_ends_within_the_startup_probe(
    emulators: Emulators, database: Database, heartbeat: Path, absent: object
) -> None:
    """Exit 3 and one sentence before the 60 s of the startup probe are over, and no heartbeat that would satisfy it."""
    with absent(emulators.spanner_host) as host:
        environment = settings(emulators, database.database_id, heartbeat, SPANNER_EMULATOR_HOST=host)
        with altered("", environment) as process:
            assert process.wait(55) == 3
            [line] = process.stderr.splitlines()
    assert line.startswith("publishworker: ")
    assert not heartbeat.exists()
