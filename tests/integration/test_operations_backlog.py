"""What waits, as the statements of `outbox status` count it on Spanner."""

from collections import Counter as Numbers
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from google.api_core.exceptions import DeadlineExceeded, InvalidArgument
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database

from outbox.errors import NotReached
from outbox.operations import backlog
from outbox.operations import table as operations_table
from outbox.operations.backlog import COUNTS, Backlog, Line
from outbox.operations.table import TaskTable
from outbox.states import NEVER
from tests.support.operations import CREATED, FUTURE, PAST, Watch, insert, pause, row, update

MICROSECOND = timedelta(microseconds=1)
WHOLE = backlog.NO_LIMIT


class Later(TaskTable):
    """Says that it is another time, and reads what is there now: rows can then lie on an edge."""

    def query(self, *arguments: Any, at: datetime | None = None, **keywords: Any) -> list[list[Any]]:
        """See TaskTable."""
        return super().query(*arguments, **keywords)


def at(watch: Watch, time: datetime) -> Backlog:
    """Return the backlog of now as if it were `time`."""
    return backlog._read_at(Later(watch.database), time, backlog.COUNTED)


def numbers(line: Line) -> dict[str, int]:
    """Return the counts of a line that are not 0."""
    return {name: getattr(line, name) for name in COUNTS if getattr(line, name)}


def test_each_task_is_of_one_state(database: Database, table: TaskTable):
    """A parked one is scheduled whatever its attempts, because nothing is wrong with it; dead begins at NEVER."""
    parked = {"AvailableAt": FUTURE, "OrderingKey": "k", "LastError": "parked: behind another task"}
    states = {
        "pending": [row("ready"), row("due", AvailableAt=PAST), row("due again", AvailableAt=PAST, Attempts=3)],
        "retrying": [
            row("retrying", AvailableAt=FUTURE, Attempts=1),
            row("retrying in order", AvailableAt=FUTURE, Attempts=1, OrderingKey="k"),
            row("says parked", AvailableAt=FUTURE, Attempts=1, OrderingKey="k", LastError="unavailable: parked: no"),
            row("late again", AvailableAt=NEVER - MICROSECOND, Attempts=9, LastError="x"),
        ],
        "scheduled": [
            row("scheduled", AvailableAt=FUTURE),
            row("parked", **parked),
            row("parked again", **parked, Attempts=3),
            row("late", AvailableAt=NEVER - MICROSECOND),
            row("with an old error", AvailableAt=FUTURE, LastError="x"),
        ],
        "dead": [row("dead", AvailableAt=NEVER, Attempts=9), row("very dead", AvailableAt=NEVER + timedelta(hours=23))],
        "none": [row("sent", SentAt=PAST), row("sent and dead", SentAt=PAST, AvailableAt=NEVER)],
    }
    insert(database, [each for rows in states.values() for each in rows])
    found = backlog.read(table, exact=True)
    [line] = found.lines
    expected = {state: len(rows) for state, rows in states.items() if state != "none"}
    assert (line.topic, line.priority, line.paused, numbers(line)) == ("orders", 50, False, expected)
    assert line.at_least == set()


def test_lines_are_topics_and_priorities(database: Database, table: TaskTable):
    """By topic, the most urgent first; what is sent has a line, too; a pause is told and changes no count."""
    insert(
        database,
        [
            row("a", Topic="orders", Priority=0),
            row("b", Topic="orders", Priority=2**63 - 1),
            row("c", Topic="orders", Priority=-(2**63)),
            row("d", Topic="invoices", Priority=7, AvailableAt=NEVER),
            row("e", Topic="invoices", Priority=7),
            row("f", Topic="only sent", Priority=3, SentAt=datetime.now(UTC)),
            row("g", Topic="sent long ago", SentAt=PAST),
        ],
    )
    pause(database, "invoices", "no task")
    found = backlog.read(table, exact=True)
    assert [(line.topic, line.priority, line.paused, numbers(line)) for line in found.lines] == [
        ("invoices", 7, True, {"pending": 1, "dead": 1}),
        ("only sent", 3, False, {"sent_last_minute": 1}),
        ("orders", 2**63 - 1, False, {"pending": 1}),
        ("orders", 0, False, {"pending": 1}),
        ("orders", -(2**63), False, {"pending": 1}),
    ]
    assert numbers(found.total) == {"pending": 3, "dead": 1, "sent_last_minute": 1}


def test_the_oldest_is_of_ready_and_due_tasks(database: Database, table: TaskTable):
    """Due ones count from when they became due, but never from before they were registered; others have no age."""
    insert(
        database,
        [
            row("ready", CreatedAt=PAST + timedelta(days=3), Priority=1),
            row("due", CreatedAt=PAST, AvailableAt=PAST + timedelta(days=2), Priority=1),
            row("younger", CreatedAt=PAST + timedelta(days=4), Priority=1),
            row("late", CreatedAt=PAST + timedelta(days=5), AvailableAt=PAST, Priority=2),
            row("scheduled", AvailableAt=FUTURE, Priority=3),
            row("dead", AvailableAt=NEVER, Priority=3),
            row("sent", SentAt=PAST, Priority=3),
            row("paused", Topic="paused", Priority=4),
        ],
    )
    pause(database, "paused")
    found = backlog.read(table, exact=True)
    assert {line.priority: line.oldest for line in found.lines} == {
        1: PAST + timedelta(days=2),
        2: PAST + timedelta(days=5),
        3: None,
        4: CREATED,
    }
    assert found.oldest is not None
    assert found.oldest.priority == 1
    assert found.age(found.oldest) == (found.as_of - PAST - timedelta(days=2)).total_seconds()


