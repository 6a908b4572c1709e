"""A rolling restart under load: SIGTERM, and another one takes the place.

Promised: nothing lost and nothing twice, exit code 0.
"""

import contextlib

from tests.support.trial import Trial


def test_rolling_restart(trial: Trial, long: bool) -> None:
    """Each worker is replaced, the new one is there before the old one goes."""
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(trial.workers(2))
        with trial.load():
            for place in [0, 1] * (5 if long else 1):
                [new] = stack.enter_context(trial.workers(1))
                workers[place].stop()
                assert workers[place].wait() == 0
                workers[place] = new
        trial.settle(30)
    trial.audit(duplicates=0)
