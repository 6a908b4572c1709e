"""`outbox status` and `outbox workers`: counts, ages, live workers and circuits, by function, command and page."""

import re
import sys
from collections import Counter as Numbers
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any
from unittest import mock

import pytest
from google.api_core.exceptions import DeadlineExceeded, InvalidArgument
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database

from outbox.errors import NotReached
from outbox.program.terminal import SHOWN
from outbox.rows import backlog
from outbox.rows.backlog import COUNTS, Line
from outbox.rows.task_table import TaskTable
from outbox.table.ddl import Layout
from outbox.table.states import NEVER
from outbox_admin import operations
from outbox_admin.changes import chunks
from outbox_admin.status import problems
from outbox_admin.tasks import selections
from outbox_admin.topics import editing
from publishworker.spanner.store import LIVENESS_TIMEOUT_SECONDS, SpannerStore
from tests.support.commands import Commands
from tests.support.commands import row as task
from tests.support.console import console
from tests.support.operations import (
    CREATED,
    DAY,
    FUTURE,
    MICROSECOND,
    PAST,
    Row,
    Watch,
    control,
    insert,
    pause,
    row,
    update,
)


class Later(TaskTable):
    """Uses a given time as now but reads current rows, so that rows can lie on a boundary."""

    def query(
        self, statement: str, tag: str, values: Any = None, *, at: datetime | None = None, **more: Any
    ) -> list[list[Any]]:
        return super().query(statement, tag, {"now": at, **(values or {})}, **more)


def numbers(line: Line) -> dict[str, int]:
    return {name: getattr(line, name) for name in COUNTS if getattr(line, name)}


def first_due(each: Row) -> datetime:
    """Return when a task should first have been sent. Its AvailableAt does not say it if the task was moved."""
    asked = None if each["Attempts"] or each["BlockedBy"] else each["AvailableAt"]
    due: datetime = each["DueAt"] or max(each["CreatedAt"], asked or each["CreatedAt"])
    return due


def test_the_oldest_age_is_of_the_task_that_should_have_been_sent_first(database: Database, watch: Watch):
    """Exactly, also of a low priority, and behind many scheduled tasks.

    A due task counts from when it became due, but not from before it was registered. One whose time was moved keeps
    its age, also when it is ready again. Sent, scheduled, blocked and dead tasks, and those of paused topics, have no
    age.
    """
    random, now, rows = Random(1), datetime.now(UTC), list[Row]()

    def day() -> datetime:
        return CREATED + random.randrange(90) * DAY

    for n in range(300):
        created, due = day(), random.choice([day(), None])
        with_age: list[Row] = [
            {"DueAt": random.choice([None, created + random.randrange(30) * DAY])},
            {"AvailableAt": day()},
            {"AvailableAt": FUTURE, "Attempts": 8, "DueAt": due},
        ]
        without: list[Row] = [
            {"SentAt": PAST}, {"AvailableAt": FUTURE - DAY}, {"AvailableAt": NEVER, "DueAt": CREATED, "Attempts": 1},
            {"AvailableAt": FUTURE, "DueAt": FUTURE, "Attempts": 1},
            {"AvailableAt": random.choice([FUTURE, PAST]), "BlockedBy": "head", "DueAt": due},
        ]  # fmt: skip
        columns = {"CreatedAt": created, "OrderingKey": "k", "Topic": random.choice("abcdef")} | random.choice(
            [*with_age, *with_age[:1] * 9, *without, without[1]]
        )
        rows.append(row(str(n), Priority=random.randrange(2), **columns))
    rows.append(row("later", Topic="g", AvailableAt=FUTURE, DueAt=FUTURE, Attempts=1))
    rows.append(row("paused", Topic="f", CreatedAt=CREATED - DAY))
    insert(database, rows)
    pause(database, "f")
    unsent = (each for each in rows if not each["SentAt"] and not each["BlockedBy"])
    aged = [each for each in unsent if each["AvailableAt"] not in (FUTURE - DAY, NEVER)]
    wanted: dict[str, datetime] = {}
    for each in (each for each in aged if first_due(each) <= now):
        wanted[each["Topic"]] = min(first_due(each), wanted.get(each["Topic"], now))
    found = backlog.read(watch.table, exact=True)
    assert {line.topic: line.oldest for line in found.lines if line.oldest} == wanted
    assert found.oldest
    assert found.oldest.oldest == min(time for topic, time in wanted.items() if topic != "f")
    ages = backlog._oldest_ages_at(Later(watch.database), now)
    assert ages.oldest == max(ages.by_topic.values())
    assert ages.by_topic == {topic: (now - wanted[topic]).total_seconds() for topic in "abcde"}


