"""What pages show: readings that tabs share, the sentence at the top, charts, and what a large page weighs."""

import argparse
import dataclasses
import json
import math
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import markupsafe
import pytest
from starlette.datastructures import QueryParams

import outbox_admin as admin
from outbox.base.values import counted
from outbox.errors import NotReached
from outbox.rows.backlog import Backlog, Line
from outbox.rows.workers import MINUTES, TAKE_OVER, SeenWorker
from outbox.table.controls import TopicControls
from outbox.table.ddl import Layout
from outbox_admin.console import routes
from outbox_admin.flags import command_line
from outbox_admin.operations import Operation
from outbox_admin.status import charts, status_commands
from outbox_admin.status.charts import Chart, Frame, by_topic, of_topic, spark, titled
from outbox_admin.status.last_hour import JOINED, WHOLE, History, Seen, Values
from outbox_admin.status.live_workers import shards_without_worker
from outbox_admin.status.problems import SHOWN, Problem, find
from outbox_admin.status.status_pages import Figures
from outbox_admin.tasks.lookup import BlockedHead
from outbox_admin.web import visits
from outbox_admin.web.visits import ENVIRONMENT, FRESH_SECONDS, Reading, Shared, Visit
from tests.support.console import NOW, OVERVIEW, ago, bare_console, crowded, history, operation, worker
from tests.support.waiting import eventually