def test_the_edges_of_due_sent_and_living(database: Database, watch: Watch):
    """What is due now is pending, what was sent a minute ago is old, who was seen 15 s ago has gone."""
    now = datetime.now(UTC)
    insert(
        database,
        [
            row("due", AvailableAt=now),
            row("scheduled", AvailableAt=now + MICROSECOND),
            row("retrying", AvailableAt=now + MICROSECOND, Attempts=1),
            row("sent", SentAt=now - timedelta(minutes=1) + MICROSECOND),
            row("sent before", SentAt=now - timedelta(minutes=1)),
        ],
    )
    seen = [("living", now), ("just living", now - timedelta(seconds=15) + MICROSECOND)]
    seen += [("gone", now - timedelta(seconds=15)), ("long gone", PAST)]
    with database.batch() as batch:
        batch.insert("AsynchronousTaskWorkers", ("WorkerId", "StartedAt", "SeenAt"), [(id, at, at) for id, at in seen])
    found = at(watch, now)
    [line] = found.lines
    assert numbers(line) == {"pending": 1, "scheduled": 1, "retrying": 1, "sent_last_minute": 1}
    assert (line.oldest, found.age(line)) == (now, 0.0)
    assert (found.workers, found.as_of) == (2, now)


def test_everything_is_read_at_one_time(database: Database, table: TaskTable):
    """A backlog is of a moment, whatever is written while it is read: a task is in one state of it."""
    insert(database, [row("a"), row("b")])
    then = table.now()
    insert(database, [row("c", Topic="invoices")])
    update(database, "a", SentAt=COMMIT_TIMESTAMP)
    update(database, "b", AvailableAt=NEVER)
    pause(database, "orders")
    found = backlog._read_at(table, then, backlog.COUNTED)
    assert [(line.topic, line.paused, numbers(line)) for line in found.lines] == [("orders", False, {"pending": 2})]
    now = backlog.read(table, exact=True)
    assert [(line.topic, numbers(line)) for line in now.lines] == [
        ("invoices", {"pending": 1}),
        ("orders", {"dead": 1, "sent_last_minute": 1}),
    ]


def test_the_backlog_is_of_ten_seconds_ago(database: Database, watch: Watch):
    """So that any replica can answer: a younger task is not in it, but in that of `--exact`; no read is of now."""
    insert(database, [row("young")])
    before = watch.table.now()
    watch.requests.clear()
    assert backlog.read(watch.table).lines == []
    reads = [request.transaction.single_use.read_only for _, request in watch.requests[1:]]
    times = {read.read_timestamp for read in reads}
    assert len(times) == 1
    [time] = times
    assert before - timedelta(seconds=10) <= time <= watch.table.now() - timedelta(seconds=10)
    assert numbers(backlog.read(watch.table, exact=True).total) == {"pending": 1}


def test_a_table_that_was_made_just_now_is_read_as_it_is_now(
    database: Database, watch: Watch, monkeypatch: pytest.MonkeyPatch
):
    """Ten seconds ago it was not there: Spanner refuses that (the emulator does not), which is no answer."""
    insert(database, [row("young")])
    made = watch.table.now()
    api = watch.database.spanner_api
    original = api.execute_streaming_sql

    def refuse(*arguments: Any, **keywords: Any) -> Any:
        time = keywords["request"].transaction.single_use.read_only.read_timestamp
        if time and time < made:
            raise InvalidArgument("Table not found: AsynchronousTasks")
        return original(*arguments, **keywords)

    monkeypatch.setattr(api, "execute_streaming_sql", refuse)
    found = backlog.read(watch.table)
    assert numbers(found.total) == {"pending": 1}
    assert found.as_of >= made


def test_an_empty_table_has_no_backlog(table: TaskTable):
    """No lines, nobody who lives, no age."""
    for exact in (True, False):
        found = backlog.read(table, exact=exact)
        assert (found.lines, found.workers, found.oldest, found.age(found.oldest)) == ([], 0, None, 0.0)


KINDS: list[tuple[str, Callable[[], dict[str, Any]]]] = [
    ("pending", dict),
    ("pending", dict),
    ("pending", lambda: {"AvailableAt": PAST}),
    ("retrying", lambda: {"AvailableAt": FUTURE, "Attempts": 1}),
    ("scheduled", lambda: {"AvailableAt": FUTURE}),
    ("dead", lambda: {"AvailableAt": NEVER}),
    ("sent_last_minute", lambda: {"SentAt": datetime.now(UTC)}),
]


