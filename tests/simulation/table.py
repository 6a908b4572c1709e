"""The rows of the simulated Spanner, at its time."""

from collections.abc import Collection
from datetime import datetime, timedelta

from outbox.table.states import is_dead
from publishworker.types import TopicKey
from tests.simulation.clockwork import Clockwork
from tests.support.fakes import FakeStore


class Table(FakeStore):
    """The rows of a fake store, with the clock of a history. Every method is one instant."""

    def __init__(self, clockwork: Clockwork, shards: int) -> None:
        super().__init__(shards)
        self._clockwork, self.epoch, self._last = clockwork, self.now, self.now
        #: The IDs of rows that were deleted.
        self.purged: set[str] = set()

    def delete(self, id: str) -> None:
        super().delete(id)
        self.purged.add(id)

    def polled_by_live(self) -> dict[str, frozenset[str]]:
        """Return the columns that live workers poll, as `outbox schema reshard` reads them: for twice the timeout."""
        self.time()
        ages = {worker: (self.now - at).total_seconds() for worker, at in self.seen_at.items()}
        live = [worker for worker, age in ages.items() if age < 2 * self.live_for(worker)]
        return {worker: frozenset(each.column for each in self.polled_by[worker]) for worker in live}

    def time(self) -> datetime:
        self.now = self.epoch + timedelta(seconds=self._clockwork.now)
        return self.now

    def commit_time(self) -> datetime:
        """Return a commit timestamp: later than all before."""
        self._last = max(self.time(), self._last + timedelta(microseconds=1))
        return self._last

    def read_time(self) -> datetime:
        """Return the timestamp of a strong read: not before any earlier commit, and before all later ones."""
        self._last = max(self.time(), self._last)
        return self._last

    def deferred_heads(self, *, skip_dead: bool) -> dict[TopicKey, str]:
        """Return the keys whose first task that may block is deferred until later, each with this task.

        Leave out those with a cancelled task before it that was made unsent and is due: polls read it, and its batch
        then also releases the next one.
        """
        now, found = self.time(), {}
        for key in self._unsent_of_key:
            in_time = (row for row in self.unsent_of(key) if not self.waiting(row).expired_before_due)
            blocking = [row for row in in_time if not (skip_dead and is_dead(row.available_at))]
            if blocking and blocking[0].cancelled_by is not None and self.is_due(blocking[0]):
                continue
            head = next((row for row in blocking if row.cancelled_by is None), None)
            if head is not None and head.blocked_by is not None and head.available_at and head.available_at > now:
                found[key] = head.id
        return found

    def next_of_keys(self, ids: Collection[str]) -> list[str]:
        """Return the tasks that become ready when these are deleted, sorted, as NEXT_OF_KEYS does."""
        self.time()
        heads = []
        keys = {TopicKey(row.topic, row.ordering_key) for id in ids if (row := self.rows.get(id)) and row.ordering_key}
        for key in keys:
            unsent = (row for row in self.unsent_of(key) if row.id not in ids and row.cancelled_by is None)
            others = (row for row in unsent if not is_dead(row.available_at))
            head = next((row for row in others if row.blocked_by or not self.waiting(row).expired_before_due), None)
            heads += [head.id] if head is not None and head.blocked_by else []
        return sorted(heads)
