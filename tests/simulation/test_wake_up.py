"""With the change stream, no task of idle workers waits for their long pauses."""

import pytest

from outbox.table.states import NEVER
from tests.simulation.audit import GOOD
from tests.simulation.plan import Plan
from tests.simulation.seeded_faults import seeded
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


def requests_of_idle_workers(workers: int, *, dead: bool) -> float:
    """Return the requests a minute of idle workers, perhaps of a topic that has a dead task."""
    world = World(Plan(1, workers=workers, shards=10, rate=1e-9, wake=workers > 1))
    table = world.spanner.table
    with quiet():
        world.clockwork.run(5.0)
        if dead:
            table.insert("dead", "orders", GOOD, created_at=table.commit_time(), available_at=NEVER)
        world.clockwork.run(40.0)
        before = sum(world.spanner.requests.values())
        world.clockwork.run(640.0)
        world.clockwork.close()
    return (sum(world.spanner.requests.values()) - before) / 10


@pytest.mark.parametrize(
    ("workers", "dead", "most", "defect"),
    [
        (1, False, 75.0, None),
        (1, True, 145.0, None),
        (1, True, 145.0, "a topic with only dead tasks is discovered less and less often"),
        (4, False, 31.0, None),
        (4, False, 31.0, "idle workers send few heartbeats"),
    ],
)
def test_idle_workers_send_few_requests(workers: int, dead: bool, most: float, defect: str | None) -> None:
    """Several are woken by a change stream, whose own requests do not count here."""
    with seeded(defect):
        requests = requests_of_idle_workers(workers, dead=dead)
    assert (requests > most) is bool(defect), requests
