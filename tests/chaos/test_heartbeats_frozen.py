"""Nobody's heartbeat counts: each worker takes all others for dead.

Promised: nothing lost; all of them poll all shards, and the locks keep them apart. Again comes at most what one of
them has in flight when the emulator aborts its transaction for that of another.
"""

from tests.support.outages import lasting
from tests.support.relays import execute
from tests.support.trial import IN_FLIGHT, Trial

FREEZE = """
UPDATE AsynchronousTaskWorkers SET SeenAt = TIMESTAMP_SUB(CURRENT_TIMESTAMP(), INTERVAL 1 MINUTE) WHERE TRUE"""


def test_heartbeats_frozen(trial: Trial, fault_seconds: float) -> None:
    """As if each of them was a minute old."""
    with trial.workers(3):
        with trial.load():
            lasting(fault_seconds, lambda: execute(trial.database, FREEZE))
        trial.settle()
    assert trial.audit(duplicates=IN_FLIGHT).kept()
