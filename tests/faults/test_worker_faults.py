"""Workers are killed, stopped, paused or replaced, their log is gone, or Spanner or Pub/Sub fails."""

import contextlib
import re
import signal
from functools import partial
from typing import NamedTuple

import pytest

from tests.faults.faults import Harm, away, broken, calls, field_of
from tests.support.rpc import Fault
from tests.support.trial import IN_FLIGHT, Trial, recorded
from tests.support.waiting import eventually, lasting


def test_workers_killed(trial: Trial, long: bool) -> None:  # OUT-LOSS-2
    """SIGKILL of random workers in the middle of a backlog. Another worker takes the place of each.

    Promised: No task is lost. At most the in-flight batches of the killed workers are published again.
    """
    kills = 20 if long else 2
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(trial.workers(2))
        for _ in range(kills):
            trial.register(60)
            trial.wait_for_backlog(trial.random.randint(1, 59))
            victim = trial.random.randrange(2)
            workers[victim].stop(signal.SIGKILL)
            workers[victim].wait()
            workers[victim] = stack.enter_context(trial.worker())
        trial.settle()
    assert trial.audit(duplicates=kills * IN_FLIGHT).kept()


@pytest.mark.extended
def test_worker_sleeps(trial: Trial, long: bool) -> None:  # OUT-LOSS-6
    """A worker is paused until Spanner has ended its idle transaction (10 s) and the others poll its shards (14 s).

    Promised: No task is lost. Other workers take over the shards. The paused worker publishes at most its in-flight
    batches again.
    """
    sleeps = 3 if long else 1
    with trial.workers(2) as workers:
        for _ in range(sleeps):
            trial.register(120)
            trial.wait_for_backlog(100)
            sleeper = workers[trial.random.randrange(2)]
            sleeper.stop(signal.SIGSTOP)
            trial.register(30)
            trial.settle()  # by the other one, which takes over the shards after the liveness timeout
            sleeper.stop(signal.SIGCONT)
            trial.register(30)
            trial.settle()
        for each in workers:
            each.end()
    assert trial.audit(duplicates=sleeps * IN_FLIGHT).kept()


@pytest.mark.extended
def test_rolling_restart(trial: Trial, long: bool) -> None:
    """Ten restarts under load (two in the short form): a new worker starts, then an old one gets SIGTERM.

    Promised: No task is lost. Each worker exits with 0. At most the batches that are in flight while shards change
    hands, twice per restart, are published again.
    """
    restarts = 10 if long else 2
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(trial.workers(2))
        with trial.load():
            for place in [number % 2 for number in range(restarts)]:
                [new] = stack.enter_context(trial.workers(1))
                workers[place].stop()
                assert workers[place].wait() == 0
                workers[place] = new
        trial.settle()
    assert trial.audit(duplicates=2 * restarts * IN_FLIGHT).kept()


@pytest.mark.extended
@pytest.mark.parametrize("service", ["", "pubsub", "spanner"])
def test_ten_seconds_to_stop(trial: Trial, service: str) -> None:
    """SIGTERM under load on a platform that kills after 10 s, with --shutdown-timeout 5. A service may never answer.

    Promised: No task is lost. The worker has ended its batches within 10 s, and exits with 0 if both services answer.
    If not, it may be killed while its last requests have no answer. At most its in-flight batches are published again.
    """
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(trial.faulty(service)).network if service else None
        with trial.worker("--shutdown-timeout", "5") as worker, trial.load():
            trial.wait_for_first_task()
            if network:
                network.hang()
                trial.register(60)
            worker.stop()
            ended = partial(re.search, r'"action": "(stopped|shutdown_timeout)"')
            eventually(lambda: ended(worker.stderr), seconds=10, message="the batches have ended")
            if network:
                worker.stop(signal.SIGKILL)
            assert worker.wait(10) == 0 or network
        if network:
            network.forward()
        stack.enter_context(trial.worker())
        trial.settle()
    assert trial.audit(duplicates=3 * IN_FLIGHT if network else 0).kept()


