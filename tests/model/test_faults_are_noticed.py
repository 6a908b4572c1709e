"""Faults that mutation testing does not make: random histories notice them."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from random import Random
from typing import Any
from unittest import mock

import pytest

from publishworker import delivery, eligibility
from publishworker.delivery import Delivery
from publishworker.in_doubt import InDoubt
from publishworker.ordering import Ordering, ResolvedKeys
from publishworker.pubsub import messages, publisher
from publishworker.pubsub.messages import Lane
from publishworker.retry_policy import RetryPolicy
from publishworker.topics.circuit_breaker import CircuitBreakers
from publishworker.types import BatchResult, Deferred, Key, Sent
from tests.support.order_ledger import Task
from tests.support.order_model import World
from tests.support.stepwise import patched

#: Enough for each fault, and which fault a thread meets at its next step: most often none (tests/support/stepwise.py).
HISTORIES, FATES = 8, [0] * 6 + [*range(1, 8), 3, 3]


def always(value: object) -> Callable[[Any], Any]:
    return lambda _real: lambda *_arguments, **_options: value


def reads_a_range(real: Any) -> Any:
    """Return `Delivery._check` that also reads the heads of the keys, in the transaction that has the locks."""

    def ours(self: Any, result: Any, rows: Any, now: Any) -> Any:
        self._store.key_heads(
            {Key(row.topic, row.ordering_key): 0 for row in rows if row.ordering_key}, 1, skip_dead=False
        )
        return real(self, result, rows, now)

    return ours


#: Each rule of the protocol, the attribute that keeps it, and the function that breaks it.
FAULTS: dict[str, tuple[object, str, Callable[[Any], Any]]] = {
    "SentAt is read again under the lock": (delivery, "skip_reasons", always({})),
    "no range is read under the lock": (Delivery, "_check", reads_a_range),
    "a transaction attempt remembers outcomes": (delivery, "untried", lambda _: lambda rows, _tried: rows),
    "it marks what an earlier attempt published": (BatchResult, "published_versions", always({})),
    "a failed commit is remembered": (InDoubt, "learn", always(None)),
    "tasks in doubt are marked": (InDoubt, "mark", always(None)),
    "a key is sent from its head on": (
        Ordering, "resolve", lambda _: lambda _self, candidates, *_: ResolvedKeys(candidates)
    ),
    "each request of a key waits for the answer to the last": (
        messages, "lanes",
        lambda real: lambda *a: [Lane(deque([each]), lane.ordered) for lane in real(*a) for each in lane.requests],
    ),
    "a failed request stops its key": (
        publisher, "_answered", lambda real: lambda lane, *a: real(lane, *a) or [lane][: len(lane.requests)]
    ),
    "no answer is no success": (publisher, "failure_of", always(Sent(""))),
    "at-most-once tasks are marked first": (eligibility, "_skip_reason", always(None)),
    "only a probe fails for its topic": (
        CircuitBreakers, "start", lambda real: lambda self, batch: replace(real(self, batch), probe=True)
    ),
    "the first outage costs no attempt": (
        CircuitBreakers, "start",
        lambda real: lambda self, batch: replace(real(self, batch), suspects=frozenset(batch.ids))
    ),
    "deferred tasks cost no attempt": (Delivery, "_behind", lambda _: lambda _self, _head, recorded, _now: recorded),
    "they wait for an hour at most": (
        RetryPolicy, "defer", lambda _: lambda _self, head, at, _now: Deferred(at, head.id)
    ),
}  # fmt: skip


def history(seed: int) -> list[str]:
    """Let two workers, callers, an operator and faults act at random; return the broken promises."""
    random = Random(seed)
    with patched():
        world = World(size=random.choice([10, 3, 1]), batches=random.choice([1, 2]))
        for step in range(60):
            worker = random.choice(world.workers)
            match random.randrange(16) if step % 12 else -1:
                case -1:
                    world.register(*(task(random, world.store.now, f"{step}-{n}") for n in range(random.randint(2, 5))))
                case 0:
                    world.wait(random.choice([1, 11, 61, 600]))
                case 1:
                    world.rush(worker)
                case 2 if sent := [id for id, row in world.store.rows.items() if row.sent_at]:
                    world.retry(random.choice(sent), plainly=False)
                case 3 if world.store.claims:
                    world.store.lose(next(iter(world.store.claims.values())))
                case 4 if world.late:
                    world.execute(world.late.pop())
                case _:
                    for _ in range(4):
                        world.advance(worker, random.randrange(4), random.choice(FATES))
        world.settle()
        for worker in world.workers:
            world.kill(worker)
        return world.ledger.broken


def task(random: Random, now: datetime, number: str) -> Task:
    key, topic = random.choice(["k", "k", "k", "l", None]), random.choice(["orders", "orders", "invoices"])
    due = random.choice([None] * 6 + [now + timedelta(seconds=1)])
    id, bad, once = f"{random.randrange(99):02}-{number}", random.random() < 0.15, random.random() < 0.5
    return Task(id=id, key=key, topic=topic, available_at=due, bad=bad, once=once and key is None)


def test_the_histories_break_no_promise_without_a_fault() -> None:
    """Else they would notice every fault."""
    assert not any(history(seed) for seed in range(HISTORIES))


@pytest.mark.parametrize("rule", FAULTS)
def test_a_history_notices_a_fault_of_the_relay(rule: str) -> None:
    owner, name, make = FAULTS[rule]
    with mock.patch.object(owner, name, make(getattr(owner, name))):
        assert any(history(seed) for seed in range(HISTORIES))
