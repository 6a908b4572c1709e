"""The backlog: tasks by topic and state, counted in the index up to a limit.

Each function that reads raises NotReached or OutboxError.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import product
from typing import Any, NamedTuple, TypeAlias

from outbox.base.values import chunked, counted
from outbox.rows import counts_sql
from outbox.rows.task_table import COUNT_SECONDS, SCAN_SECONDS, TaskTable, read_before
from outbox.rows.workers import SeenWorker, rows_at
from outbox.table.controls import LIMITS, NO_CONTROLS, TopicControls, problems, stated
from outbox.table.states import UNSENT

#: A shard and a topic (None: all topics).
Range: TypeAlias = tuple[int, str | None]
#: Returns the rows of a statement with these parameters.
Query: TypeAlias = Callable[[str, Mapping[str, Any]], list[list[Any]]]

#: A count stops at this many tasks of a shard and topic. With ten shards, a topic is counted up to 100,000. So with a
#: worker for each shard, the autoscaler's metric can be 10,000 for each worker.
COUNT_LIMIT = 10_000
NO_LIMIT = 2**62
#: Age of the snapshot that metrics read. Any replica can serve a snapshot of ten seconds ago.
#: https://cloud.google.com/spanner/docs/timestamp-bounds
STALENESS = timedelta(seconds=10)
#: All ranges of one state together read at most MAX_TOTAL tasks, or COUNT_LIMIT for each shard if these are more. But
#: the limit of a range is never below MIN_COUNT_LIMIT.
MAX_TOTAL, MIN_COUNT_LIMIT = 1_000_000, 100
#: Max topics that are counted.
MAX_TOPICS = 1_000
#: Max pairs of a shard and a topic in one request, because Spanner limits a request to 10 MiB.
MAX_RANGES = 10_000
#: Max ready tasks of a shard and topic that are read to find the oldest, the most urgent ones first.
AGED_READY = 1_000
_REGISTERED = "registered_last_minute"
COUNTS = (*UNSENT, _REGISTERED, "sent_last_minute")


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """A number of tasks. If `at_least`, the count stopped early."""

    number: int
    at_least: bool = False

    def __str__(self) -> str:
        """Return text such as `1 task` or `at least 100,000 tasks`."""
        return f"{'at least ' if self.at_least else ''}{counted(self.number, 'task')}"


class Counted(NamedTuple):
    """A row of `counts_sql.count_statement`: a number of tasks of a topic and state in a range."""

    shard: int
    of_topic: str | None
    topic: str
    state: str
    number: int
    oldest: datetime | None
    next_due: datetime | None
    registered: int


@dataclasses.dataclass(slots=True)
class Line:
    """The tasks of one topic. `at_least` names the counts that stopped early.

    `oldest` is when the oldest pending or retrying task should first have been sent. `next_due` is when the next
    scheduled or retrying task will be due. If `at_limit`, the topic is sent as fast as its limits allow.
    """

    topic: str
    paused: bool = False
    at_limit: bool = False
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

    @property
    def unsent(self) -> int:
        return sum(getattr(self, state) for state in UNSENT)

    def add(self, other: "Line") -> None:
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.oldest, self.next_due = _first(self.oldest, other.oldest), _first(self.next_due, other.next_due)
        self.at_least |= other.at_least


class Ages(NamedTuple):
    """Ages in seconds: of the oldest task of each topic, and of all topics that are not at their limits."""

    by_topic: Mapping[str, float]
    oldest: float


@dataclasses.dataclass(frozen=True, slots=True)
class Backlog:
    """All lines and the live workers as they were at `as_of`. Lines are by topic.

    `whole` is false if there are more than MAX_TOPICS topics. Only the first MAX_TOPICS are then included.
    """

    as_of: datetime
    workers: Sequence[SeenWorker]
    lines: Sequence[Line]
    whole: bool = True
    #: Workers that ended within the hour without deleting their heartbeat row.
    silent: Sequence[SeenWorker] = ()

    @property
    def everything(self) -> Line:
        """Return the sum of all lines."""
        merged = Line("", at_least=set() if self.whole else set(COUNTS))
        for line in self.lines:
            merged.add(line)
        return merged

    @property
    def total(self) -> Line:
        """Return the sum of all lines, without the pending tasks of paused topics, and with the age of `oldest`."""
        lines = [
            dataclasses.replace(line, pending=0, at_least=line.at_least - {"pending"}) if line.paused else line
            for line in self.lines
        ]
        total, oldest = dataclasses.replace(self, lines=lines).everything, self.oldest
        return dataclasses.replace(total, oldest=oldest.oldest if oldest else None)

    @property
    def oldest(self) -> Line | None:
        """Return the line with the oldest task, ignoring topics that are paused or at their limits."""
        lines = [line for line in self.lines if line.oldest and not (line.paused or line.at_limit)]
        return min(lines, key=lambda line: line.oldest or self.as_of, default=None)

    def topics(self) -> dict[str, Line]:
        """Return the lines by topic."""
        return {line.topic: line for line in self.lines}

    def by_topic_and_state(self) -> Counter[tuple[str, str]]:
        """Return the numbers of unsent tasks, without zeros. Pending tasks of paused topics have the state `paused`."""
        counts: Counter[tuple[str, str]] = Counter()
        for line in self.lines:
            for state in UNSENT:
                counts[line.topic, "paused" if line.paused and state == "pending" else state] += getattr(line, state)
        return +counts

    def age(self, line: Line | None) -> float:
        """Return the age of the oldest task of a line in seconds, or 0 if there is none."""
        return max(0.0, (self.as_of - line.oldest).total_seconds()) if line and line.oldest else 0.0


def _first(*times: datetime | None) -> datetime | None:
    return min(filter(None, times), default=None)


def read(table: TaskTable, *, exact: bool = False, limit: int | None = None, at: datetime | None = None) -> Backlog:
    """Return the backlog now, or `at` a time, read at one timestamp.

    Unless `exact`, each count stops at `limit` in a shard and topic, by default at COUNT_LIMIT, or less if many of them
    have many tasks. A number is then a lower bound, and the age is that of the counted tasks: the most urgent ones.
    """
    at = at or table.now()
    tally = _Tally(table, at, "outbox-status", NO_LIMIT if exact else limit)
    tally.add_sent()
    found, workers = _unsent(tally), rows_at(table, at)
    live, silent = ([each for each in workers if each.is_live is wanted] for wanted in (True, False))
    return dataclasses.replace(found, workers=live, silent=silent)


def read_unsent(table: TaskTable, age: timedelta = timedelta()) -> Backlog:
    """Return the unsent tasks of this long ago, without workers. Other counts of the backlog are incomplete."""
    return read_before(table.now(), age, lambda at: _unsent(_Tally(table, at, "outbox-status", None)))


def oldest_ages(table: TaskTable) -> Ages:
    """Return the age of the oldest task of each topic, and of all of them, in seconds, as of ten seconds ago.

    Paused topics, and topics without pending or retrying tasks, are left out. Ages are exact with three exceptions. Of
    more than MAX_TOPICS topics, only the first are read. Of the ready tasks of a shard and topic, only the AGED_READY
    most urgent ones are read. Of the due tasks, and of those that are due later, only the first by AvailableAt are
    read, up to the limit of a count.
    """
    return read_before(table.now(), STALENESS, lambda at: _oldest_ages_at(table, at))


def _oldest_ages_at(table: TaskTable, at: datetime) -> Ages:
    controls = table.controls(at)
    paused = {topic for topic, row in controls.items() if row.paused}
    topics = [topic for topic in table.topics(MAX_TOPICS + len(paused), at) if topic not in paused][:MAX_TOPICS]
    tally = _Tally(table, at, "outbox-age", None)
    ranges = ranges_of(table.shards, topics)
    dataclasses.replace(tally, limit=range_limit(ranges, AGED_READY)).add(counts_sql.COUNT_READY, ranges)
    for statement in (counts_sql.COUNT_DUE, counts_sql.COUNT_LATER):
        tally.add(statement, ranges)
    if any(stated(controls.get(line.topic, NO_CONTROLS), LIMITS) for line in tally.lines.values() if line.oldest):
        tally.add_sent()
    backlog = Backlog(at, (), tally.controlled(controls))
    ages = {topic: backlog.age(line) for topic, line in backlog.topics().items() if line.oldest}
    return Ages(ages, backlog.age(backlog.oldest))


def _unsent(tally: "_Tally") -> Backlog:
    table, at = tally.table, tally.at
    topics = table.topics(MAX_TOPICS + 1, at)
    whole = len(topics) <= MAX_TOPICS
    ranges = ranges_of(table.shards, topics[:MAX_TOPICS])
    tally.add(counts_sql.COUNT_READY, ranges, "pending")
    tally.add(counts_sql.COUNT_DUE, ranges, "pending")
    tally.add(counts_sql.COUNT_LATER, ranges, "retrying", "scheduled", "blocked")
    tally.add(counts_sql.COUNT_DEAD, ranges, "dead")
    lines = sorted(tally.controlled(table.controls(at)), key=lambda line: line.topic)
    for line in lines:
        line.at_least = tally.at_least[line.topic] | tally.at_least[None]
    return Backlog(at, [], lines, whole)


def _is_at_limit(controls: TopicControls, sent: Count) -> bool:
    """Tell whether the valid limits of a topic explain that its tasks wait, by what was sent in the last minute.

    That is half of what the rate allows, because a part of the workers may have none of its tasks. One task is enough
    if a limit is not of a rate, or if not all sent tasks are counted.
    """
    if not stated(controls, LIMITS) or problems(controls).keys() & {*LIMITS}:
        return False
    if controls.max_in_flight is not None or sent.at_least:
        return sent.number > 0
    return sent.number + 1 > (controls.rate_per_second or 0) * 30


def ranges_of(shards: Sequence[int], topics: Iterable[str | None] = (None,)) -> list[Range]:
    """Return the ranges of these shards and topics, or of the shards."""
    return [*product(shards, topics)]


def range_limit(ranges: Collection[Sequence[Any]], most: int | None = None) -> int:
    """Return the max number of tasks that a read of a state reads in each of these ranges, at most `most`.

    Without `most`, at most COUNT_LIMIT.
    """
    total = max(MAX_TOTAL, COUNT_LIMIT * len({shard for shard, *_ in ranges}))
    return max(MIN_COUNT_LIMIT, min(most or COUNT_LIMIT, total // max(1, len(ranges))))


def count(
    query: Query, statement: str, ranges: Sequence[Range], limit: int | None = None
) -> tuple[list[Counted], set[Range]]:
    """Return the counts of a statement of `counts_sql.count_statement`, and the shards and topics that have more tasks.

    Each range is counted up to `limit`. Without it, small ranges are counted first, and large ones share what may
    still be read. So the backlog of a topic is counted as far with a thousand small topics as alone.
    """
    first = limit or range_limit(ranges)
    rows = _rows(query, statement, ranges, first)
    full = _full(rows, first)
    if limit or not full or (more := range_limit(full)) <= first:
        return rows, full
    again = _rows(query, statement, [each for each in ranges if each in full], more)
    return [*(row for row in rows if (row.shard, row.of_topic) not in full), *again], _full(again, more)


def _rows(query: Query, statement: str, ranges: Iterable[Range], limit: int) -> list[Counted]:
    """Return the counts of all ranges, request by request."""
    rows: list[Counted] = []
    for chunk in chunked(ranges, MAX_RANGES):
        shards, topics = (list(each) for each in zip(*chunk, strict=True))
        places = {"range_shards": shards, "range_topics": topics}
        rows += [Counted(*row) for row in query(statement, {**places, "limit": limit})]
    return rows


def _full(rows: Iterable[Counted], limit: int) -> set[Range]:
    totals: Counter[Range] = Counter()
    for row in rows:
        totals[row.shard, row.of_topic] += row.number
    return {place for place, number in totals.items() if number >= limit}


@dataclasses.dataclass(frozen=True, slots=True)
class _Tally:
    """Adds up counts, as of `at`, by topic. `at_least` has the incomplete counts of each topic."""

    table: TaskTable
    at: datetime
    tag: str
    limit: int | None
    lines: dict[str, Line] = dataclasses.field(default_factory=dict)
    at_least: dict[str | None, set[str]] = dataclasses.field(default_factory=lambda: defaultdict(set))

    def add(self, statement: str, ranges: Sequence[Range], *names: str) -> None:
        """Add the counts `names` of these ranges."""
        rows, full = count(self._query, statement, ranges, self.limit)
        for _, topic in full:
            self.at_least[topic] |= {*names, _REGISTERED}
        for row in rows:
            line = self.lines.setdefault(row.topic, Line(row.topic))
            setattr(line, row.state, getattr(line, row.state) + row.number)
            line.registered_last_minute += row.registered
            line.oldest, line.next_due = _first(line.oldest, row.oldest), _first(line.next_due, row.next_due)

    def add_sent(self) -> None:
        """Add the tasks that were sent in the last minute."""
        self.add(counts_sql.COUNT_SENT, ranges_of(self.table.shards), "sent_last_minute")

    def controlled(self, controls: Mapping[str, TopicControls]) -> list[Line]:
        """Return the lines, with what follows from the controls of their topics."""
        for line in self.lines.values():
            row = controls.get(line.topic, NO_CONTROLS)
            line.paused = row.paused
            sent = Count(line.sent_last_minute, "sent_last_minute" in self.at_least[None])
            line.at_limit = _is_at_limit(row, sent)
        return [*self.lines.values()]

    def _query(self, statement: str, values: Mapping[str, Any]) -> list[list[Any]]:
        seconds = COUNT_SECONDS if self.limit == NO_LIMIT else SCAN_SECONDS
        return self.table.query(statement, self.tag, values, at=self.at, seconds=seconds)
