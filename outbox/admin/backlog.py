"""How much waits: by topic, priority and state, counted in the index with a limit."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import product
from typing import Any, TypeVar

from google.api_core.exceptions import FailedPrecondition, InvalidArgument, NotFound

from outbox.admin import statements
from outbox.admin.table import COUNT_SECONDS, LOOK_SECONDS, TaskTable
from outbox.errors import OutboxError

T = TypeVar("T")

#: Where a count stops, in each shard and topic: with ten shards at 100,000.
COUNTED = 10_000
NO_LIMIT = 2**62
#: Age of what is read: a snapshot of ten seconds ago can be read from any replica.
#: https://cloud.google.com/spanner/docs/timestamp-bounds
STALENESS = timedelta(seconds=10)
#: Where all counts of a state together stop, as long as that leaves LEAST for each shard and topic.
IN_ALL, LEAST = 1_000_000, 100
#: Topics that are looked at.
MAX_TOPICS = 1_000
#: Times that a topic whose ready tasks exceed the limit is asked for lower priorities.
MAX_LOOKS = 20
#: Due tasks of a shard and topic among which the oldest is looked for.
FIRST_DUE = 100
_HIGHEST, _LOWEST = 2**63 - 1, -(2**63)
COUNTS = ("pending", "retrying", "scheduled", "dead", "sent_last_minute")


@dataclasses.dataclass(slots=True)
class Line:
    """The tasks of one topic and priority; `at_least` names the counts that stopped early.

    `oldest` is since when the task has been pending that has been so longest.
    """

    topic: str
    priority: int
    paused: bool = False
    pending: int = 0
    retrying: int = 0
    scheduled: int = 0
    dead: int = 0
    sent_last_minute: int = 0
    oldest: datetime | None = None
    at_least: set[str] = dataclasses.field(default_factory=set)

    def add(self, other: "Line") -> None:
        """Add the counts of another line."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.oldest = min((each for each in (self.oldest, other.oldest) if each), default=None)
        self.at_least |= other.at_least

    def unpending(self) -> "Line":
        """Return the line without what is pending."""
        return dataclasses.replace(self, pending=0, oldest=None, at_least=self.at_least - {"pending"})


@dataclasses.dataclass(frozen=True, slots=True)
class Backlog:
    """All lines, by topic and then by priority, the highest first, as they were at `as_of`.

    Not `whole` if there are more topics than MAX_TOPICS, of which the first are here.
    """

    as_of: datetime
    workers: int
    lines: Sequence[Line]
    whole: bool = True

    @property
    def total(self) -> Line:
        """Return all lines as one; what is pending in a paused topic does not count."""
        merged = Line("", 0, at_least=set() if self.whole else set(COUNTS))
        for line in self.lines:
            merged.add(line.unpending() if line.paused else line)
        return merged

    @property
    def oldest(self) -> Line | None:
        """Return the line whose oldest task has been pending longest, of a topic that is not paused."""
        waiting = [line for line in self.lines if line.oldest and not line.paused]
        return min(waiting, key=lambda line: line.oldest or self.as_of, default=None)

    def topics(self) -> dict[str, Line]:
        """Return each topic's lines as one, by its name."""
        merged: dict[str, Line] = {}
        for line in self.lines:
            merged.setdefault(line.topic, Line(line.topic, line.priority, line.paused)).add(line)
        return merged

    def age(self, line: Line | None) -> float:
        """Return for how many seconds the oldest pending task of a line has waited, 0 if none does."""
        return max(0.0, (self.as_of - line.oldest).total_seconds()) if line and line.oldest else 0.0


class BacklogCounter:
    """Adds up what shards have counted. Pure; rows are (shard, topic, priority, state, number, oldest)."""

    def __init__(self, limit: int) -> None:
        """Counts in one place stop at `limit`."""
        self._limit = limit
        self._lines: dict[tuple[str, int], Line] = {}
        # Lines that come later may be of what was not reached.
        self._cut: dict[str, set[str]] = defaultdict(set)
        self._unreached: dict[str, int] = {}

    def add(self, rows: Iterable[Sequence[Any]], *names: str) -> None:
        """Add the counts `names` of places that are a shard and a topic."""
        full: dict[tuple[int, str], int] = defaultdict(int)
        for shard, topic, priority, state, number, oldest in rows:
            self._add(topic, priority, state, number, oldest)
            full[shard, topic] += number
        for (_, topic), number in full.items():
            if number >= self._limit:
                self._cut[topic].update(names)

    def add_sent(self, rows: Sequence[Sequence[Any]]) -> None:
        """Add what was sent, of places that are a shard."""
        full: dict[int, int] = defaultdict(int)
        for shard, topic, priority, _, number, _ in rows:
            self._add(topic, priority, "sent_last_minute", number, None)
            full[shard] += number
        if any(number >= self._limit for number in full.values()):
            for line in self._lines.values():
                line.at_least.add("sent_last_minute")

    def add_ready(self, rows: Sequence[Sequence[Any]]) -> dict[str, int]:
        """Add ready tasks, which come by priority; return the topics to be asked again, for what is not above what.

        Where a shard's count stopped, lower priorities were not reached: nothing of them is added, from any shard.
        """
        full: dict[tuple[int, str], int] = defaultdict(int)
        lowest: dict[tuple[int, str], int] = {}
        for shard, topic, priority, _, number, _ in rows:
            full[shard, topic] += number
            lowest[shard, topic] = min(priority, lowest.get((shard, topic), priority))
        reached: dict[str, int] = {}
        for place, number in full.items():
            if number >= self._limit:
                reached[place[1]] = max(lowest[place], reached.get(place[1], lowest[place]))
        for _, topic, priority, state, number, oldest in rows:
            if topic not in reached or priority >= reached[topic]:
                self._add(topic, priority, state, number, oldest)
        for topic_and_priority in reached.items():
            self._lines[topic_and_priority].at_least.add("pending")
        self._unreached = {topic: priority - 1 for topic, priority in reached.items() if priority > _LOWEST}
        return self._unreached

    def lines(self, paused: Collection[str]) -> list[Line]:
        """Return what was added, by topic, then priority."""
        for line in self._lines.values():
            line.paused = line.topic in paused
            line.at_least |= self._cut.get(line.topic, set())
            if line.priority <= self._unreached.get(line.topic, _LOWEST - 1):
                line.at_least.add("pending")
        return sorted(self._lines.values(), key=lambda line: (line.topic, -line.priority))

    def _add(self, topic: str, priority: int, name: str, number: int, oldest: datetime | None) -> None:
        line = self._lines.setdefault((topic, priority), Line(topic, priority))
        setattr(line, name, getattr(line, name) + number)
        if oldest and (line.oldest is None or oldest < line.oldest):
            line.oldest = oldest


