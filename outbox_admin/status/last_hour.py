"""The last hour by minute: the histories that all workers send with their heartbeats, added up.

A worker that stops deletes its row, and so its history. Therefore a History keeps the workers that it has seen, and the
first `read` also reads versions of the rows that Spanner still keeps. Any program may write the column Info.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, TypeAlias

from outbox.errors import OutboxError
from outbox.rows.backlog import Backlog, Line
from outbox.rows.task_table import TaskTable
from outbox.rows.workers import MINUTES, SeenWorker, part, rows_at
from outbox.table.states import UNSENT

#: The age of the oldest versions that the first read asks for, and its steps. Spanner keeps versions for an hour.
OLDEST, STEP = timedelta(minutes=55), timedelta(minutes=5)
#: Max topics of one sample, topics of all workers, and workers that left.
TOPICS, MAX_TOPICS, MAX_LEFT = 50, 1_000, 200
#: Minutes until a count is whole everywhere, and those between two values that belong together: workers count a large
#: backlog every few minutes. A value that is older says nothing about now.
WHOLE, JOINED = 2, 5
#: A value for each minute, the current one last. None is a gap: nothing has counted it, or it is not complete yet.
Values: TypeAlias = Sequence[float | None]
_NONE: Values = (None,) * MINUTES


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """A worker when it was last seen. `gone_at` is when it was no longer live, and None if it still is."""

    worker: SeenWorker
    gone_at: datetime | None = None
    said_goodbye: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """The tasks of a topic as this process has counted them. `unsent` is None if it is a lower bound."""

    pending: float | None = 0
    unsent: float | None = 0
    oldest: float | None = 0


#: What this process has read, by minute and topic. None: all topics.
Samples: TypeAlias = Mapping[int, Mapping[str | None, Sample]]


@dataclasses.dataclass(frozen=True)
class History:
    """The figures of all topics, and of the largest ones of each worker. Without a topic, a method is about all."""

    as_of: datetime
    workers: Mapping[str, Seen]
    samples: Samples

    @functools.cached_property
    def first(self) -> int:
        """Return the minute of the first value, counted since 1970."""
        return _minute(self.as_of) - MINUTES + 1

    def place(self, time: datetime) -> float:
        """Return the place of a time among the values. The first minute begins at 0."""
        return time.timestamp() / 60 - self.first

    @functools.cached_property
    def left(self) -> list[Seen]:
        """Return the workers that are not live any more, the last one first."""
        found = [seen for seen in self.workers.values() if seen.gone_at]
        return sorted(found, key=lambda seen: seen.gone_at or self.as_of, reverse=True)

    @functools.cached_property
    def incomplete(self) -> frozenset[int]:
        """Return the places of the minutes whose figures a worker may not have sent before it left."""
        gone = (self._span(seen.worker.seen_at, seen.gone_at or self.as_of) for seen in self.left)
        return frozenset(place for span in gone for place in span)

    @functools.cached_property
    def topics(self) -> frozenset[str]:
        """Return the topics that have figures of their own."""
        found = (part(each, "topics").keys() for each in self._histories)
        own = (topic for row in self.samples.values() for topic in row if topic is not None)
        return frozenset(sorted({*own}.union(*found))[:MAX_TOPICS])

    @functools.cached_property
    def is_of_part(self) -> bool:
        """Tell whether a worker has left out topics, because they do not fit into its heartbeat."""
        return any(each.get("topics_left_out") for each in self._histories)

    def published(self, topic: str | None = None) -> Values:
        return self._counted(topic, "published")

    def failed(self, topic: str | None = None) -> Values:
        return self._counted(topic, "failed")

    def latency(self) -> Values:
        """Return the latencies in seconds that 95 % of the tasks of the slowest worker did not exceed."""
        columns = zip(*(self._values(each, None, "p95")[0] for each in self._histories), strict=True)
        known = [[each for each in column if each is not None] for column in columns]
        return [max(each, default=None) for each in known] or _NONE

    def pending(self, topic: str | None = None) -> Values:
        """Return the numbers of pending tasks. They may be lower bounds."""
        return [each.pending for each in self._samples(topic)]

    def oldest(self, topic: str | None = None) -> Values:
        """Return the age of the oldest task in seconds."""
        return [each.oldest for each in self._samples(topic)]

    def registered(self, topic: str | None = None) -> Values:
        """Return about how many tasks were registered: the published ones, and by how many the unsent ones grew."""
        unsent = joined([each.unsent for each in self._samples(topic)])
        rows = zip(self.published(topic), [None, *unsent[:-1]], unsent, strict=True)
        found = [
            None if sent is None or before is None or after is None else sent + after - before
            for sent, before, after in rows
        ]
        # Workers count the unsent tasks only now and then, so the count may fall in the minute after the publish.
        return [
            None if each is None else max(0, each + min(0, later or 0))
            for each, later in zip(found, [*found[1:], None], strict=True)
        ]

    @functools.cached_property
    def _histories(self) -> list[Mapping[str, Any]]:
        return [found for seen in self.workers.values() if (found := part(seen.worker.info, "history"))]

    def _values(self, history: Mapping[str, Any], topic: str | None, *names: str) -> list[Values]:
        """Return figures of a worker, each in the places of its minutes."""
        series, minute = _series(history, topic), history.get("minute")
        late = self.first + MINUTES - 1 - minute if isinstance(minute, int) else MINUTES
        return [_aligned(series.get(name), late) for name in names]

    @functools.cached_property
    def _complete(self) -> frozenset[int]:
        """Return the places of the minutes of which all live workers have sent all."""
        until = min([self.as_of, *(seen.worker.seen_at for seen in self.workers.values() if not seen.gone_at)])
        told = (seen.worker for seen in self.workers.values() if part(seen.worker.info, "history"))
        places = {place for each in told for place in self._span(each.started_at, each.seen_at)}
        return frozenset(place for place in places if place < _minute(until) - self.first)

    def _span(self, begin: datetime, end: datetime) -> range:
        return range(max(0, _minute(begin) - self.first), min(MINUTES - 1, _minute(end) - self.first) + 1)

    def _counted(self, topic: str | None, name: str) -> Values:
        columns = zip(*(self._values(each, topic, name)[0] for each in self._histories), strict=True)
        sums = [sum(filter(None, column)) for column in columns] or [0] * MINUTES
        return [number if place in self._complete else None for place, number in enumerate(sums)]

    @functools.cached_property
    def _counting(self) -> list[int | None]:
        """Return for each minute the number of the history that has its backlog. Few workers count it."""
        counted = [self._values(each, None, "pending")[0] for each in self._histories]
        return [
            next((at for at, row in enumerate(counted) if row[place] is not None), None) for place in range(MINUTES)
        ]

    def _samples(self, topic: str | None) -> list[Sample]:
        """Return the backlog of each minute: what a worker has sent, or else what this process has read."""
        sent = {at: self._backlog(self._histories[at], topic) for at in {*self._counting} if at is not None}
        rows = [self.samples.get(self.first + place, {}) for place in range(MINUTES)]
        own = [row.get(topic, Sample() if 0 < len(row) <= TOPICS else None) for row in rows]
        theirs = [None if at is None else sent[at][place] for place, at in enumerate(self._counting)]
        *past, _ = [each or mine or Sample(None, None, None) for each, mine in zip(theirs, own, strict=True)]
        return [*past, own[-1] or theirs[-1] or Sample(None, None, None)]

    def _backlog(self, history: Mapping[str, Any], topic: str | None) -> list[Sample | None]:
        """Return the backlog of a topic that a worker has sent. A topic without unsent tasks is not in a minute."""
        is_whole = topic is None or not history.get("topics_left_out") or topic in part(history, "topics")
        empty = Sample() if is_whole else None
        columns = self._values(history, None, "pending", "oldest") + self._values(
            history, topic, "pending", "unsent", "oldest"
        )
        return [
            # Of a topic without due tasks, a worker sends no age.
            None if total is None else empty if pending is None else Sample(pending, unsent, oldest or (age and 0))
            for total, age, pending, unsent, oldest in zip(*columns, strict=True)
        ]


def read(table: TaskTable, backlog: Backlog, last: History | None = None) -> History:
    """Return the history as of a backlog. Without a `last` one, read the rows of the hour. Raises NotReached."""
    workers = last.workers if last else {}
    for age in (OLDEST - n * STEP for n in range(OLDEST // STEP) if last is None):
        try:
            workers = _seen(workers, rows_at(table, backlog.as_of - age), backlog.as_of - age)
        except OutboxError:
            continue  # the table is younger, or Spanner keeps its versions for a shorter time
    minute = _minute(backlog.as_of)
    samples = {at: found for at, found in (last.samples if last else {}).items() if at > minute - MINUTES}
    workers = _seen(workers, (*backlog.workers, *backlog.silent), backlog.as_of)
    return History(backlog.as_of, workers, samples | {minute: _sampled(backlog)})


def _seen(workers: Mapping[str, Seen], rows: Iterable[SeenWorker], at: datetime) -> dict[str, Seen]:
    """Return the workers of the last hour as of `at`. A row that another worker deletes is older than an hour."""
    found = {row.id: Seen(row, None if row.is_live else row.seen_at + timedelta(seconds=row.timeout)) for row in rows}
    absent = (seen if seen.gone_at else Seen(seen.worker, at, said_goodbye=True) for seen in workers.values())
    known = {seen.worker.id: seen for seen in absent} | found
    gone = sorted((at - seen.gone_at, id) for id, seen in known.items() if seen.gone_at)
    kept = {id for age, id in gone[:MAX_LEFT] if age < timedelta(minutes=MINUTES)}
    return {id: seen for id, seen in known.items() if id in kept or not seen.gone_at}


def _sampled(backlog: Backlog) -> dict[str | None, Sample]:
    lines = sorted(backlog.topics().items(), key=lambda pair: -pair[1].unsent)[:TOPICS]
    found: dict[str | None, Sample] = {topic: _sample(backlog, line, line) for topic, line in lines if line.unsent}
    return found | {None: _sample(backlog, backlog.everything, backlog.oldest)}


def _sample(backlog: Backlog, line: Line, oldest: Line | None) -> Sample:
    return Sample(line.pending, None if line.at_least & {*UNSENT} else line.unsent, backlog.age(oldest))


def joined(values: Values) -> Values:
    """Return values that are counted less often than every minute, with a straight line between two of them."""
    found, known = [*values], [(place, each) for place, each in enumerate(values) if each is not None]
    for (begin, first), (end, last) in pairwise(known):
        if end - begin <= JOINED:
            found[begin:end] = [first + (last - first) * n / (end - begin) for n in range(end - begin)]
    return found


def latest(values: Values, text: Callable[[float], str]) -> str:
    """Return the last value as a text, with its age if there should be a newer one, or a dash if it is too old."""
    for age, value in enumerate(values[: -JOINED - 2 : -1]):
        if value is not None:
            return text(value) + (f" ({age}m ago)" if age > WHOLE else "")
    return "\N{EN DASH}"


def _minute(time: datetime) -> int:
    return int(time.timestamp() // 60)


def _series(history: Mapping[str, Any], topic: str | None) -> Mapping[str, Any]:
    return part(history, "all") if topic is None else part(part(history, "topics"), topic)


def _aligned(values: Any, late: int) -> Values:
    """Return the last values, `late` minutes before the current one, in their places."""
    if not isinstance(values, list) or abs(late) >= MINUTES:
        return _NONE
    found = [each if type(each) in (int, float) and 0 <= each < 1e12 else None for each in values[-MINUTES:]]
    begin = max(0, len(found) + late)
    return [*_NONE, *found, *_NONE][begin : begin + MINUTES]
