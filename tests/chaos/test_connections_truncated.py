"""Connections end in the middle of a message.

Promised: nothing lost; again comes at most what was on its way to Pub/Sub at such an end, or its answer back.
"""

from tests.support.outages import lasting
from tests.support.trial import Trial


def test_connections_truncated(trial: Trial, fault_seconds: float) -> None:
    """Twice a second, one of the two networks at random."""
    with trial.faulty_pubsub() as pubsub, trial.spanner_proxy() as spanner, trial.workers(2):

        def disturb() -> None:
            trial.random.choice([pubsub.network, spanner]).truncate()

        with trial.load():
            lasting(fault_seconds, disturb)
        trial.settle()
    assert trial.audit(duplicates=pubsub.unanswered).kept()
