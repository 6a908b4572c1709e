"""How counts that stop early become a backlog, compared with a naive model."""

import dataclasses
from collections import Counter as Numbers
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from unittest import mock

from hypothesis import example, given
from hypothesis import strategies as st

from outbox.admin import backlog, statements
from outbox.admin.backlog import COUNTS, Backlog, Line
from outbox.admin.table import TaskTable
from outbox.table.statements import CONTROLS

NOW = datetime(2026, 11, 21, 13, tzinfo=UTC)
LOWEST, HIGHEST = -(2**63), 2**63 - 1
SHARDS = 3
#: The state that a count is of, for each range of the index.
KINDS = {
    "ready": "pending", "due": "pending", "retrying": "retrying", "scheduled": "scheduled", "blocked": "blocked",
    "dead": "dead", "sent": "sent_last_minute",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Task:
    """One row; `since` is for how many seconds it is ready or due."""

    shard: int
    topic: str
    priority: int
    kind: str
    since: int = 0

    @property
    def count(self) -> str:
        return KINDS[self.kind]

    @property
    def time(self) -> datetime | None:
        return NOW - timedelta(seconds=self.since) if self.count == "pending" else None


#: Which tasks a statement counts, and in which order, if in any.
PARTS: dict[str, tuple[tuple[str, ...], Callable[[Task], Any] | None]] = {
    statements.COUNT_READY: (("ready",), lambda task: (-task.priority, -task.since)),
    statements.COUNT_DUE: (("due",), lambda task: -task.since),
    statements.COUNT_LATER: (("retrying", "scheduled", "blocked"), None),
    statements.COUNT_DEAD: (("dead",), None),
}


class FakeTable:
    """Answers the statements of a backlog from a list of tasks, as their text says."""

    def __init__(self, tasks: Sequence[Task], paused: Iterable[str] = ()) -> None:
        self._tasks, self._paused = tasks, sorted(paused)
        self.shards = range(SHARDS)
        self.asked: list[str] = []

    def topics(self, _count: int, _at: datetime) -> list[str]:
        return sorted({task.topic for task in self._tasks if task.kind != "sent"} | set(self._paused))

    def query(self, statement: str, _tag: str, values: Mapping[str, Any], **_: object) -> list[list[Any]]:
        self.asked.append(statement)
        if statement == statements.WORKERS_AT:
            return [["a", 100, 14, None], ["gone", 14_000, 14, None], ["b", 13_999, 14, "Shard"]]
        if statement == CONTROLS:
            return [[topic, True, None, None, None] for topic in self._paused]
        limit = values["limit"]
        if statement == statements.COUNT_SENT:
            return _grouped([task for task in self._tasks if task.kind == "sent"], limit, by_topic=False)
        kinds, order = PARTS[statement]
        tasks = [task for task in self._tasks if task.kind in kinds]
        if statement == statements.COUNT_READY:
            ranges = zip(values["range_shards"], values["range_topics"], strict=True)
            below = dict(zip(ranges, values["max_priorities"], strict=True))
            tasks = [task for task in tasks if task.priority <= below.get((task.shard, task.topic), LOWEST - 1)]
        else:
            tasks = [task for task in tasks if task.topic in values["topics"]]
        return _grouped(tasks, limit, order)


def _grouped(
    tasks: Iterable[Task], limit: int, order: Callable[[Task], Any] | None = None, *, by_topic: bool = True
) -> list[list[Any]]:
    """Return (shard, topic, priority, state, number, oldest) of the first `limit` tasks of each place."""
    places: dict[Any, list[Task]] = defaultdict(list)
    for task in tasks:
        places[task.shard, task.topic if by_topic else ""].append(task)
    parts: dict[Any, list[Task]] = defaultdict(list)
    for here in places.values():
        for task in (sorted(here, key=order) if order else here)[:limit]:
            parts[task.shard, task.topic, task.priority, task.count].append(task)
    return [
        [*part, len(found), min((task.time for task in found if task.time), default=None)]
        for part, found in parts.items()
    ]


def read(table: FakeTable, limit: int, queries: int = backlog.MAX_QUERIES) -> Backlog:
    with mock.patch.object(backlog, "MAX_QUERIES", queries):
        return backlog._read_at(cast("TaskTable", table), NOW, limit)


def truth(tasks: Iterable[Task]) -> dict[tuple[str, int], Numbers[str]]:
    numbers: dict[tuple[str, int], Numbers[str]] = defaultdict(Numbers)
    for task in tasks:
        numbers[task.topic, task.priority][task.count] += 1
    return numbers


def pending_since(tasks: Iterable[Task], line: Line) -> list[datetime]:
    return [task.time for task in tasks if (task.topic, task.priority) == (line.topic, line.priority) and task.time]


TASKS = st.lists(
    st.builds(
        Task,
        shard=st.integers(0, SHARDS - 1),
        topic=st.sampled_from(["a", "b"]),
        priority=st.sampled_from([0, 50, 100, 1, 2, 3, -7, LOWEST, HIGHEST]),
        kind=st.sampled_from(["ready", "ready", "ready", *KINDS]),
        since=st.integers(0, 50),
    ),
    max_size=60,
)


@given(TASKS, st.integers(1, 6), st.sampled_from([1, 2, 3, backlog.MAX_QUERIES]))
@example([Task(0, "a", 1, "due"), Task(0, "a", 5, "due"), Task(0, "a", 5, "dead")], 1, 20)
@example([Task(0, "a", 9, "ready"), Task(0, "a", 5, "ready"), Task(0, "a", 5, "dead")], 1, 1)
@example([Task(0, "a", 9, "ready"), Task(0, "a", 9, "ready"), Task(1, "a", 5, "ready"), Task(1, "a", 5, "ready")], 2, 1)
def test_a_count_is_exact_or_reported_as_a_lower_bound(tasks: list[Task], limit: int, queries: int):
    """Also where the queries stop early: a count that is not reported as a bound is exact."""
    found, true = read(FakeTable(tasks), limit, queries), truth(tasks)
    lines = {(line.topic, line.priority): line for line in found.lines}
    assert set(lines) <= set(true)
    for place, line in lines.items():
        for name in COUNTS:
            if name in line.at_least:
                assert 0 <= getattr(line, name) <= true[place][name]
            else:
                assert getattr(line, name) == true[place][name]
    for topic, priority in set(true) - set(lines):
        for name in true[topic, priority]:
            assert any(name in line.at_least for line in found.lines if name.startswith("sent") or line.topic == topic)
    for name in COUNTS:
        whole = sum(numbers[name] for numbers in true.values())
        number = getattr(found.total, name)
        assert number == whole or (number < whole and name in found.total.at_least)


def test_a_request_has_a_limited_number_of_ranges():
    """Spanner limits a request to 10 MiB. The rows of all requests are added up."""
    numbers: list[int] = []

    def ask(_statement: str, **parameters: Any) -> list[list[Any]]:
        shards, topics = parameters["range_shards"], parameters["range_topics"]
        assert len(shards) == len(topics) == len(parameters["max_priorities"])
        numbers.append(len(shards))
        return [[shards[0], topics[0], 50, "pending", 1, NOW]]

    ranges = [(shard, f"topic-{number}") for number in range(1_000) for shard in range(25)]
    counter = backlog.BacklogCounter(1)
    with mock.patch.object(backlog, "MAX_QUERIES", 1):
        left = backlog._add_ready(counter, ask, ranges, 1)
    assert numbers == [10_000, 10_000, 5_000]
    assert left == {(0, "topic-0"): 49, (0, "topic-400"): 49, (0, "topic-800"): 49}
    assert [line.pending for line in counter.lines(())] == [1, 1, 1]


@given(TASKS)
def test_without_a_limit_everything_is_counted(tasks: list[Task]):
    """`--exact` reports no lower bound, runs each query once, and finds every oldest task."""
    table = FakeTable(tasks)
    found, true = read(table, backlog.NO_LIMIT), truth(tasks)
    assert {(line.topic, line.priority): {name: getattr(line, name) for name in COUNTS} for line in found.lines} == {
        place: {name: numbers[name] for name in COUNTS} for place, numbers in true.items()
    }
    assert not any(line.at_least for line in found.lines)
    assert table.asked.count(statements.COUNT_READY) <= 1
    assert all(line.oldest == min(pending_since(tasks, line), default=None) for line in found.lines)
    assert found.lines == sorted(found.lines, key=lambda line: (line.topic, -line.priority))


@given(TASKS, st.integers(1, 6), st.sets(st.sampled_from(["a", "b", "row only"])))
def test_totals_and_topics_are_the_sums_of_lines(tasks: list[Task], limit: int, paused: set[str]):
    """Pending tasks of a paused topic are in no total: neither their count, nor their age, nor an early stop."""
    found = read(FakeTable(tasks, paused), limit)
    before = [dataclasses.replace(line, at_least=set(line.at_least)) for line in found.lines]
    going = [line for line in found.lines if line.topic not in paused]
    total = found.total
    assert all(line.paused == (line.topic in paused) for line in found.lines)
    assert total.pending == sum(line.pending for line in going)
    for name in ("dead", "retrying", "sent_last_minute"):
        assert getattr(total, name) == sum(getattr(line, name) for line in found.lines)
    assert ("pending" in total.at_least) == any("pending" in line.at_least for line in going)
    oldest = min((line.oldest for line in going if line.oldest), default=None)
    assert total.oldest == oldest
    assert (found.oldest.oldest if found.oldest else None) == oldest
    assert found.oldest is None or found.oldest in going
    assert found.age(found.oldest) == (0.0 if oldest is None else (NOW - oldest).total_seconds())

    topics = found.topics()
    assert list(topics) == sorted({line.topic for line in found.lines})
    for topic, merged in topics.items():
        own = [line for line in found.lines if line.topic == topic]
        assert merged.paused == (topic in paused)
        assert merged.oldest == min((line.oldest for line in own if line.oldest), default=None)
        assert merged.at_least == set().union(*(line.at_least for line in own))
        assert all(getattr(merged, name) == sum(getattr(line, name) for line in own) for name in COUNTS)
    assert found.lines == before


def test_an_empty_backlog_has_no_age():
    empty = Backlog(NOW, 0, [])
    assert (empty.total, empty.oldest, empty.topics(), empty.age(None)) == (Line("", 0), None, {}, 0.0)
    assert empty.age(Line("a", 0)) == 0.0
    assert empty.age(Line("a", 0, oldest=NOW + timedelta(seconds=1))) == 0.0
