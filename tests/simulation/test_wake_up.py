"""With the change stream, no task of idle workers waits for their long pauses."""

from tests.simulation.world import Plan, World, quiet

#: Max seconds from the commit to the receipt. In the simulation, the stream reports an insert after up to 0.15 s.
MAX_SECONDS = 0.5
#: The same from the time at which a scheduled task becomes due.
MAX_SECONDS_DUE = 2.0


def test_idle_workers_send_new_and_due_tasks_soon() -> None:
    """Each insert wakes all workers, mostly in vain, and most tasks are the first of their topic for some seconds."""
    for seed in range(4):
        world = World(Plan(seed=seed, workers=4, shards=10, rate=0.5, seconds=300.0, keys=0.0, wake=True))
        with quiet():
            world.clockwork.spawn(world.application, world.applications)
            world.clockwork.run(330.0)
            world.clockwork.close()
        tasks = world.audit.tasks.values()
        new = [task.last_at - task.at for task in tasks if task.available_at == task.at]
        due = [task.last_at - task.available_at for task in tasks if task.available_at > task.at]
        assert len(new) > 50 < 5 * len(due)
        assert (max(new) < MAX_SECONDS, max(due) < MAX_SECONDS_DUE) == (True, True), (seed, max(new), max(due))
