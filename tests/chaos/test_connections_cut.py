"""Connections are cut again and again.

Promised: nothing lost; again comes at most what is on its way at each cut.
"""

from itertools import count

from tests.support.outages import lasting
from tests.support.trial import IN_FLIGHT, Trial


def test_connections_cut(trial: Trial, fault_seconds: float) -> None:
    """Twice a second, one of the two networks at random."""
    with trial.pubsub_proxy() as pubsub, trial.spanner_proxy() as spanner, trial.workers(2):
        faults = count()

        def disturb() -> None:
            next(faults)
            trial.random.choice([pubsub, spanner]).cut()

        with trial.load():
            lasting(fault_seconds, disturb)
        trial.settle()
    trial.audit(duplicates=next(faults) * 2 * IN_FLIGHT)
