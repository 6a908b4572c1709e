"""Which shards are this worker's: the living divide them among themselves, without a leader.

Each worker writes a heartbeat row and reads those of the others with its polls. All that see the same rows come to the
same division. A wrong one costs collisions, or a delay of at most a lease; correctness is the locks' matter.
"""

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from itertools import product

from outbox.shared.throttled_log import ThrottledLog
from publishworker.spanner.store import Store, StoreError

_log = logging.getLogger("publishworker")

#: Seconds between two heartbeats of a worker.
HEARTBEAT_INTERVAL_SECONDS = 5.0


class Membership:
    """This worker among the others. It belongs to the thread of the loop."""

    def __init__(
        self,
        store: Store,
        worker: str,
        shards: Sequence[int],
        *,
        shared: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin as if alone; with `shared` every worker has all shards, and still says that it lives."""
        self._store = store
        self._worker = worker
        self._all = tuple(shards)
        self._shared = shared
        self._clock = clock
        self._throttled_log = ThrottledLog(clock)
        self._failure: StoreError | None = None
        self._was_seen = True
        self._known_until = float("-inf")
        self._started_at = datetime.now(UTC)
        self._beat_at = float("-inf")
        self._living: frozenset[str] = frozenset({worker})
        self._gone: frozenset[str] = frozenset()
        self.shards = self._all

    @property
    def size(self) -> int:
        """Return how many workers live, this one included."""
        return len(self._living)

    @property
    def seconds_to_beat(self) -> float:
        """Return how long the next heartbeat can wait."""
        return max(0.0, self._beat_at + HEARTBEAT_INTERVAL_SECONDS - self._clock())

    def beat(self) -> None:
        """Write the heartbeat if it is time.

        One that fails stops nothing: the others take over this worker's shards, and the locks keep them apart.
        """
        if self.seconds_to_beat > 0:
            return
        self._beat_at = self._clock()
        self._failure = None
        try:
            self._store.heartbeat(self._worker, self._started_at, self._gone)
        except StoreError as error:
            self._failure = error

    def learn(self, living: Collection[str], gone: Collection[str]) -> bool:
        """Take in which workers live, and whose rows are so old that they may be deleted.

        Returns whether this worker has other shards now.
        """
        if self._failure is not None:  # said here, where the store serves polls: else there is an outage to tell of
            self._throttled_log.say("fleet", "", f"no heartbeat is written, other workers take over: {self._failure}")
        before = self.shards
        self._gone = frozenset(gone) - {self._worker}
        seen = self._worker in living
        if self._was_seen and not seen:
            # After an outage all are silent; who is alive is known when they have had the time to say so.
            self._known_until = self._clock() + HEARTBEAT_INTERVAL_SECONDS
        self._was_seen = seen
        living = frozenset(living) | {self._worker}  # whoever looks is alive
        if self._clock() < self._known_until:
            living |= self._living
        if living != self._living:
            self._living = living
            self.shards = self._all if self._shared else divide(living, self._all)[self._worker]
            shards = ", ".join(map(str, self.shards))
            _log.info("%d workers live; this one polls shards %s", len(living), shards, extra={"action": "assigned"})
        return self.shards != before

    def leave(self) -> None:
        """Let the others have the shards at once; if it fails, they have them after the lease."""
        try:
            self._store.leave(self._worker)
        except StoreError as error:
            self._throttled_log.say("fleet", "", f"no leave was taken, the others wait for the lease to end: {error}")


def divide(workers: Collection[str], shards: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the shards of each worker: every shard has one, every worker has one, and loads differ by at most one.

    Rendezvous hashing with bounded loads: pairs of worker and shard, the highest hash first, as long as both have room.
    Where workers outnumber shards they share: each has one shard, and a shard has several workers.
    """
    pairs = sorted(product(workers, shards), key=lambda pair: _score(*pair), reverse=True)
    many, few = (1, 0) if len(shards) >= len(workers) else (0, 1)  # positions in a pair
    least, over = divmod(max(len(shards), len(workers)), min(len(shards), len(workers)))
    load: Counter[object] = Counter()
    assigned: dict[object, tuple[str, int]] = {}
    for most in (least, least + 1)[: 2 if over else 1]:
        for pair in pairs:
            if pair[many] not in assigned and load[pair[few]] < most:
                assigned[pair[many]] = pair
                load[pair[few]] += 1
    of: dict[str, list[int]] = {worker: [] for worker in workers}
    for worker, shard in assigned.values():
        of[worker].append(shard)
    return {worker: tuple(sorted(its)) for worker, its in of.items()}


def _score(worker: str, shard: int) -> bytes:
    return hashlib.blake2b(f"{worker}/{shard}".encode(), digest_size=8).digest()