@pytest.mark.parametrize(
    ("limits", "sent", "is_late"),
    [
        ({"RatePerSecond": 0.1, "Burst": 1}, 2, True),
        ({"RatePerSecond": 0.1, "Burst": 1}, 3, False),
        ({"RatePerSecond": 0.01, "Burst": 1}, 0, False),
        ({"RatePerSecond": -1.0, "Burst": 1}, 3, True),
        ({"RatePerSecond": sys.float_info.max, "Burst": 1}, 3, True),
        ({"MaxInFlight": 1}, 0, True),
        ({"MaxInFlight": 1}, 1, False),
        ({}, 3, True),
    ],
)
def test_a_topic_is_not_late_while_it_is_sent_at_its_limit(
    database: Database, watch: Watch, limits: Row, sent: int, is_late: bool
):
    """At half of its rate or more, so that a limit does not hide that nothing is sent. It has its own age anyway."""
    now = datetime.now(UTC)
    insert(database, [row("a", CreatedAt=PAST), *(row(f"{n}", SentAt=now, Priority=n) for n in range(sent))])
    control(database, "orders", **limits)
    ages = backlog._oldest_ages_at(Later(watch.database), now)
    assert (ages.by_topic.keys(), ages.oldest > 0) == ({"orders"}, is_late)
    found = problems.read(watch.table, backlog.read(watch.table))
    assert [each.kind for each in found.problems] == ["no_worker", *([] if is_late else ["at_limit"])]
    assert bool(found.problems[0].effects) == is_late
    assert (found.backlog.oldest is not None, found.backlog.total.oldest is not None) == (is_late, is_late)


def test_the_boundaries_of_due_sent_and_live(database: Database, watch: Watch):
    """A task due now is pending, one sent a minute ago is old, a worker is not live at the liveness timeout."""
    now = datetime.now(UTC)
    insert(
        database,
        [
            row("due", AvailableAt=now),
            row("scheduled", AvailableAt=now + MICROSECOND),
            row("retrying", AvailableAt=now + MICROSECOND, Attempts=1, DueAt=now),
            row("sent", SentAt=now - timedelta(minutes=1) + MICROSECOND),
            row("sent before", SentAt=now - timedelta(minutes=1)),
        ],
    )
    timeout = timedelta(seconds=LIVENESS_TIMEOUT_SECONDS)
    seen = [("live", now), ("just live", now - timeout + MICROSECOND), ("gone", now - timeout), ("long gone", PAST)]
    with database.batch() as batch:
        batch.insert("AsynchronousTaskWorkers", ("WorkerId", "StartedAt", "SeenAt"), [(id, at, at) for id, at in seen])
        idle = ("idle", now, now - timeout, LIVENESS_TIMEOUT_SECONDS + 1)
        batch.insert("AsynchronousTaskWorkers", ("WorkerId", "StartedAt", "SeenAt", "LivenessTimeoutSeconds"), [idle])
    found = backlog.read(Later(watch.database), at=now, limit=backlog.COUNT_LIMIT)
    [line] = found.lines
    assert numbers(line) == {"pending": 1, "scheduled": 1, "retrying": 1, "sent_last_minute": 1}
    assert (line.oldest, line.next_due, found.age(line)) == (now, now + MICROSECOND, 0.0)
    assert ([worker.id for worker in found.workers], found.as_of) == (["idle", "just live", "live"], now)


