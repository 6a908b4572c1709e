"""A model of Spanner: the table, row locks with wound-wait, latency, capacity, lost answers.

What it does not model: plans, splits that move, replicas, leader changes, and the time that a transaction of many
participants takes beyond a constant for each.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import IntEnum
from math import exp
from typing import Any, TypeVar

from outbox.table.ddl import Layout
from outbox.table.shared_sql import EXCLUSIVE
from publishworker.spanner import relay_sql
from publishworker.spanner import store as product
from publishworker.spanner.store import Decide, Discovery
from publishworker.spanner.write_errors import NotWritten, StoreError, TimedOut
from publishworker.types import Candidate, KeyHeads, PollRequest, RowChange, TopicKey
from tests.simulation.audit import Audit
from tests.simulation.clockwork import Clockwork, Process
from tests.simulation.table import Table
from tests.support.fakes import StoredTask

#: Seconds without a request after which Spanner may abort a transaction.
#: https://cloud.google.com/spanner/docs/reference/rest/v1/TransactionOptions
IDLE_SECONDS = 10.0
#: The client's CPU for an aborted lock query and its error, in requests: 1.9 to 2.1 ms where a request takes 1.5 ms.
ABORTED_REQUESTS = 1.3
#: Seconds that a request may wait for capacity. Then Spanner pushes back with ABORTED.
MAX_QUEUE_SECONDS = 2.0
#: Seconds that a late answer takes longer. It shows the rows as they were before.
LATE_SECONDS = 3.0

Answer = TypeVar("Answer")


class Mode(IntEnum):
    SHARED, EXCLUSIVE = range(2)


class Aborted(Exception):
    """The transaction has lost its locks, or the database is overloaded."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Medians in seconds of a request as the client sees it, without waits for locks, and the spread of all.

    The defaults are of the order that users report for a regional instance; `commit` grows by `participant` for each
    split that it writes to.
    """

    read: float = 0.006
    lock: float = 0.007
    commit: float = 0.012
    participant: float = 0.0001
    publish: float = 0.025
    sigma: float = 0.35

    def times(self, factor: float) -> "Latencies":
        names = ("read", "lock", "commit", "participant", "publish")
        return replace(self, **{name: getattr(self, name) * factor for name in names})


DEFAULT_LATENCIES = Latencies()


@dataclass(frozen=True, slots=True)
class Cpu:
    """Seconds of the worker's CPU for each request to Spanner or Pub/Sub, and for each claimed task."""

    request: float = 0.0
    task: float = 0.0


NO_CPU = Cpu()


@dataclass(eq=False)
class Transaction:
    """One transaction attempt. Attempts of one call share their age, so the oldest call wins in the end."""

    age: tuple[float, int]
    exclusive: bool = True
    held: dict[str, Mode] = field(default_factory=dict)
    wounded: bool = False
    commits: bool = False
    asked_at: float = 0.0
    #: Called if Spanner takes its locks away.
    lost: Callable[[], object] = lambda: None


class Locks:
    """Row locks, shared and exclusive. An older transaction aborts younger ones in its way, a younger one waits."""

    def __init__(self, clockwork: Clockwork) -> None:
        self._clockwork = clockwork
        self._holders: dict[str, dict[Transaction, Mode]] = defaultdict(dict)
        self._waiters: dict[str, list[Callable[[Any], None]]] = defaultdict(list)
        self.wounds = 0

    def acquire(self, transaction: Transaction, id: str, mode: Mode) -> None:
        """Wait for the lock. Raises Aborted."""
        while others := self._in_the_way(transaction, id, mode):
            for other in others:
                idle = self._clockwork.now - other.asked_at >= IDLE_SECONDS
                if not other.commits and (idle or transaction.age < other.age):
                    self.wound(other)
            if not (others := self._in_the_way(transaction, id, mode)):
                break
            self._waiters[id].append(self._clockwork.waiter())
            self._clockwork.park(min(IDLE_SECONDS - (self._clockwork.now - other.asked_at) for other in others) + 0.001)
            if transaction.wounded:
                raise Aborted("wounded while it waited")
        if transaction.wounded:
            raise Aborted("wounded")
        self._holders[id][transaction] = transaction.held[id] = max(mode, transaction.held.get(id, mode))

    def _in_the_way(self, transaction: Transaction, id: str, mode: Mode) -> list[Transaction]:
        return [
            other
            for other, its in self._holders.get(id, {}).items()
            if other is not transaction and (mode is Mode.EXCLUSIVE or its is Mode.EXCLUSIVE)
        ]

    def holders(self, id: str) -> list[Transaction]:
        return list(self._holders.get(id, ()))

    def wound(self, transaction: Transaction) -> None:
        self.wounds += 1
        transaction.wounded = True
        transaction.lost()
        self.release(transaction)

    def release(self, transaction: Transaction) -> None:
        for id in transaction.held:
            self._holders[id].pop(transaction, None)
            if not self._holders[id]:
                del self._holders[id]
            for wake in self._waiters.pop(id, ()):
                wake(True)
        transaction.held = {}


