"""Spanner answers one in three Commits with UNAVAILABLE, and has done nothing.

Promised: nothing lost and nothing twice: the Commit is asked for again.
"""

from tests.support.outages import lasting
from tests.support.rpc import Fault
from tests.support.trial import Trial


def test_commits_refused(trial: Trial, fault_seconds: float) -> None:
    """Those of heartbeats, too."""
    with trial.faulty_spanner() as spanner, trial.workers(2):
        with spanner.failing(trial.chance(0.3, Fault.REFUSED, "Commit")), trial.load():
            lasting(fault_seconds)
        trial.settle()
    faults = spanner.seen["Commit", Fault.REFUSED]
    assert faults > 0
    assert trial.audit(duplicates=0).kept()