NOON = datetime(2026, 11, 26, 12, tzinfo=UTC)
HOUR = 3_600


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def reads_in_an_hour(tabs: int) -> int:
    """Let tabs ask for the same value every five seconds, each at its own time."""
    clock, reads = Clock(), list[float]()
    shared = Shared(lambda _last: reads.append(clock.now), clock)
    asking = sorted(n * FRESH_SECONDS + tab * FRESH_SECONDS / tabs for tab in range(tabs) for n in range(HOUR // 5))
    for clock.now in asking:
        shared.get()
    return len(reads)


def test_a_hundred_tabs_read_as_often_as_one() -> None:
    assert reads_in_an_hour(1) == HOUR / FRESH_SECONDS
    assert reads_in_an_hour(100) <= reads_in_an_hour(1)


def test_an_error_keeps_the_last_value_with_its_age_and_is_not_tried_at_once_again() -> None:
    clock, answers = Clock(), list[Any](["first", NotReached("no route"), "second"])

    def read(_last: str | None) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    shared, found = Shared(read, clock), list[Reading]()
    for clock.now in (0, 6, 7, 12):
        found.append(shared.get())
    assert found == [
        Reading("first", 0), Reading("first", 6, "no route"), Reading("first", 7, "no route"), Reading("second", 0),
    ]  # fmt: skip


def test_the_first_value_is_awaited_and_read_once() -> None:
    clock, may_end, reads = Clock(), threading.Event(), list[int]()

    def read(_last: str | None) -> str:
        reads.append(1)
        may_end.wait(10)
        return "value"

    shared = Shared(read, clock)
    with ThreadPoolExecutor(20) as threads:
        found = [threads.submit(shared.get) for _ in range(20)]
        may_end.set()
    assert ([each.result().value for each in found], len(reads)) == (["value"] * 20, 1)


def test_no_page_waits_for_a_slow_read_also_not_after_an_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the last value with its age, until a read has ended that began after the action."""
    clock, may_end, numbers = Clock(), threading.Event(), iter(range(9))

    def read(_last: int | None) -> int:
        number = next(numbers)
        return number if number != 1 or may_end.wait(60) else -1

    shared = Shared(read, clock)
    assert shared.get() == Reading(0, 0)
    monkeypatch.setattr(visits, "PATIENCE_SECONDS", 0.05)
    clock.now = 42
    with ThreadPoolExecutor(40) as threads:
        found = [each.result() for each in [threads.submit(shared.get) for _ in range(40)]]
    assert found == [Reading(0, 42)] * 40
    shared.forget()
    late = shared.get()
    assert (late.value, late.age, late.is_current, late.written is None) == (0, 42, False, False)
    monkeypatch.setattr(visits, "PATIENCE_SECONDS", 60)
    may_end.set()
    assert eventually(lambda: shared.get() if shared._ended.is_set() else None) == Reading(2, 0)


def test_a_read_that_fails_unexpectedly_is_said_and_tried_again() -> None:
    clock, answers = Clock(), ["value"]
    shared = Shared(lambda _last: answers[int(clock.now < 9)], clock)
    limit = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
    with limit, pytest.raises(RuntimeError):
        shared.get()
    assert shared.get() == Reading(None, math.inf, "list index out of range")
    clock.now = 12
    assert shared.get() == Reading("value", 0)


def status(**values: Any) -> Figures:
    usual: dict[str, Any] = {
        "backlog": Backlog(NOON, (), ()), "history": History(NOON, {}, {}), "controls": {}, "orphans": [],
        "errors": (), "operations": (), "blocked": (), "reshard": None, "problems": (),
    }  # fmt: skip
    return Figures(**usual | values)


def test_topics_with_a_problem_come_first_and_then_large_ones() -> None:
    lines = [Line("a"), Line("b", pending=5), Line("c", dead=1), Line("d", pending=9), Line("e")]
    late = Problem("late", "e", True, "", OVERVIEW)
    found = status(backlog=Backlog(NOON, (), lines), problems=[late], controls={"f": TopicControls(paused=True)})
    assert found.topics() == ["e", "c", "d", "b", "a", "f"]
    assert found.topics(sort="pending")[:3] == ["d", "b", "a"]
    assert found.topics(sort="topic") == [*"abcdef"]
    assert found.topics("B", "nonsense") == ["b"]


def health(reading: Reading) -> tuple[str, str]:
    """Return the class and the text of the sentence at the top of each page."""
    macro: Any = ENVIRONMENT.get_template("status/health.html").module
    [found] = re.findall(r'class="health (\w+)" data-mark="[^"]*" data-state="[^"]*">([^<]*)<', macro.health(reading))
    level, sentence = found
    return level, sentence


WORKER = SeenWorker("w", 1.0, NOON, NOON, {})
OLD = Line("orders", pending=3, oldest=NOON - timedelta(minutes=14))
NEW = Line("orders", pending=3, oldest=NOON - timedelta(seconds=0.4))
DEAD = Line("orders", dead=2)
MANY = Line("orders", pending=9, dead=2, at_least={"pending", "dead"})
CIRCUIT = {"topic": "orders", "reason": "permission_denied", "error": "403"}
OPEN = "orders: circuit open for 0.0s: permission_denied"
PAUSED = Line("orders", paused=True, pending=150, oldest=NOON - timedelta(hours=5))
PAUSED_TOO = dataclasses.replace(PAUSED, topic="mails")
PAUSE = Operation("a", "pause", NOON - timedelta(hours=5), NOON, "ann", "", None, None, None, None, None)
HOUR_AGO = NOON - timedelta(hours=1)
INTERRUPTED = Operation("b", "retry", HOUR_AGO, None, "ann", "", 9, None, None, HOUR_AGO, None)
BLOCKED = Line("orders", blocked=90)
EITHER = "either they stopped, or Spanner refuses their writes"
LIMITED = dataclasses.replace(OLD, at_limit=True)
FAILING = SeenWorker("w", 1.0, NOON, NOON, {"circuits": [CIRCUIT]})
LIMIT = {"orders": TopicControls(rate_per_second=5, burst=10)}


def silent(age: float) -> SeenWorker:
    return SeenWorker(f"worker-{age}", age, NOON, NOON - timedelta(seconds=age), {})


HEAD = mock.Mock(state="dead", columns={"Topic": "orders", "OrderingKey": "k", "LastError": "no", "CreatedAt": NOON})
BEHIND = BlockedHead("a", "orders", 90, HEAD)
HOPELESS = mock.Mock(state="dead", columns=HEAD.columns | {"LastError": "too_large: 11 MB"})
LATENESS = "orders is late: its oldest task has waited 14m"


@pytest.mark.parametrize(
    ("given", "level", "found"),
    [
        ({"lines": [NEW]}, "ok", {}),
        ({}, "ok", {}),
        ({"lines": [NEW, DEAD]}, "warn", {"2 dead tasks of orders": []}),
        ({"lines": [DEAD], "workers": [FAILING]}, "warn", {OPEN: [], "2 dead tasks of orders": []}),
        ({"workers": [FAILING], "orphans": [1, 2]}, "bad", {
            "2 shards without a live worker: no task there is published": [], OPEN: []}),
        ({"lines": [dataclasses.replace(OLD, dead=2)], "workers": [FAILING], "orphans": [1]}, "bad", {
            "1 shard without a live worker: no task there is published": [], OPEN: [LATENESS],
            "2 dead tasks of orders": []}),
        ({"lines": [OLD], "orphans": [1]}, "bad", {
            "1 shard without a live worker: no task there is published": [LATENESS]}),
        ({"lines": [OLD, PAUSED_TOO]}, "bad", {LATENESS: [], "mails is paused: 150 pending tasks": []}),
        ({"lines": [OLD], "workers": ()}, "bad", {
            "No live worker, so no task is published. Pending: 3 tasks": [LATENESS]}),
        ({"lines": [dataclasses.replace(OLD, topic=name) for name in "abcde"], "workers": ()}, "bad", {
            "No live worker, so no task is published. Pending: 15 tasks": [
                *(LATENESS.replace("orders", name) for name in "abc"), "2 more topics late"]}),
        ({"lines": [OLD], "workers": (), "silent": [silent(20), silent(80), *[silent(600)] * 2]}, "bad", {
            f"No heartbeat since 2026-11-26 11:59:40 UTC, of 1 worker: {EITHER}. Pending: 3 tasks": [LATENESS]}),
        ({"silent": [silent(80)] * 2}, "ok", {}),
        ({"silent": [silent(4_000), *[silent(600)] * 3]}, "warn", {
            "3 workers died within the hour, the last one 10m ago: worker-600": []}),
        ({"lines": [LIMITED], "controls": LIMIT}, "warn", {
            "orders is sent at its limit of 5 tasks a second, 10 at once: its oldest task has waited 14m": []}),
        ({"lines": [OLD], "controls": LIMIT}, "bad", {
            f"{LATENESS}, and it has a limit of 5 tasks a second, 10 at once": []}),
        ({"lines": [MANY]}, "warn", {"at least 2 dead tasks of orders": []}),
        ({"lines": [PAUSED]}, "warn", {"orders is paused: 150 pending tasks": []}),
        # The first of each kind before the second of any.
        ({"lines": [PAUSED, PAUSED_TOO, dataclasses.replace(DEAD, topic="a")]}, "warn", {
            "orders is paused: 150 pending tasks": [], "2 dead tasks of a": [],
            "mails is paused: 150 pending tasks": []}),
        ({"lines": [BLOCKED, Line("mails", blocked=1)], "blocked": [BlockedHead("a", "orders", 90, None)]}, "warn", {
            "orders: 90 blocked tasks behind a": [], "mails: 1 blocked task behind the heads of their keys": []}),
        ({"lines": [dataclasses.replace(OLD, blocked=90, dead=1)], "blocked": [BEHIND]}, "bad", {
            "orders: 90 blocked tasks behind a of the key k, which is dead: no": [LATENESS]}),
        ({"lines": [dataclasses.replace(BLOCKED, dead=2)], "blocked": [BEHIND]}, "bad", {
            "orders: 90 blocked tasks behind a of the key k, which is dead: no": [], "2 dead tasks of orders": []}),
        ({"controls": {"orders": TopicControls(publish_to="no/topic")}}, "bad", {
            "orders: its route to 'no/topic' is invalid, so its tasks are not published": []}),
        ({"controls": {"orders": TopicControls(publish_to="orders-v2")}, "workers": [FAILING]}, "warn", {
            OPEN.replace("orders", "orders (routed to orders-v2)"): []}),
    ],
)  # fmt: skip
def test_the_worst_problems_come_first_and_each_has_its_effects(
    given: dict[str, Any], level: str, found: dict[str, list[str]]
) -> None:
    """The first one is on every page, and decides its color. A topic is late once: as the effect of its cause."""
    backlog = Backlog(NOON, given.pop("workers", (WORKER,)), given.pop("lines", ()), silent=given.pop("silent", ()))
    usual: dict[str, Any] = {"orphans": [], "controls": {}, "changed_by": {}, "blocked": ()}
    problems = find(backlog, **usual | given)
    assert [(each.text, [*each.effects]) for each in problems] == [*found.items()]
    sentences = [*found] or ["Healthy: oldest task 0.4s, 1 live worker, no dead tasks"]
    more = f". And {counted(len(sentences) - 1, 'more problem')}" if sentences[1:] else ""
    shown = health(Reading(status(backlog=backlog, problems=problems), 1.0))
    assert shown[0] == level
    assert level == "ok" or shown[1] == markupsafe.escape(sentences[0] + more)


@pytest.mark.parametrize("more", [{}, {"paused": True}, {"at_limit": True}])
def test_an_age_of_a_part_of_the_tasks_is_no_proof(more: dict[str, bool]) -> None:
    """Of many ready tasks, only the most urgent ones are read. Topics that wait on purpose do not count."""
    options = argparse.Namespace(max_age=60, max_pending=None, max_dead=None)
    backlog = Backlog(NOON, (WORKER,), [NEW, dataclasses.replace(MANY, topic="mails", **more)])
    found = status_commands._beyond(backlog, options)
    assert found == [] if more else "Pass --exact" in found[0]


def test_problems_that_are_not_shown_are_counted() -> None:
    """Of each kind, and in the sentence at the top."""
    lines = [dataclasses.replace(OLD, topic=f"topic-{n:03}") for n in range(150)]
    backlog = Backlog(NOON, (WORKER,), lines)
    problems = find(backlog, orphans=[], controls={}, changed_by={}, blocked=())
    assert ([each.number for each in problems], problems[-1].text) == ([1] * SHOWN + [140], "140 more late topics")
    assert health(Reading(status(backlog=backlog, problems=problems), 1.0))[1].endswith("And 149 more problems")


@pytest.mark.parametrize("size", [(80, 24), (120, 50)])
def test_a_terminal_shows_the_part_that_fits_and_what_is_left_out(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    """The worst first, also if lines are longer than the screen is wide. A pipe gets everything."""
    lines = [dataclasses.replace(OLD, topic=f"topic-{n:03}-of-a-team") for n in range(200)]
    backlog = Backlog(NOON, (WORKER,), lines)
    problems = find(backlog, orphans=[], controls={}, changed_by={}, blocked=())
    problems[0] = dataclasses.replace(problems[0], error="not_found")
    monkeypatch.setattr(admin.problems, "read", lambda *_args, **_more: status(backlog=backlog, problems=problems))
    options = argparse.Namespace(json=False, topics=None)
    everything = status_commands._rendered(mock.Mock(), backlog, options).splitlines()
    assert len(everything) > 200
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_: os.terminal_size(size))
    found = re.sub(r"\x1b\[\d*m", "", status_commands._rendered(mock.Mock(), backlog, options)).splitlines()
    assert size[1] - 12 < sum(1 + len(line) // size[0] for line in found) < size[1]
    assert max(len(line) for line in found if not line.startswith("    ")) <= size[0]
    assert any(line.startswith("    Pause the topic.") for line in found)
    assert found[3] == everything[3]
    assert re.fullmatch(r"Left out, because the terminal is small: .*\d+ topics.*", found[-1])
    assert any(line.startswith("topic-000-of-a-team  ") for line in found)


@pytest.mark.parametrize(
    ("line", "more", "command"),
    [
        (OLD, {"workers": [FAILING]}, "topics probe --reason=TEXT -- orders"),
        (PAUSED, {"changed_by": {"orders": PAUSE}}, "resume --reason=TEXT -- orders"),
        (OLD, {"controls": LIMIT, "changed_by": {"orders": PAUSE}},
            "topics set --rate=N --burst=N --reason=TEXT -- orders"),
        (BLOCKED, {"blocked": [BEHIND]}, "retry --reason=TEXT -- a"),
        (BLOCKED, {"blocked": [BlockedHead("a", "orders", 90, HOPELESS)]}, "cancel --reason=TEXT -- a"),
        (DEAD, {}, "retry --state=dead --topic=orders --dry-run"),
        (NEW, {"last": [PAUSE, INTERRUPTED]}, "operations continue -- b"),
        (OLD, {"workers": ()}, "workers"),
        (OLD, {}, "list --state=pending --topic=orders"),
    ],
)  # fmt: skip
def test_a_problem_says_who_did_it_and_what_to_do(line: Line, more: dict[str, Any], command: str) -> None:
    backlog = Backlog(NOON, more.pop("workers", (WORKER,)), [line])
    usual: dict[str, Any] = {"orphans": [], "controls": {}, "changed_by": {}, "blocked": ()}
    [problem] = find(backlog, **usual | more)
    action = problem.action
    assert command_line(action.command, *action.arguments, **action.flags) == f"outbox {command}"
    assert command_line("status", max_pending=0, watch=False, json=True) == "outbox status --max-pending=0 --json"
    assert problem.by == more.get("changed_by", {}).get("orders")


def test_a_worker_that_has_just_started_or_left_leaves_no_shard_without_a_worker() -> None:
    """The first heartbeat has no shards, and those of the others say later what they have taken over."""
    former = json.dumps({"shards": [[0, 0]], "version": "1"})
    rows = {NOON: [("left", 1_000, 14, None, NOON - timedelta(hours=1), NOON, former)]}
    table = mock.Mock(layout=Layout(2))
    table.query.side_effect = lambda *_args, at=None, **_more: rows.get(at, []) if at else []
    info = {"shards": [], "version": "1"}
    young, old = (
        SeenWorker("w", 1.0, NOON - age, NOON, info) for age in (timedelta(seconds=50), timedelta(seconds=70))
    )
    assert shards_without_worker(table, [young], NOON) is None
    assert shards_without_worker(table, [old], NOON) == [0, 1]
    assert shards_without_worker(table, [old], NOON + TAKE_OVER) == [1]


def test_the_sentence_says_how_old_the_figures_are() -> None:
    """Old figures are never said to be healthy, whatever the reason."""
    late = status(problems=[Problem("late", "e", True, "e is late", OVERVIEW)])
    slow = "The figures are 42s old, because the read that follows takes long. Then: "
    for reading, expected in (
        (Reading(None, math.inf, "no route."), ("bad", "The figures could not be read. no route.")),
        (
            Reading(status(), 65.0, "no route."),
            ("bad", "The figures could not be read. These are 1m 5s old. no route."),
        ),
        (Reading(None, math.inf), ("warn", "The first figures are being read")),
        (Reading(status(), 42.0), ("warn", f"{slow}no problem")),
        (Reading(late, 42.0), ("bad", f"{slow}e is late")),
    ):
        assert health(reading) == expected


def chart(*values: float | None, kind: str = "line", **more: Any) -> Chart:
    """Return a chart whose range ends with these values."""
    given = [*[None] * (MINUTES - len(values)), *values]
    return Chart(Frame(history(), (), "15m"), kind, "Title", {"a": given}, **more)


def test_ticks_are_round_and_reach_the_largest_value() -> None:
    for most, texts in {
        0: "0 1", 3: "0 1 2 3", 7: "0 2 4 6 8", 2_700: "0 1,000 2,000 3,000", 0.3: "0s 100ms 200ms 300ms",
        50: "0s 15s 30s 45s 1m", 1_500: "0s 10m 20m 30m", 4 * 86_400: "0s 1d 2d 3d 4d",
    }.items():  # fmt: skip
        found = chart(most, is_duration="s" in texts).ticks()
        assert [text for _, text in found] == texts.split()
        assert (found[0][0], found[-1][0]) == (100, 0)


def test_gaps_are_gaps_and_a_single_value_is_visible() -> None:
    line = chart(0, 10, None, 5)
    assert line.paths() == [(0, "M115 100L125 0h0M145 50h0")]
    assert chart(10, None, None, 5, is_backlog=True).paths() == [(0, "M115 0L125 16.7L135 33.3L145 50h0")]
    assert chart(10, *[None] * JOINED, 5, is_backlog=True).paths() == [(0, "M85 0h0M145 50h0")]
    assert chart(10, None, kind="area").paths() == [(0, "M135 100L135 0h4V100z")]
    assert chart(10, 0, kind="bars").paths() == [(0, "M131 100V0h8V100z")]
    assert spark([None] * MINUTES) == ""


DASH = "\N{EN DASH}"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((7, 5), "5"),
        ((7, 5, *[None] * WHOLE), "5"),
        ((7, 5, *[None] * JOINED), f"5 ({JOINED}m ago)"),
        ((7, 5, *[None] * (JOINED + 1)), DASH),
        ((None,), DASH),
    ],
)
def test_an_old_value_is_not_shown_as_the_current_one(values: Values, text: str) -> None:
    """A topic that published its last task half an hour ago has no latency now."""
    assert chart(*values).last("a") == text


def test_stacked_series_add_up_and_the_lowest_is_drawn_last() -> None:
    given = {"low": [None] * 59 + [2], "high": [None] * 58 + [1, 2]}
    found = Chart(Frame(history(), (), "15m"), "bars", "Title", given)
    assert found.ticks()[-1][1] == "4"
    assert found.paths() == [(1, "M131 100V75h8V100zM141 100V0h8V100z"), (0, "M141 100V50h8V100z")]
    assert found.rows()[:2] == [(ago(0.5), ["2", "2"]), (ago(1.5), ["\N{EN DASH}", "1"])]


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


def test_a_topic_has_its_failures_and_only_all_topics_a_latency() -> None:
    rings = worker(all={"published": [5, 5]}, topics={"orders": {"published": [4, 0], "failed": [9, 0]}})
    shared = Frame(history(rings), (), "1h")
    found = {each.title: each for each in of_topic(shared, "orders")}
    assert found["Failed attempts"].last("failed") == "9"
    assert found["Registered and published per minute"].last("published") == "4"
    assert (len(found), len(of_topic(shared, None))) == (4, 5)
    assert not re.search("nan|inf|e[+-]", "".join(path for each in found.values() for _, path in each.paths()))


def test_pages_with_200_topics_and_40_workers_are_light() -> None:
    """As sent without compression: at most 64 kB, with all problems and all minutes that are shown."""
    status = crowded()
    console = bare_console(status=Shared(lambda _last: status))
    handlers = {route.path: route.handler for route in routes() if route.method == "GET"}
    topics = [("/", f"topics={page}") for page in range(1, 5)]
    others = (("/", ""), ("/", "range=15m"), ("/topic", "name=topic-001"), ("/workers", ""), ("/operations", ""))
    listed: list[bytes] = []
    for path, query in (*topics, *others):
        visit = Visit(console=console, person="ann", roles=frozenset(), path=path, query=QueryParams(query))
        page = bytes(handlers[path](visit).body)
        assert 5_000 < len(page) < 64_000, (path, query)
        listed += re.findall(b'row"><a href="/topic.name=([^"]+)', page) if "topics=" in query else []
    assert sorted(listed) == sorted(each.topic.encode() for each in status.backlog.lines)


@pytest.mark.parametrize(("number", "is_cut"), [(15, False), (16, True)])
def test_a_phone_leaves_out_topics_only_if_a_link_leads_to_all(number: int, is_cut: bool) -> None:
    """The style sheet leaves out those of a table of the class `first`."""
    whole = crowded()
    status = dataclasses.replace(whole, backlog=dataclasses.replace(whole.backlog, lines=whole.backlog.lines[:number]))
    console = bare_console(status=Shared(lambda _last: status))
    visit = Visit(console=console, person="ann", roles=frozenset(), path="/")
    page = bytes(next(route.handler for route in routes() if route.path == "/")(visit).body).decode()
    assert ('class="topics first"' in page, f"All {number} topics" in page) == (is_cut, is_cut)
