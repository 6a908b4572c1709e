"""SIGKILL of all workers at once, as when a node dies.

Promised: nothing lost; again comes at most what they had in flight.
"""

import signal

from tests.support.trial import IN_FLIGHT, Trial
from tests.support.waiting import eventually


def test_all_workers_killed(trial: Trial, long: bool) -> None:
    """Each time in the middle of a backlog."""
    times = 5 if long else 1
    for _ in range(times):
        with trial.workers(2) as workers:
            trial.register(120)
            eventually(lambda: trial.backlog() < 80, seconds=30, message="some are sent")
            for each in workers:
                each.stop(signal.SIGKILL)
    with trial.workers(1):
        trial.settle()
    assert trial.audit(duplicates=times * 2 * IN_FLIGHT).kept()
