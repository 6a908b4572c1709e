"""The worker's parts, put together for a test: small numbers, one seed, a turn that waits for its batches."""

from collections.abc import Iterable, Mapping
from itertools import zip_longest
from random import Random
from typing import Any

from publishworker.delivery.delivery import Tools
from publishworker.delivery.marking import SharedMarking
from publishworker.delivery.rules import RetryPolicy
from publishworker.host import Host
from publishworker.spanner.store import PollRequest
from publishworker.telemetry.metrics import Client, Metrics
from publishworker.telemetry.reporter import Reporter
from publishworker.turn.in_flight import Limits
from publishworker.turn.membership import Membership
from publishworker.turn.relay import Relay
from publishworker.types import Claim, ClaimedTask, Kind
from tests.specification.trace import Trace

HOST, SHARES = {"clock", "random", "threads", "progress"}, {"fair_share"}


def policy(**values: Any) -> RetryPolicy:
    """Return the default retry policy, with other values, and random times of one seed."""
    defaults = {"initial": 1, "longest": 3600, "max_attempts": 10, "dead_after": 86_400, "random": Random(1)}
    return RetryPolicy(**{**defaults, **values})


def relay_of(
    store: Any,  # by its methods, such as a FakeStore
    publisher: Any,
    client: Client | None = None,
    *,
    size: int = 10,
    batches: int = 2,
    batch_bytes: int = 10**6,
    membership: Membership | None = None,
    retries: Mapping[str, float] | None = None,
    **options: Any,
) -> Relay:
    host = Host(**{"random": Random(1)} | {name: options.pop(name) for name in HOST & options.keys()})
    trace: Trace | None = options.pop("trace", None)
    store = trace.store(store) if trace else store
    shares = {name: options.pop(name) for name in SHARES & options.keys()}
    relay = Relay(
        Tools(
            store=store,
            publisher=publisher,
            policy=policy(random=host.random, skip_dead=options.pop("skip_dead", False), **(retries or {})),
            marking=SharedMarking(host, options.pop("shutdown_seconds", 0.0)),
            host=host,
        ),
        Limits(size, batch_bytes, batches, **shares),
        membership or Membership(store, "worker"),
        Reporter(Metrics(client), host.clock),
        **{"discovery_seconds": 0, **options},
    )
    return trace.batches_of(relay) if trace else relay


def claim_of(
    topic: str,
    *ids: str,
    keys: Iterable[str | None] = (),
    releases: Iterable[str] = (),
    kind: Kind = Kind.PUBLISH,
    bytes: int = 0,
    **more: Any,
) -> Claim:
    """Return a claim. Each task in `releases` has the last key."""
    tasks = tuple(ClaimedTask(*pair, shard=3) for pair in zip_longest(ids, keys))
    after = tuple(ClaimedTask(id, tasks[-1].ordering_key, 3) for id in releases)
    return Claim(topic, tasks, kind, after, bytes, **more)


def poll_request(*topics: str, shards: Iterable[int] = range(10), per_range: int = 100, **more: Any) -> PollRequest:
    return PollRequest(shards=tuple(shards), topics=frozenset(topics), per_range=per_range, **more)
