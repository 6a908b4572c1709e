"""Tasks as `outbox list`, `show` and `tail` read them from Spanner."""

from datetime import timedelta
from random import Random
from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.admin import tasks
from outbox.admin.changes import TaskSelection
from outbox.admin.table import TaskTable
from outbox.reading import Position, SentTasks
from outbox.table.states import NEVER, STATES, UNSENT
from tests.support.operations import CREATED, FUTURE, MICROSECOND, OF_STATES, PAST, SECOND, Watch, insert, row


def ids(table: TaskTable, limit: int = 1_000, **selection: Any) -> list[str]:
    return [task.columns["Id"] for task in tasks.listed(table, TaskSelection(**selection), limit)]


def test_each_task_is_listed_in_its_state_and_no_other(database: Database, watch: Watch):
    """Without a state all unsent tasks are listed, at one time; nothing more is asked when the limit is reached."""
    insert(database, [row(f"{state} {n}", **each) for state, of in OF_STATES.items() for n, each in enumerate(of)])
    every = {state: {f"{state} {n}" for n in range(len(of))} for state, of in OF_STATES.items()}
    for state, names in every.items():
        found = tasks.listed(watch.table, TaskSelection(state=state), 100)
        assert ({task.columns["Id"] for task in found}, {task.state for task in found}) == (names, {state})
        assert {getattr(tasks.task(watch.table, name), "state", None) for name in names} == {state}
    watch.requests.clear()
    unsent = tasks.listed(watch.table, TaskSelection(), 100)
    lists = [request for _, request in watch.requests if request.request_options.request_tag == "outbox-list"]
    assert len(lists) == 5
    assert len({str(request.transaction.single_use.read_only.read_timestamp) for request in lists}) == 1
    assert not any("CURRENT_TIMESTAMP" in request.sql for request in lists)
    assert [task.state for task in unsent] == [state for state in UNSENT for _ in OF_STATES[state]]
    names = [task.columns["Id"] for task in unsent]
    assert set(names) == set().union(*(every[state] for state in UNSENT))
    for limit in (1, 3, 6, 11, 12):
        assert ids(watch.table, limit) == names[:limit]


@pytest.mark.parametrize("state", ["scheduled", "retrying", "blocked", "dead"])
def test_tasks_due_later_are_listed_by_their_due_time(database: Database, table: TaskTable, state: str):
    """Then by priority, age and id; dead ones in the order in which they would come back."""
    begin = NEVER if state == "dead" else FUTURE
    more = {"Attempts": 1 if state == "retrying" else 0, "BlockedBy": "head" if state == "blocked" else None}
    rows = [
        row(name, AvailableAt=begin + after * SECOND, Priority=priority, CreatedAt=CREATED + age * SECOND)
        | more
        for name, after, priority, age in (
            ("d", 0, 9, 5), ("b", 0, 9, 6), ("c", 0, 9, 6), ("a", 0, 1, 0), ("e", 1, 5, 0), ("f", 2, 9, 0),
        )
    ]  # fmt: skip
    insert(database, rows)
    assert ids(table, state=state) == ["d", "b", "c", "a", "e", "f"]
    assert ids(table, 3, state=state) == ["d", "b", "c"]


def test_since_is_inclusive_and_until_is_exclusive(database: Database, table: TaskTable):
    """By SentAt for sent tasks, by CreatedAt for others; so two lists that share an edge have no task in common."""
    edge = PAST + timedelta(microseconds=5)
    names = {"before": -MICROSECOND, "at": 0 * SECOND, "after": MICROSECOND}
    for state in STATES:
        columns, time = OF_STATES[state][0], "SentAt" if state == "sent" else "CreatedAt"
        insert(database, [row(f"{state} {name}", **{**columns, time: edge + delta}) for name, delta in names.items()])
    for state in STATES:
        for found, times in (
            (("at", "after"), {"since": edge}),
            (("before",), {"until": edge}),
            (("at",), {"since": edge, "until": edge + MICROSECOND}),
            ((), {"since": edge + SECOND}),
        ):
            assert set(ids(table, state=state, **times)) == {f"{state} {name}" for name in found}
    assert set(ids(table, since=edge)) == {f"{state} {name}" for state in UNSENT for name in ("at", "after")}


def test_an_error_is_found_by_a_part_of_it(database: Database, table: TaskTable):
    """In any case; no character means anything but itself, and a task without an error is not found."""
    errors = {
        "percent": "100% of quota", "under": "not_found: 404", "quotes": "it's not \"no\"", "none": None, "empty": "",
        "umlaut": "GRÖßE 🎉", "backslash": "c:\\x a\nb",
    }  # fmt: skip
    insert(database, [row(name, LastError=error, AvailableAt=NEVER) for name, error in errors.items()])
    for part, found in {
        "100%": ["percent"], "%": ["percent"], "_": ["under"], "It's": ["quotes"], '"NO"': ["quotes"],
        "\\": ["backslash"], "NOT_FOUND": ["under"], "größe": ["umlaut"], "GRÖSSE": [], "🎉": ["umlaut"],
        "a\nb": ["backslash"], "not": ["quotes", "under"], "null": [],
    }.items():  # fmt: skip
        assert sorted(ids(table, state="dead", error=part)) == found, part
    assert sorted(ids(table, error="%")) == ["percent"]
    assert sorted(ids(table, error="not")) == ["quotes", "under"]


def test_the_sent_tasks_of_a_key_are_in_the_order_in_which_they_were_published(database: Database, table: TaskTable):
    """A worker marks them in one transaction, so by CreatedAt, then Sequence, then ID. A list has the newest first."""
    order = [("f", 0, 9), ("e", 1, None), ("d", 1, 1), ("a", 1, 2), ("b", 1, 10), ("c", 1, 10)]
    rows = [
        row(id, OrderingKey="k", CreatedAt=CREATED + seconds * SECOND, Sequence=sequence, SentAt=PAST)
        for id, seconds, sequence in order
    ]
    insert(database, Random(1).sample(rows, len(rows)))
    published = [id for id, _, _ in order]
    assert [each["Id"] for each in SentTasks(table, Position(PAST), None).page().rows] == published
    assert ids(table, state="sent") == published[::-1]
    # The end of a page selects by CreatedAt, too.
    assert ids(table, 5, state="sent") == published[:0:-1]
