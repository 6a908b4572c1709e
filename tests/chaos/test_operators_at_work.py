"""Operators send tasks again and purge sent ones under load.

Promised: nothing lost; again comes what they asked for, and no more.
"""

from tests.support.outages import lasting
from tests.support.trial import Trial


def test_operators_at_work(trial: Trial, fault_seconds: float) -> None:
    """Twice a second."""
    again = purged = 0

    def operate() -> None:
        nonlocal again, purged
        again += trial.send_again(10)
        purged += len(trial.delete_sent(older_than=1))

    with trial.workers(2):
        with trial.load():
            lasting(fault_seconds, operate)
        trial.settle()
    assert again > 0
    assert purged > 0
    assert trial.audit(duplicates=again).kept()
