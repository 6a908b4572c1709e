"""Tells whether any unsent task is left to send, and of which topics. No turn of the relay needs this."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from google.cloud.spanner_v1 import KeyRange, KeySet

from outbox.table.controls import TopicControls, problems
from outbox.table.layouts import LayoutShards, by_layout
from outbox.table.shared_sql import TO_SEND_INDEX
from outbox.table.states import LEFT_TO_SEND, is_dead, unsent_state
from publishworker.spanner import relay_sql
from publishworker.spanner.store import READ_SECONDS, SpannerStore

#: Rows of the first read of unsent tasks, and of each further read of the same topic.
FIRST_ROWS, MORE_ROWS = 1_000, 10_000


class UnsentRow(NamedTuple):
    """An unsent task, with the columns of the index AsynchronousTasksToSend."""

    id: str
    shard: int
    topic: str
    available_at: datetime | None
    priority: int
    created_at: datetime
    is_ordered: bool
    attempts: int
    is_blocked: bool

    @property
    def place(self) -> list[Any]:
        """Return the task's key in the index. Tasks of one transaction may have the same key."""
        return [self.shard, None, self.topic, self.available_at, self.priority, self.created_at]

    def is_left_to_send(self, now: datetime) -> bool:
        """Tell whether workers send the task without an operator."""
        return unsent_state(self, now) in LEFT_TO_SEND


#: Tells, from the last task of a read, whether to leave out the rest of its topic in its shard.
_SkipRest = Callable[[UnsentRow], bool]


class UnsentTasks:
    """The unsent tasks of a table. The reads of a method use one timestamp. Each method raises StoreError."""

    def __init__(self, store: SpannerStore) -> None:
        self._store = store

    def any_to_send(self, shards: Iterable[int] | None = None, *, misrouted: bool = False) -> bool:
        """Tell whether `shards`, or all, have a pending or retrying task that workers may send.

        They hold the tasks of paused topics, and of topics with an invalid route. With `misrouted`, tell whether there
        is such a task in a topic with an invalid route that is not paused.
        """
        now, paused, invalid = self._now_and_held()

        def is_other(topic: str) -> bool:
            return topic in paused or (topic in invalid) != misrouted

        def skip_rest(last: UnsentRow) -> bool:
            return is_dead(last.available_at) or is_other(last.topic)

        rows = self._rows(now, skip_rest, shards)
        return any(each.is_left_to_send(now) and not is_other(each.topic) for each in rows)

    def topics(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the topics with pending or retrying tasks, and those with keys, by the first tasks of each shard."""
        now, *_ = self._now_and_held()
        found = list(self._rows(now, lambda _last: True))
        to_send = frozenset(each.topic for each in found if each.is_left_to_send(now))
        return to_send, frozenset(each.topic for each in found if each.is_ordered)

    def _now_and_held(self) -> tuple[datetime, frozenset[str], frozenset[str]]:
        """Return the time, the paused topics, and the topics with an invalid route."""
        with self._store.reading() as snapshot:
            request = self._store.request("outbox-unsent", READ_SECONDS)
            [[now, held]] = snapshot.execute_sql(relay_sql.NOW_AND_HELD, **request)
        paused = frozenset(topic for topic, is_paused, _ in held if is_paused)
        return now, paused, frozenset(topic for topic, _, to in held if problems(TopicControls(publish_to=to)))

    def _rows(self, at: datetime, skip_rest: _SkipRest, shards: Iterable[int] | None = None) -> Iterator[UnsentRow]:
        """Yield each task that is unsent at `at`, once, by shard, topic and time."""
        for each in by_layout(self._store.layouts[0].ids if shards is None else shards):
            yield from self._of_layout(each, at, skip_rest)

    def _of_layout(self, shards: LayoutShards, at: datetime, skip_rest: _SkipRest) -> Iterator[UnsentRow]:
        """Yield the tasks of one layout. No read is large enough to time out."""
        starts: list[list[Any]] = [[shard, None] for shard in sorted(shards.numbers)]
        limit, known = FIRST_ROWS, frozenset[str]()
        while starts:
            found = self._read(shards, starts, at, limit)
            yield from (each for each in found if each.id not in known)
            if len(found) < limit:
                return
            last = found[-1]
            start = last.place
            if skip_rest(last):
                start = [last.shard, None, last.topic + relay_sql.NEXT_NAME_SUFFIX]
                limit, known = FIRST_ROWS, frozenset()
            else:
                # Several tasks may have the same index key, and a read starts at a key. So the next read returns the
                # tasks at this key again. Skip them.
                limit = limit * 2 if start == starts[0] else MORE_ROWS
                known = frozenset(each.id for each in found if each.place == start)
            starts = [start, *(each for each in starts if each[0] > last.shard)]

    def _read(self, shards: LayoutShards, starts: Sequence[Sequence[Any]], at: datetime, limit: int) -> list[UnsentRow]:
        ranges = [KeyRange(start_closed=start, end_closed=[start[0], None]) for start in starts]
        with self._store.reading(at) as snapshot:
            found = snapshot.read(
                "AsynchronousTasks",
                [shards.sql(name) for name in relay_sql.UNSENT_COLUMNS],
                KeySet(ranges=ranges),
                index=shards.sql(TO_SEND_INDEX),
                limit=limit,
                **self._store.request("outbox-unsent", READ_SECONDS),
            )
            return [
                UnsentRow._make((*read, bool(key), attempts, bool(blocked_by)))
                for *read, key, attempts, blocked_by in found
            ]
