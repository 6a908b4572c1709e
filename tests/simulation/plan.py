"""All that a history depends on: the load, the settings of the workers, and the faults."""

import dataclasses
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

import grpc

from outbox.table.ddl import Layout
from outbox_admin.schema.reshard import POLLED
from tests.simulation.spanner import DEFAULT_LATENCIES, NO_CPU, Cpu, Latencies

if TYPE_CHECKING:
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


def kill(_world: "World", node: "Node", _fault: "Fault") -> End:
    node.kill()
    return node.start


def stop(_world: "World", node: "Node", _fault: "Fault") -> End:
    """Stop a worker as by SIGTERM. If it hangs, it is killed."""
    node.stop.set()
    node.relay.wake()
    process = node.process

    def end() -> None:
        if node.process is process:
            node.kill()
            node.start()

    return end


def pause(world: "World", node: "Node", fault: "Fault") -> End:
    node.process.paused_until = world.clockwork.now + fault.seconds
    return lambda: None


def cut(_world: "World", node: "Node", fault: "Fault") -> End:
    """Cut a worker off one of the services, so that its requests have no answer."""
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


def slow(world: "World", _node: "Node", _fault: "Fault") -> End:
    world.pubsub.slow += SLOW
    return lambda: setattr(world.pubsub, "slow", world.pubsub.slow - SLOW)


def overload(world: "World", _node: "Node", _fault: "Fault") -> End:
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
    node.kill()
    node.start(previous=True)
    process = node.process

    def upgrade() -> None:
        if node.process is process:
            node.kill()
            node.start()

    return upgrade


FAULTS: dict[str, Callable[["World", "Node", "Fault"], End]] = {
    "kill": kill, "stop": stop, "pause": pause, "no spanner": cut, "no pubsub": cut, "slow pubsub": slow,
    "overload": overload, "clock": skew, "no wake-ups": lose_wake_ups, "previous version": downgrade,
    **dict.fromkeys(TROUBLES, trouble), **dict.fromkeys(ANSWERS, break_topic),
}  # fmt: skip


#: Max transactions that the applications of a drawn plan begin. More take seconds, and show no more.
TRANSACTIONS = 300


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Fault:
    """`kind` begins at `at` and lasts `seconds`; `which` is the number of a worker or of a topic."""

    at: float
    kind: str
    which: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """All that a history depends on."""

    seed: int
    workers: int = 2
    shards: int = 4
    batch_size: int = 10
    concurrency: int = 2
    fair_share: float = 0.1
    rate: float = 20.0  # transactions of the applications, per second
    seconds: float = 60.0  # of registrations and faults
    keys: float = 0.3  # part of the tasks with an ordering key
    bad: float = 0.0  # part that Pub/Sub refuses
    once: float = 0.0  # part of those without a key that are at-most-once
    lifetimes: tuple[float | None, ...] = (None,)  # seconds until a task expires
    skip_dead: bool = False
    faults: tuple[Fault, ...] = ()
    latencies: Latencies = DEFAULT_LATENCIES
    exclusive: bool = True
    cpu: Cpu = NO_CPU
    reshard: int = 0  # new number of shards, while the applications register
    wake: bool = False  # a change stream starts polls, and idle workers poll seldom
    refused: float = 0.0  # part of the tasks whose rows Spanner refuses to change, until the registrations end
    routes: bool = False  # an operator routes topics and ends routes
    longest_backoff: float = 60.0  # seconds between two attempts
    poll_interval: float = 1.0
    idle_interval: float = 15.0
    cancels: float = 0.0  # transactions that cancel tasks, per second
    bulk: float = 0.0  # retries, cancellations and purges of many tasks, per second
    replays: float = 0.0  # row deletions and replays from the archive, per second
    restores: float = 0.0  # restores of tasks that operators have cancelled, per second
    repeats: float = 0.0  # registrations of a task that was registered before, per second
    unanswered: float = 0.0  # part of the commits of applications and jobs whose answer is lost
    controls: float = 0.0  # changes of limits and retry policies, per second
    limit: int = 0  # tasks a second, of each topic, until the registrations end or an operator changes it
    large: float = 0.0  # part of the messages with 3 MB
    commit_delay: float = 0.0  # seconds for which marks of tasks without an ordering key wait for others
    reads: bool = False  # a program follows the sent tasks
    mixed: bool = False  # each worker has a batch size, a concurrency and a poll interval of its own

    @classmethod
    def of(cls, seed: int) -> "Plan":
        """Draw a plan."""
        random = Random(seed)
        workers, seconds = random.choice([1, 2, 2, 3, 4]), random.choice([5.0, 10.0, 20.0, 60.0])
        faults = [_fault(random, seconds) for _ in range(random.choice([0, 1, 3, 6, 10]))]
        return cls(
            seed,
            workers=workers,
            shards=random.choice([1, 2, 4, 10]),
            batch_size=random.choice([1, 3, 10, 100]),
            concurrency=random.choice([1, 2, 4, 8]),
            fair_share=random.choice([0.0, 0.1, 0.5]),
            rate=min(random.choice([1.0, 5.0, 20.0]), TRANSACTIONS / seconds),
            seconds=seconds,
            keys=random.choice([0.0, 0.3, 1.0]),
            bad=random.choice([0.0, 0.0, 0.05, 0.2]),
            once=random.choice([0.0, 0.0, 0.2]),
            lifetimes=random.choice([(None,), (None,) * 9 + (1.0, 30.0)]),
            skip_dead=random.random() < 0.3,
            faults=tuple(sorted(faults)),
            latencies=DEFAULT_LATENCIES.times(random.choice([0.3, 1, 1, 3, 10])),
            reshard=random.choice([0, 0, 0, 2, 5]),
            wake=random.random() < 0.5,
            longest_backoff=random.choice([60.0, 300.0, 900.0, 3600.0]),
            poll_interval=random.choice([1.0, 1.0, 1.0, 10.0, 30.0]),
            idle_interval=random.choice([15.0, 15.0, 60.0, 300.0]),
            routes=random.random() < 0.3,
            cancels=random.choice([0.0, 0.0, 0.5, 5.0]),
            bulk=random.choice([0.0, 0.0, 0.2, 1.0]),
            replays=random.choice([0.0, 0.0, 0.0, 0.5]),
            controls=random.choice([0.0, 0.0, 0.2]),
            refused=random.choice([0.0] * 9 + [0.02]),
            large=random.choice([0.0] * 9 + [0.05]),
            mixed=random.random() < 0.2,
            reads=random.random() < 0.3,
            limit=random.choice([0] * 5 + [5]),
            commit_delay=random.choice([0.0, 0.05, 0.5]),
            restores=random.choice([0.0, 1.0]),
            unanswered=random.choice([0.0] * 9 + [0.2]),
            repeats=random.choice([0.0] * 9 + [1.0]),
        )


