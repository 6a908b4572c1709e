"""The last hour of a worker by minute, for its heartbeat: what it published, what failed, how long tasks took.

The worker's thread counts. The threads of the gauges add the backlog, if this worker reads it.
"""

import contextlib
import json
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

from outbox.rows.workers import MINUTES
from publishworker.types import Turn

#: Max topics of one minute. The figures of all topics include the others.
TOPICS = 20
#: Approximate number of latencies of one batch that are counted, here and in metrics. More could fill the socket
#: buffer of the Datadog agent, which would then drop counters.
LATENCY_SAMPLES = 20
#: The ratio of the bounds between which latencies are counted.
RATIO = 1.1
#: The key of the figures of all topics. The name of a topic may be an empty text.
ALL = None
#: The figures of a topic in one minute.
_Figures: TypeAlias = Mapping[str, float | None]
_COUNTS, _STATES = ("published", "failed"), ("pending", "unsent", "oldest")


@dataclass(slots=True)
class _Row:
    """The current minute of a topic. `oldest` is an age in seconds."""

    published: int = 0
    failed: int = 0
    latencies: Counter[int] = field(default_factory=Counter)
    pending: int | None = None
    unsent: int | None = None
    oldest: float | None = None

    def figures(self) -> _Figures:
        return {
            "published": self.published, "failed": self.failed, "p95": self._p95(),
            "pending": self.pending, "unsent": self.unsent, "oldest": self.oldest,
        }  # fmt: skip

    def _p95(self) -> float | None:
        """Return the latency in seconds that 95 % of the tasks do not exceed."""
        left = 0.95 * self.latencies.total()
        for bound, number in sorted(self.latencies.items()):
            left -= number
            if left <= 0:
                return _short(RATIO ** (bound + 0.5))
        return None


class WorkerHistory:
    """The figures of the last MINUTES. Used by several threads."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns the seconds since 1970, because the minutes of all workers are added up."""
        self._clock = clock
        self._minute = 0
        self._rows: dict[str | None, _Row] = defaultdict(_Row)
        self._past: dict[int, dict[str | None, _Figures]] = {}
        self._lock = threading.Lock()

    def add(self, topic: str, counts: Turn, latencies: Mapping[str, float]) -> None:
        """Count the outcomes of a batch, and some of the latencies of its tasks."""
        step = max(1, len(latencies) // LATENCY_SAMPLES)
        sampled = Counter(_bound(each) for each in islice(latencies.values(), 0, None, step))
        with self._current() as rows:
            for row in (rows[ALL], rows[topic]):
                row.published += counts.published
                row.failed += counts.failed
            rows[ALL].latencies += sampled

    def add_backlog(self, pending: Mapping[str, int], unsent: Mapping[str, int | None]) -> None:
        """Note the numbers of tasks by topic. None is a number that is not known exactly."""
        with self._current() as rows:
            for topic in _largest({topic: pending.get(topic, 0) + (unsent[topic] or 0) for topic in unsent}):
                rows[topic].pending, rows[topic].unsent = pending.get(topic, 0), unsent[topic]
            known = [number for number in unsent.values() if number is not None]
            rows[ALL].pending = sum(pending.values())
            rows[ALL].unsent = sum(known) if len(known) == len(unsent) else None

    def add_ages(self, ages: Mapping[str, float], oldest: float) -> None:
        """Note the age of the oldest task of each topic that has one, and of all topics."""
        with self._current() as rows:
            for topic in _largest(ages):
                rows[topic].oldest = _short(ages[topic])
            rows[ALL].oldest = _short(oldest)

    def as_json(self, most: int) -> dict[str, Any]:
        """Return the series of all topics, and those of the largest ones that fit into `most` bytes of JSON.

        Each series ends with the current minute, which is `minute`, counted since 1970. Before its first value, a count
        is 0, and any other figure is unknown. A minute that the worker did not count is unknown.
        """
        with self._current() as current:
            past = self._past | {self._minute: _figures(current)}
        weights: Counter[str] = Counter()
        for rows in past.values():
            weights.update({topic: _weight(row) for topic, row in rows.items() if topic is not ALL})
        found: dict[str, Any] = {"minute": max(past), "all": _series(past, ALL), "topics": {}}
        left = most - size(found | {"topics_left_out": len(weights)})
        for topic, _ in weights.most_common(TOPICS):
            series = _series(past, topic)
            if (left := left - size({topic: series})) < 0:
                break
            found["topics"][topic] = series
        return found | {"topics_left_out": len(weights) - len(found["topics"])}

    @contextlib.contextmanager
    def _current(self) -> Iterator[dict[str | None, _Row]]:
        """Yield the rows of this minute. First keep the largest topics of the last one, and drop the oldest minute.

        If the clock was set back, the past minutes move with it, so that the last one is before this one.
        """
        with self._lock:
            if (minute := int(self._clock() // 60)) != self._minute:
                if self._rows:
                    self._past[self._minute] = _figures(self._rows)
                back = max(0, self._minute + 1 - minute)
                past = ((at - back, rows) for at, rows in self._past.items())
                self._past = {at: rows for at, rows in past if minute - MINUTES < at < minute}
                self._minute = minute
                self._rows.clear()
            yield self._rows


def _figures(rows: Mapping[str | None, _Row]) -> dict[str | None, _Figures]:
    found = {topic: row.figures() for topic, row in rows.items()}
    kept = _largest({topic: _weight(row) for topic, row in found.items() if topic is not ALL})
    return {topic: found[topic] for topic in (ALL, *kept) if topic in found}


def _weight(figures: _Figures) -> float:
    return sum(figures[name] or 0 for name in (*_COUNTS, "unsent", "pending"))


def _series(past: Mapping[int, Mapping[str | None, _Figures]], topic: str | None) -> dict[str, list[float | None]]:
    found: dict[str, list[float | None]] = {}
    for at in range(min(past), max(past) + 1):
        figures = past.get(at, {}).get(topic, {})
        begun = {name for name, value in figures.items() if value or (value is not None and name in _STATES)}
        for name in found.keys() | begun:
            # The worker counts each minute. One that it did not count is a gap, such as after a jump of its clock.
            nothing = 0 if name in _COUNTS and at in past else None
            found.setdefault(name, []).append(figures.get(name, nothing))
    return dict(sorted(found.items()))


def _largest(weights: Mapping[str, float]) -> list[str]:
    return [topic for topic, weight in Counter(weights).most_common(TOPICS) if weight]


def _bound(seconds: float) -> int:
    return math.floor(math.log(max(seconds, 0.001), RATIO))


def _short(seconds: float) -> float:
    """Return whole seconds, or less than ten with two significant digits."""
    return round(seconds) if seconds >= 10 else float(f"{seconds:.2g}")


def size(value: object) -> int:
    return len(json.dumps(value, separators=(",", ":")))
