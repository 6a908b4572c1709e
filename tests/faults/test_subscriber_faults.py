"""Subscribers with the inbox are killed, paused and cut off, beside a worker that is killed."""

import contextlib
import dataclasses
import signal
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.instance import Instance

from outbox.table import ddl
from tests.support.inbox_subscriber import EFFECTS, LEASE_SECONDS
from tests.support.processes import Process, started
from tests.support.proxy import Proxy
from tests.support.spanner import fresh_database, query
from tests.support.trial import IN_FLIGHT, Trial
from tests.support.waiting import eventually, lasting

#: Tasks before each fault, and how often all kinds of faults happen.
TASKS, ROUNDS = 20, 1
TASKS_IF_LONG, ROUNDS_IF_LONG = 60, 4


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """Two subscribers and two workers. The subscribers reach both services through proxies."""

    trial: Trial
    stack: contextlib.ExitStack
    spanner: Proxy
    pubsub: Proxy
    arguments: tuple[str, ...]
    subscribers: list[Process]
    workers: list[Process]
    ended: list[Process] = dataclasses.field(default_factory=list)

    def subscriber(self) -> Process:
        hosts = {"SPANNER_EMULATOR_HOST": self.spanner.address, "PUBSUB_EMULATOR_HOST": self.pubsub.address}
        fixed = {"GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW": "false", "SPANNER_DISABLE_BUILTIN_METRICS": "true"}
        return self.stack.enter_context(
            started("tests.support.inbox_subscriber", *self.arguments, environment=hosts | fixed)
        )

    def outcomes(self) -> Counter[str]:
        """Return how many messages the subscribers have handled, by outcome."""
        lines = [line for each in (*self.subscribers, *self.ended) for line in each.stdout.splitlines()]
        return Counter(line.removeprefix("outcome:") for line in lines if line.startswith("outcome:"))


def subscriber_killed(field: Field) -> None:
    place = field.trial.random.randrange(2)
    field.subscribers[place].stop(signal.SIGKILL)
    field.subscribers[place].wait()
    field.ended.append(field.subscribers[place])
    field.subscribers[place] = field.subscriber()


def subscriber_paused(field: Field) -> None:
    """Longer than its leases, so its messages are delivered again while it may have an open transaction."""
    place = field.trial.random.randrange(2)
    field.subscribers[place].stop(signal.SIGSTOP)
    lasting(LEASE_SECONDS + 3)
    field.subscribers[place].stop(signal.SIGCONT)


def connections_cut(field: Field) -> None:
    field.trial.random.choice([field.spanner, field.pubsub]).cut()


def spanner_unavailable(field: Field) -> None:
    field.spanner.refuse()
    lasting(2)
    field.spanner.forward()


def worker_killed(field: Field) -> None:
    place = field.trial.random.randrange(2)
    field.workers[place].stop(signal.SIGKILL)
    field.workers[place].wait()
    field.workers[place] = field.stack.enter_context(field.trial.worker())


FAULTS: tuple[Callable[[Field], None], ...] = (
    subscriber_killed, subscriber_paused, connections_cut, spanner_unavailable, worker_killed
)  # fmt: skip


@contextlib.contextmanager
def field_of(trial: Trial, database: Database, max_batch: int) -> Iterator[Field]:
    # Without message ordering: after a subscriber is killed, the emulator delivers no message of its keys any more.
    subscriptions = [
        trial.pubsub.new_subscription(topic, ack_seconds=LEASE_SECONDS) for topic in (trial.topic, trial.ordered_topic)
    ]
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(host)) for host in (trial.spanner_host, trial.pubsub_host)]
        arguments = (str(database.database_id), str(max_batch), *(each.name for each in subscriptions))
        field = Field(trial, stack, proxies[0], proxies[1], arguments, [], stack.enter_context(trial.workers(2)))
        field.subscribers.extend(field.subscriber() for _ in range(2))
        for each in field.subscribers:
            each.wait_for_text("receiving")
        yield field


@pytest.mark.extended
@pytest.mark.parametrize("max_batch", [pytest.param(1, marks=pytest.mark.long("single messages, too")), 20])
def test_inbox(trial: Trial, spanner_instance: Instance, max_batch: int, long: bool) -> None:
    """SIGKILL, SIGSTOP and broken connections of subscribers that use the inbox, and SIGKILL of workers, at random.

    Promised: No task is lost. Each committed task has exactly one effect in the subscriber's database. At most the
    in-flight batches of the killed workers are published again.
    """
    tasks, rounds = (TASKS_IF_LONG, ROUNDS_IF_LONG) if long else (TASKS, ROUNDS)
    faults = list(FAULTS) * rounds
    trial.random.shuffle(faults)
    with (
        fresh_database(spanner_instance, [*ddl.statements(), EFFECTS]) as database,
        field_of(trial, database, max_batch) as field,
    ):

        def effects() -> Counter[str]:
            return Counter(id for [id] in query(database, "SELECT TaskId FROM Effects"))

        for fault in faults:
            wanted = len(effects()) + trial.random.randint(1, tasks // 2)
            trial.register(tasks)
            eventually(lambda: len(effects()) >= wanted, seconds=120, message="effects")  # noqa: B023 - called here
            fault(field)
        trial.settle()
        again = trial.send_again(tasks)
        trial.settle()
        eventually(lambda: len(effects()) >= len(trial.ledger.committed), seconds=120, message="an effect of each task")
        eventually(lambda: field.outcomes()["duplicate"] >= again, seconds=120, message="each duplicate")
        # The messages of killed and paused subscribers are delivered again after their leases.
        lasting(LEASE_SECONDS + 3)
        for each in field.subscribers:
            each.end()
        outcomes, found = field.outcomes(), effects()
    figures = trial.audit(duplicates=faults.count(worker_killed) * IN_FLIGHT + again)
    trial.notes = {
        "effects": sum(found.values()),
        "second_effects": sum(found.values()) - len(found),
        "without_effect": len(trial.ledger.committed - found.keys()),
        "duplicate_deliveries": outcomes["duplicate"],
        "failed_deliveries": outcomes["failed"],
    }
    assert figures.kept()
    assert found == dict.fromkeys(trial.ledger.committed, 1)
