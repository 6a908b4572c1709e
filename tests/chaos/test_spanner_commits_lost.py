"""The connection to Spanner is cut after a Commit arrived: the worker cannot know that it did.

Promised: nothing lost and nothing twice: the Commit is asked for again, or the mark is found.
"""

from tests.support.outages import lasting
from tests.support.rpc import Fault
from tests.support.trial import Trial


def test_spanner_commits_lost(trial: Trial, fault_seconds: float) -> None:
    """One in five Commits, those of heartbeats too; all connections of all workers are cut."""
    with trial.faulty_spanner() as spanner, trial.workers(2):
        with spanner.failing(trial.chance(0.2, Fault.LOST, "Commit")), trial.load():
            lasting(fault_seconds)
        trial.settle()
    faults = spanner.seen["Commit", Fault.LOST]
    assert faults > 0
    assert trial.audit(duplicates=0).kept()
