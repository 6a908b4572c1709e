"""SIGKILL of random workers while they work.

Promised: nothing lost; again comes at most what the dead had in flight, their groups.
"""

import contextlib
import signal

from tests.support.trial import IN_FLIGHT, Trial
from tests.support.waiting import eventually


def test_workers_killed(trial: Trial, long: bool) -> None:
    """Each dies with a backlog to work on, and another one takes its place."""
    kills = 20 if long else 4
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(trial.workers(2))
        for _ in range(kills):
            trial.register(60)
            moment = trial.random.randint(1, 59)
            eventually(lambda at=moment: trial.backlog() <= at, seconds=30, message="some are sent")
            victim = trial.random.randrange(2)
            workers[victim].stop(signal.SIGKILL)
            workers[victim].wait()
            workers[victim] = stack.enter_context(trial.worker())
        trial.settle()
    assert trial.audit(duplicates=kills * IN_FLIGHT).kept()
