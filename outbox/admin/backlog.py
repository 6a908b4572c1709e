"""The backlog: tasks by topic, priority and state, counted in the index up to a limit.

Each function that reads raises NotReached or OutboxError.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import product
from typing import Any, TypeAlias

from outbox.admin import statements
from outbox.admin.table import COUNT_SECONDS, SCAN_SECONDS, TaskTable, read_before
from outbox.admin.workers import Worker, live
from outbox.program.values import chunked
from outbox.table.statements import CONTROLS
from outbox.table.states import UNSENT

#: The ready tasks of a shard and topic up to a priority.
Range: TypeAlias = tuple[int, str, int]

#: A count stops at this many tasks of a shard and topic: with ten shards, at 100,000 tasks of a topic.
COUNT_LIMIT = 10_000
NO_LIMIT = 2**62
#: Age of the snapshot that metrics read. Any replica can serve a snapshot of ten seconds ago.
#: https://cloud.google.com/spanner/docs/timestamp-bounds
STALENESS = timedelta(seconds=10)
#: All ranges of one state together read at most MAX_TOTAL tasks, but the limit of a range is never below
#: MIN_COUNT_LIMIT.
MAX_TOTAL, MIN_COUNT_LIMIT = 1_000_000, 100
#: Max topics that are counted.
MAX_TOPICS = 1_000
#: Max queries for the ready tasks of a shard and topic. A query that stops at its limit of tasks is followed by one for
#: the lower priorities.
MAX_QUERIES = 20
#: Max pairs of a shard and a topic in one request, because Spanner limits a request to 10 MiB.
MAX_RANGES = 10_000
#: Ready tasks of a shard, topic and priority that are read to find the oldest. The first one by CreatedAt may not be
#: the oldest: if it was scheduled, deferred and released, it should first have been sent at its DueAt.
FIRST_READY = 10
_HIGHEST, _LOWEST = 2**63 - 1, -(2**63)
_REGISTERED = "registered_last_minute"
COUNTS = (*UNSENT, _REGISTERED, "sent_last_minute")


@dataclasses.dataclass(slots=True)
class Line:
    """The tasks of one topic and priority. `at_least` names the counts that stopped early.

    `oldest` is when the oldest task should first have been sent: a pending, retrying or blocked one. `next_due` is when
    the next scheduled or retrying task will be due.
    """

    topic: str
    priority: int
    paused: bool = False
    pending: int = 0
    retrying: int = 0
    scheduled: int = 0
    blocked: int = 0
    dead: int = 0
    registered_last_minute: int = 0
    sent_last_minute: int = 0
    oldest: datetime | None = None
    next_due: datetime | None = None
    at_least: set[str] = dataclasses.field(default_factory=set)

    def add(self, other: "Line") -> None:
        """Add the counts of another line."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.oldest, self.next_due = _first(self.oldest, other.oldest), _first(self.next_due, other.next_due)
        self.at_least |= other.at_least


@dataclasses.dataclass(frozen=True, slots=True)
class Backlog:
    """All lines and the live workers as they were at `as_of`. Lines are by topic and then by priority, highest first.

    `whole` is false if there are more than MAX_TOPICS topics. Only the first MAX_TOPICS are then included.
    """

    as_of: datetime
    workers: Sequence[Worker]
    lines: Sequence[Line]
    whole: bool = True

    @property
    def everything(self) -> Line:
        """Return the sum of all lines."""
        merged = Line("", 0, at_least=set() if self.whole else set(COUNTS))
        for line in self.lines:
            merged.add(line)
        return merged

    @property
    def total(self) -> Line:
        """Return the sum of all lines, without the pending tasks of paused topics, and without their age."""
        lines = [
            dataclasses.replace(line, pending=0, oldest=None, at_least=line.at_least - {"pending"})
            if line.paused
            else line
            for line in self.lines
        ]
        return dataclasses.replace(self, lines=lines).everything

    @property
    def oldest(self) -> Line | None:
        """Return the line with the oldest task, ignoring paused topics."""
        lines = [line for line in self.lines if line.oldest and not line.paused]
        return min(lines, key=lambda line: line.oldest or self.as_of, default=None)

    def topics(self) -> dict[str, Line]:
        """Return the sum of each topic's lines, by topic."""
        merged: dict[str, Line] = {}
        for line in self.lines:
            merged.setdefault(line.topic, Line(line.topic, line.priority, line.paused)).add(line)
        return merged

    def age(self, line: Line | None) -> float:
        """Return the age of the oldest task of a line in seconds, or 0 if there is none."""
        return max(0.0, (self.as_of - line.oldest).total_seconds()) if line and line.oldest else 0.0


