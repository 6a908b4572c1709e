"""The worker's parts, put together for a test: small numbers, one seed, a turn that waits for its groups."""

from collections.abc import Iterable
from random import Random
from typing import Any

from publishworker.fleet import Fleet
from publishworker.metrics import Client, Metrics
from publishworker.publisher import Publisher
from publishworker.relay import Relay
from publishworker.sampling import Limits
from publishworker.store import Store
from publishworker.task import Look


def relay_of(
    store: Store,
    publisher: Publisher,
    client: Client | None = None,
    *,
    size: int = 10,
    groups: int = 2,
    group_bytes: int = 10**6,
    fleet: Fleet | None = None,
    **options: Any,
) -> Relay:
    """Return a relay that is alone, looks for news at each turn, and waits for all groups of a turn."""
    return Relay(
        store,
        publisher,
        Metrics(client),
        fleet or Fleet(store, "worker", store.shards),
        limits=Limits(size, group_bytes, groups),
        **{"publish_seconds": 5, "look_further_seconds": 0, "random": Random(1), **options},
    )


def look(
    *topics: str,
    known: Iterable[str] | None = None,
    shards: Iterable[int] = range(10),
    per_range: int = 100,
    **more: Any,
) -> Look:
    """Return what a poll asks for: the ready tasks of `topics`, with news where `known` topics are given."""
    return Look(
        shards=tuple(shards),
        topics=frozenset(topics),
        per_range=per_range,
        known=None if known is None else frozenset(known),
        **more,
    )