@pytest.mark.extended
def test_logs_on_a_full_disk(trial: Trial, fault_seconds: float) -> None:
    """The disk is full, so no log line can be written.

    Promised: No task is lost or published twice. The worker goes on, and exits with 0 after SIGTERM.
    """
    with trial.worker("--log-level", "debug", FULL_DISK="1") as worker:
        with trial.load():
            lasting(fault_seconds)
        trial.settle()
        worker.end()
    assert trial.audit(duplicates=0).kept()


@pytest.mark.long("the simulation refuses writes, too")
def test_spanner_refuses_writes(trial: Trial) -> None:
    """Spanner answers reads, and refuses all commits of the workers for a minute, heartbeats included.

    Promised: No task is lost or published twice. The workers keep their shards, and mark what they have published when
    commits work again.
    """
    with field_of(trial, 2, ("spanner",)) as field:
        with calls("spanner", "Commit", Fault.REFUSED, 1.0)(field, 60.0):
            for _ in range(4):
                trial.register(20)
                lasting(15.0)
        trial.settle()
    assert trial.audit(duplicates=0).kept()


NOTHING = "No task is lost or published twice."
UNANSWERED = "No task is lost. At most the requests that Pub/Sub had not answered are published again."
UNMARKED = "No task is lost. At most the tasks that were published but not marked at its start are published again."


class Scenario(NamedTuple):
    title: str
    promise: str
    services: tuple[str, ...]
    harm: Harm


SPANNER, PUBSUB, BOTH = ("spanner",), ("pubsub",), ("pubsub", "spanner")
SCENARIOS = {
    "spanner_commits_lost": Scenario(
        "Spanner gets the commit, and then the connection is cut, for 20 % of the commits. Their outcome is unknown.",
        f"{NOTHING} The client commits again, or the next turn finds the mark.",
        SPANNER, calls("spanner", "Commit", Fault.LOST, 0.2),
    ),
    "pubsub_answers_lost": Scenario(
        "Pub/Sub gets the request, and then the connection is cut, for 20 % of the requests. Their outcome is unknown.",
        UNANSWERED, PUBSUB, calls("pubsub", "Publish", Fault.LOST, 0.2),
    ),
    "connections_cut": Scenario("The workers' connections are cut twice a second.", UNANSWERED, BOTH, broken("cut")),
    "connections_half_closed": Scenario(
        "Twice a second, the workers' connections are half-closed: workers can send no more requests on them, but "
        "still receive answers.",
        UNANSWERED, BOTH, broken("half_close"),
    ),
    "pubsub_refuses": Scenario(
        "Pub/Sub refuses connections and cuts the open ones.", UNANSWERED, PUBSUB, away("refuse", "pubsub")
    ),
    "pubsub_hangs": Scenario(
        "Pub/Sub accepts connections and never answers.",
        f"{UNANSWERED} So are the probes: one per topic, worker and second.",
        PUBSUB, away("hang", "pubsub"),
    ),
    "spanner_refuses": Scenario(
        "Spanner refuses connections and cuts the open ones.", UNMARKED, SPANNER, away("refuse", "spanner")
    ),
    "spanner_hangs": Scenario(
        "Spanner accepts connections and never answers.", UNMARKED, SPANNER, away("hang", "spanner")
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "scenario",
    [
        "spanner_commits_lost",
        "pubsub_answers_lost",
        *(
            pytest.param(name, marks=pytest.mark.extended)
            for name in ("connections_cut", "pubsub_hangs", "spanner_refuses", "spanner_hangs")
        ),
        *(
            pytest.param(name, marks=pytest.mark.long("others break connections, too"))
            for name in ("connections_half_closed", "pubsub_refuses")
        ),
    ],
)
def test_a_service_fails(trial: Trial, fault_seconds: float, scenario: str) -> None:
    """The fault comes under load and lasts until a worker has met it. The backlog is sent when it is over."""
    _, _, services, harm = SCENARIOS[scenario]
    with field_of(trial, 2, services) as field:
        with trial.load():
            trial.wait_for_first_task()
            with harm(field, fault_seconds) as effect:
                lasting(fault_seconds, effect.again)
                eventually(effect.met, seconds=40, message=f"a worker meets {scenario}")
                if scenario in {"pubsub_refuses", "pubsub_hangs"}:
                    assert recorded(trial.database) == 0
        trial.settle()
    assert trial.audit(duplicates=effect.duplicates()).kept()
