"""The clocks of two workers are a minute ahead and a minute behind.

Promised: nothing lost, nothing twice, both work, and what is asked for later is sent then, no earlier and not a
minute later: all times that matter are the database's.
"""

from datetime import UTC, datetime, timedelta

import outbox
from tests.support.outages import lasting, log_lines
from tests.support.trial import Trial, id_of

#: Seconds; and tasks that are asked for later, so that both workers have some.
SKEW, SCHEDULED = 60, 20
SHIFTED = "tests.support.shifted_clock"


def test_clocks_off(trial: Trial, fault_seconds: float) -> None:
    """Beside each other, on one table."""
    with (
        trial.worker(module=SHIFTED, SHIFTED_CLOCK_SECONDS=f"{SKEW}") as ahead,
        trial.worker(module=SHIFTED, SHIFTED_CLOCK_SECONDS=f"-{SKEW}") as behind,
    ):
        for each, least in ((ahead, 50), (behind, -70)):
            each.wait_for_text("relaying")
            said = datetime.fromisoformat(log_lines(each)[0]["timestamp"])
            assert least < (said - datetime.now(UTC)).total_seconds() < least + 20
        for each in (ahead, behind):
            each.wait_for_text('"assigned"')  # each knows of the other
        later = datetime.now(UTC) + timedelta(seconds=fault_seconds + 2)
        with trial.database.batch(default_retry_delay=0.02) as batch:
            scheduled = {outbox.register(batch, trial.topic, b"later", available_at=later) for _ in range(SCHEDULED)}
        trial.ledger.committed |= scheduled
        with trial.load():
            lasting(fault_seconds)
        trial.settle()
        for each in (ahead, behind):
            each.stop()
        assert [each.wait() for each in (ahead, behind)] == [0, 0]
    assert trial.audit(duplicates=0).kept()
    times = [each.publish_time for each in trial.received if id_of(each) in scheduled]
    assert len(times) == SCHEDULED
    assert later <= min(times) <= max(times) < later + timedelta(seconds=SKEW - 10)
