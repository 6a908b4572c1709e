"""Shard assignment: the live workers divide the shards among themselves, without a leader.

Each worker writes heartbeats to its row and reads those of the others. If a worker has written none for its liveness
timeout (14 s, or 29 s if it is idle), the others take over its shards when they next read the heartbeats. Workers that
read the same rows compute the same assignment. If two workers poll one shard, they wait for each other's row locks. If
no worker polls a shard, its tasks wait until the liveness timeout and the next poll. Correctness depends only on the
row locks.

While Spanner refuses writes, all heartbeats become old. A worker that then took over shards would publish the tasks
that the others have published and cannot mark. So silence counts as an end only for a worker that can write.
"""

import contextlib
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from itertools import product

from outbox.base.schedules import RECONNECT
from outbox.base.values import counted
from outbox.table.ddl import Layout
from publishworker.log import ThrottledLog, log
from publishworker.spanner.store import LIVENESS_TIMEOUT_SECONDS, SpannerStore, Workers
from publishworker.spanner.write_errors import StoreError

#: Seconds between two heartbeats of a worker.
HEARTBEAT_INTERVAL_SECONDS = 7.5
#: The same while the worker has nothing to send and waits for the change stream. Otherwise idle workers would send
#: twice as many requests (docs/benchmarks.md).
IDLE_HEARTBEAT_INTERVAL_SECONDS = 21.0
#: The liveness timeout that an idle worker's heartbeat sets: 21 s to the next heartbeat, 5 s until that times out, and
#: 3 s for a second attempt, which follows at once.
IDLE_LIVENESS_TIMEOUT_SECONDS = 29
#: Workers that read the change stream. A partition may have 20 readers (https://docs.cloud.google.com/spanner/quotas).
#: Half of that, so that two groups of workers may overlap for a while, as in a deployment.
MAX_STREAM_READERS = 10
#: Workers that count the backlog.
COUNTING_WORKERS = 2
#: Heartbeat rows that each worker reads in a second, at most. Up to 400 workers, this is the bound. With more
#: workers, they must still be read when the next worker may time out.
HEARTBEAT_ROWS_PER_SECOND = 60