def _fault(random: Random, seconds: float) -> Fault:
    fault = Fault(random.uniform(0, seconds), random.choice(list(FAULTS)), random.randrange(8), _duration(random))
    # A long time of unknown errors makes good tasks dead.
    return dataclasses.replace(fault, seconds=min(fault.seconds, 120.0)) if fault.kind == "topic odd" else fault


def _duration(random: Random) -> float:
    """Return the seconds of a fault. Few last so long that workers no longer remember what they have published."""
    return 1_000.0 if random.random() < 0.002 else min(random.expovariate(1 / 12), 120.0)


#: Plans in which some mechanisms have more to do than in most drawn ones, by what they are about.
DENSE = {
    "blocked keys": lambda seed: Plan(
        seed, rate=5.0, keys=1.0, bad=0.2, cancels=5.0, bulk=0.5, skip_dead=seed % 2 == 0
    ),
    "replays": lambda seed: Plan(
        seed, rate=5.0, cancels=5.0, replays=2.0, bulk=2.0, faults=(
            Fault(0.0, "unanswered commits", 0, 60.0),
            *(Fault(5.0 * n, "no spanner", seed + n, 8.0) for n in range(1, 11)),
        ),
    ),
    "restores": lambda seed: Plan(
        seed, rate=5.0, seconds=30.0, keys=0.7, bulk=2.0, restores=2.0, repeats=2.0, bad=0.1,
        latencies=DEFAULT_LATENCIES.times(10), skip_dead=seed % 2 == 0,
        faults=tuple(Fault(6.0 * n, "no spanner", seed + n, 3.0) for n in range(1, 5)),
    ),
    "operations": lambda seed: Plan(
        seed, rate=5.0, seconds=30.0, keys=1.0, bad=0.2, cancels=2.0, bulk=2.0, unanswered=0.3, skip_dead=seed % 2 == 0
    ),
    "refused rows": lambda seed: Plan(seed, rate=5.0, keys=0.5, refused=0.1, once=0.3, bad=0.1),
    "limits": lambda seed: Plan(seed, workers=4, keys=0.0, limit=5, seconds=25.0),
    "readers": lambda seed: Plan(seed, rate=5.0, batch_size=50, seconds=20.0, reads=True, reshard=5),
    "keys": lambda seed: Plan(
        seed, rate=8.0, seconds=20.0, keys=1.0, batch_size=3, concurrency=8, latencies=DEFAULT_LATENCIES.times(10),
        faults=(
            Fault(0.0, "refused requests", 0, 20.0), Fault(0.0, "unanswered publishes", 0, 20.0),
            Fault(5.0, "topic odd", seed, 10.0),
        ),
    ),
    "suspensions": lambda seed: Plan(
        seed, workers=1 + seed % 2, rate=5.0, seconds=20.0, reshard=5, faults=(Fault(4.0, "pause", 0, 90.0),)
    ),
    "stops": lambda seed: Plan(
        seed, workers=3, rate=10.0, seconds=20.0, faults=(
            Fault(0.0, "slow pubsub", 0, 20.0), *(Fault(2.0 * n, "stop", seed + n, 15.0) for n in range(1, 6))
        ),
    ),
}  # fmt: skip