def test_the_backlog_is_read_at_one_timestamp(database: Database, watch: Watch):
    """Each task is in one state of a backlog, whatever is written while it is read."""
    insert(database, [row("a"), row("b")])
    then = watch.table.now()
    insert(database, [row("c", Topic="invoices")])
    update(database, "a", SentAt=COMMIT_TIMESTAMP)
    update(database, "b", AvailableAt=NEVER)
    pause(database, "orders")
    found = backlog.read(watch.table, at=then, limit=backlog.COUNT_LIMIT)
    assert [(line.topic, line.paused, numbers(line)) for line in found.lines] == [("orders", False, {"pending": 2})]
    now = backlog.read(watch.table, exact=True)
    assert [(line.topic, numbers(line)) for line in now.lines] == [
        ("invoices", {"pending": 1}),
        ("orders", {"dead": 1, "sent_last_minute": 1}),
    ]


@pytest.mark.emulator_only("it answers for a time before the table was created")
def test_the_backlog_of_metrics_is_of_ten_seconds_ago(own_database: Database, monkeypatch: pytest.MonkeyPatch):
    """So that any replica can answer; if there was no table then (the emulator does not refuse it), it is of now."""
    watch = Watch(own_database)
    for found in (backlog.read(watch.table), backlog.read_unsent(watch.table, backlog.STALENESS)):
        assert (found.lines, found.workers, found.oldest, found.age(found.oldest)) == ([], [], None, 0.0)
    assert backlog.oldest_ages(watch.table) == ({}, 0.0)
    insert(own_database, [row("young")])
    before = watch.table.now()
    watch.requests.clear()
    assert backlog.read_unsent(watch.table, backlog.STALENESS).lines == []
    reads = [request.transaction.single_use.read_only for _, request in watch.requests[1:]]
    [time] = {read.read_timestamp for read in reads}
    assert before - timedelta(seconds=10) <= time <= watch.table.now() - timedelta(seconds=10)
    watch.check()

    created = watch.table.now()
    api = watch.database.spanner_api
    original = api.execute_streaming_sql

    def refuse(*arguments: Any, **keywords: Any) -> Any:
        time = keywords["request"].transaction.single_use.read_only.read_timestamp
        if time and time < created:
            raise InvalidArgument("Table not found: AsynchronousTasks")
        return original(*arguments, **keywords)

    monkeypatch.setattr(api, "execute_streaming_sql", refuse)
    found = backlog.read_unsent(watch.table, backlog.STALENESS)
    assert numbers(found.total) == {"pending": 1}
    assert found.as_of >= created
    calls = []

    def time_out(*arguments: Any, **_keywords: Any) -> Any:
        calls.append(arguments)
        raise NotReached("not in time") from DeadlineExceeded("504")

    monkeypatch.setattr(backlog, "_unsent", time_out)
    with pytest.raises(NotReached):
        backlog.read_unsent(watch.table, backlog.STALENESS)
    assert len(calls) == 1


KINDS: list[tuple[str, Callable[[], dict[str, Any]]]] = [
    ("pending", dict),
    ("pending", dict),
    ("pending", lambda: {"AvailableAt": PAST}),
    ("retrying", lambda: {"AvailableAt": FUTURE, "Attempts": 1, "DueAt": PAST}),
    ("scheduled", lambda: {"AvailableAt": FUTURE}),
    ("blocked", lambda: {"AvailableAt": FUTURE, "BlockedBy": "head", "Attempts": 1, "DueAt": PAST}),
    ("dead", lambda: {"AvailableAt": NEVER}),
    ("sent_last_minute", lambda: {"SentAt": datetime.now(UTC)}),
]
NEW = "registered_last_minute"


