"""Charts: ticks, paths with gaps, stacks, marks, and what a page with many topics and workers weighs."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from starlette.datastructures import QueryParams

from outbox.admin.backlog import Backlog, Line
from outbox.admin.history import MINUTES, History, Seen
from outbox.admin.operations import Operation
from outbox.admin.problems import SHOWN, Problem
from outbox.admin.workers import Worker
from outbox.console import charts
from outbox.console.application import routes
from outbox.console.charts import Chart, Frame, by_topic, of_topic, spark, titled
from outbox.console.readings import Shared, Status
from outbox.console.visits import Visit
from tests.support.console import bare_console

NOW = datetime(2026, 11, 26, 12, 7, 30, tzinfo=UTC)


def ago(minutes: float) -> datetime:
    return NOW - timedelta(minutes=minutes)


def history(*workers: Worker, gone: dict[str, datetime] | None = None) -> History:
    return History(NOW, {each.id: Seen(each, (gone or {}).get(each.id)) for each in workers}, {})


def worker(id: str = "a", started: float = 300, version: str = "1", **found: Any) -> Worker:
    minute = int(NOW.timestamp() // 60)
    return Worker(id, 1.0, ago(started), NOW, {"version": version, "history": {"minute": minute, **found}})


def chart(*values: float | None, kind: str = "line", **more: Any) -> Chart:
    """Return a chart whose range ends with these values."""
    given = [*[None] * (MINUTES - len(values)), *values]
    return Chart(Frame(history(), (), "15m"), kind, "Title", {"a": given}, **more)


@pytest.mark.parametrize(
    ("most", "is_duration", "texts"),
    [
        (0, False, ["0", "1"]), (3, False, ["0", "1", "2", "3"]), (7, False, ["0", "2", "4", "6", "8"]),
        (2_700, False, ["0", "1,000", "2,000", "3,000"]), (0.3, True, ["0s", "100ms", "200ms", "300ms"]),
        (50, True, ["0s", "15s", "30s", "45s", "1m"]), (1_500, True, ["0s", "10m", "20m", "30m"]),
        (4 * 86_400, True, ["0s", "1d", "2d", "3d", "4d"]),
    ],
)  # fmt: skip
def test_ticks_are_round_and_reach_the_largest_value(most: float, *, is_duration: bool, texts: list[str]) -> None:
    found = chart(most, is_duration=is_duration).ticks()
    assert [text for _, text in found] == texts
    assert (found[0][0], found[-1][0]) == (100, 0)


def test_gaps_are_gaps_and_a_single_value_is_visible() -> None:
    line = chart(0, 10, None, 5)
    assert line.paths() == [(0, "M115 100L125 0h0M145 50h0")]
    assert line.last("a") == "5"
    assert chart(None).last("a") == "\N{EN DASH}"
    assert chart(10, None, kind="area").paths() == [(0, "M135 100L135 0h4V100z")]
    assert chart(10, 0, kind="bars").paths() == [(0, "M131 100V0h8V100z")]
    assert spark([None] * MINUTES) == ""


def test_stacked_series_add_up_and_the_lowest_is_drawn_last() -> None:
    given = {"low": [None] * 59 + [2], "high": [None] * 58 + [1, 2]}
    found = Chart(Frame(history(), (), "15m"), "bars", "Title", given)
    assert found.ticks()[-1][1] == "4"
    assert found.paths() == [(1, "M131 100V75h8V100zM141 100V0h8V100z"), (0, "M141 100V50h8V100z")]
    assert found.rows()[:2] == [(ago(0.5), ["2", "2"]), (ago(1.5), ["\N{EN DASH}", "1"])]


def operation(minutes: float, name: str = "pause", selection: Any = None, tasks: int | None = None) -> Operation:
    text = json.dumps(selection or {"topics": {"orders": {}}})
    return Operation("id", name, ago(minutes), None, "ann", text, tasks, None, None, None, None)


def test_operations_and_deployments_are_marks_and_near_ones_are_one() -> None:
    """A view changes nothing. A worker that stopped as it was told to is no mark."""
    deployed = [worker(id, started=20, version="2") for id in "bcd"]
    died, told = worker("died"), worker("told")
    seen = history(*deployed, died, gone={"died": ago(5)})
    seen = History(NOW, {**seen.workers, "told": Seen(told, ago(4), said_goodbye=True)}, {})
    found = Frame(seen, [operation(30), operation(29.5, "retry", {"topic": "mails"}, 7), operation(9, "view")], "1h")
    assert [(x, [event.text for event in events]) for x, events in found.marks] == [
        (49.2, ["pause orders", "retry 7 tasks of mails"]),
        (65.8, ["3 workers started, version 2"]),
        (90.8, ["worker died died"]),
    ]
    assert [events[0].is_bad for _, events in found.marks] == [False, False, True]
    assert Frame(seen, [operation(70)], "15m").marks == [
        (63.3, [charts.Event(ago(5), "worker died died", is_bad=True)])
    ]


@pytest.mark.parametrize("selection", [3, [], "x", {"topics": 3}, {"topic": [1]}])
def test_a_selection_that_no_command_writes_has_a_title(selection: Any) -> None:
    assert titled(operation(0, "retry", selection, 5)).startswith("retry 5 tasks")


def test_the_ticks_of_a_range_are_round_times() -> None:
    found = {range: [f"{time:%H:%M}" for _, time in Frame(history(), (), range).ticks()] for range in charts.RANGES}
    assert found == {"1h": ["11:15", "11:30", "11:45", "12:00"], "15m": ["11:55", "12:00", "12:05"]}


def test_the_largest_topics_have_a_series_each_and_the_others_share_one() -> None:
    topics = {f"t{n}": {"pending": [n], "unsent": [n]} for n in range(8)}
    found = by_topic(history(worker(all={"pending": [28], "unsent": [28]}, topics=topics)))
    assert {name: values[-1] for name, values in found.items()} == {
        "t7": 7, "t6": 6, "t5": 5, "t4": 4, "t3": 3, "others": 3,
    }  # fmt: skip
    assert list(by_topic(history())) == ["others"]


def test_a_topic_has_its_failures_by_reason() -> None:
    rings = worker(all={"published": [5, 5]}, topics={"orders": {"published": [4, 0], ":not_found": [9, 0]}})
    shared = Frame(history(rings), (), "1h")
    found = {each.title: each for each in of_topic(shared, "orders")}
    assert found["Failed attempts by reason"].last("not_found") == "9"
    assert found["Registered and published per minute"].last("published") == "4"
    assert len(of_topic(shared, None)) == 4
    assert not re.search("nan|inf|e[+-]", "".join(path for each in found.values() for _, path in each.paths()))


def test_pages_with_200_topics_and_40_workers_are_light() -> None:
    """As sent without compression: at most 60 kB, also with all problems that are shown."""
    values = [n * 37 % 900 for n in range(MINUTES)]
    names = ("published", "p50", "p95", "pending", "unsent", "oldest", ":not_found", ":unavailable", "busy")
    ring = dict.fromkeys(names, values)
    topics_of = [{f"topic-{n + 40 * m:03}": ring for m in range(5)} for n in range(40)]
    workers = [worker(f"publishworker-{n:040}", all=ring, topics=topics_of[n]) for n in range(40)]
    lines = [Line(f"topic-{n:03}", 50, pending=n, registered_last_minute=9, sent_last_minute=9) for n in range(200)]
    backlog = Backlog(NOW, workers, lines)
    status = Status(
        backlog=backlog, history=history(*workers), controls={}, orphans=[], errors=(), blocked=(),
        operations=[operation(n) for n in range(30)], reshard=None,
        problems=[Problem("late", each.topic, is_bad=True, text=f"{each.topic} is late") for each in lines[:SHOWN]],
    )  # fmt: skip
    console = bare_console(status=Shared(lambda _last: status))
    handlers = {route.path: route.handler for route in routes() if route.method == "GET"}
    topics = [("/", f"topics={page}") for page in range(1, 5)]
    others = (("/", ""), ("/", "range=15m"), ("/topic", "name=topic-001"), ("/workers", ""), ("/operations", ""))
    listed: list[bytes] = []
    for path, query in (*topics, *others):
        visit = Visit(console=console, person="ann", roles=frozenset(), path=path, query=QueryParams(query))
        page = bytes(handlers[path](visit).body)
        assert 5_000 < len(page) < 60_000, (path, query)
        listed += re.findall(b'row"><a href="/topic.name=([^"]+)', page) if "topics=" in query else []
    assert sorted(listed) == [each.topic.encode() for each in lines]
