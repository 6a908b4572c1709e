"""All that a history depends on: the load, the settings of the workers, and the faults."""

import dataclasses
from random import Random

from tests.simulation.faults import FAULTS
from tests.simulation.spanner import DEFAULT_LATENCIES, NO_CPU, Cpu, Latencies


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
    cancels: float = 0.0  # attempts to cancel a task, per second

    @classmethod
    def of(cls, seed: int) -> "Plan":
        """Draw a plan."""
        random = Random(seed)
        workers, seconds = random.choice([1, 2, 2, 3, 4]), random.choice([5.0, 10.0, 20.0, 60.0])
        faults = [
            Fault(random.uniform(0, seconds), random.choice(list(FAULTS)), random.randrange(8), _duration(random))
            for _ in range(random.choice([0, 1, 3, 6, 10]))
        ]
        return cls(
            seed,
            workers=workers,
            shards=random.choice([1, 2, 4, 10]),
            batch_size=random.choice([1, 3, 10, 100]),
            concurrency=random.choice([1, 2, 4, 8]),
            fair_share=random.choice([0.0, 0.1, 0.5]),
            rate=random.choice([1.0, 5.0, 20.0]),
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
            longest_backoff=random.choice([60.0, 300.0, 900.0]),
            poll_interval=random.choice([1.0, 1.0, 1.0, 10.0, 30.0]),
            idle_interval=random.choice([15.0, 15.0, 60.0, 300.0]),
            routes=random.random() < 0.3,
            cancels=random.choice([0.0, 0.0, 0.5, 5.0]),
        )


def _duration(random: Random) -> float:
    return min(random.expovariate(1 / 12), 120.0)
