"""What one topic or one kind of tasks takes from others, in histories in which the shares matter."""

from unittest import mock

import pytest

from tests.simulation.plan import Plan
from tests.simulation.seeded_faults import DEFECTS
from tests.simulation.world import World, quiet


def seconds_beside_a_slow_topic(seed: int) -> float:
    """Send two backlogs, one of a topic whose publishes take 3 s; return the seconds until the other is received."""
    world = World(Plan(seed, workers=1, concurrency=8, rate=1e-9))
    world.pubsub.slow_topics["orders"] = 3.0
    with quiet():
        world.clockwork.run(15.0)
        world.load(1_000)
        world.load(600, "invoices")
        fast = [task for task in world.audit.tasks.values() if task.topic == "invoices"]
        world.clockwork.run(world.clockwork.now + 120.0, lambda: all(task.received for task in fast))
        world.clockwork.close()
    return max(task.last_at - task.at for task in fast)


@pytest.mark.parametrize("defect", [None, "a topic gets at most half of the places while another waits"])
def test_a_slow_topic_leaves_half_of_the_places_to_another(defect: str | None) -> None:
    owner, name, make = DEFECTS[defect] if defect else (World, "load", lambda real: real)
    with mock.patch.object(owner, name, make(getattr(owner, name))):
        slowest = max(map(seconds_beside_a_slow_topic, range(2)))
    assert (slowest > 4.0) is bool(defect), slowest
