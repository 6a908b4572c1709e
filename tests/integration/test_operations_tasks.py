"""Tasks as `outbox list`, `show` and `tail` read them from Spanner."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from random import Random
from typing import Any

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database

from outbox.message import parsed
from outbox.operations import tasks
from outbox.operations.changes import Selection
from outbox.operations.table import TaskTable
from outbox.operations.tasks import Position
from outbox.states import NEVER, STATES, UNSENT
from tests.support.fakes import serialized
from tests.support.operations import CREATED, FUTURE, PAST, Watch, insert, opened, pause, row

SECOND, MICROSECOND = timedelta(seconds=1), timedelta(microseconds=1)


def ids(table: TaskTable, limit: int = 1_000, **selection: Any) -> list[str]:
    """Return the ids of a list."""
    return [task.columns["Id"] for task in tasks.listed(table, Selection(**selection), limit)]


PARKED = {"AvailableAt": FUTURE, "OrderingKey": "k", "LastError": "parked: behind another"}
OF_STATES: dict[str, list[dict[str, Any]]] = {
    "pending": [{}, {"AvailableAt": PAST}, {"AvailableAt": PAST, "Attempts": 3, "LastError": "x"}],
    "retrying": [
        {"AvailableAt": FUTURE, "Attempts": 1},
        {"AvailableAt": NEVER - MICROSECOND, "Attempts": 1, "LastError": "is parked: no"},
    ],
    "scheduled": [{"AvailableAt": FUTURE}, PARKED, {**PARKED, "Attempts": 2}, {"AvailableAt": NEVER - MICROSECOND}],
    "dead": [{"AvailableAt": NEVER}, {"AvailableAt": NEVER + timedelta(hours=23), "Attempts": 1}],
    "sent": [{"SentAt": PAST}, {"SentAt": PAST, "AvailableAt": NEVER, "LastError": "x"}],
}


def test_each_task_is_listed_in_its_state_and_no_other(database: Database, table: TaskTable):
    """And the same state stands beside a task that is shown alone; without a state all that is not sent is listed."""
    insert(database, [row(f"{state} {n}", **each) for state, of in OF_STATES.items() for n, each in enumerate(of)])
    every = {state: {f"{state} {n}" for n in range(len(of))} for state, of in OF_STATES.items()}
    assert {state: set(ids(table, state=state)) for state in STATES} == every
    for state, names in every.items():
        assert {task.state for task in tasks.listed(table, Selection(state=state), 100)} == {state}
        for name in names:
            task = tasks.task(table, name)
            assert task is not None
            assert task.state == state
    unsent = tasks.listed(table, Selection(), 100)
    assert [task.state for task in unsent] == [state for state in UNSENT for _ in OF_STATES[state]]
    assert {task.columns["Id"] for task in unsent} == set().union(*(every[state] for state in UNSENT))


def test_pending_tasks_come_by_priority_then_age(database: Database, table: TaskTable):
    """Ready and due ones alike, from all shards and topics; a limit takes the first of them."""
    random = Random(1)
    rows = []
    for n in range(60):
        created = CREATED + n * SECOND
        columns: dict[str, Any] = {"Topic": random.choice("ab"), "Priority": random.choice([0, 50, 100])}
        columns |= {"AvailableAt": random.choice([None, PAST])}
        rows.append(row(f"{random.randrange(10**6)} {n}", CreatedAt=created, **columns))
    insert(database, rows)
    order = [each["Id"] for each in sorted(rows, key=lambda each: (-each["Priority"], each["CreatedAt"]))]
    assert ids(table, state="pending") == ids(table) == order
    for limit in (1, 7, 59, 60):
        assert ids(table, limit, state="pending") == order[:limit]
    assert (
        ids(table, 5, state="pending", topic="a")
        == [id for id in order if {each["Id"]: each["Topic"] for each in rows}[id] == "a"][:5]
    )


@pytest.mark.parametrize("state", ["scheduled", "retrying", "dead"])
def test_waiting_tasks_come_by_the_time_at_which_they_are_due(database: Database, table: TaskTable, state: str):
    """Then by priority, age and id; dead ones in the order in which they would come back."""
    begin, attempts = (NEVER if state == "dead" else FUTURE), (1 if state == "retrying" else 0)
    rows = [
        row(name, AvailableAt=begin + after * SECOND, Priority=priority, CreatedAt=CREATED + age * SECOND)
        | {"Attempts": attempts}
        for name, after, priority, age in (
            ("d", 0, 9, 5), ("b", 0, 9, 6), ("c", 0, 9, 6), ("a", 0, 1, 0), ("e", 1, 5, 0), ("f", 2, 9, 0),
        )
    ]  # fmt: skip
    insert(database, rows)
    assert ids(table, state=state) == ["d", "b", "c", "a", "e", "f"]
    assert ids(table, 3, state=state) == ["d", "b", "c"]


def test_sent_tasks_come_the_newest_first(database: Database, table: TaskTable):
    """Also of topics without an unsent task, however far back, and of those that are named only."""
    rows = [
        row(f"{n:02}", SentAt=PAST + n * SECOND, CreatedAt=CREATED - n * SECOND, Topic="ab"[n % 2]) for n in range(30)
    ]
    insert(database, [rows[n] for n in Random(1).sample(range(30), 30)])
    insert(database, [row("unsent")])
    now = table.now()
    recent = [row("now", SentAt=now - SECOND), row("minutes ago", SentAt=now - timedelta(minutes=5))]
    insert(database, recent)
    newest_first = ["now", "minutes ago", *(f"{n:02}" for n in reversed(range(30)))]
    assert ids(table, state="sent") == newest_first
    assert [ids(table, limit, state="sent") for limit in (1, 2, 3)] == [
        newest_first[:1],
        newest_first[:2],
        newest_first[:3],
    ]
    assert ids(table, 4, state="sent", topic="b") == ["29", "27", "25", "23"]
    assert ids(table, state="sent", since=PAST + 28 * SECOND, until=PAST + 30 * SECOND) == ["29", "28"]


@pytest.mark.parametrize("state", STATES)
def test_a_beginning_is_inclusive_and_an_end_is_not(database: Database, table: TaskTable, state: str):
    """By SentAt for sent tasks, by CreatedAt for others; so two lists that share an edge have no task in common."""
    time = "SentAt" if state == "sent" else "CreatedAt"
    columns = OF_STATES[state][0]
    edge = PAST + timedelta(microseconds=5)
    names = {"before": -MICROSECOND, "at": 0 * SECOND, "after": MICROSECOND}
    insert(database, [row(name, **{**columns, time: edge + delta}) for name, delta in names.items()])
    assert set(ids(table, state=state, since=edge)) == {"at", "after"}
    assert set(ids(table, state=state, until=edge)) == {"before"}
    assert set(ids(table, state=state, since=edge, until=edge + MICROSECOND)) == {"at"}
    assert ids(table, state=state, since=edge + SECOND) == []
    if state != "sent":
        assert set(ids(table, since=edge)) == {"at", "after"}


PARTS: list[tuple[str, list[str]]] = [
    ("100%", ["percent"]),
    ("%", ["percent"]),
    ("_", ["under"]),
    ("It's", ["quotes"]),
    ('"NO"', ["quotes"]),
    ("\\", ["backslash"]),
    ("NOT_FOUND", ["under"]),
    ("größe", ["umlaut"]),
    ("GRÖSSE", []),
    ("🎉", ["umlaut"]),
    ("a\nb", ["backslash"]),
    ("not", ["under", "quotes"]),
    ("null", []),
]


def test_an_error_is_found_by_a_part_of_it(database: Database, table: TaskTable):
    """In any case; no character means anything but itself, and a task without an error is not found."""
    errors = {
        "percent": "100% of quota", "under": "not_found: 404", "quotes": "it's not \"no\"", "none": None, "empty": "",
        "umlaut": "GRÖßE 🎉", "backslash": "c:\\x a\nb",
    }  # fmt: skip
    insert(database, [row(name, LastError=error, AvailableAt=NEVER) for name, error in errors.items()])
    for part, found in PARTS:
        assert sorted(ids(table, state="dead", error=part)) == sorted(found), part
        assert sorted(ids(table, error=part)) == sorted(found), part


def test_a_topic_is_its_exact_name(database: Database, table: TaskTable):
    """With all that it holds: names are parameters; an unknown one has no tasks."""
    names = ["orders", "Orders", "orders'", 'orders"', "orders\\", "orders%", "größe 🎉"]
    for number, state in enumerate(STATES):
        columns = OF_STATES[state][0]
        insert(database, [row(f"{state} {n}", Topic=name, **columns) for n, name in enumerate(names)])
        for n, name in enumerate(names):
            assert ids(table, state=state, topic=name) == [f"{state} {n}"]
            assert len(ids(table, topic=name)) == min(number + 1, len(UNSENT))
        assert ids(table, state=state, topic="order") == []


def test_a_limit_goes_over_all_states(database: Database, table: TaskTable):
    """What is left of it is for the next one, and nothing more is asked when nothing is left."""
    insert(database, [row(f"{state} {n}", **each) for state, of in OF_STATES.items() for n, each in enumerate(of)])
    found = ids(table)
    assert len(found) == 11
    for limit in range(1, 12):
        assert ids(table, limit) == found[:limit]


def test_paused_topics_are_listed(database: Database, table: TaskTable):
    """A pause is no state of a task; a topic that has only a row has none."""
    insert(database, [row("a")])
    pause(database, "orders", "empty")
    assert ids(table) == ["a"]
    assert ids(table, topic="empty") == []


def test_a_task_is_shown_with_every_column(database: Database, table: TaskTable):
    """As they are in the row, the data as bytes; None if there is no such task."""
    every = {
        "Topic": "orders", "Priority": -5, "OrderingKey": "k'", "Sequence": 7, "CreatedAt": CREATED,
        "AvailableAt": FUTURE, "ExpiresAt": FUTURE + SECOND, "AtMostOnce": True, "Attempts": 3, "LastError": "x\n",
        "SentAt": PAST,
    }  # fmt: skip
    data = serialized(b"\x00\xff", attributes={"a": "b"})
    insert(database, [row("it's", Data=data, **every), row("plain")])
    task = tasks.task(table, "it's")
    assert task is not None
    shard = task.columns["Shard"]
    assert shard in table.shards
    assert task == tasks.Task("sent", {**every, "Id": "it's", "Data": data, "Bytes": len(data), "Shard": shard})
    message = parsed(task.columns["Data"])
    assert message is not None
    assert (message.data, dict(message.attributes)) == (b"\x00\xff", {"a": "b"})
    plain = tasks.task(table, "plain")
    assert plain is not None
    nulls = [name for name, value in plain.columns.items() if value is None]
    assert sorted(nulls) == ["AvailableAt", "ExpiresAt", "LastError", "OrderingKey", "SentAt", "Sequence"]
    for missing in ("its", "IT'S", "", "' OR '' = '"):
        assert tasks.task(table, missing) is None


@pytest.mark.parametrize("data", [b"\xff", b"{}", b"\x0a\x05abc", b"\x12\x00\xff"])
def test_data_that_is_no_message_is_none(database: Database, table: TaskTable, data: bytes):
    """Somebody wrote the row by hand: it is shown all the same."""
    insert(database, [row("a", Data=data)])
    task = tasks.task(table, "a")
    assert task is not None
    assert task.columns["Data"] == data
    assert parsed(data) is None
    assert parsed(b"") is not None


def followed(table: TaskTable, position: Position, limit: int, topic: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield all tasks behind a position, page by page."""
    while rows := tasks.sent_after(table, position, topic, limit):
        assert len(rows) <= limit
        yield from rows
        position = Position(rows[-1]["SentAt"], rows[-1]["Id"])


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_pages_of_sent_tasks_miss_none_and_repeat_none(database: Database, table: TaskTable, limit: int):
    """A group is marked in one transaction, so many share a SentAt: a page may end between any two of them."""
    random = Random(limit)
    rows = [row(f"task {n}", SentAt=PAST + random.randrange(3) * SECOND, Topic="ab"[n % 2]) for n in range(40)]
    insert(database, [*rows, row("before", SentAt=PAST - MICROSECOND), row("unsent"), row("dead", AvailableAt=NEVER)])
    order = sorted((each["SentAt"], each["Id"]) for each in rows)
    assert [(each["SentAt"], each["Id"]) for each in followed(table, Position(PAST), limit)] == order
    of_b = [each["Id"] for each in followed(table, Position(PAST), limit, "b")]
    assert of_b == [id for _, id in order if int(id[5:]) % 2]
    middle = Position(*order[20])
    assert [each["Id"] for each in followed(table, middle, limit)] == [id for _, id in order[21:]]


