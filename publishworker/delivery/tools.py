"""What every batch works with: the two services, and the rules that the worker's settings choose."""

from dataclasses import dataclass, field

from publishworker.delivery.marking import SharedMarking
from publishworker.delivery.rules import RetryPolicy
from publishworker.host import Host
from publishworker.pubsub.publisher import Publisher
from publishworker.spanner.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What every delivery works with."""

    store: Store
    publisher: Publisher
    policy: RetryPolicy
    #: The time limit for publishing one batch.
    publish_seconds: float
    #: What all batches share when they mark again.
    marking: SharedMarking
    host: Host = field(default_factory=Host)