@pytest.mark.parametrize("limit", [1, 3, 8, 1_000])
def test_a_count_is_exact_or_named_as_a_lower_bound(database: Database, table: TaskTable, limit: int):
    """In each shard and topic at most `limit` rows of a state are read, and each priority of ready tasks shows."""
    random = Random(limit)
    true: dict[tuple[str, int], Numbers[str]] = defaultdict(Numbers)
    rows = []
    for n in range(250):
        (name, columns), topic, priority = random.choice(KINDS), random.choice("ab"), random.choice([0, 1, 2, 50])
        true[topic, priority][name] += 1
        created = CREATED + timedelta(seconds=random.randrange(1_000))
        rows.append(row(str(n), Topic=topic, Priority=priority, CreatedAt=created, **columns()))
    insert(database, rows)

    found = backlog._read_at(table, table.now(), limit)
    assert {(line.topic, line.priority) for line in found.lines} == set(true)
    for line in found.lines:
        for name in COUNTS:
            number, whole = getattr(line, name), true[line.topic, line.priority][name]
            assert number == whole or (number < whole and name in line.at_least)
        assert line.pending > 0
        ready = [each for each in rows if (each["Topic"], each["Priority"]) == (line.topic, line.priority)]
        ready = [each for each in ready if each["SentAt"] is None and each["AvailableAt"] is None]
        assert line.oldest == min(each["CreatedAt"] for each in ready)
    named = set().union(*(line.at_least for line in found.lines))
    assert named == (set(COUNTS) if limit <= 3 else set() if limit == 1_000 else named)
    exact = backlog.read(table, exact=True)
    assert {(line.topic, line.priority): numbers(line) for line in exact.lines} == {
        place: dict(counts) for place, counts in true.items()
    }
    assert not exact.total.at_least


def test_a_topic_that_is_found_by_nothing_but_its_tasks(database: Database, table: TaskTable):
    """Also the last one of many, with characters of any kind: names are no part of a statement."""
    names = ["Z", "a'b", 'a"b', "a\\b", "a\nb", "ä", "🎉", "%", "@topics"]
    insert(database, [row(f"task {n}", Topic=name) for n, name in enumerate(names)])
    assert [line.topic for line in backlog.read(table, exact=True).lines] == sorted(names)


@pytest.mark.parametrize("rows", [1, 3, 200])
def test_every_topic_is_found_in_its_order(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch, rows: int
):
    """Whether a look reaches one topic or many, and whether a topic has tasks, a row of its own, or both."""
    monkeypatch.setattr(operations_table, "TOPIC_ROWS", rows)
    random = Random(rows)
    tasks = [row(str(n), Topic=f"topic-{random.randrange(9)}", OrderingKey=random.choice("abc")) for n in range(60)]
    insert(database, [*tasks, row("sent", Topic="topic-sent", SentAt=PAST)])
    pause(database, "topic-4", "a-row", "z-row")
    names = sorted({"a-row", "z-row", "topic-4", *(each["Topic"] for each in tasks)})
    assert table.topics() == names
    assert [table.topics(count) for count in range(1, 6)] == [names[:count] for count in range(1, 6)]
    assert table.topics(99) == names


def test_more_topics_than_are_counted_are_said_to_be_so(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch
):
    """The first ones by name are counted; every sum is then a lower bound, never a number that looks whole."""
    insert(database, [row(f"task {n}", Topic=f"topic-{n}") for n in range(4)])
    monkeypatch.setattr(backlog, "MAX_TOPICS", 4)
    assert backlog.read(table, exact=True).whole
    monkeypatch.setattr(backlog, "MAX_TOPICS", 3)
    found = backlog.read(table, exact=True)
    assert (found.whole, len(found.lines), found.total.pending) == (False, 3, 3)
    assert found.total.at_least == set(COUNTS)


def test_many_topics_share_the_rows_that_a_look_may_read(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch
):
    """Two topics and ten shards: 40 rows of a state in all are two in each place, but never fewer than the least."""
    insert(database, [row(f"{topic} {n}", Topic=topic, OrderingKey="k") for topic in "ab" for n in range(9)])
    monkeypatch.setattr(backlog, "IN_ALL", 40)
    for least, counted in ((1, 2), (5, 5), (100, 9)):
        monkeypatch.setattr(backlog, "LEAST", least)
        found = backlog._read_at(table, table.now(), None)
        assert [line.pending for line in found.lines] == [counted] * 2
        assert found.total.at_least == ({"pending"} if counted < 9 else set())


def test_a_look_that_takes_too_long_is_not_made_again(watch: Watch, monkeypatch: pytest.MonkeyPatch):
    """Only a table that was not there ten seconds ago is read as it is now: a busy Spanner is not asked twice."""
    looks = []

    def time_out(*arguments: Any, **_keywords: Any) -> Any:
        looks.append(arguments)
        raise NotReached("not in time") from DeadlineExceeded("504")

    monkeypatch.setattr(backlog, "_read_at", time_out)
    with pytest.raises(NotReached):
        backlog.read(watch.table)
    assert len(looks) == 1
