"""Spanner takes connections and says nothing.

Promised: nothing lost; again comes at most what was published and not marked when it began.
"""

from tests.support.outages import lasting
from tests.support.trial import IN_FLIGHT, Trial


def test_spanner_hangs(trial: Trial, fault_seconds: float) -> None:
    """Under load, and what waits is sent when it is over."""
    with trial.spanner_proxy() as proxy, trial.workers(2):
        with trial.load():
            lasting(1)
            proxy.hang()
            lasting(fault_seconds)
            proxy.forward()
        trial.settle()
    assert trial.audit(duplicates=2 * IN_FLIGHT).kept()
