"""What every batch works with, and how long its steps take, for its metrics."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, cast

from outbox.table.states import first_due
from publishworker.delivery.marking import SharedMarking
from publishworker.delivery.rules import RetryPolicy
from publishworker.host import Host
from publishworker.pubsub.publisher import Publisher
from publishworker.spanner.store import Decide, Store
from publishworker.types import CLAIM, COMMIT, PUBLISH, Answer, LockedRow, Published, RowChange


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


class Timing:
    """The times of a batch, over all its transaction attempts. It wraps the store and the publisher of the batch."""

    def __init__(self, clock: Callable[[], float]) -> None:
        #: The seconds of each phase.
        self.phases: dict[str, float] = {}
        #: Seconds between a task's due time and Pub/Sub's answer.
        self.latencies: dict[str, float] = {}
        #: Transactions that have begun. While the number grows, the batch is not stuck.
        self.transactions = 0
        #: Attempts that were aborted after they had decided. Aborts of the query that locks are not counted.
        self.aborted = 0
        self._clock = clock
        self._phase_began = self._locked_at = clock()
        self._now: datetime  # the database's time at the last lock

    def of(self, tools: Tools) -> Tools:
        """Return tools whose use is timed."""
        return replace(tools, store=cast(Store, _Store(tools.store, self)), publisher=_Publisher(tools.publisher, self))

    def claim(self, store: Store, ids: Sequence[str], decide: Decide, *, may_delay: bool) -> datetime:
        """Time a transaction. Raises StoreError."""
        self.transactions += 1
        self._phase_began, has_decided = self._clock(), False

        def timed(rows: Sequence[LockedRow], now: datetime) -> Mapping[str, RowChange]:
            nonlocal has_decided
            self.aborted += has_decided  # an earlier attempt had decided, so it was aborted
            self._locked_at, self._now = self._end(CLAIM), now  # after an abort, this includes the commit that failed
            changes = decide(rows, now)
            has_decided, self._phase_began = True, self._clock()
            return changes

        try:
            return store.claim(ids, timed, may_delay=may_delay)
        finally:
            self._end(COMMIT if has_decided else CLAIM)

    def published(self, rows: Sequence[LockedRow], answers: Mapping[str, Answer]) -> None:
        """Record the answers for rows that the last transaction has locked."""
        waited = self._end(PUBLISH) - self._locked_at
        for row in rows:
            if isinstance(answers.get(row.id), Published):
                self.latencies[row.id] = max(0.0, (self._now - first_due(row)).total_seconds() + waited)

    def _end(self, phase: str) -> float:
        """Add the time since the last phase ended to this one. Return the time now."""
        now = self._clock()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._phase_began
        self._phase_began = now
        return now


class _Store:
    def __init__(self, store: Store, timing: Timing) -> None:
        self._store, self._timing = store, timing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def claim(self, ids: Sequence[str], decide: Decide, *, may_delay: bool = False) -> datetime:
        return self._timing.claim(self._store, ids, decide, may_delay=may_delay)


class _Publisher:
    def __init__(self, publisher: Publisher, timing: Timing) -> None:
        self._publisher, self._timing = publisher, timing
        self.refusals = publisher.refusals

    def publish(
        self, topic: str, rows: Sequence[LockedRow], seconds: float, alone: Collection[str] = frozenset()
    ) -> dict[str, Answer]:
        answers = self._publisher.publish(topic, rows, seconds, alone)
        self._timing.published(rows, answers)
        return answers
