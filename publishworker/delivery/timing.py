"""How long the steps of a batch take, and how long its tasks waited, for its metrics."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime

from outbox.table.states import first_due
from publishworker.types import CLAIM, COMMIT, PUBLISH, Answer, LockedRow, Published, RowChange


class Timing:
    """The times of a batch, over all runs of its transactions."""

    def __init__(self, clock: Callable[[], float]) -> None:
        #: The seconds of each phase.
        self.phases: dict[str, float] = {}
        #: Seconds between a task's due time and Pub/Sub's answer.
        self.latencies: dict[str, float] = {}
        #: Transactions that have begun. While the number grows, the batch is not stuck.
        self.transactions = 0
        #: Runs that were aborted after they had decided. Aborts of the query that locks are not counted.
        self.aborted = 0
        #: What the last run of the transaction writes, or None before its first run.
        self.changes: Mapping[str, RowChange] | None = None
        self._clock = clock
        self._phase_began = self._locked_at = clock()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Time the transaction in the block. Each run of it calls `locked` and then `committing`."""
        self.transactions += 1
        self.changes, self._phase_began = None, self._clock()
        try:
            yield
        finally:
            self._end(CLAIM if self.changes is None else COMMIT)

    def locked(self) -> None:
        """Record that the rows are locked."""
        self.aborted += self.changes is not None  # an earlier run of this transaction had decided, so it was aborted
        self._locked_at = self._end(CLAIM)  # after an abort, this includes the commit that failed

    def committing(self, changes: Mapping[str, RowChange]) -> None:
        """Record what this run writes. Its commit begins."""
        self.changes = changes
        self._phase_began = self._clock()

    def published(self, rows: Sequence[LockedRow], answers: Mapping[str, Answer], now: datetime) -> None:
        """Record the answers for rows that were locked at `now`, the database's time."""
        waited = self._end(PUBLISH) - self._locked_at
        for row in rows:
            if isinstance(answers.get(row.id), Published):
                self.latencies[row.id] = max(0.0, (now - first_due(row)).total_seconds() + waited)

    def _end(self, phase: str) -> float:
        """Add the time since the last phase ended to this one. Return the time now."""
        now = self._clock()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._phase_began
        self._phase_began = now
        return now