def test_a_count_is_exact_or_reported_as_a_lower_bound(database: Database, table: TaskTable):
    """In each shard and topic at most `limit` rows of a state are read.

    A count that is not reported as a bound is exact, and then the age of the topic is right.
    """
    random = Random(1)
    true: dict[str, Numbers[str]] = defaultdict(Numbers)
    rows = []
    for n in range(160):
        (name, columns), topic, priority = random.choice(KINDS), random.choice("ab"), random.choice([0, 1, 2, 50])
        true[topic][name] += 1
        is_new = random.random() < 0.2
        true[topic][NEW] += is_new
        created = (datetime.now(UTC) if is_new else CREATED) - timedelta(milliseconds=random.randrange(10_000))
        rows.append(row(str(n), Topic=topic, Priority=priority, CreatedAt=created, **columns()))
    insert(database, rows)
    ready: dict[str, datetime] = {}
    for each in rows:
        if each["SentAt"] is None and each["AvailableAt"] is None:
            ready[each["Topic"]] = min(each["CreatedAt"], ready.get(each["Topic"], FUTURE))

    for limit in (1, 3, 1_000):
        found = backlog.read(table, limit=limit)
        assert {line.topic for line in found.lines} == set(true)
        for line in found.lines:
            for name in COUNTS:
                number, whole = getattr(line, name), true[line.topic][name]
                assert number == whole or (number < whole and name in line.at_least)
            assert "pending" in line.at_least or line.oldest == ready[line.topic]
        named = set().union(*(line.at_least for line in found.lines))
        assert named == (set(COUNTS) if limit <= 3 else set() if limit == 1_000 else named)
        for name in COUNTS:
            number, whole = getattr(found.total, name), sum(counts[name] for counts in true.values())
            assert number == whole or (number < whole and name in found.total.at_least)
    exact = backlog.read(table, exact=True)
    assert {line.topic: numbers(line) for line in exact.lines} == {
        topic: {name: number for name, number in counts.items() if number} for topic, counts in true.items()
    }
    assert not exact.total.at_least


INFO: dict[str, Any] = {
    "host": "node-1", "version": "0.1.0", "shards": [[0, 9]], "in_flight": 2, "utilization": 0.25, "settings": {},
}  # fmt: skip
CIRCUIT = {"topic": "orders", "reason": "not_found", "error": "404 no", "open_seconds": 25, "seconds_to_probe": 300}


def test_a_heartbeat_carries_the_info(database: Database, outbox: Commands) -> None:
    """As JSON, in the same commit; a worker that is gone is not listed."""
    store = SpannerStore(database, Layout(10))
    store.heartbeat("me", datetime.now(UTC), (), info=INFO | {"circuits": [CIRCUIT]})
    gone = datetime.now(UTC) - timedelta(minutes=1)
    with database.batch() as batch:
        batch.insert("AsynchronousTaskWorkers", ("WorkerId", "StartedAt", "SeenAt"), [("gone", gone, gone)])
    [found] = outbox.objects("workers", "--json")
    [worker] = found["workers"]
    assert (worker["id"], worker["host"], worker["version"]) == ("me", "node-1", "0.1.0")
    assert (worker["shards"], worker["in_flight"], worker["utilization"]) == (list(range(10)), 2, 0.25)
    assert 0 <= worker["age"] < 10
    assert [circuit["reason"] for circuit in worker["circuits"]] == ["not_found"]
    assert (found["differing"], found["shards_without_worker"]) == ({}, [])
    for command in ("status", "topics"):
        [found] = outbox.objects(command, "--json")
        assert [circuit["topic"] for circuit in found["circuits"]] == ["orders"]


def test_tasks_of_a_topic_that_cannot_be_published_are_not_said_to_be_next(
    database: Database, outbox: Commands
) -> None:
    """The commands and the page name the pause, or the circuit and its next probe."""
    insert(database, [task("a-1"), task("b-1", Topic="paused"), task("c-1", Topic="fine"), task("d-1", "dead")])
    pause(database, "paused")
    for id, more in (("a", {"circuits": [CIRCUIT]}), ("b", {"settings": {"batch_size": 50}})):
        SpannerStore(database, Layout(10)).heartbeat(id, datetime.now(UTC), (), info=INFO | more)
    circuit = "the circuit of the topic is open in 1 of 2 workers (not_found), and the next probe is in "
    notes = outbox.here("list").stderr.splitlines()
    assert [note.startswith(f"outbox: due tasks of orders wait: {circuit}") for note in notes] == [True, False]
    assert notes[1] == "outbox: due tasks of paused wait: the topic is paused"
    assert [circuit in outbox.here("show", id).stderr for id in ("a-1", "c-1", "d-1")] == [True, False, False]
    with mock.patch.object(problems, "why_waiting", side_effect=NotReached("no answer")):
        listed = outbox.here("list", "--topic", "fine")
    assert (listed.code, listed.stderr) == (0, "outbox: no answer\n")  # the command has done what it is for
    browser = console(database)
    for path in ("/task?id=a-1", "/tasks?state=pending", "/topic?name=orders"):
        assert circuit in browser.get(path).text, path
    marked = re.findall(r'<span class="differs">(.*?)<', browser.get("/workers").text)
    assert marked == ["batch_size=default", "batch_size=50"]
    for id in "cd":
        SpannerStore(database, Layout(10)).heartbeat(id, datetime.now(UTC), (), info=INFO)
    marked = re.findall(r'<span class="differs">(.*?)<', console(database).get("/workers").text)
    assert marked == ["batch_size=50"]  # only the one that differs from most
    assert "as soon as it can" in browser.get("/task?id=c-1").text
    assert "But the topic is paused" in browser.get("/task?id=b-1").text


