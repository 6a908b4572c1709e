"""What one topic or one kind of tasks takes from others, in histories in which the shares matter."""

import pytest

from tests.simulation.audit import BAD, GOOD, Known
from tests.simulation.plan import Plan
from tests.simulation.seeded_faults import seeded
from tests.simulation.world import World, quiet


def seconds_beside_a_slow_topic(seed: int, tasks: int, priority: int) -> float:
    """Send two backlogs, one of a topic whose publishes take 3 s; return the seconds until the other is received."""
    world = World(Plan(seed, workers=1, concurrency=8, rate=1e-9))
    world.pubsub.slow_topics["orders"] = 3.0
    with quiet():
        world.clockwork.run(15.0)
        world.load(1_000)
        world.load(tasks, "invoices", priority)
        fast = [task for task in world.audit.tasks.values() if task.topic == "invoices"]
        world.clockwork.run(world.clockwork.now + 120.0, lambda: all(task.received for task in fast))
        world.clockwork.close()
    return max(task.last_at - task.at for task in fast)


@pytest.mark.parametrize(
    ("tasks", "priority", "defect"),
    [
        (600, 50, None),
        (600, 50, "a topic gets at most half of the places while another waits"),
        (60, 0, None),
        (60, 0, "a topic leaves a place to another of a lower priority"),
    ],
)
def test_a_slow_topic_leaves_places_to_another(tasks: int, priority: int, defect: str | None) -> None:
    """OUT-DELAY-2. Half of the places, or one to a lower priority."""
    with seeded(defect):
        slowest = max(seconds_beside_a_slow_topic(seed, tasks, priority) for seed in range(2))
    assert (slowest > 4.0) is bool(defect), slowest


@pytest.mark.parametrize("defect", [None, "the size of a poll follows the backlog"])
def test_a_backlog_of_one_shard_is_sent_as_fast_as_others(defect: str | None) -> None:
    """A poll reads as many rows of the only range with tasks as of all ranges together."""
    world = World(Plan(1, workers=1, shards=10, concurrency=8, rate=1e-9))
    table = world.spanner.table
    with seeded(defect), quiet():
        world.clockwork.run(15.0)
        for id in [id for id in map(str, range(6_000)) if table.shards_of(id) == (0,)]:
            table.insert(id, "orders", GOOD, created_at=table.commit_time())
            world.audit.committed(id, Known("orders", "", world.clockwork.now, world.clockwork.now))
        seconds = world.run_until(unsent=0) - 15.0
        world.clockwork.close()
    assert (seconds > 2.0) is bool(defect), seconds


def seconds_beside_messages(seed: int, *, slow: float) -> float:
    """Send 200 tasks behind three messages that cannot be sent; return the seconds until all others are received.

    Pub/Sub refuses the three if it is `slow`. Otherwise their requests fail as in an outage.
    """
    world = World(Plan(seed, workers=1, shards=1, concurrency=1, rate=1e-9))
    world.pubsub.slow = slow
    with quiet():
        world.clockwork.run(15.0)
        world.load(203)
        bad, good = [*world.audit.tasks][:3], [*world.audit.tasks.values()][3:]
        if slow:
            for id in bad:
                world.spanner.table.change(id, data=BAD)
        else:
            world.pubsub.poison = frozenset(bad)
        world.clockwork.run(world.clockwork.now + 300.0, lambda: all(task.received for task in good))
        world.clockwork.close()
    return max((task.last_at if task.received else 1e9) - task.at for task in good)


@pytest.mark.parametrize(
    ("slow", "most", "defect"),
    [
        (0.0, 30.0, None),
        (0.0, 30.0, "a probe in an outage is drawn at random"),
        (0.0, 30.0, "a task that met an outage shares no request"),
        (3.0, 120.0, None),
        (3.0, 120.0, "a refused request that there was no time to split is remembered"),
    ],
)
def test_messages_that_cannot_be_sent_delay_no_others(slow: float, most: float, defect: str | None) -> None:
    """OUT-DELAY-1. A request takes longer than half of the publish timeout if Pub/Sub is slow."""
    with seeded(defect):
        longest = max(seconds_beside_messages(seed, slow=slow) for seed in range(2))
    assert (longest > most) is bool(defect), longest
