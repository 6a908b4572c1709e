"""A task is not deferred for longer because another worker sends the head of its key."""

import grpc

from tests.simulation.audit import FEW_TURNS, Known
from tests.simulation.plan import Plan
from tests.simulation.world import GOOD, World, quiet


def test_a_task_that_was_deferred_while_its_head_was_in_doubt_is_sent_soon() -> None:
    """A worker publishes the head, and is cut off from Spanner. The other worker fails and defers the next task.

    The first worker marks the head when it reaches Spanner again. Its claim does not name the next task.
    """
    world = World(Plan(seed=1))
    clockwork, table, tasks = world.clockwork, world.spanner.table, world.audit.tasks

    def register(id: str) -> None:
        table.insert(id, "orders", GOOD, ordering_key="k", created_at=table.commit_time())
        world.audit.committed(id, Known("orders", "k", clockwork.now, clockwork.now))

    with quiet():
        clockwork.run(20.0)
        register("head")
        clockwork.run(30.0, lambda: tasks["head"].received > 0)
        [first] = [node for node in world.nodes if len(node.relay._in_flight)]
        first.cut.append("spanner")
        world.pubsub.broken["orders"] = grpc.StatusCode.DATA_LOSS
        register("next")
        clockwork.run(65.0)
        assert (table.rows["head"].attempts > 0, table.rows["next"].blocked_by) == (True, "head")
        world.pubsub.broken.clear()
        first.cut.clear()
        clockwork.run(80.0, lambda: table.rows["head"].sent_at is not None)
        reads = world.spanner.requests["key_heads"]
        clockwork.run(clockwork.now + FEW_TURNS, lambda: tasks["next"].received > 0)
        clockwork.close()
    assert (tasks["head"].received, tasks["next"].received) == (1, 1)
    assert world.spanner.requests["key_heads"] - reads <= 2  # the one that finds the task, and that of the next poll
