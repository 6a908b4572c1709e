"""What every batch works with: the two services, and the rules that the worker's settings choose."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from publishworker.delivery import rules
from publishworker.delivery.claim import Claim
from publishworker.delivery.marking import SharedMarking
from publishworker.delivery.rules import RetryPolicy
from publishworker.host import Host
from publishworker.pubsub.publisher import Publisher
from publishworker.spanner.store import Store
from publishworker.types import Answer, LockedRow


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

    def publish(self, claim: Claim, rows: Sequence[LockedRow]) -> dict[str, Answer]:
        """Publish rows of a claim within the time limit. Tasks that failed before share no request."""
        alone = rules.published_alone(claim, rows)
        return self.publisher.publish(claim.destination, rows, self.publish_seconds, alone)
