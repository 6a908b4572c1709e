"""A rolling restart under load: SIGTERM, and another one takes the place.

Promised: nothing lost, exit code 0; again comes at most what is in flight where shards change hands, twice a restart.
"""

import contextlib

from tests.support.trial import IN_FLIGHT, Trial


def test_rolling_restart(trial: Trial, long: bool) -> None:
    """Each worker is replaced, the new one is there before the old one goes."""
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
