"""What tabs share: the number of reads in an hour, waiting threads, samples, and the sentence at the top."""

import dataclasses
import json
import re
import threading
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import markupsafe
import pytest

from outbox.admin.backlog import Backlog, Line
from outbox.admin.history import History
from outbox.admin.operations import Operation
from outbox.admin.problems import Problem, find
from outbox.admin.tasks import BlockedHead
from outbox.admin.workers import TAKE_OVER, Worker, shards_without_worker
from outbox.base.values import counted
from outbox.console.readings import (
    FRESH_SECONDS,
    Reading,
    Shared,
    Status,
)
from outbox.console.visits import _ENVIRONMENT
from outbox.errors import NotReached
from outbox.table.controls import TopicControls
from outbox.table.layouts import Layout
from tests.support.waiting import eventually

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)
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


def test_while_one_thread_reads_the_others_get_the_last_value() -> None:
    clock, may_end = Clock(), threading.Event()
    shared = Shared(lambda _last: clock.now if clock.now == 0 else may_end.wait(10), clock)
    shared.get()
    clock.now = 10
    reading = threading.Thread(target=shared.get)
    reading.start()
    eventually(shared._reading.locked, seconds=5)
    assert shared.get() == Reading(0.0, 10)
    may_end.set()
    reading.join()
    assert shared.get().age == 0


def test_the_first_value_is_awaited_and_read_once() -> None:
    clock, may_end, reads, found = Clock(), threading.Event(), list[int](), list[Any]()

    def read(_last: str | None) -> str:
        reads.append(1)
        may_end.wait(10)
        return "value"

    shared = Shared(read, clock)
    threads = [threading.Thread(target=lambda: found.append(shared.get().value)) for _ in range(20)]
    for thread in threads:
        thread.start()
    may_end.set()
    for thread in threads:
        thread.join()
    assert (found, len(reads)) == (["value"] * 20, 1)


def test_the_page_after_an_action_awaits_a_read_that_began_later() -> None:
    """Another tab may be reading what the action has changed since."""
    clock, may_end, numbers, found = Clock(), threading.Event(), iter(range(9)), list[Any]()

    def read(_last: int | None) -> int:
        number = next(numbers)
        return number if number != 1 or may_end.wait(10) else -1

    shared = Shared(read, clock)
    shared.get()
    clock.now = 10
    threads = [threading.Thread(target=shared.get)]
    threads[0].start()
    eventually(shared._reading.locked, seconds=5)
    shared.forget()
    threads.append(threading.Thread(target=lambda: found.append(shared.get().value)))
    threads[1].start()
    may_end.set()
    for thread in threads:
        thread.join()
    assert found == [2]


def status(**values: Any) -> Status:
    usual: dict[str, Any] = {
        "backlog": Backlog(NOW, (), ()), "history": History(NOW, {}, {}), "controls": {}, "orphans": [],
        "errors": (), "operations": (), "blocked": (), "reshard": None, "problems": (),
    }  # fmt: skip
    return Status(**usual | values)


def test_topics_with_a_problem_come_first_and_then_large_ones() -> None:
    lines = [Line("a", 50), Line("b", 50, pending=5), Line("c", 50, dead=1), Line("d", 50, pending=9), Line("e", 50)]
    late = Problem("late", "e", is_bad=True, text="")
    found = status(backlog=Backlog(NOW, (), lines), problems=[late], controls={"f": TopicControls(paused=True)})
    assert found.topics() == ["e", "c", "d", "b", "a", "f"]


def health(reading: Reading) -> tuple[str, str]:
    """Return the class and the text of the sentence at the top of each page."""
    macro: Any = _ENVIRONMENT.get_template("health.html").module
    [found] = re.findall(r'class="health (\w+)" role="status">([^<]*)<', macro.health(reading))
    level, sentence = found
    return level, sentence


WORKER = Worker("w", 1.0, NOW, NOW, {})
OLD = Line("orders", 50, pending=3, oldest=NOW - timedelta(minutes=14))
NEW = Line("orders", 50, pending=3, oldest=NOW - timedelta(seconds=0.4))
DEAD = Line("orders", 50, dead=2)
MANY = Line("orders", 50, pending=9, dead=2, at_least={"pending", "dead"})
CIRCUIT = {"topic": "orders", "reason": "permission_denied", "error": "403"}
OPEN = "orders: circuit open for 0.0s: permission_denied"
PAUSED = Line("orders", 50, paused=True, pending=150, oldest=NOW - timedelta(hours=5))
PAUSED_TOO = dataclasses.replace(PAUSED, topic="mails")
PAUSE = Operation("a", "pause", NOW - timedelta(hours=5), NOW, "ann", "", None, None, None, None, None)
BLOCKED = Line("orders", 50, blocked=90)
FAILING = Worker("w", 1.0, NOW, NOW, {"circuits": [CIRCUIT]})


