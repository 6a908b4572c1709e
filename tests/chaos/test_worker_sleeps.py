"""SIGSTOP and SIGCONT: a worker that sleeps through its transaction's limits and through its lease.

Promised: nothing lost, the others take its shards, and when it wakes up it repeats at most what it had in flight.
"""

import signal

from tests.support.outages import lasting
from tests.support.trial import IN_FLIGHT, Trial
from tests.support.waiting import eventually


def test_worker_sleeps(trial: Trial, long: bool) -> None:
    """For longer than the 10 s that Spanner allows a transaction to idle, and the 15 s of a lease."""
    sleeps = 3 if long else 1
    with trial.workers(2) as workers:
        for _ in range(sleeps):
            trial.register(120)
            eventually(lambda: trial.backlog() < 100, seconds=30, message="some are sent")
            sleeper = workers[trial.random.randrange(2)]
            sleeper.stop(signal.SIGSTOP)
            lasting(17)
            trial.register(30)
            trial.settle()  # by the other one
            sleeper.stop(signal.SIGCONT)
            trial.register(30)
            trial.settle()
        for each in workers:
            each.stop()
        assert [each.wait() for each in workers] == [0, 0]
    assert trial.audit(duplicates=sleeps * IN_FLIGHT).kept()
