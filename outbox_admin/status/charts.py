"""Charts of the last hour: what `chart.html` draws as SVG, and writes as a table. Pure.

A plot is stretched to the width of the page, so paths have no text. One minute is 10 units wide, and a plot 100 high.
"""

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from outbox.base.values import counted, listed, spoken
from outbox.rows.workers import MINUTES
from outbox_admin import operations
from outbox_admin.operations import Operation
from outbox_admin.status.last_hour import History, Values, joined, latest

#: The ranges of time by the name that the address has, each with its minutes, and those between two ticks.
RANGES = {"1h": (60, 15), "15m": (15, 5)}
#: Max topics of a chart. The others are one series.
TOPICS = 5
#: Events that are closer than this part of the width are one mark.
CLOSEST = 1 / 30
OTHERS = "others"
_STEPS = (1, 2, 5, 10)
_DURATIONS = (15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 14_400, 28_800, 86_400)


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """What an operator or a deployment did, and the ID of its operation, if it is one."""

    time: datetime
    text: str
    who: str = ""
    operation: str = ""
    is_bad: bool = False


@dataclasses.dataclass(frozen=True)
class Frame:
    """What all charts of a page share: the range, and what was done in it."""

    history: History
    operations: Sequence[Operation]
    range: str

    @functools.cached_property
    def marks(self) -> list[tuple[float, list[Event]]]:
        """Return the events of the range in groups, each with its place in percent."""
        groups: list[tuple[float, list[Event]]] = []
        for event in sorted(_events(self.history, self.operations), key=lambda event: event.time):
            x = self.x(event.time)
            if groups and x - groups[-1][0] < 100 * CLOSEST:
                groups[-1][1].append(event)
            elif 0 <= x <= 100:
                groups.append((x, [event]))
        return groups

    @property
    def minutes(self) -> int:
        return RANGES[self.range][0]

    def x(self, time: datetime) -> float:
        """Return the place of a time in percent of the width."""
        place = self.history.place(time) - MINUTES + self.minutes
        return round(100 * place / self.minutes, 1)

    def ticks(self) -> list[tuple[float, datetime]]:
        """Return the places of whole quarters of an hour, or of five minutes."""
        step = 60 * RANGES[self.range][1]
        end = 60 * (self.history.first + MINUTES)
        times = range(math.ceil((end - 60 * self.minutes) / step) * step, end + 1, step)
        return [(self.x(time), time) for time in (datetime.fromtimestamp(each, UTC) for each in times)]

    def incomplete(self) -> list[tuple[float, float]]:
        """Return place and width, in percent, of the minutes in which a worker left."""
        first = MINUTES - self.minutes
        return [(round(100 * (at - first) / self.minutes, 2), round(100 / self.minutes, 2))
                for at in sorted(self.history.incomplete) if at >= first]  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Chart:
    """A chart of a kind (line, area or bars). Areas and bars are stacked, the first series at the bottom."""

    frame: Frame
    kind: str
    title: str
    series: Mapping[str, Values]
    is_duration: bool = False
    is_backlog: bool = False  # so that workers may not count it in each minute

    @property
    def shown(self) -> dict[str, Values]:
        """Return the values of the range."""
        return {name: values[-self.frame.minutes :] for name, values in self.series.items()}

    def text(self, value: float | None) -> str:
        if value is None:
            return "\N{EN DASH}"
        return _duration(value) if self.is_duration else f"{value:,.0f}"

    def last(self, name: str) -> str:
        """Return the last value, unless it is old."""
        return latest(self.shown[name], self.text)

    def ticks(self) -> list[tuple[float, str]]:
        """Return the height and the text of each tick: round numbers from 0 to above the largest value."""
        step, top = self._scale
        return [(round(100 - 100 * n * step / top, 1), self.text(n * step)) for n in range(round(top / step) + 1)]

    def paths(self) -> list[tuple[int, str]]:
        """Return the number of each series and its path, those that are drawn first at the beginning."""
        draw, (_, top) = {"line": _line, "area": _area, "bars": _bars}[self.kind], self._scale
        return [(number, draw(values, top)) for number, values in reversed([*enumerate(self._ends)])]

    def minutes(self) -> list[tuple[datetime, list[str]]]:
        """Return each minute with the text of the value of each series."""
        first = self.frame.history.first + MINUTES - self.frame.minutes
        rows = enumerate(zip(*self.shown.values(), strict=True), first)
        return [(datetime.fromtimestamp(60 * at, UTC), [*map(self.text, row)]) for at, row in rows]

    def rows(self) -> list[tuple[datetime, list[str]]]:
        """Return the values of each minute of a short range, and of each fourth one of an hour, the last one first."""
        return self.minutes()[:: -(self.frame.minutes // 15)]

    @property
    def _ends(self) -> list[Values]:
        """Return the upper end of each series: its values, or their sums with the series below it."""
        ends: list[Values] = []
        for values in map(joined, self.shown.values()) if self.is_backlog else self.shown.values():
            below = ends[-1] if ends and self.kind != "line" else [None] * len(values)
            ends.append([low if high is None else (low or 0) + high for low, high in zip(below, values, strict=True)])
        return ends

    @property
    def _scale(self) -> tuple[float, float]:
        most = max((each for values in self._ends for each in values if each is not None), default=0)
        least = most / 4
        if self.is_duration and least > 10:
            step: float = next((each for each in _DURATIONS if each >= least), math.ceil(least / 86_400) * 86_400)
        else:
            size = 10 ** math.floor(math.log10(least)) if least > (0 if self.is_duration else 1) else 1
            step = next(size * each for each in _STEPS if size * each >= least)
        return step, step * max(1, math.ceil(most / step))


def of_topic(frame: Frame, topic: str | None) -> list[Chart]:
    """Return the charts of a topic, or of all."""
    history = frame.history
    counts = {"registered": history.registered(topic), "published": history.published(topic)}
    pending = {"pending": history.pending(topic)} if topic is not None else by_topic(history)
    charts = [
        Chart(frame, "line", "Registered and published per minute", counts),
        Chart(frame, "area", "Pending" if topic is not None else "Pending by topic", pending, is_backlog=True),
        Chart(frame, "line", "Age of the oldest task", {"oldest": history.oldest(topic)}, True, True),
        Chart(frame, "bars", "Failed attempts", {"failed": history.failed(topic)}),
    ]
    latency = Chart(frame, "line", "Latency of the slowest worker", {"p95": history.latency()}, is_duration=True)
    return charts if topic is not None else [*charts, latency]


def by_topic(history: History) -> dict[str, Values]:
    """Return the pending tasks of the topics with most of them, and those of the others."""
    found = {topic: history.pending(topic) for topic in history.topics}
    largest = sorted(found, key=lambda topic: -sum(filter(None, found[topic])))
    shown = {topic: found[topic] for topic in largest[:TOPICS] if any(found[topic])}
    rest = [
        None if total is None else max(0, total - sum(filter(None, row)))
        for total, *row in zip(history.pending(), *shown.values(), strict=True)
    ]
    named = {topic or "(empty)": values for topic, values in shown.items()}
    return named | ({OTHERS: rest} if any(rest) or not shown else {})


def spark(values: Values) -> str:
    """Return the path of a line without axes, 10 units a minute wide and 100 high."""
    return _line(joined(values), max(filter(None, values), default=1))


def titled(operation: Operation) -> str:
    """Return an operation and what it is about in a few words."""
    found = operations.parsed(operation.selection)
    found = found if isinstance(found, dict) else {}
    topics = found.get("topics")
    of = listed(topics, 2) if isinstance(topics, dict) else found.get("topic")
    tasks = f" {counted(operation.tasks, 'task')}" if operation.tasks is not None else ""
    return f"{operation.operation}{tasks}{f' of {of}' if of and tasks else f' {of}' if of else ''}"


def _events(history: History, operations: Sequence[Operation]) -> Iterator[Event]:
    for each in operations:
        if each.operation != "view":
            yield Event(each.started_at, titled(each), each.principal or "", each.id)
    started: dict[tuple[int, str], list[datetime]] = defaultdict(list)
    for seen in history.workers.values():
        worker = seen.worker
        started[round(worker.started_at.timestamp() / 120), worker.text("version")].append(worker.started_at)
        if seen.gone_at and not seen.said_goodbye:
            yield Event(seen.gone_at, f"worker {worker.id} died", is_bad=True)
    for (_, version), times in started.items():
        yield Event(min(times), f"{counted(len(times), 'worker')} started{f', version {version}' if version else ''}")


def _duration(seconds: float) -> str:
    return f"{1_000 * seconds:.3g}ms" if 0 < seconds < 1 else f"{seconds:.2g}s" if seconds < 10 else spoken(seconds)


def _runs(values: Values, top: float) -> Iterator[list[tuple[int, str]]]:
    for is_gap, run in itertools.groupby(enumerate(values), key=lambda point: point[1] is None):
        if not is_gap:
            yield [(10 * at + 5, f"{100 - 100 * (value or 0) / top:.3g}") for at, value in run]


def _line(values: Values, top: float) -> str:
    return "".join("M" + "L".join(f"{x} {y}" for x, y in run) + "h0" for run in _runs(values, top))


def _area(values: Values, top: float) -> str:
    # The last value has a width of its own, so that a single one is visible.
    return "".join(
        f"M{run[0][0]} 100L" + "L".join(f"{x} {y}" for x, y in run) + "h4V100z" for run in _runs(values, top)
    )


def _bars(values: Values, top: float) -> str:
    return "".join(f"M{x - 4} 100V{y}h8V100z" for run in _runs(values, top) for x, y in run if y != "100")