def test_a_follower_sees_each_task_that_is_marked_meanwhile_once(database: Database, table: TaskTable):
    """Whatever it reads between two commits: those of later ones lie behind all that it has seen."""
    names = [f"task {n:03}" for n in range(120)]
    insert(database, [row(name) for name in names])
    marker = opened(database)
    position = Position(table.now())

    def mark() -> None:
        for start in range(0, len(names), 8):
            with marker.batch() as batch:
                values = [(name, COMMIT_TIMESTAMP) for name in names[start : start + 8]]
                batch.update("AsynchronousTasks", ("Id", "SentAt"), values)

    thread = threading.Thread(target=mark)
    thread.start()
    seen: list[str] = []
    pages = 0
    while len(seen) < len(names) and pages < 10_000:
        marking = thread.is_alive()
        rows = tasks.sent_after(table, position, None, 3)
        pages += 1
        seen += [each["Id"] for each in rows]
        if rows:
            position = Position(rows[-1]["SentAt"], rows[-1]["Id"])
        elif not marking:
            break
    thread.join()
    assert sorted(seen) == names
    assert tasks.sent_after(table, position, None, 3) == []


def test_what_is_followed_has_what_a_line_needs(database: Database, table: TaskTable):
    """Seven columns by their names."""
    columns = {"Topic": "orders", "Priority": 7, "OrderingKey": "k", "SentAt": PAST, "CreatedAt": CREATED}
    insert(database, [row("a", **columns)])
    assert tasks.sent_after(table, Position(PAST), "orders", 1) == [columns | {"Id": "a", "Bytes": len(serialized())}]
    assert tasks.sent_after(table, Position(PAST), "invoices", 1) == []
    assert tasks.sent_after(table, Position(PAST + MICROSECOND), "orders", 1) == []


def test_a_list_of_all_states_is_of_one_moment(watch: Watch):
    """Each state is a query: at different times a task could be of none of them, or of two."""
    tasks.listed(watch.table, Selection(), 10)
    lists = [request for _, request in watch.requests if request.request_options.request_tag == "outbox-list"]
    assert len(lists) == 4
    assert len({str(request.transaction.single_use.read_only.read_timestamp) for request in lists}) == 1
    assert not any("CURRENT_TIMESTAMP" in request.sql for request in lists)