def read(table: TaskTable, *, exact: bool = False, limit: int | None = None, of_sent: bool = True) -> Backlog:
    """Return the backlog of ten seconds ago, or now and whole if `exact`; what was sent and who lives only `of_sent`.

    Each count stops at `limit` in a shard and topic; by default at COUNTED, or at less where there are many topics.
    Everything is read at one timestamp. Raises NotReached, OutboxError.
    """
    if exact:
        return _read_at(table, table.now(), NO_LIMIT)
    return _lately(table, lambda at: _read_at(table, at, limit, of_sent=of_sent))


def oldest_age(table: TaskTable) -> float:
    """Return how old the oldest pending task was ten seconds ago, in seconds, of topics that are not paused; 0 if none.

    Found by seeks into the index, so it costs the same however many tasks a priority has. Exact unless there are more
    than MAX_TOPICS topics, of which the first are looked at, or a shard and topic has more than MAX_LOOKS priorities;
    of the lower ones some tasks are looked at then. Raises NotReached, OutboxError.
    """
    return _lately(table, lambda at: _oldest_age_at(table, at))


def _lately(table: TaskTable, look: Callable[[datetime], T]) -> T:
    """Return what `look` sees ten seconds ago, or now if the table has been made since."""
    now = table.now()
    try:
        return look(now - STALENESS)
    except OutboxError as error:
        if not isinstance(error.__cause__, NotFound | InvalidArgument | FailedPrecondition):
            raise
        return look(now)


def _oldest_age_at(table: TaskTable, at: datetime) -> float:
    def ask(statement: str, **values: Any) -> list[list[Any]]:
        return table.query(statement, "outbox-age", values, at=at, seconds=LOOK_SECONDS)

    paused = {topic for topic, is_paused, *_ in ask(statements.CONTROLS) if is_paused}
    topics = [topic for topic in table.topics(MAX_TOPICS + len(paused), at) if topic not in paused][:MAX_TOPICS]
    found = ask(statements.OLDEST_DUE, shards=list(table.shards), topics=topics, limit=FIRST_DUE, now=at)[0]
    belows = dict.fromkeys(product(table.shards, topics), _HIGHEST)
    for _ in range(MAX_LOOKS):
        if belows:
            rows = ask(statements.OLDEST_READY, **_places(belows))
            found += [created for _, _, _, created in rows]
            belows = {(shard, topic): priority - 1 for shard, topic, priority, _ in rows if priority > _LOWEST}
    if belows:
        limit = max(LEAST, min(COUNTED, IN_ALL // len(belows)))
        found += ask(statements.OLDEST_OF_SOME_READY, **_places(belows), limit=limit)[0]
    oldest = min((each for each in found if each), default=at)
    return max(0.0, (at - oldest).total_seconds())


def _places(belows: Mapping[tuple[int, str], int]) -> dict[str, Any]:
    shards, names = [shard for shard, _ in belows], [topic for _, topic in belows]
    return {"places": shards, "names": names, "belows": list(belows.values())}


def _read_at(table: TaskTable, at: datetime, limit: int | None, *, of_sent: bool = True) -> Backlog:
    topics = table.topics(MAX_TOPICS + 1, at)
    whole = len(topics) <= MAX_TOPICS
    del topics[MAX_TOPICS:]
    if limit is None:
        limit = max(LEAST, min(COUNTED, IN_ALL // (max(1, len(topics)) * len(table.shards))))
    places: dict[str, Any] = {"shards": list(table.shards), "limit": limit}
    seconds = COUNT_SECONDS if limit == NO_LIMIT else LOOK_SECONDS

    def ask(statement: str, **values: Any) -> list[list[Any]]:
        return table.query(statement, "outbox-status", values, at=at, seconds=seconds)

    counter = BacklogCounter(limit)
    belows = dict.fromkeys(topics, _HIGHEST)
    for _ in range(MAX_LOOKS):
        if belows:
            ready = ask(statements.COUNT_READY, **places, topics=list(belows), belows=list(belows.values()))
            belows = counter.add_ready(ready)
    counter.add(ask(statements.COUNT_DUE, **places, topics=topics, now=at), "pending")
    counter.add(ask(statements.COUNT_WAITING, **places, topics=topics, now=at), "retrying", "scheduled")
    counter.add(ask(statements.COUNT_DEAD, **places, topics=topics), "dead")
    workers = 0
    if of_sent:
        counter.add_sent(ask(statements.COUNT_SENT, **places, now=at))
        [[workers]] = ask(statements.LIVE_WORKERS, now=at)
    paused = {topic for topic, is_paused, *_ in ask(statements.CONTROLS) if is_paused}
    return Backlog(at, workers, counter.lines(paused), whole=whole)
