"""Pub/Sub answers UNAVAILABLE now and then, and has accepted nothing.

Promised: nothing lost and nothing twice.
"""

from tests.support.outages import lasting
from tests.support.rpc import Fault
from tests.support.trial import Trial


def test_pubsub_unavailable(trial: Trial, fault_seconds: float) -> None:
    """Three in ten requests."""
    with trial.faulty_pubsub() as pubsub, trial.workers(2):
        with pubsub.failing(trial.chance(0.3, Fault.REFUSED, "Publish")), trial.load():
            lasting(fault_seconds)
        trial.settle()
    faults = pubsub.seen["Publish", Fault.REFUSED]
    assert faults > 0
    assert trial.audit(duplicates=0).kept()