class Spanner:
    """The service: one table, its locks, and as many requests a second as its capacity allows."""

    def __init__(self, clockwork: Clockwork, shards: int, latencies: Latencies) -> None:
        self.clockwork, self.latencies = clockwork, latencies
        #: The split of a row. By default the entries in the indexes decide, which are together.
        self.split_of: Callable[[StoredTask], int] = lambda row: row.shards[0] % 10
        self.table = Table(clockwork, shards)
        #: The rows of other tables, by their keys.
        self.others: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = defaultdict(dict)
        self.locks = Locks(clockwork)
        self.process = Process("spanner")
        #: Units of work that it can do in a second, or None for any number. More wait, those of low priority longer.
        self.capacity: float | None = None
        #: Tells of a commit of an application or a job whether its answer is lost.
        self.is_unanswered: Callable[[], bool] = lambda: False
        #: The work of a request by its kind and rows, and the work done. "rows" are those that a poll has returned.
        self.work: Callable[[str, int], float] = lambda kind, _rows: kind != "rows"
        self.worked = 0.0
        self._busy_until = self._urgent_until = 0.0
        self._ages = itertools.count()
        self.requests: dict[str, int] = defaultdict(int)
        self.aborts = 0
        #: The rows of heartbeats that were read.
        self.heartbeat_rows = 0

    def drawn(self, median: float) -> float:
        """Return a latency of this median."""
        return median * exp(self.clockwork.random.gauss(0, self.latencies.sigma))

    def wait(self, median: float) -> None:
        """Let the running fiber wait for a latency of this median."""
        self.clockwork.sleep(self.drawn(median))

    def age(self) -> tuple[float, int]:
        return self.clockwork.now, next(self._ages)

    def begin(self, kind: str, serve: Callable[[], None]) -> None:
        """Serve a request, in a fiber if it may have to wait for a lock or for capacity. Fibers cost time."""
        if kind in ("lock", "commit") or self.capacity is not None:
            self.clockwork.spawn(self.process, serve)
        else:
            serve()

    def serve(self, kind: str, rows: int = 0, *, urgent: bool) -> None:
        """Wait for capacity. Raises Aborted if that would take long."""
        self.clockwork.sleep(self.book(kind, rows, urgent=urgent))

    def book(self, kind: str, rows: int, *, urgent: bool) -> float:
        """Add a request to the queue, and return its seconds there. Raises Aborted if it would wait long."""
        units = self.work(kind, rows)
        self.worked += units
        if self.capacity is None:
            return 0.0
        now, work = self.clockwork.now, units / self.capacity
        end = max(now, self._urgent_until) + work if urgent else max(now, self._busy_until, self._urgent_until) + work
        if end - now > MAX_QUEUE_SECONDS:
            raise Aborted("overloaded")
        if urgent:
            self._urgent_until = end
            self._busy_until = max(now, self._busy_until) + work
        else:
            self._busy_until = end
        return end - now

    def lock(self, transaction: Transaction, ids: Sequence[str]) -> list[Any]:
        transaction.asked_at = self.clockwork.now
        for id in ids:
            self.locks.acquire(transaction, id, Mode.EXCLUSIVE if transaction.exclusive else Mode.SHARED)
        transaction.asked_at = self.clockwork.now
        self.table.time()
        return [self.table.as_locked(self.table.rows[id]) for id in ids if id in self.table.rows]

    def commit(self, transaction: Transaction, marks: Mapping[str, RowChange], delay: float = 0.0) -> datetime:
        transaction.asked_at = self.clockwork.now
        for id in sorted(marks):
            self.locks.acquire(transaction, id, Mode.EXCLUSIVE)
        if transaction.wounded:
            raise Aborted("wounded")
        self.table.refuse(marks)
        transaction.commits = True
        touched = {self.split_of(self.table.rows[id]) for id in marks}
        self.clockwork.sleep(delay + self.latencies.participant * len(touched))
        committed = self.table.commit_time()
        self.table.apply(marks, committed)
        self.locks.release(transaction)
        return committed

    def roll_back(self, transaction: Transaction) -> None:
        if not transaction.commits:
            transaction.wounded = True  # a lock query that still waits must not get the locks
            self.locks.release(transaction)


