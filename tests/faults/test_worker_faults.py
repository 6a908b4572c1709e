"""Workers are killed, stopped, paused or replaced, or their log is gone."""

import contextlib
import signal

import pytest

from tests.support.trial import IN_FLIGHT, Trial
from tests.support.waiting import lasting


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
