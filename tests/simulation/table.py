"""The rows of the simulated Spanner, with the ranges of the outbox's indexes."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sortedcontainers import SortedList

from outbox.table.ddl import Layout
from publishworker.spanner.store import PollRequest
from publishworker.types import Candidate, KeyHeads, QueuedTask, RowChange, TopicKey
from tests.simulation.clockwork import Clockwork
from tests.support.fakes import FakeStore, StoredTask, candidate, place_in_key


class Table(FakeStore):
    """The rows, with the ranges of both indexes. Every method is one instant."""

    def __init__(self, clockwork: Clockwork, shards: int) -> None:
        super().__init__(shards)
        self._clockwork, self.epoch, self._last = clockwork, self.now, self.now
        self._ready: dict[tuple[int, str], SortedList[Any]] = defaultdict(SortedList)
        self._due: dict[tuple[int, str], SortedList[Any]] = defaultdict(SortedList)
        self._unsent_of_key: dict[TopicKey, SortedList[Any]] = defaultdict(SortedList)
        self._unsent_topics: dict[int, Counter[str]] = defaultdict(Counter)
        self.unsent_count = 0

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

    def insert(self, id: str, topic: str, data: bytes = b"", **columns: Any) -> None:
        super().insert(id, topic, data, **columns)
        self._index(self.rows[id])

    def delete(self, id: str) -> None:
        self._index(self.rows.pop(id), remove=True)

    def build(self, *layouts: Layout) -> None:
        """Give the table these layouts and no others."""
        for row in self.rows.values():
            self._index(row, remove=True)
        super().build(*layouts)
        for row in self.rows.values():
            self._index(row)

    def change(self, id: str, **columns: Any) -> None:
        row = self.rows[id]
        self._index(row, remove=True)
        for name, value in columns.items():
            setattr(row, name, value)
        self._index(row)

    def apply(self, marks: Mapping[str, RowChange], committed: datetime) -> None:
        for id in marks:
            self._index(self.rows[id], remove=True)
        super().apply(marks, committed)
        for id in marks:
            self._index(self.rows[id])

    def _index(self, row: StoredTask, *, remove: bool = False) -> None:
        """Add the entries of an unsent row to the ranges, or remove them."""
        if row.sent_at is not None:
            return
        change, number = (SortedList.remove, -1) if remove else (SortedList.add, 1)
        for place in ((shard, row.topic) for shard in row.shards):
            if row.available_at is None:
                change(self._ready[place], (-row.priority, row.created_at, row.id))
            else:
                change(self._due[place], (row.available_at, -row.priority, row.created_at, row.id))
        if row.ordering_key is not None:
            change(self._unsent_of_key[TopicKey(row.topic, row.ordering_key)], place_in_key(row))
        for shard in row.shards:
            self._unsent_topics[shard][row.topic] += number
        self.unsent_count += number

    def poll(self, request: PollRequest) -> Sequence[Candidate]:
        self.require(request.shards)
        now, found = self.time(), dict[str, Candidate]()
        for place in itertools.product(request.shards, sorted(request.topics)):
            ids = [each[-1] for each in self._ready[place].islice(stop=request.per_range)]
            if request.below_priority is not None:
                lower = self._ready[place].irange(minimum=(1 - request.below_priority,))
                ids += [each[-1] for each in itertools.islice(lower, request.per_range)]
            if request.due:
                due = itertools.takewhile(lambda each: each[0] <= now, self._due[place])
                ids += [each[-1] for each in itertools.islice(due, request.per_range)]
            found |= {id: candidate(self.rows[id], place[0]) for id in ids}
        return tuple(found.values())

    def topics_of(self, shards: Sequence[int], known: Collection[str]) -> frozenset[str]:
        self.require(shards)
        found = (topic for shard in shards for topic, number in self._unsent_topics[shard].items() if number)
        return frozenset(found).difference(known)

    def key_heads(self, keys: Mapping[TopicKey, int], per_key: int, *, skip_dead: bool) -> KeyHeads:
        self.time()
        self.require(keys.values())
        found: dict[TopicKey, list[QueuedTask]] = {}
        for key in keys:
            rows = (self.rows[id] for _, _, id in self._unsent_of_key[key])
            wanted = (row for row in rows if not (skip_dead and self.is_dead(row)))
            if first := [self.waiting(row) for row in itertools.islice(wanted, per_key)]:
                found[key] = first
        return found

    def deferred_heads(self, *, skip_dead: bool) -> dict[TopicKey, str]:
        """Return the keys whose first task that may block is deferred until later, each with this task."""
        now, found = self.time(), {}
        for key, queue in self._unsent_of_key.items():
            rows = (self.rows[id] for _, _, id in queue)
            blocking = (
                row for row in rows if not (self.waiting(row).expired_before_due or (skip_dead and self.is_dead(row)))
            )
            head = next(blocking, None)
            if head is not None and head.blocked_by is not None and head.available_at and head.available_at > now:
                found[key] = head.id
        return found

    def next_of_keys(self, ids: Collection[str]) -> list[str]:
        """Return the tasks that become ready when these are deleted, sorted, as NEXT_OF_KEYS does."""
        now, heads = self.time(), []
        keys = {TopicKey(row.topic, row.ordering_key) for id in ids if (row := self.rows.get(id)) and row.ordering_key}
        for key in keys:
            rows = (self.rows[id] for _, _, id in self._unsent_of_key[key] if id not in ids)
            others = (
                row
                for row in rows
                if not self.is_dead(row) and (row.blocked_by or not self.waiting(row).expired_before_due)
            )
            head = next(others, None) if now else None
            heads += [head.id] if head is not None and head.blocked_by else []
        return sorted(heads)

    def unsent_rows(self) -> list[StoredTask]:
        return [row for row in self.rows.values() if row.sent_at is None]
