"""The faults of a history. Each function begins one, and returns what ends it.

`Audit.disturbances` counts what may cause duplicates: each time, what one worker has in flight.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from outbox.admin.reshard import POLLED
from outbox.table.layouts import Layout

if TYPE_CHECKING:
    from tests.simulation.plan import Fault
    from tests.simulation.world import Node, World

End = Callable[[], object]
#: What a broken topic answers. DATA_LOSS is recorded as a failed attempt of each task.
ANSWERS = {
    "topic missing": grpc.StatusCode.NOT_FOUND,
    "topic away": grpc.StatusCode.UNAVAILABLE,
    "topic odd": grpc.StatusCode.DATA_LOSS,
}
#: Requests that fail, the part of them that does, and how: see `Connection`.
TROUBLES = {
    "lost commits": ("commit", 0.3, "lost"),
    "unanswered commits": ("commit", 0.3, "unanswered"),
    "unanswered publishes": ("publish", 0.3, "unanswered"),
    "refused requests": ("all", 0.2, "refused"),
    "late answers": ("poll", 0.3, "late"),
}
#: Requests a second of an overloaded database.
OVERLOAD = 20.0
#: Seconds that a slow Pub/Sub takes longer: more than the time to publish a batch.
SLOW = 6.0


def kill(world: "World", node: "Node", _fault: "Fault") -> End:
    world.audit.disturbances["kill"] += 1
    node.kill()
    return node.start


def stop(world: "World", node: "Node", _fault: "Fault") -> End:
    """Stop a worker as by SIGTERM. If it hangs, it is killed."""
    node.stop.set()
    node.relay.wake()
    process = node.process

    def end() -> None:
        if node.process is process:
            world.audit.disturbances["stop"] += bool(process.fibers)
            node.kill()
            node.start()

    return end


def pause(world: "World", node: "Node", fault: "Fault") -> End:
    world.audit.disturbances["pause"] += 1
    node.process.paused_until = world.clockwork.now + fault.seconds
    return lambda: None


def cut(world: "World", node: "Node", fault: "Fault") -> End:
    """Cut a worker off one of the services, so that its requests have no answer."""
    world.audit.disturbances[fault.kind] += 1 + int(fault.seconds / 5)
    service = fault.kind.removeprefix("no ")
    node.cut.append(service)
    return lambda: node.cut.remove(service)


def trouble(world: "World", _node: "Node", fault: "Fault") -> End:
    entry = TROUBLES[fault.kind]
    world.troubles.append(entry)
    return lambda: world.troubles.remove(entry)


def break_topic(world: "World", _node: "Node", fault: "Fault") -> End:
    topic = world.destination(world.topics[fault.which % len(world.topics)])
    world.pubsub.broken[topic] = ANSWERS[fault.kind]
    return lambda: world.pubsub.broken.pop(topic, None)


def slow(world: "World", _node: "Node", fault: "Fault") -> End:
    world.audit.disturbances[fault.kind] += len(world.nodes) * (1 + int(fault.seconds))
    world.pubsub.slow += SLOW
    return lambda: setattr(world.pubsub, "slow", world.pubsub.slow - SLOW)


def overload(world: "World", _node: "Node", fault: "Fault") -> End:
    world.audit.disturbances[fault.kind] += len(world.nodes) * (1 + int(fault.seconds / 2))
    world.spanner.capacity = OVERLOAD
    return lambda: setattr(world.spanner, "capacity", None)


def skew(_world: "World", node: "Node", fault: "Fault") -> End:
    """Set a worker's clock forward. It stays so."""
    node.process.skew += fault.seconds
    return lambda: None


def lose_wake_ups(world: "World", _node: "Node", _fault: "Fault") -> End:
    """Stop the readers of the change stream. The workers do not notice."""
    world.silent += 1
    return lambda: setattr(world, "silent", world.silent - 1)


def downgrade(world: "World", node: "Node", _fault: "Fault") -> End:
    """Replace a worker by one of the previous version. It polls the first layout, which must not be retired."""
    if world.spanner.table.recorded.get(Layout(world.plan.shards), POLLED) != POLLED:
        return lambda: None
    world.audit.disturbances["downgrade"] += 1
    node.kill()
    node.start(previous=True)
    process = node.process

    def upgrade() -> None:
        if node.process is process:
            world.audit.disturbances["upgrade"] += 1
            node.kill()
            node.start()

    return upgrade


FAULTS: dict[str, Callable[["World", "Node", "Fault"], End]] = {
    "kill": kill, "stop": stop, "pause": pause, "no spanner": cut, "no pubsub": cut, "slow pubsub": slow,
    "overload": overload, "clock": skew, "no wake-ups": lose_wake_ups, "previous version": downgrade,
    **dict.fromkeys(TROUBLES, trouble), **dict.fromkeys(ANSWERS, break_topic),
}  # fmt: skip
