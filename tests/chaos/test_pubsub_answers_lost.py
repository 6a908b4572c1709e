"""The connection to Pub/Sub is cut after a request arrived: the worker cannot know that it did.

Promised: nothing lost; again comes at most what was on its way to Pub/Sub then, or its answer back.
"""

from tests.support.outages import lasting
from tests.support.rpc import Fault
from tests.support.trial import Trial


def test_pubsub_answers_lost(trial: Trial, fault_seconds: float) -> None:
    """One in five answers is lost, with all connections of all workers."""
    with trial.faulty_pubsub() as pubsub, trial.workers(2):
        with pubsub.failing(trial.chance(0.2, Fault.LOST, "Publish")), trial.load():
            lasting(fault_seconds)
        trial.settle()
    assert pubsub.seen["Publish", Fault.LOST] > 0
    assert trial.audit(duplicates=pubsub.unanswered).kept()