@pytest.mark.parametrize(
    ("given", "level", "sentences"),
    [
        ({"lines": [NEW]}, "ok", ["Healthy: oldest task 0.4s, 1 live worker, no dead tasks"]),
        ({}, "ok", ["Healthy: oldest task 0.0s, 1 live worker, no dead tasks"]),
        ({"lines": [NEW, DEAD]}, "warn", ["2 dead tasks of orders"]),
        ({"lines": [DEAD], "workers": [FAILING]}, "warn", [OPEN, "2 dead tasks of orders"]),
        ({"workers": [FAILING], "orphans": [1, 2]}, "bad", [
            "2 shards without a live worker: no task there is published", OPEN]),
        ({"lines": [OLD, DEAD], "workers": [FAILING], "orphans": [1]}, "bad", [
            "1 shard without a live worker: no task there is published", OPEN,
            "orders is late: its oldest task has waited 14m", "2 dead tasks of orders"]),
        ({"lines": [OLD, PAUSED_TOO]}, "bad", [
            "orders is late: its oldest task has waited 14m", "mails is paused: 150 pending tasks"]),
        ({"lines": [OLD], "workers": ()}, "bad", [
            "No live worker, so no task is published. Pending: 3 tasks",
            "orders is late: its oldest task has waited 14m"]),
        ({"lines": [MANY]}, "warn", ["at least 2 dead tasks of orders"]),
        ({"lines": [PAUSED]}, "warn", ["orders is paused: 150 pending tasks"]),
        ({"lines": [PAUSED], "paused_by": {"orders": PAUSE}}, "warn", [
            "orders is paused since 2026-11-26 07:00, by ann: 150 pending tasks"]),
        ({"lines": [BLOCKED], "blocked": [BlockedHead("a", 90, None)]}, "warn", [
            "90 blocked tasks behind the heads of ordering keys, most behind a"]),
        ({"controls": {"orders": TopicControls(publish_to="no/topic")}}, "bad", [
            "orders: its route to 'no/topic' is invalid, so its tasks are not published"]),
        ({"controls": {"orders": TopicControls(publish_to="orders-v2")}, "workers": [FAILING]}, "warn", [
            OPEN.replace("orders", "orders (routed to orders-v2)")]),
    ],
)  # fmt: skip
def test_the_worst_problems_come_first_and_causes_before_effects(
    given: dict[str, Any], level: str, sentences: list[str]
) -> None:
    """The first one is on every page, and decides its color."""
    backlog = Backlog(NOW, given.pop("workers", (WORKER,)), given.pop("lines", ()))
    usual: dict[str, Any] = {"orphans": [], "controls": {}, "paused_by": {}, "blocked": ()}
    problems = find(backlog, **usual | given)
    assert not problems or [each.text for each in problems] == sentences
    more = f". And {counted(len(sentences) - 1, 'more problem')}" if sentences[1:] else ""
    found = health(Reading(status(backlog=backlog, problems=problems), 1.0))
    assert found == (level, markupsafe.escape(sentences[0] + more))


def test_a_worker_that_has_just_started_or_left_leaves_no_shard_without_a_worker() -> None:
    """The first heartbeat has no shards, and those of the others say later what they have taken over."""
    former = json.dumps({"shards": [[0, 0]], "version": "1"})
    rows = {NOW: [("left", 1_000, 14, None, NOW - timedelta(hours=1), NOW, former)]}
    table = mock.Mock(layout=Layout(2))
    table.query.side_effect = lambda *_args, at=None, **_more: rows.get(at, []) if at else []
    info = {"shards": [], "version": "1"}
    young, old = (Worker("w", 1.0, NOW - age, NOW, info) for age in (timedelta(seconds=50), timedelta(seconds=70)))
    assert shards_without_worker(table, [young], NOW) is None
    assert shards_without_worker(table, [old], NOW) == [0, 1]
    assert shards_without_worker(table, [old], NOW + TAKE_OVER) == [1]


def test_the_sentence_says_how_old_the_figures_are() -> None:
    never: Reading = Reading(None, float("inf"), "no route.")
    assert health(never) == ("bad", "Spanner did not answer. no route.")
    stale = Reading(status(), 65.0, "no route.")
    assert health(stale) == ("bad", "Spanner did not answer. The figures are 1m 5s old. no route.")