def _first(*times: datetime | None) -> datetime | None:
    return min(filter(None, times), default=None)


class BacklogCounter:
    """Adds up the counts of all ranges of the index. It reads nothing itself.

    Rows are (shard, topic, priority, state, number, oldest, next due, registered in the last minute).
    """

    def __init__(self, limit: int) -> None:
        """Expect that each query stops counting at `limit` in each range."""
        self._limit = limit
        self._lines: dict[tuple[str, int], Line] = {}
        #: The incomplete counts of each topic (None: of all topics). Each has a priority: the count is incomplete for
        #: this priority and all lower ones.
        self._incomplete: dict[str | None, set[tuple[str, int]]] = defaultdict(set)

    def add(self, rows: Iterable[Sequence[Any]], *names: str, by_topic: bool = True) -> None:
        """Add rows. `names` are the counts to which they belong.

        A range is one topic of a shard or, without `by_topic`, a whole shard.
        """
        totals: dict[tuple[int, str | None], int] = defaultdict(int)
        for shard, topic, *row in rows:
            self._add(topic, *row)
            totals[shard, topic if by_topic else None] += row[2]
        for (_, topic), number in totals.items():
            if number >= self._limit:
                self._incomplete[topic] |= {(name, _HIGHEST) for name in names}

    def add_ready(self, rows: Iterable[Sequence[Any]]) -> list[Range]:
        """Add rows of ready tasks, highest priorities first, and return the ranges that have more tasks.

        A query that stops at the limit leaves the count of its lowest priority incomplete.
        """
        totals: dict[tuple[int, str], int] = defaultdict(int)
        lowest: dict[tuple[int, str], int] = {}
        for shard, topic, priority, state, number, *row in rows:
            self._add(topic, priority, state, number, *row)
            totals[shard, topic] += number
            lowest[shard, topic] = min(priority, lowest.get((shard, topic), priority))
        stopped = [(*place, lowest[place]) for place, number in totals.items() if number >= self._limit]
        for _, topic, priority in stopped:
            self._lines[topic, priority].at_least.add("pending")
        return [(shard, topic, priority - 1) for shard, topic, priority in stopped if priority > _LOWEST]

    def mark_incomplete(self, ranges: Iterable[Range]) -> None:
        """Note that the ready tasks of these ranges are not counted."""
        for _, topic, priority in ranges:
            self._incomplete[topic] |= {("pending", priority), (_REGISTERED, priority)}

    def with_pending(self) -> list[tuple[str, int]]:
        """Return the topics and priorities that have pending tasks."""
        return [place for place, line in self._lines.items() if line.pending]

    def lines(self, paused: Collection[str]) -> list[Line]:
        """Return all lines, by topic and then by priority."""
        for line in self._lines.values():
            line.paused = line.topic in paused
            incomplete = self._incomplete[line.topic] | self._incomplete[None]
            line.at_least |= {name for name, priority in incomplete if line.priority <= priority}
        return sorted(self._lines.values(), key=lambda line: (line.topic, -line.priority))

    def _add(self, topic: str, priority: int, *counted: Any) -> None:
        name, number, oldest, next_due, registered = counted
        line = self._lines.setdefault((topic, priority), Line(topic, priority))
        setattr(line, name, getattr(line, name) + number)
        line.registered_last_minute += registered
        line.oldest, line.next_due = _first(line.oldest, oldest), _first(line.next_due, next_due)


def read(table: TaskTable, *, exact: bool = False, limit: int | None = None) -> Backlog:
    """Return the current backlog, read at one timestamp.

    Unless `exact`, each count stops at `limit` in a shard and topic, by default COUNT_LIMIT, or less if there are many
    topics.
    """
    return _read_at(table, table.now(), NO_LIMIT if exact else limit)


def read_unsent_stale(table: TaskTable) -> Backlog:
    """Return the unsent tasks of ten seconds ago. The other counts of the backlog are incomplete or not read."""
    return read_before(table.now(), STALENESS, lambda at: _read_at(table, at, None, of_sent=False))


def oldest_ages(table: TaskTable) -> dict[str, float]:
    """Return the age of the oldest task of each topic in seconds, as of ten seconds ago.

    Paused topics, and topics without pending, retrying or blocked tasks, are left out. Of ready tasks, seeks in the
    index find the age, so the cost does not depend on the number of tasks of a priority. Ages are exact with three
    exceptions. Of more than MAX_TOPICS topics, only the first are read. Of more than MAX_QUERIES priorities of a shard
    and topic, only some tasks of the lower ones are read. Of the due tasks, and of those that are due later, only the
    first by AvailableAt are read: as many as a count reads.
    """
    return read_before(table.now(), STALENESS, lambda at: _oldest_ages_at(table, at))


