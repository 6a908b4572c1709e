"""Release key heads after a batch that had no locks for a time."""

import contextlib
from collections.abc import Callable
from datetime import datetime

from publishworker.delivery import rules
from publishworker.delivery.claim import Claim
from publishworker.spanner.errors import StoreError
from publishworker.spanner.store import Decide, Store


def release(
    claim: Claim, store: Store, policy: rules.RetryPolicy, transact: Callable[[Claim, Decide], datetime]
) -> None:
    """Release the heads of the claim's keys that another worker has deferred while the batch had no locks.

    If this fails, their deferrals end by themselves, within a minute.
    """
    if not claim.keys:
        return
    with contextlib.suppress(StoreError):
        deferred = claim.of_deferred(store.key_heads(claim.keys, 1, skip_dead=policy.skip_dead))
        if deferred.tasks:
            transact(deferred, lambda rows, now: rules.releases(deferred, rows, {}, now, policy))
