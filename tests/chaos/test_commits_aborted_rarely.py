"""Spanner aborts 5 % of the commits.

Promised: nothing lost and nothing twice: what was published is remembered while the transaction runs again.
"""

from tests.support.outages import lasting
from tests.support.rpc import Fault
from tests.support.trial import Trial


def test_commits_aborted_rarely(trial: Trial, fault_seconds: float) -> None:
    """Those of heartbeats, too."""
    with trial.faulty_spanner() as spanner, trial.workers(2):
        with spanner.failing(trial.chance(0.05, Fault.ABORTED, "Commit")), trial.load():
            lasting(fault_seconds)
        trial.settle()
    faults = spanner.seen["Commit", Fault.ABORTED]
    assert faults > 0
    assert trial.audit(duplicates=0).kept()
