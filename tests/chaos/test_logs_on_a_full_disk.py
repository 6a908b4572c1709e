"""No log line can be written: the disk is full.

Promised: workers work on, nothing lost, nothing twice, exit code 0.
"""

from tests.support.outages import lasting
from tests.support.trial import Trial


def test_logs_on_a_full_disk(trial: Trial, fault_seconds: float) -> None:
    """From the first line on."""
    with trial.worker("--log-level", "debug", module="tests.support.full_disk") as worker:
        with trial.load():
            lasting(fault_seconds)
        trial.settle()
        worker.stop()
        assert worker.wait() == 0
    assert trial.audit(duplicates=0).kept()
