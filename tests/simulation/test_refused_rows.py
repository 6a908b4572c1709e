"""Rows that Spanner refuses to change, as if they violated a constraint: only their tasks suffer."""

from unittest import mock

import pytest

from tests.simulation.plan import Plan
from tests.simulation.world import World


@pytest.mark.parametrize("once", [0.0, 1.0])
@pytest.mark.parametrize("refused", [0.02, 0.1])
def test_other_tasks_do_not_wait_for_refused_rows(refused: float, once: float) -> None:
    """They are sent within three seconds, and no refused task is published twice within the minute."""
    plan = Plan(7, workers=1, batch_size=100, seconds=60.0, keys=0.0, once=once, refused=refused, rate=5.0)
    world = World(plan)
    bad: set[str] = set()

    def repair() -> None:
        bad.update(world.spanner.table.refused)
        world.spanner.table.refused.clear()

    world.clockwork.after(60.0, repair)
    with mock.patch.object(world.operators, "mend"):  # which would pause topics
        audit = world.play()
    assert audit.problems == []
    assert len(bad) > 2
    good = [task for id, task in audit.tasks.items() if id not in bad]
    waits = [task.last_at - max(task.at, task.available_at) for task in good]
    assert max(waits) < 3.0
    assert audit.duplicates == 0
