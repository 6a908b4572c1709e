"""`retry`, `purge` and `cancel` on Spanner change the selected tasks and no others, whatever happens meanwhile."""

import itertools
from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.admin import backlog, changes, operator_sql
from outbox.admin.backlog import Count
from outbox.admin.changes import TaskSelection
from outbox.admin.table import TaskTable
from outbox.table.states import NEVER
from tests.support.operations import (
    FUTURE,
    PAST,
    changed,
    delete,
    insert,
    row,
    rows_of,
    update,
)

STATES: dict[str, dict[str, Any]] = {
    "dead": {"AvailableAt": NEVER, "Attempts": 10, "LastError": "not_found: 404"},
    "retrying": {"AvailableAt": FUTURE, "Attempts": 2, "LastError": "unavailable"},
    "sent": {"SentAt": PAST, "AvailableAt": PAST, "Attempts": 0, "LastError": "an old one"},
    "scheduled": {"AvailableAt": FUTURE},
    "ready": {},
    "due": {"AvailableAt": PAST, "Attempts": 1},
}
DEAD = {"AvailableAt": NEVER, "Attempts": 9}
#: Those that a selection without ids may be of.
RETRIED = ("dead", "retrying", "sent")


@pytest.mark.parametrize("state", ["dead", "retrying", "scheduled"])
def test_all_counts_of_a_preview_are_those_of_one_time(state: str) -> None:
    """Otherwise, if they take long, fewer tasks can match with the expired ones than without them."""
    for statement in (*operator_sql.counts_of_state(state, {"unexpired"}), operator_sql.grouped(state, {"unexpired"})):
        assert ("ExpiresAt <= @now" in statement, "CURRENT_TIMESTAMP" in statement) == (True, False)


def test_a_count_is_exact_or_stops_early(database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch):
    """In each shard and topic, of sent tasks in each shard; it says so. Ids are counted whole, in as many chunks."""
    monkeypatch.setattr(changes, "CHUNK", 7)
    limited = (*RETRIED, "scheduled")
    for state in limited:
        insert(database, [row(f"{state} {n}", **STATES[state], OrderingKey="one shard") for n in range(15)])
    insert(database, [row(f"pending {n}", AvailableAt=(None, PAST)[n % 2]) for n in range(15)])
    for state in (*limited, "pending"):
        assert changes.count(table, TaskSelection(state=state), exact=False) == Count(15)
        assert changes.count(table, TaskSelection(state=state, topic="other"), exact=True) == Count(0)
    ids = tuple(f"{state} {n}" for state in (*limited, "pending") for n in range(15))
    assert changes.count(table, TaskSelection(ids=(*ids, "missing")), exact=False) == Count(60)
    assert changes.count(table, TaskSelection(ids=ids, state="dead"), exact=False) == Count(15)
    for name in ("MAX_TOTAL", "COUNT_LIMIT", "MIN_COUNT_LIMIT"):
        monkeypatch.setattr(backlog, name, 10)
    for state in limited:
        assert changes.count(table, TaskSelection(state=state), exact=False) == Count(10, at_least=True)
        assert changes.count(table, TaskSelection(state=state), exact=True) == Count(15)
    assert str(Count(1)) == "1 task"
    assert str(Count(100_000, at_least=True)) == "at least 100,000 tasks"


SENT = {"SentAt": PAST}


@pytest.mark.parametrize(
    ("how", "name", "state", "columns"),
    [
        ("change", "retry", "dead", DEAD), ("continue", "cancel", "dead", DEAD), ("continue", "purge", "sent", SENT),
        pytest.param("change", "retry", "sent", SENT, marks=pytest.mark.extended),
        pytest.param("begin", "retry", "dead", DEAD, marks=pytest.mark.extended),
    ],
)  # fmt: skip
def test_a_change_takes_tasks_that_matched_at_the_preview_and_still_match(  # noqa: PLR0917 - cases
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch, how: str, name: str, state: str,
    columns: dict[str, Any],
):  # fmt: skip
    """By filter and by IDs, on many pages of one SentAt, at once, later, and continued by another process."""
    monkeypatch.setattr(changes, "CHUNK", 2)
    monkeypatch.setattr(changes, "PAGE", 2)
    for of_ids in (False, True):
        kinds = ("stays", "leaves", "comes", "goes")
        stay, leave, come, go = ([f"{of_ids} {n} {kind}" for n in range(7)] for kind in kinds)
        insert(database, [row(id, **columns, OrderingKey="one shard") for id in (*stay, *leave, *go)])
        insert(database, [row(id, OrderingKey="one shard") for id in come])
        at = table.now()
        ids = tuple(sorted([*stay, *leave, *come, *go])) if of_ids else None
        selection = TaskSelection(state=state, ids=ids, as_of=at, until=at)
        delete(database, *go)
        for id in leave:
            update(database, id, AvailableAt=None, SentAt=None)
        for id in come:
            update(database, id, **columns)
        if how == "change":
            outcomes = list(changes.change(table, name, selection))
        else:
            changes.begin(table, name, selection, changes.UNNAMED, id=f"{of_ids}", selected=14)
            chunks = 1 if how == "continue" else 100
            outcomes = list(itertools.islice(changes.resume(table, f"{of_ids}"), chunks))
            outcomes += changes.resume(table, f"{of_ids}") if how == "continue" else ()
        assert changed(outcomes) == stay
        assert sorted(id for outcome in outcomes for id in outcome.missing) == go
        unchanged = {id: state for outcome in outcomes for id, state in outcome.unchanged.items()}
        came = dict.fromkeys(come if of_ids else (), changes.NEWCOMER)
        assert unchanged == dict.fromkeys(leave, "pending") | came
        after = rows_of(database)
        assert all(after[id][column] == value for id in come for column, value in columns.items())