def _oldest_ages_at(table: TaskTable, at: datetime) -> dict[str, float]:
    def ask(statement: str, **parameters: Any) -> list[list[Any]]:
        return table.query(statement, "outbox-age", parameters, at=at, seconds=SCAN_SECONDS)

    paused = {topic for topic, is_paused, *_ in ask(CONTROLS) if is_paused}
    topics = [topic for topic in table.topics(MAX_TOPICS + len(paused), at) if topic not in paused][:MAX_TOPICS]
    counter = BacklogCounter(FIRST_READY)
    if left := _add_ready(counter, ask, product(table.shards, topics), FIRST_READY, now=at):
        limit = max(MIN_COUNT_LIMIT, min(COUNT_LIMIT, MAX_TOTAL // len(left)))
        for rows in _ready(ask, left, limit, now=at):
            counter.add(rows, "pending")
    values = {"shards": list(table.shards), "topics": topics, "limit": range_limit(table, topics), "now": at}
    for statement in (statements.COUNT_DUE, statements.COUNT_LATER):
        counter.add(ask(statement, **values))
    backlog = Backlog(at, (), counter.lines(()))
    return {topic: backlog.age(line) for topic, line in backlog.topics().items() if line.oldest}


def _add_ready(
    counter: BacklogCounter,
    ask: Callable[..., list[list[Any]]],
    ranges: Iterable[tuple[int, str]],
    limit: int,
    **more: Any,
) -> list[Range]:
    """Add the ready tasks of all shards and topics. Return the ranges that are left."""
    left = [(*place, _HIGHEST) for place in ranges]
    for _ in range(MAX_QUERIES):
        left = [each for rows in _ready(ask, left, limit, **more) for each in counter.add_ready(rows)]
    return left


def _ready(
    ask: Callable[..., list[list[Any]]],
    ranges: Iterable[Range],
    limit: int,
    statement: str = statements.COUNT_READY,
    **more: Any,
) -> Iterator[list[list[Any]]]:
    """Yield the rows of ready tasks in these ranges, request by request."""
    for chunk in chunked(ranges, MAX_RANGES):
        shards, topics, priorities = (list(each) for each in zip(*chunk, strict=True))
        yield ask(statement, range_shards=shards, range_topics=topics, max_priorities=priorities, limit=limit, **more)


def range_limit(table: TaskTable, topics: Collection[str], most: int = COUNT_LIMIT) -> int:
    """Return the max number of tasks that a read of a state reads in each shard and topic, at most `most`."""
    return max(MIN_COUNT_LIMIT, min(most, MAX_TOTAL // (max(1, len(topics)) * len(table.shards))))


def _read_at(table: TaskTable, at: datetime, limit: int | None, *, of_sent: bool = True) -> Backlog:
    topics = table.topics(MAX_TOPICS + 1, at)
    whole = len(topics) <= MAX_TOPICS
    del topics[MAX_TOPICS:]
    if limit is None:
        limit = range_limit(table, topics)
    seconds = COUNT_SECONDS if limit == NO_LIMIT else SCAN_SECONDS

    def ask(statement: str, **parameters: Any) -> list[list[Any]]:
        return table.query(statement, "outbox-status", parameters, at=at, seconds=seconds)

    counter = BacklogCounter(limit)
    values: dict[str, Any] = {"shards": list(table.shards), "limit": limit, "now": at}
    counter.mark_incomplete(_add_ready(counter, ask, product(table.shards, topics), limit, now=at))
    if of_sent:
        ranges = ((shard, *place) for shard, place in product(table.shards, counter.with_pending()))
        for rows in _ready(ask, ranges, limit, statements.COUNT_REGISTERED, now=at):
            counter.add(rows, _REGISTERED)
    counter.add(ask(statements.COUNT_DUE, **values, topics=topics), "pending", _REGISTERED)
    later = ask(statements.COUNT_LATER, **values, topics=topics)
    counter.add(later, "retrying", "scheduled", "blocked", _REGISTERED)
    counter.add(ask(statements.COUNT_DEAD, **values, topics=topics), "dead", _REGISTERED)
    workers: Sequence[Worker] = []
    if of_sent:
        counter.add(ask(statements.COUNT_SENT, **values), "sent_last_minute", _REGISTERED, by_topic=False)
        workers = live(table, at)
    paused = {topic for topic, is_paused, *_ in ask(CONTROLS) if is_paused}
    return Backlog(at, workers, counter.lines(paused), whole=whole)