class Connection:
    """The store of one worker: each method is a request that takes time, waits, fails or loses its answer."""

    def __init__(
        self,
        spanner: Spanner,
        process: Process,
        fate: Callable[[str], str | None] = lambda _kind: None,
        *,
        exclusive: bool = True,
        cpu: Cpu = NO_CPU,
        audit: Audit | None = None,
        max_deferral: timedelta = timedelta.max,
        only: Sequence[Layout] = (),
        commit_delay: float = 0.0,
    ) -> None:
        """`fate` says of each request whether it is `refused`, or its way there (`lost`) or back (`unanswered`) fails.

        `audit` is told of the rows and marks of each claim. With `only`, the worker knows no other layouts.
        """
        self._spanner, self._process, self._fate, self._exclusive = spanner, process, fate, exclusive
        self._exclusive &= EXCLUSIVE in relay_sql.LOCK
        self._clockwork, self._audit, self._cpu = spanner.clockwork, audit, cpu
        self.layouts: Sequence[Layout] = only or spanner.table.layouts
        self._only, self._max_deferral, self._commit_delay = only, max_deferral, commit_delay

    def _call(
        self, kind: str, median: float, execute: Callable[[], Any], limit: float, *, rows: int = 0, urgent: bool = False
    ) -> Any:
        """Send a request, wait for its answer. Raises StoreError, Aborted."""
        clockwork, spanner = self._clockwork, self._spanner
        fate, there, back = self._fate(kind), spanner.drawn(median / 2), spanner.drawn(median / 2)
        spanner.requests[kind] += 1
        back += LATE_SECONDS * (fate == "late")
        wake = clockwork.waiter()

        def serve() -> None:
            try:
                spanner.serve(kind, rows, urgent=urgent)
                spanner.table.time()
                answer = execute()
            except (Aborted, StoreError) as error:
                answer = error
            if fate != "unanswered":
                clockwork.after(back, lambda: wake((answer,)))

        if fate == "refused":
            clockwork.after(there, lambda: wake(StoreError("UNAVAILABLE")))
        elif fate != "lost":
            clockwork.after(there, lambda: spanner.begin(kind, serve))
        answer = clockwork.park(limit)
        if answer is None:
            raise TimedOut("DEADLINE_EXCEEDED")
        if isinstance(answer, StoreError):
            raise answer
        [result] = answer
        if isinstance(result, Exception):
            raise result
        return result

    def _read(self, kind: str, execute: Callable[[], Answer], scans: int = 1) -> Answer:
        self._work(self._cpu.request)
        try:
            found: Answer = self._call(kind, self._spanner.latencies.read, execute, product.READ_SECONDS, rows=scans)
        except Aborted as error:
            raise StoreError(str(error)) from error
        return found

    def poll(self, request: PollRequest) -> Sequence[Candidate]:
        def execute() -> Sequence[Candidate]:
            found = self._spanner.table.poll(request)
            self._spanner.book("rows", len(found), urgent=False)
            return found

        return self._read("poll", execute, scans=1 + request.due + (request.below_priority is not None))

    def discover(self, shards: Sequence[int], known: Collection[str], *, workers: bool = True) -> Discovery:
        found = self._read("discover", lambda: self._spanner.table.discover(shards, known, workers=workers))
        if found.workers is None:
            return found
        self._spanner.heartbeat_rows += len(self._spanner.table.seen_at)
        if self._only:
            return replace(found, workers=replace(found.workers, layouts=()))
        self.layouts = found.workers.layouts or self.layouts
        return found

    def seconds_until_due(self, shards: Sequence[int], topics: Collection[str]) -> float | None:
        return self._read("next_due", lambda: self._spanner.table.seconds_until_due(shards, topics))

    def key_heads(self, keys: Mapping[TopicKey, int], per_key: int, *, skip_dead: bool) -> KeyHeads:
        def execute() -> KeyHeads:
            found = self._spanner.table.key_heads(keys, per_key, skip_dead=skip_dead)
            if self._audit:
                self._audit.chosen(self._process, (task.id for queue in found.values() for task in queue))
            return found

        return self._read("key_heads", execute)

    def heartbeat(self, *arguments: Any, **options: Any) -> None:
        self._write("heartbeat", lambda: self._spanner.table.heartbeat(*arguments, **options))

    def delete_heartbeat(self, worker: str) -> None:
        self._write("heartbeat", lambda: self._spanner.table.delete_heartbeat(worker))

    def _write(self, kind: str, execute: Callable[[], Any]) -> None:
        try:
            limit = product.HEARTBEAT_TIMEOUT_SECONDS
            self._call(kind, self._spanner.latencies.commit, execute, limit, urgent=True)
        except Aborted as error:
            raise NotWritten(str(error)) from error

    def claim(self, ids: Sequence[str], decide: Decide, *, may_delay: bool = False) -> datetime:
        """See Store: the transaction attempts of the client, with its limits."""
        clockwork, spanner = self._clockwork, self._spanner
        age, end = spanner.age(), clockwork.now + product.ABORTED_SECONDS
        while True:
            transaction = Transaction(age, self._exclusive, asked_at=clockwork.now, lost=lambda: self._lost(ids))
            try:
                return self._attempt(transaction, sorted(ids), decide, self._commit_delay if may_delay else 0.0)
            except Aborted as error:
                spanner.aborts += 1
                self._work(ABORTED_REQUESTS * self._cpu.request)
                if clockwork.now >= end:
                    raise NotWritten(f"ABORTED: {error}") from error
                spanner.wait(product.ABORTED.first)
            finally:
                self._roll_back(transaction)

    def _attempt(self, transaction: Transaction, ids: Sequence[str], decide: Decide, delay: float) -> datetime:
        spanner = self._spanner
        if self._audit:
            self._audit.messages.claims(self._process, ids)
        try:
            rows, now = self._call(
                "lock", spanner.latencies.lock, lambda: self._lock(transaction, ids), product.LOCK_SECONDS,
                rows=len(ids),
            )  # fmt: skip
        except StoreError as error:
            raise NotWritten(str(error)) from error
        if self._audit:
            self._audit.claimed(self._process, rows, now)
        self._work(3 * self._cpu.request + len(rows) * self._cpu.task)  # lock, publish, commit
        decided = decide(rows, now)
        marks = {row.id: decided[row.id] for row in rows if row.id in decided}

        def execute() -> datetime:
            committed = spanner.commit(transaction, marks, delay)
            if self._audit:
                self._audit.marked(self._process, marks, committed, committed + self._max_deferral)
            return committed

        try:
            committed: datetime = self._call("commit", spanner.latencies.commit, execute, 10.0, rows=len(marks))
        except (Aborted, StoreError):
            self._lost(ids)
            raise
        return committed

    def _lost(self, ids: Sequence[str]) -> None:
        """Tell the audit that a living worker loses its locks. A kill is a fault of its own, and an exit is none."""
        if self._audit and self._process.alive:
            self._audit.messages.touch(self._process, ids)

    def _lock(self, transaction: Transaction, ids: Sequence[str]) -> tuple[list[Any], datetime]:
        """Return the locked rows and the time of the lock, which a suspended process reads late."""
        rows, now = self._spanner.lock(transaction, ids), self._spanner.table.time()
        if self._audit:
            self._audit.locked(rows, now)
        return rows, now

    def _work(self, seconds: float) -> None:
        """Use the CPU of the process: one core, which all its fibers share."""
        if seconds:
            process, clockwork = self._process, self._clockwork
            process.worked += seconds
            process.busy_until = max(clockwork.now, process.busy_until) + seconds
            clockwork.sleep(process.busy_until - clockwork.now)

    def _roll_back(self, transaction: Transaction) -> None:
        """Release the locks, unless they are released already or the request is lost: then they stay until idle."""
        if self._process.alive and not transaction.commits and self._fate("rollback") is None:
            self._clockwork.after(self._spanner.drawn(0.003), lambda: self._spanner.roll_back(transaction))
