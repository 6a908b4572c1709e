"""Lists of tasks, single tasks, and `outbox.reader`, which follows sent tasks."""

import itertools
import threading
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any
from unittest import mock

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database
from google.pubsub_v1.types import PubsubMessage

import outbox
from outbox import reading
from outbox.base.schedules import Schedule
from outbox.base.values import MAX_ID_CHARACTERS
from outbox.errors import NotReached, OutboxError, SettingError
from outbox.reading import Position, SentTasks
from outbox.rows import backlog
from outbox.rows.task_table import TaskTable
from outbox.table.states import NEVER, STATES, UNSENT
from outbox_admin.tasks import lookup
from outbox_admin.tasks.selections import TaskSelection
from outbox_admin.value_types import TEXT
from tests.support.fakes import serialized
from tests.support.operations import (
    CREATED,
    DAY,
    FUTURE,
    MICROSECOND,
    OF_STATES,
    PAST,
    SECOND,
    Watch,
    insert,
    row,
    update,
)
from tests.support.waiting import eventually


def paged(table: TaskTable, *states: str, limit: int, newest: bool = False, topic: str | None = None) -> Iterator[str]:
    after = None
    while True:
        selection = TaskSelection(topic=topic)
        page = lookup.find(table, states, selection, newest=newest, after=after, limit=limit)
        assert page.whole
        assert len(page.tasks) == limit or page.next is None
        yield from (task.columns["Id"] for task in page.tasks)
        if page.next is None:
            return
        after = page.next


def test_each_task_is_listed_in_its_state_and_no_other(database: Database, watch: Watch):
    """Several states are listed as of one time. Every request has LOW priority and takes no lock."""
    insert(database, [row(f"{state} {n}", **each) for state, of in OF_STATES.items() for n, each in enumerate(of)])
    every = {state: {f"{state} {n}" for n in range(len(of))} for state, of in OF_STATES.items()}
    for state, names in every.items():
        page = lookup.find(watch.table, [state])
        assert ({task.columns["Id"] for task in page.tasks}, {task.state for task in page.tasks}) == (names, {state})
        assert (page.next, page.whole) == (None, True)
        assert {getattr(lookup.task(watch.table, name), "state", None) for name in names} == {state}
    found = {task.columns["Id"] for task in lookup.find(watch.table, UNSENT, limit=1_000).tasks}
    assert found == set().union(*(every[state] for state in UNSENT))
    watch.requests.clear()
    page = lookup.find(watch.table, ["dead", "sent"])
    assert {task.columns["Id"] for task in page.tasks} == every["dead"] | every["sent"]
    lists = [request for _, request in watch.requests if request.request_options.request_tag == "outbox-list"]
    times = {request.transaction.single_use.read_only.read_timestamp.rfc3339() for request in lists}
    assert times == {page.as_of.rfc3339()}
    assert not any("CURRENT_TIMESTAMP" in request.sql for request in lists)
    watch.check()


