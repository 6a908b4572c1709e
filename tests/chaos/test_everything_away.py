"""Spanner and Pub/Sub go away, one after the other, and come back in the same order.

Promised: nothing lost; again comes at most what was in flight when each began.
"""

from tests.support.outages import lasting
from tests.support.trial import IN_FLIGHT, Trial


def test_everything_away(trial: Trial, fault_seconds: float) -> None:
    """There is a time in which neither answers."""
    with trial.pubsub_proxy() as pubsub, trial.spanner_proxy() as spanner, trial.workers(2):
        with trial.load():
            lasting(1)
            spanner.refuse()
            lasting(fault_seconds / 2)
            pubsub.refuse()
            lasting(fault_seconds / 2)
            spanner.forward()
            lasting(fault_seconds / 2)
            pubsub.forward()
        trial.settle()
    assert trial.audit(duplicates=4 * IN_FLIGHT).kept()
