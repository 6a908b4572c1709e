"""A pause and its end apply within 10 s, however long the workers wait between polls or are suspended."""

from random import Random

import pytest

from tests.simulation.audit import PAUSE_SECONDS
from tests.simulation.plan import Plan
from tests.simulation.world import World, quiet

SLOW = {"poll_interval": 30.0}
WAKES = {"wake": True}
LONG = {"wake": True, "idle_interval": 300.0}


@pytest.mark.parametrize("intervals", [{}, SLOW, WAKES, LONG], ids=["default", "slow", "wake", "long"])
@pytest.mark.parametrize("suspended", [False, True])
def test_idle_workers_follow_a_pause_and_its_end(intervals: dict[str, float], suspended: bool, long: bool) -> None:
    """At-most-once tasks, tasks with keys and due tasks as well. `suspended` is as by SIGSTOP, in the idle pause."""
    for seed in range(15 if long else 5):
        world, random = World(Plan(seed=seed, once=0.3, **intervals)), Random(seed)  # type: ignore[arg-type]  # mixed

        def registrations(seconds: float, world: World = world, random: Random = random) -> None:
            world.clockwork.run(world.clockwork.now + seconds)
            for _ in range(8):
                world.clockwork.spawn(world.application, lambda: world.register(random))

        with quiet():
            registrations(1.0)
            world.clockwork.run(random.uniform(30.0, 70.0))  # the tasks are sent, and the pauses are long
            if suspended:
                for node in world.nodes:
                    node.process.paused_until = world.clockwork.now + 40.0
            for topic in world.topics:
                world.set_paused(topic, paused=True)
            before = set(world.audit.tasks)
            registrations(PAUSE_SECONDS + random.uniform(0.5, 5.0))
            world.clockwork.run(world.clockwork.now + 60.0)
            assert not world.audit.problems, seed
            world.clockwork.run(world.clockwork.now + random.uniform(0.0, 60.0))
            for topic in world.topics:
                world.set_paused(topic, paused=False)
            world.clockwork.run(world.clockwork.now + 10.0)
            world.clockwork.close()
        new = [task for id, task in world.audit.tasks.items() if id not in before]
        assert (bool(new), all(task.received for task in new)) == (True, True), seed
