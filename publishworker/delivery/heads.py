"""Make deferred key heads ready again, after a batch lost its locks for a time by an abort or a failed commit."""

import contextlib
from collections.abc import Callable
from datetime import datetime

from publishworker.delivery.claim import Claim
from publishworker.spanner.errors import StoreError
from publishworker.spanner.store import Decide, Store


def release(claim: Claim, store: Store, *, skip_dead: bool, transact: Callable[[Claim, Decide], datetime]) -> None:
    """Make the first task of each ordering key ready, if another worker has deferred it meanwhile.

    `transact` itself releases the deferred heads among the rows that it locks, so nothing else is written.

    If Spanner does not answer, the keys wait until the deferrals end.
    """
    if not claim.keys:
        return
    with contextlib.suppress(StoreError):
        deferred = claim.of_deferred(store.key_heads(claim.keys, 1, skip_dead=skip_dead))
        if deferred.tasks:
            transact(deferred, lambda _rows, _now: {})
