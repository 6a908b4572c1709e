"""The faults of a soak: each does its harm for a while, mends it, and knows how many duplicates it may cost."""

import contextlib
import dataclasses
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack

from tests.support.processes import Process
from tests.support.relays import execute
from tests.support.rpc import Fault, Faulty
from tests.support.trial import IN_FLIGHT, Trial

FREEZE = """
UPDATE AsynchronousTaskWorkers SET SeenAt = TIMESTAMP_SUB(CURRENT_TIMESTAMP(), INTERVAL 1 MINUTE) WHERE TRUE"""


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """What faults can reach. The first worker is never harmed itself, to be watched; `stack` ends the others."""

    trial: Trial
    pubsub: Faulty
    spanner: Faulty
    workers: list[Process]
    stack: ExitStack

    def one(self) -> int:
        """Choose one of the workers that may be harmed."""
        return self.trial.random.randrange(1, len(self.workers))

    def replace(self, place: int) -> None:
        """Start another worker in one's place."""
        self.workers[place] = self.stack.enter_context(self.trial.worker())

    @property
    def in_flight(self) -> int:
        """Return how many tasks all workers together have in flight at most."""
        return len(self.workers) * IN_FLIGHT

    def service(self) -> Faulty:
        """Choose one of the two."""
        return self.trial.random.choice([self.pubsub, self.spanner])


#: Does harm in the block, which lasts so many seconds; yields what tells afterwards how many duplicates it may cost.
Harm = Callable[[Field, float], AbstractContextManager[Callable[[], int]]]


@contextlib.contextmanager
def worker_killed(field: Field, _seconds: float) -> Iterator[Callable[[], int]]:
    """SIGKILL."""
    place = field.one()
    field.workers[place].stop(signal.SIGKILL)
    field.workers[place].wait()
    yield lambda: IN_FLIGHT
    field.replace(place)


@contextlib.contextmanager
def worker_sleeps(field: Field, _seconds: float) -> Iterator[Callable[[], int]]:
    """SIGSTOP, SIGCONT."""
    sleeper = field.workers[field.one()]
    sleeper.stop(signal.SIGSTOP)
    yield lambda: IN_FLIGHT
    sleeper.stop(signal.SIGCONT)


@contextlib.contextmanager
def worker_restarted(field: Field, _seconds: float) -> Iterator[Callable[[], int]]:
    """SIGTERM."""
    place = field.one()
    field.workers[place].stop()
    assert field.workers[place].wait() == 0
    field.replace(place)
    yield lambda: 0


@contextlib.contextmanager
def service_refuses(field: Field, _seconds: float) -> Iterator[Callable[[], int]]:
    """Connections are cut and refused."""
    network = field.service().network
    network.refuse()
    yield lambda: field.in_flight
    network.forward()


@contextlib.contextmanager
def service_hangs(field: Field, seconds: float) -> Iterator[Callable[[], int]]:
    """Connections are silent; each topic is probed once a second and worker."""
    network = field.service().network
    network.hang()
    yield lambda: field.in_flight + 2 * len(field.workers) * int(seconds + 1)
    network.forward()


@contextlib.contextmanager
def service_slow(field: Field, _seconds: float) -> Iterator[Callable[[], int]]:
    """Each answer takes 0.2 s longer."""
    network = field.service().network
    network.delay(0.1)
    yield lambda: 0
    network.delay(0)


@contextlib.contextmanager
def connections_broken(field: Field, _seconds: float) -> Iterator[Callable[[], int]]:
    """Connections end: at once, in the middle of a message, or in one direction."""
    faulty = field.service()
    before = faulty.unanswered
    field.trial.random.choice([faulty.network.cut, faulty.network.truncate, faulty.network.half_close])()
    yield lambda: faulty.unanswered - before


def _calls(service: str, fault: Fault, method: str, share: float) -> Harm:
    """Return a fault of a share of the calls of a method; what Pub/Sub has not answered then may be repeated."""

    @contextlib.contextmanager
    def harm(field: Field, _seconds: float) -> Iterator[Callable[[], int]]:
        faulty: Faulty = getattr(field, service)
        before = faulty.unanswered
        with faulty.failing(field.trial.chance(share, fault, method)):
            yield lambda: faulty.unanswered - before

    harm.__name__ = f"{method.lower()}_{fault.value}"
    return harm


@contextlib.contextmanager
def heartbeats_frozen(field: Field, _seconds: float) -> Iterator[Callable[[], int]]:
    """All workers take each other for dead for a moment."""
    execute(field.trial.database, FREEZE)
    yield lambda: IN_FLIGHT


@contextlib.contextmanager
def sent_again(field: Field, _seconds: float) -> Iterator[Callable[[], int]]:
    """Operators want some tasks again."""
    count = field.trial.send_again(20)
    yield lambda: count


FAULTS: tuple[Harm, ...] = (
    worker_killed, worker_sleeps, worker_restarted, service_refuses, service_hangs, service_slow, connections_broken,
    _calls("spanner", Fault.ABORTED, "Commit", 0.5), _calls("spanner", Fault.LOST, "Commit", 0.2),
    _calls("spanner", Fault.REFUSED, "Commit", 0.2), _calls("pubsub", Fault.LOST, "Publish", 0.2),
    _calls("pubsub", Fault.REFUSED, "Publish", 0.3), heartbeats_frozen, sent_again,
)  # fmt: skip