@pytest.mark.parametrize("state", STATES)
def test_a_list_is_sorted_by_time(database: Database, table: TaskTable, state: str):
    """By SentAt of sent tasks, and by CreatedAt of others, whatever the topic, the priority and the due time."""
    random, columns = Random(1), OF_STATES[state]
    rows = [
        row(f"{n:02}", **{**columns[n % len(columns)], "Topic": "ab"[n % 2], "Priority": random.randrange(3)})
        | {"SentAt" if state == "sent" else "CreatedAt": CREATED + n // 2 * SECOND}
        for n in range(12)
    ]  # fmt: skip
    insert(database, random.sample(rows, len(rows)))
    order = [f"{n:02}" for n in range(12)]
    assert list(paged(table, state, limit=5)) == order
    assert list(paged(table, state, limit=5, newest=True)) == order[::-1]
    assert list(paged(table, state, limit=3, topic="b")) == order[1::2]


@pytest.mark.parametrize("newest", [False, True])
def test_pages_are_stable_while_rows_change(database: Database, table: TaskTable, newest: bool):
    """Tasks change their state, are deleted and are added between two pages. Each that stays is listed once."""
    insert(database, [row(f"{n:02}", CreatedAt=CREATED + n // 3 * SECOND) for n in range(12)])
    found: list[str] = []
    after = None
    for number in range(9):
        page = lookup.find(table, UNSENT, newest=newest, after=after, limit=2)
        found += [task.columns["Id"] for task in page.tasks]
        if (after := page.next) is None:
            break
        update(database, "00" if newest else "11", AvailableAt=(NEVER, FUTURE, None)[number % 3], Attempts=number % 2)
        update(database, page.tasks[0].columns["Id"], SentAt=PAST)
        insert(database, [row(f"new {number}", CreatedAt=CREATED + (99 if newest else -99) * SECOND)])
    assert sorted(found) == [f"{n:02}" for n in range(12)]


def test_a_cursor_goes_on_only_where_it_came_from(database: Database, table: TaskTable):
    """A cut or foreign one is refused in a sentence, as is one of the other order."""
    insert(database, [row(name) for name in "abc"])
    cursor = lookup.find(table, limit=1).next
    assert cursor
    for edited in (cursor[:-1], f"{cursor}A", "", "zwölf", "$$"):
        with pytest.raises(OutboxError, match="is not a cursor from the end of a list"):
            lookup.find(table, after=edited)
    with pytest.raises(OutboxError, match="is from a list of the oldest tasks"):
        lookup.find(table, after=cursor, newest=True)


FORGED = (
    "", "{}", "[]", "7", "[true, 1, 2, 3]", "[" * 5_000, '[false, "x", "y", "z"]', '[1, TIME, TIME, "a"]',
    "[false, TIME, TIME, 5]", '[false, TIME, TIME, ["a"]]', '[false, TIME, TIME, "\\ud800"]', "[false, TIME, TIME]",
    '[false, "2026-01-01", TIME, "a"]', '[false, TIME, null, "a"]', '[false, "2026-02-30T00:00:00Z", TIME, "a"]',
    '[false, "9999-12-31T23:59:59.999999Z", TIME, "a"]', '[false, "0001-01-01T00:00:00Z", TIME, "a"]',
    '[ false,TIME,TIME,"a"]',
)  # fmt: skip


def test_a_forged_cursor_is_refused(table: TaskTable):
    for text, newest, state in itertools.product(FORGED, (False, True), ("dead", "sent")):
        times = text.replace("TIME", '"2026-01-01T00:00:00.000001Z"')
        forged = urlsafe_b64encode(times.encode()).decode().rstrip("=")
        with pytest.raises(SettingError, match="is not a cursor from the end of a list"):
            lookup.find(table, (state,), after=forged, newest=newest)


def test_the_command_accepts_the_cursor_of_the_longest_id(database: Database, table: TaskTable):
    long = "\N{OUTBOX TRAY}" * (MAX_ID_CHARACTERS - 1)
    insert(database, [row(f"{n}{long}") for n in range(2)])
    cursor = TEXT.value(str(lookup.find(table, limit=1).next), "--after")
    assert [task.columns["Id"] for task in lookup.find(table, after=cursor).tasks] == [f"1{long}"]


def test_a_list_compares_a_bounded_number_of_tasks(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch
):
    """Of each shard and topic those that workers take first. The page says that there are more."""
    for name, most in {"MAX_TOTAL": 0, "COUNT_LIMIT": 0, "MIN_COUNT_LIMIT": 3}.items():
        monkeypatch.setattr(backlog, name, most)
    of_one_shard = {"OrderingKey": "k"}
    insert(database, [row(str(n), CreatedAt=CREATED + n * SECOND, **of_one_shard) for n in range(5)])
    page = lookup.find(table, newest=True, limit=2)
    assert ([task.columns["Id"] for task in page.tasks], page.whole) == (["2", "1"], False)
    assert lookup.find(table, limit=3).whole is False
    assert lookup.find(table, limit=5).whole is True
    few = TaskSelection(id_prefix="4")
    assert lookup.find(table, selection=few, limit=2) == lookup.TaskList([], mock.ANY, None, whole=False)
    assert len(lookup.find(table, selection=few, limit=5).tasks) == 1


#: The end of a selection of times, and rows around it in each state.
EDGE = PAST + timedelta(microseconds=5)
AROUND = {"before": -MICROSECOND, "at": 0 * SECOND, "after": MICROSECOND}
ERRORS = {
    "percent": "100% of quota", "under": "not_found: 404", "quotes": "it's not \"no\"", "none": None, "empty": "",
    "umlaut": "GRÖßE 🎉", "backslash": "c:\\x a\nb",
}  # fmt: skip
#: A state, what narrows its list, and the IDs of the tasks in it, the oldest first.
SELECTED: list[tuple[str, dict[str, Any], list[str]]] = [
    *(
        (state, {"topic": "times", **times}, [f"{state}-{name}" for name in names])
        for state in ("pending", "dead", "sent")
        for names, times in (
            (("at", "after"), {"since": EDGE}),
            (("before",), {"until": EDGE}),
            (("at",), {"since": EDGE, "until": EDGE + MICROSECOND}),
            ((), {"since": EDGE + SECOND}),
        )
    ),
    *(
        ("dead", {"topic": "errors", "error": part}, names)
        for part, names in {
            "100%": ["percent"], "%": ["percent"], "_": ["under"], "It's": ["quotes"], '"NO"': ["quotes"],
            "\\": ["backslash"], "NOT_FOUND": ["under"], "größe": ["umlaut"], "GRÖSSE": [], "🎉": ["umlaut"],
            "not": ["quotes", "under"], "null": [],
        }.items()
    ),
    ("pending", {"topic": "errors", "error": "not"}, []),
    ("pending", {"ordering_key": "k"}, ["aa", "b"]),
    ("pending", {"id_prefix": "a"}, ["aa", "ab"]),
    ("pending", {"id_prefix": "a", "ordering_key": "k"}, ["aa"]),
    ("sent", {"id_prefix": "a%"}, ["a%"]),
]  # fmt: skip


def test_a_list_has_the_selected_tasks_in_their_order(database: Database, table: TaskTable) -> None:
    """`since` is inclusive and `until` exclusive, of SentAt for sent tasks. No character of an error is a pattern."""
    for state in ("pending", "dead", "sent"):
        columns, time = OF_STATES[state][0], "SentAt" if state == "sent" else "CreatedAt"
        rows = [(f"{state}-{name}", columns | {time: EDGE + delta}) for name, delta in AROUND.items()]
        insert(database, [row(id, **{**each, "Topic": "times"}) for id, each in rows])
    insert(database, [row(name, LastError=error, AvailableAt=NEVER, Topic="errors") for name, error in ERRORS.items()])
    insert(database, [row("aa", OrderingKey="k"), row("ab", OrderingKey="K"), row("b", OrderingKey="k")])
    insert(database, [row("a%", SentAt=PAST)])
    for state, narrowed, ids in SELECTED:
        found = lookup.find(table, [state], TaskSelection(**narrowed)).tasks
        assert [task.columns["Id"] for task in found] == ids, (state, narrowed)


def test_the_heads_of_blocked_keys_are_listed_with_the_tasks_that_wait(database: Database, watch: Watch):
    """Most waiting tasks first, whatever the state of the head, also if it is gone."""
    waiting = [("dead", 3), ("gone", 2), ("later", 1)]
    behind = [
        row(f"{head} {n}", AvailableAt=FUTURE, OrderingKey=head, BlockedBy=head) for head, count in waiting
        for n in range(count)
    ]  # fmt: skip
    dead = row("dead", AvailableAt=NEVER, OrderingKey="dead", LastError="not_found")
    insert(database, [*behind, dead, row("later", AvailableAt=FUTURE, OrderingKey="later"), row("free")])
    seen = backlog.read(watch.table)
    update(database, "dead", SentAt=PAST)
    heads = lookup.blocked_heads(watch.table, seen)
    assert [(each.id, each.topic, each.blocked, each.head and each.head.state) for each in heads] == [
        ("dead", "orders", 3, "dead"), ("gone", "orders", 2, None), ("later", "orders", 1, "scheduled"),
    ]  # fmt: skip
    assert (heads[0].head and heads[0].head.columns["LastError"]) == "not_found"
    assert [each.id for each in lookup.blocked_heads(watch.table, seen, limit=1)] == ["dead"]
    watch.check()


SECONDS = 30.0
#: Within the retention.
RECENT = datetime.now(UTC) - timedelta(hours=2)


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "FOLLOW", Schedule(0.02, 0.02))


def mark(database: Database, *ids: str) -> None:
    with database.batch() as batch:
        batch.update("AsynchronousTasks", ("Id", "SentAt"), [(id, COMMIT_TIMESTAMP) for id in ids])


def followed(table: TaskTable, position: Position, topic: str | None = None) -> Iterator[str]:
    """Return the IDs of all pages. Each begins where the one before ended, as a text that was stored."""
    more = True
    while more:
        page = SentTasks(table, Position.read(str(position)), topic).page()
        yield from (each["Id"] for each in page.rows)
        position, more = page.end, page.more


def read(reader: outbox.Reader, number: int | None = None) -> list[str]:
    """Return the IDs of this number of tasks, or of those that are there."""
    found = []
    while len(found) != number and (task := reader.read(timeout=0 if number is None else SECONDS)):
        found.append(task.id)
    return found


def tied_rows() -> list[dict[str, Any]]:
    """Return tasks of which many share SentAt and CreatedAt, as batches and transactions make them."""
    random = Random(1)
    return [
        row(
            f"task {n}", SentAt=RECENT + random.randrange(3) * SECOND, CreatedAt=CREATED + random.randrange(2) * SECOND,
            Sequence=random.choice((None, 30 - n)), Topic="ab"[n % 2],
        )
        for n in range(30)
    ]  # fmt: skip


@pytest.mark.parametrize("size", [1, 4, 100])
def test_pages_miss_no_task_and_repeat_none(
    database: Database, table: TaskTable, size: int, monkeypatch: pytest.MonkeyPatch
):
    """In the order of publishing, wherever a page ends, from each position, of all topics or one."""
    monkeypatch.setattr(reading, "PAGE_ROWS", size)
    rows = sorted(tied_rows(), key=lambda each: (each["SentAt"], each["CreatedAt"], each["Sequence"] or 0, each["Id"]))
    insert(database, [*rows, row("before", SentAt=RECENT - MICROSECOND), row("unsent"), row("dead", AvailableAt=NEVER)])
    order = [each["Id"] for each in rows]
    assert list(followed(table, Position(RECENT))) == order
    for number in range(0, len(rows), 7):
        assert list(followed(table, Position.of(rows[number]))) == order[number + 1 :]
    assert list(followed(table, Position(RECENT), "b")) == [each["Id"] for each in rows if each["Topic"] == "b"]
    assert list(followed(table, Position(RECENT + MICROSECOND), "none")) == []


def test_a_reader_returns_tasks_with_their_messages_and_goes_on_where_another_stopped(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    """After each task. It holds no more than some messages, so a page has more tasks than it takes at once."""
    monkeypatch.setattr(reading, "BUFFER_BYTES", 3 * len(serialized()))
    columns = {"Topic": "b", "Priority": 7, "OrderingKey": "k", "Sequence": 3, "SentAt": RECENT, "CreatedAt": CREATED}
    insert(
        database,
        [*tied_rows(), row("no message", SentAt=RECENT + timedelta(hours=1), Data=b"\xff\xff"), row("a", **columns)],
    )
    order: list[outbox.SentTask] = []
    reader = outbox.reader(database)
    while task := reader.read(timeout=0):
        order.append(task)
        reader = outbox.reader(database, since=reader.position)
    every = list(itertools.takewhile(lambda each: each.id != "no message", outbox.reader(database)))
    assert [each.id for each in every] == [each.id for each in order[:-1]]
    assert len(order) == 32
    assert order[-1].message is None
    found = next(each for each in order if each.id == "a")
    message = PubsubMessage.deserialize(serialized())
    assert found == outbox.SentTask("a", "b", message, 7, "k", CREATED, RECENT)


def test_a_task_that_is_sent_again_is_returned_again(database: Database):
    insert(database, [row("first"), row("again"), row("once", AtMostOnce=True)])
    mark(database, "first", "again", "once")
    reader = outbox.reader(database)
    assert read(reader) == ["again", "first", "once"]
    update(database, "again", SentAt=None)
    assert read(reader) == []
    mark(database, "again")
    assert read(reader, 1) == ["again"]
    assert read(reader) == []


def test_a_reader_waits_until_a_task_is_sent_or_it_is_closed(database: Database):
    """Its position passes the tasks of other topics, so that a later start reads them no more."""
    insert(database, [row("a"), row("other", Topic="invoices")])
    reader, began = outbox.reader(database, since=datetime.now(UTC) - DAY, topic="orders"), datetime.now(UTC)
    found = list[str]()
    thread = threading.Thread(target=lambda: found.extend(task.id for task in reader))
    start = time.monotonic()
    assert reader.read(timeout=0.2) is None
    assert 0.2 <= time.monotonic() - start < SECONDS
    with reader:
        thread.start()
        mark(database, "other")
        mark(database, "a")
        eventually(lambda: found == ["a"], seconds=SECONDS)
        position = reader.position
        eventually(lambda: reader.position > position, seconds=SECONDS)
        assert Position.read(reader.position).sent_at > began
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert reader.read() is None


def test_a_position_that_the_retention_has_passed_is_an_error(own_database: Database):
    """A reader that begins there gets the tasks that are left. After that it has a gap if it falls back."""
    kept, gone = datetime.now(UTC) - 6 * DAY, datetime.now(UTC) - 8 * DAY
    insert(own_database, [row("kept", SentAt=kept), row("gone", SentAt=gone)])
    assert read(outbox.reader(own_database, since=str(Position(kept)))) == ["kept"]
    reader = outbox.reader(own_database, since=str(Position(gone)))
    for _ in range(2):
        with pytest.raises(outbox.PositionExpired, match="deleted: the retention of the table is 7 days"):
            reader.read()
    assert reader.position == str(Position(gone))
    for since in (None, gone, outbox.reader(own_database).position):
        reader = outbox.reader(own_database, since=since)
        assert read(reader) == ["gone", "kept"]
    reader._sent.position = Position(gone)
    with pytest.raises(outbox.PositionExpired):
        reader.read(timeout=SECONDS)
    own_database.update_ddl(["ALTER TABLE AsynchronousTasks DROP ROW DELETION POLICY"]).result()
    assert read(outbox.reader(own_database, since=str(Position(gone)))) == ["gone", "kept"]


def test_a_failed_read_loses_no_task(database: Database, monkeypatch: pytest.MonkeyPatch):
    """Also if Spanner fails between a page and its messages. The position stays, and the next call reads again."""
    insert(database, [row("a", SentAt=RECENT)])
    reader = outbox.reader(database, since=RECENT)
    for method in ("strong_query", "query"):
        with monkeypatch.context() as patch:
            patch.setattr(TaskTable, method, mock.Mock(side_effect=NotReached("Spanner is away")))
            with pytest.raises(NotReached):
                reader.read(timeout=SECONDS)
        assert reader.position == str(Position(RECENT))
    assert read(reader, 1) == ["a"]