def test_a_pause_has_its_author_after_many_other_changes(database: Database, table: TaskTable) -> None:
    insert(database, [row("waits")])
    editing.switch(table, "pause", ["orders"], operations.Author("jane"))
    for burst in range(1, 2 + SHOWN):
        editing.change(table, "controls", ["orders"], {"rate_per_second": 5.0, "burst": burst})
    found = problems.read(table, backlog.read(table)).problems
    assert [each.by and each.by.principal for each in found if each.kind == "paused"] == ["jane"]


def test_topics_can_be_chosen_and_found(database: Database, outbox: Commands) -> None:
    """With their problems, circuits and limits. An unknown one is named."""
    insert(database, [task("a-1", "dead"), task("b-1", "dead", Topic="mails"), task("c-1", "dead", Topic="team.mails")])
    SpannerStore(database, Layout(10)).heartbeat("a", datetime.now(UTC), (), info=INFO | {"circuits": [CIRCUIT]})
    [status] = outbox.objects("status", "--json", "--topic", "mails", "--topic", "team.mails")
    assert ([each["topic"] for each in status["topics"]], status["dead"]) == (["mails", "team.mails"], 2)
    assert (status["circuits"], {each["kind"] for each in status["problems"]}) == ([], {"dead"})
    assert outbox.here("status", "--topic", "mails", "--max-dead", "1").code == 0
    [topics] = outbox.objects("topics", "--json", "--topic", "orders")
    assert [each["topic"] for each in topics["topics"]] == ["orders"]
    assert [each["topic"] for each in topics["circuits"]] == ["orders"]
    assert "unknown topic 'mail'" in outbox.here("status", "--topic", "mail").stderr
    browser = console(database)
    found = [
        re.findall('href="/topic.name=([^"]+)"', browser.get(path).text) for path in ("/search?q=MAIL", "/?topic=team")
    ]
    assert found == [["mails", "team.mails"], ["team.mails"]]


def test_errors_that_differ_only_in_ids_and_numbers_are_one_group(database: Database, outbox: Commands) -> None:
    """In the status, and in the preview of a change."""
    ids = ["7f3ad5a0-0000-4000-8000-abcdefabcdef", "dcbaabcd-abcd-abcd-abcd-abcdefabcdef", "91", "o_1"]
    errors = [f"unknown: 500 request {id} failed after {n}.{n} s\nat 0x{n}" for n, id in enumerate(ids)]
    insert(database, [task(f"d{n}", "dead", LastError=error) for n, error in enumerate([*errors, "unknown: other"])])
    [status] = outbox.objects("status", "--json")
    found = [(each["error"] in errors, each["tasks"]) for each in status["errors"] if each["state"] == "dead"]
    assert found == [(True, 4), (False, 1)]
    for narrowed in ({"state": "dead"}, {"ids": ("d0", "d1", "d2", "d3", "d4")}):
        groups = chunks.preview(TaskTable(database), selections.TaskSelection(**narrowed)).groups
        assert [number for *_, number in groups] == [4, 1]


def test_topics_that_are_not_counted_are_mentioned(
    database: Database, outbox: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the commands and the console. No such topic seems to have no tasks."""
    insert(database, [task(topic, topic=topic) for topic in ("a", "b")])
    pause(database, "b")
    monkeypatch.setattr(backlog, "MAX_TOPICS", 1)
    sentence = "Only the first 1 are counted"
    assert all(sentence in outbox.here(command).stderr for command in ("status", "topics"))
    [listed] = outbox.objects("topics", "--json")
    assert [each["at_least"] for each in listed["topics"]] == [[], sorted(backlog.COUNTS)]
    browser = console(database)
    assert sentence in browser.get("/").text
    assert "may not be counted" in browser.get("/topic?name=b").text
