"""Datadog's agent goes away under load: its socket vanishes.

Promised: nothing lost, nothing twice.
"""

import contextlib
from pathlib import Path

from tests.support.dogstatsd import UnixAgent
from tests.support.outages import lasting
from tests.support.trial import Trial
from tests.support.waiting import eventually


def test_agent_gone(trial: Trial, fault_seconds: float, tmp_path: Path) -> None:
    """It hears first, and then is gone for good."""
    agent = UnixAgent(tmp_path / "dsd.socket")
    with contextlib.ExitStack() as stack:
        with agent.listening():
            workers = stack.enter_context(trial.workers(2, **agent.environment))
            trial.register(30)
            trial.settle()
            eventually(lambda: agent.heard, message="the agent hears")
        with trial.load():
            lasting(fault_seconds)
        trial.settle()
        for each in workers:
            each.stop()
        assert [each.wait() for each in workers] == [0, 0]
    assert trial.audit(duplicates=0).kept()
