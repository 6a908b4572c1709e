"""The faults of the scenarios and of the soak: each does harm in a block, and returns how many duplicates it allows."""

import contextlib
import itertools
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from tests.support.processes import Process
from tests.support.relays import execute
from tests.support.rpc import Fault, Faulty
from tests.support.trial import IN_FLIGHT, Trial

#: Tasks: about a second of load.
STALLED = 40
FREEZE = """
UPDATE AsynchronousTaskWorkers SET SeenAt = TIMESTAMP_SUB(CURRENT_TIMESTAMP(), INTERVAL 1 MINUTE) WHERE TRUE"""


@dataclass(frozen=True, slots=True)
class Field:
    """Workers, and the services behind networks that may fail: "pubsub", "spanner" or both. `stack` ends the workers.

    The soak measures the first worker, so no fault harms it.
    """

    trial: Trial
    services: Mapping[str, Faulty]
    workers: list[Process]
    stack: ExitStack

    def one(self) -> int:
        return self.trial.random.randrange(1, len(self.workers))

    def replace(self, place: int) -> None:
        self.workers[place] = self.stack.enter_context(self.trial.worker())

    def unanswered(self) -> int:
        """Return how many messages went to Pub/Sub without an answer so far."""
        return sum(each.unanswered for each in self.services.values())

    def is_stalled(self) -> bool:
        """Return whether the workers have sent nothing for about a second of load."""
        return self.trial.backlog() > STALLED

    def any_of(self, services: Collection[str]) -> Faulty:
        return self.services[self.trial.random.choice(sorted(services))]

    @property
    def in_flight(self) -> int:
        return len(self.workers) * IN_FLIGHT


@contextlib.contextmanager
def field_of(trial: Trial, workers: int, services: Collection[str]) -> Iterator[Field]:
    with ExitStack() as stack:
        faulty = {name: stack.enter_context(trial.faulty(name)) for name in services}
        yield Field(trial, faulty, stack.enter_context(trial.workers(workers)), stack)


@dataclass(frozen=True, slots=True)
class Effect:
    """The maximum number of duplicates, whether a worker has met the fault, and how to repeat it."""

    duplicates: Callable[[], int] = lambda: 0
    met: Callable[[], object] = lambda: True
    again: Callable[[], object] = lambda: None


#: Does harm in the block, which lasts at least so many seconds.
Harm = Callable[[Field, float], AbstractContextManager[Effect]]


def calls(service: str, method: str, fault: Fault, share: float) -> Harm:
    """Return the fault that a share of the calls of a method fails; Pub/Sub may get unanswered requests again."""

    @contextlib.contextmanager
    def harm(field: Field, _seconds: float) -> Iterator[Effect]:
        faulty = field.services[service]
        before, seen = faulty.unanswered, faulty.seen[method, fault]
        with faulty.failing(field.trial.chance(share, fault, method)):
            yield Effect(lambda: faulty.unanswered - before, lambda: faulty.seen[method, fault] > seen)

    harm.__name__ = f"{method.lower()}_{fault.value}"
    return harm


def away(how: str, *services: str) -> Harm:
    """Return the fault that a service is unavailable; `how` is `Proxy.refuse` or `Proxy.hang`.

    While Pub/Sub hangs, each worker probes each of both topics once a second.
    """

    @contextlib.contextmanager
    def harm(field: Field, seconds: float) -> Iterator[Effect]:
        faulty = field.any_of(services)
        is_pubsub = faulty is field.services.get("pubsub")
        probes = 2 * len(field.workers) * int(seconds + 1) if is_pubsub and how == "hang" else 0
        getattr(faulty.network, how)()
        yield Effect(lambda: field.in_flight + probes, field.is_stalled)
        faulty.network.forward()

    harm.__name__ = f"service_{how}s"
    return harm


def slow(delay: float, *services: str) -> Harm:
    """Return the fault that each answer of a service takes twice the delay longer."""

    @contextlib.contextmanager
    def harm(field: Field, _seconds: float) -> Iterator[Effect]:
        network = field.any_of(services).network
        network.delay(delay)
        yield Effect(met=lambda: field.trial.backlog() < len(field.trial.ledger.committed))
        network.delay(0)

    harm.__name__ = "service_slow"
    return harm


def broken(how: str) -> Harm:
    """Return the fault that the connections of the services end in turn; `how` is the name of a method of `Proxy`."""

    @contextlib.contextmanager
    def harm(field: Field, _seconds: float) -> Iterator[Effect]:
        networks = [each.network for each in field.services.values()]
        accepted, unanswered = [each.accepted for each in networks], field.unanswered()
        turns = itertools.cycle(networks)

        def harm_next() -> None:
            getattr(next(turns), how)()

        def met() -> bool:  # the workers have connected again
            return all(network.accepted > before for network, before in zip(networks, accepted, strict=True))

        harm_next()
        yield Effect(lambda: field.unanswered() - unanswered, met, again=harm_next)

    harm.__name__ = f"connections_{how}"
    return harm


@contextlib.contextmanager
def worker_killed(field: Field, _seconds: float) -> Iterator[Effect]:
    place = field.one()
    field.workers[place].stop(signal.SIGKILL)
    field.workers[place].wait()
    yield Effect(lambda: IN_FLIGHT)
    field.replace(place)


@contextlib.contextmanager
def worker_sleeps(field: Field, _seconds: float) -> Iterator[Effect]:
    sleeper = field.workers[field.one()]
    sleeper.stop(signal.SIGSTOP)
    yield Effect(lambda: IN_FLIGHT)
    sleeper.stop(signal.SIGCONT)


@contextlib.contextmanager
def worker_restarted(field: Field, _seconds: float) -> Iterator[Effect]:
    place = field.one()
    field.workers[place].stop()
    assert field.workers[place].wait() == 0
    field.replace(place)
    yield Effect()


@contextlib.contextmanager
def heartbeats_frozen(field: Field, _seconds: float) -> Iterator[Effect]:
    execute(field.trial.database, FREEZE)
    yield Effect(lambda: IN_FLIGHT)


@contextlib.contextmanager
def sent_again(field: Field, _seconds: float) -> Iterator[Effect]:
    count = field.trial.send_again(20)
    yield Effect(lambda: count)


BOTH = ("pubsub", "spanner")
#: The faults of a soak.
FAULTS: tuple[Harm, ...] = (
    worker_killed, worker_sleeps, worker_restarted, away("refuse", *BOTH), away("hang", *BOTH), slow(0.1, *BOTH),
    broken("cut"), broken("half_close"),
    calls("spanner", "Commit", Fault.ABORTED, 0.5), calls("spanner", "Commit", Fault.LOST, 0.2),
    calls("spanner", "Commit", Fault.REFUSED, 0.2), calls("pubsub", "Publish", Fault.LOST, 0.2),
    calls("pubsub", "Publish", Fault.REFUSED, 0.3), heartbeats_frozen, sent_again,
)  # fmt: skip
