"""With the change stream, no task of idle workers waits for their long pauses."""

import pytest

from tests.simulation.plan import Plan
from tests.simulation.world import World, quiet


@pytest.mark.parametrize(
    ("fails", "max_new", "max_due"), [(0.0, 0.5, 2.0), pytest.param(0.1, 3.0, 5.0, marks=pytest.mark.extended)]
)
def test_idle_workers_send_new_and_due_tasks_soon(fails: float, max_new: float, max_due: float) -> None:
    """Each insert wakes all workers, mostly in vain, and most tasks are the first of their topic for some seconds.

    `fails` is the part of the claims and commits that Spanner refuses. `max_new` are seconds from the commit to the
    receipt. In the simulation, the stream reports an insert after up to 0.15 s. `max_due` are seconds from the time at
    which a scheduled task becomes due.
    """
    for seed in range(4):
        world = World(Plan(seed=seed, workers=4, shards=10, rate=0.5, seconds=300.0, keys=0.0, wake=True))
        world.troubles += [("lock", fails, "refused"), ("commit", fails, "refused")]
        with quiet():
            world.clockwork.spawn(world.application, world.applications)
            world.clockwork.run(330.0)
            world.clockwork.close()
        tasks = world.audit.tasks.values()
        new = [task.last_at - task.at for task in tasks if task.available_at == task.at]
        due = [task.last_at - task.available_at for task in tasks if task.available_at > task.at]
        assert (len(new) > 50, len(due) > 10, all(task.received for task in tasks)) == (True, True, True)
        assert (max(new) < max_new, max(due) < max_due) == (True, True), (seed, max(new), max(due))
