"""A killed worker's shards get other workers within the time that docs/architecture/relay.md promises."""

from random import Random

import pytest

from tests.simulation.plan import Plan
from tests.simulation.world import World, quiet


@pytest.mark.parametrize(("wake", "busy", "seconds"), [(False, False, 15.0), (True, False, 30.0), (True, True, 15.0)])
def test_idle_workers_take_over_the_shards_of_a_killed_one(
    wake: bool, busy: bool, seconds: float
) -> None:  # OUT-LOSS-6
    """The time counts from its last heartbeat. The killed worker was idle, or had a scheduled task.

    The change stream reports nothing to the others, as after a retry, and their clocks differ.
    """
    for seed in range(8):
        random = Random(seed)
        world = World(Plan(seed=seed, workers=4, wake=wake))
        killed, *others = world.nodes
        for node in world.nodes:
            node.process.skew = random.uniform(0, 5)
        with quiet():
            world.clockwork.run(random.uniform(60, 90))
            assert [node.membership.size for node in world.nodes] == [4] * 4
            if busy:
                world.schedule(killed.membership.shards[0], seconds=3600)
                world.clockwork.run(world.clockwork.now + random.uniform(40, 60))
            killed.kill()
            age = world.spanner.table.time() - world.spanner.table.seen_at[killed.process.name]
            world.clockwork.run(world.clockwork.now + seconds - age.total_seconds())
            world.clockwork.close()
        assert [node.membership.size for node in others] == [3] * 3, seed
        assert {shard for node in others for shard in node.membership.shards} == set(range(world.plan.shards))
