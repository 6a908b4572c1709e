"""The worker's parts, put together for a test: small numbers, one seed, a turn that waits for its groups."""

from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

from publishworker.batching import Limits
from publishworker.delivery import Delivery
from publishworker.membership import Fleet
from publishworker.pubsub.publisher import Publisher
from publishworker.relay import Relay
from publishworker.retry_policy import Retries
from publishworker.spanner.store import Store
from publishworker.telemetry.metrics import Client, Metrics
from publishworker.types import Look


def relay_of(
    store: Store,
    publisher: Publisher,
    client: Client | None = None,
    *,
    size: int = 10,
    groups: int = 2,
    group_bytes: int = 10**6,
    fleet: Fleet | None = None,
    retries: Mapping[str, float] | None = None,
    **options: Any,
) -> Relay:
    """Return a relay that is alone, looks for news at each turn, and waits for all groups of a turn."""
    random = Random(1)
    defaults: dict[str, Any] = {"initial": 1, "longest": 3600, "max_attempts": 10, "dead_after": 86_400}
    return Relay(
        store,
        Delivery(
            store,
            publisher,
            Retries(random=random, **{**defaults, **(retries or {})}),
            publish_seconds=5,
            pass_dead=options.get("pass_dead", False),
        ),
        Metrics(client),
        fleet or Fleet(store, "worker", store.shards),
        limits=Limits(size, group_bytes, groups),
        **{"look_further_seconds": 0, "random": random, **options},
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