class Membership:
    """The live workers, and the shards of this worker. Only the worker's thread uses it."""

    def __init__(
        self,
        store: SpannerStore,
        worker: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._worker = worker
        #: Whether the worker has no tasks and waits for the change stream. It then writes its heartbeat less often.
        self.idle = False
        #: Whether a turn has failed since the last heartbeat. A turn that is only slow says nothing about the others.
        self.turn_failed = False
        #: Returns the information about this worker for its heartbeat. The argument is the shards that it polls.
        self.info: Callable[[Sequence[int]], Mapping[str, object] | None] = lambda _shards: None
        self._is_assigned = False
        #: The liveness timeout that the last written heartbeat has set.
        self._liveness_timeout = LIVENESS_TIMEOUT_SECONDS
        #: The layouts that this worker polls.
        self.layouts = tuple(store.layouts)
        self._clock = clock
        self._throttled_log = ThrottledLog(clock)
        self._failure: StoreError | None = None
        self._started_at = datetime.now(UTC)
        self._heartbeat_at = float("-inf")
        #: Since when each heartbeat was written in time, after one that was not.
        self._writes_since = float("-inf")
        self._assigned_at = clock()
        self._next_timeout_at = math.inf
        self._live: frozenset[str] = frozenset({worker})
        self._gone: frozenset[str] = frozenset()
        #: The IDs of the shards that this worker polls.
        self.shards = _ids(self.layouts)

    @property
    def size(self) -> int:
        return len(self._live)

    @property
    def counts_backlog(self) -> bool:
        """Tell whether this worker counts the backlog: two do, so that one that hangs or cannot count is no gap."""
        return self._worker in sorted(self._live)[:COUNTING_WORKERS]

    @property
    def follows_stream(self) -> bool:
        """Tell whether this worker reads the change stream: one of the first live workers. Callable on any thread."""
        return self._is_assigned and sorted(self._live).index(self._worker) < MAX_STREAM_READERS

    @property
    def reads_workers(self) -> bool:
        """Tell whether the next discovery reads the heartbeats.

        Every worker reads all of them. If there are very many, it reads them less often, but always when a worker may
        time out.
        """
        seconds = self.size / HEARTBEAT_ROWS_PER_SECOND
        waits = seconds > 1 and self._clock() - self._assigned_at < seconds
        return not (waits and self.seconds_to_next_timeout > 0)

    @property
    def seconds_to_heartbeat(self) -> float:
        uses_idle_interval = self.idle and self._liveness_timeout == IDLE_LIVENESS_TIMEOUT_SECONDS
        interval = IDLE_HEARTBEAT_INTERVAL_SECONDS if uses_idle_interval else HEARTBEAT_INTERVAL_SECONDS
        seconds = RECONNECT.first if self._failure else interval
        return max(0.0, self._heartbeat_at + seconds - self._clock())

    @property
    def seconds_to_next_timeout(self) -> float:
        """Return the seconds until another worker is no longer live, if none of them writes a heartbeat."""
        return max(0.0, self._next_timeout_at - self._clock())

    @property
    def _is_silent(self) -> bool:
        """Tell whether an outage has kept this worker from writing its heartbeat in time."""
        is_late = self._liveness_timeout <= self._clock() - self._heartbeat_at < math.inf
        return self._failure is not None or (self.turn_failed and is_late)

    @property
    def _can_tell(self) -> bool:
        """Tell whether silent workers have ended: they have had as much time to write as this worker."""
        return not self._is_silent and self._clock() - self._writes_since >= LIVENESS_TIMEOUT_SECONDS

    def heartbeat(self) -> None:
        """Write the heartbeat if it is due. If writes fail, workers whose writes succeed take over."""
        if self.seconds_to_heartbeat > 0:
            return
        with contextlib.suppress(StoreError):
            self._write(self.layouts)

    def _write(self, layouts: Sequence[Layout]) -> None:
        was_silent, self._heartbeat_at = self._is_silent, self._clock()
        liveness_timeout = IDLE_LIVENESS_TIMEOUT_SECONDS if self.idle else LIVENESS_TIMEOUT_SECONDS
        # Before the first assignment, the worker knows no topic to poll, so it says that it polls no shard.
        info = self.info(self.shards if self._is_assigned else ())
        try:
            self._store.heartbeat(
                self._worker, self._started_at, layouts, liveness_timeout=liveness_timeout, info=info, remove=self._gone
            )
        except StoreError as error:
            self._failure = error
            raise
        if was_silent:
            self._writes_since = self._heartbeat_at
        self._failure, self.turn_failed = None, False
        self._liveness_timeout = liveness_timeout

    def assign(self, workers: Workers) -> None:
        """Take this worker's part of the shards. Raises StoreError.

        The worker begins to poll a new layout before its heartbeat names the new layout. It stops polling the old one
        after its heartbeat no longer names the old one. `outbox schema reshard` relies on both: it retires the
        old layout when all live heartbeats name the new one, and drops the old layout when no heartbeat names it. If
        the write of the heartbeat fails, the worker polls both layouts until a later write succeeds, because the failed
        write may have been committed.
        """
        self._assigned_at = self._clock()
        if self._failure is not None:  # only the heartbeat failed, because the read succeeded. `Worker` logs outages
            sentence = f"Heartbeat failed: {self._failure}. Until one succeeds, this worker takes over no shards."
            self._throttled_log.log("heartbeat_failed", "", sentence)
        if self._is_silent and not self._is_assigned:  # it began in an outage, and the others do not know it yet
            self._write(self.layouts)
            self._live |= workers.silent
        others = {id: seconds for id, seconds in workers.live.items() if id != self._worker}
        others |= dict.fromkeys(self._kept(workers), float(LIVENESS_TIMEOUT_SECONDS))
        self._gone = workers.gone - {self._worker} if self._can_tell else frozenset()
        self._next_timeout_at = self._clock() + min(others.values(), default=math.inf)
        live = frozenset({*others, self._worker})  # this worker is live even if its row timed out
        layouts = workers.layouts or self.layouts
        if layouts != self.layouts:
            self._divide(live, tuple(sorted({*layouts, *self.layouts})))
            self._write(layouts)
            columns = " and ".join(each.column for each in layouts)
            log.info("This worker polls %s", columns, extra={"action": "reshard"})
        self._divide(live, layouts)
        self._is_assigned = True

    def _kept(self, workers: Workers) -> frozenset[str]:
        """Return the silent workers that stay live, because this worker cannot tell whether they have ended."""
        silent = self._live & workers.silent - {self._worker}
        if silent and self._can_tell:
            with contextlib.suppress(StoreError):
                self._write(self.layouts)  # writes may have begun to fail since the last heartbeat
                return frozenset()
        return silent

    def _divide(self, live: frozenset[str], layouts: tuple[Layout, ...]) -> None:
        """Take this worker's part of the shards if the live workers or the layouts have changed."""
        if (live, layouts) != (self._live, self.layouts):
            self._live, self.layouts = live, layouts
            self.shards = divide(live, _ids(layouts))[self._worker]  # OUT-LOSS-6
            shards = ", ".join(map(str, self.shards))
            workers = counted(len(live), "live worker")
            log.info("%s; this one polls shards %s", workers, shards, extra={"action": "assigned"})

    def delete_heartbeat(self) -> None:
        """Delete the heartbeat, so that others take over at once, and not only after the liveness timeout."""
        try:
            self._store.delete_heartbeat(self._worker)
        except StoreError as error:
            sentence = f"The heartbeat row was not deleted; other workers take over after the liveness timeout: {error}"
            self._throttled_log.log("heartbeat_failed", "", sentence)


def _ids(layouts: Sequence[Layout]) -> tuple[int, ...]:
    return tuple(id for layout in layouts for id in layout.ids)


def divide(workers: Collection[str], shards: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the shards of each worker: each shard has a worker, each worker a shard, and loads differ by at most one.

    Few shards move when a worker joins or leaves: many workers notice it only after seconds, and meanwhile no
    worker polls a shard that has moved. So this is rendezvous hashing with bounded loads: pairs of worker and shard are
    assigned by descending hash while both have room. If there are more workers than shards, each worker has one shard,
    and a shard has several workers.
    """
    hashes = {
        pair: hashlib.blake2b("{}/{}".format(*pair).encode(), digest_size=8).digest()
        for pair in product(workers, shards)
    }
    pairs = sorted(hashes, key=hashes.__getitem__, reverse=True)
    # A pair is (worker, shard). `larger` is the index of the side that has more, `smaller` that of the other side.
    larger, smaller = (1, 0) if len(shards) >= len(workers) else (0, 1)
    min_load, rest = divmod(max(len(shards), len(workers)), min(len(shards), len(workers)))
    load: Counter[object] = Counter()
    assigned: dict[object, tuple[str, int]] = {}
    for max_load in (min_load, min_load + 1) if rest else (min_load,):
        for pair in pairs:
            if pair[larger] not in assigned and load[pair[smaller]] < max_load:
                assigned[pair[larger]] = pair
                load[pair[smaller]] += 1
    return {worker: tuple(sorted(shard for owner, shard in assigned.values() if owner == worker)) for worker in workers}
