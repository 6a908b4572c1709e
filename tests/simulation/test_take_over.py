"""A killed worker's shards get other workers within the time that docs/architecture/workers.md promises."""

from random import Random

import pytest

from tests.simulation.world import Plan, World, quiet


@pytest.mark.parametrize(("wake", "seconds"), [(False, 15.0), (True, 30.0)])
def test_idle_workers_take_over_the_shards_of_a_killed_one(wake: bool, seconds: float) -> None:
    """Although no change stream reports anything to them, as after a retry, and although their clocks differ."""
    for seed in range(8):
        random = Random(seed)
        world = World(Plan(seed=seed, workers=4, wake=wake))
        killed, *others = world.nodes
        for node in world.nodes:
            node.process.skew = random.uniform(0, 5)
        with quiet():
            world.clockwork.run(random.uniform(60, 90))
            assert [node.membership.size for node in world.nodes] == [4] * 4
            killed.kill()
            world.clockwork.run(world.clockwork.now + seconds)
            world.clockwork.close()
        assert [node.membership.size for node in others] == [3] * 3, seed
        assert {shard for node in others for shard in node.membership.shards} == set(range(world.plan.shards))
