"""Pub/Sub answers half a second late, within the limits.

Promised: nothing lost and nothing twice.
"""

from tests.support.outages import lasting
from tests.support.trial import Trial


def test_pubsub_slow(trial: Trial, fault_seconds: float) -> None:
    """It is slow all the time, and fast at the end."""
    with trial.pubsub_proxy() as proxy, trial.workers(2):
        proxy.delay(0.25)
        with trial.load():
            lasting(fault_seconds)
        proxy.delay(0)
        trial.settle()
    assert trial.audit(duplicates=0).kept()
