"""`cancel` keeps tasks in a table of their own, and `restore` puts them back as they were."""

from collections.abc import Sequence
from typing import Any

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database

from outbox.admin import changes, operations, tasks
from outbox.admin.changes import TaskSelection
from outbox.admin.table import TaskTable
from outbox.table.states import CANCELLED, NEVER, UNSENT
from tests.support.operations import (
    CREATED,
    FUTURE,
    OF_STATES,
    PAST,
    SECOND,
    changed,
    insert,
    line,
    row,
    rows_of,
    update,
)
from tests.support.spanner import query

#: Every unsent state, with all columns.
EVERY = {"Sequence": 3, "AtMostOnce": True, "Priority": -1, "DueAt": PAST, "Data": b"\x00\xff", "ExpiresAt": FUTURE}
ROWS = [
    *(
        row(f"{state} {n}", **{**each, "OrderingKey": "k" if state == "blocked" else None})
        for state in UNSENT
        for n, each in enumerate(OF_STATES[state])
    ),
    *(row(f"{state} every", **{**OF_STATES[state][0], **EVERY}) for state in UNSENT if state != "blocked"),
    row("head", OrderingKey="k", AvailableAt=NEVER, CreatedAt=CREATED - SECOND),
]


def of_ids(*ids: str, state: str = changes.ANY_UNSENT) -> TaskSelection:
    return TaskSelection(state=state, ids=ids)


def cancel(table: TaskTable, *ids: str) -> str:
    """Cancel tasks; return the operation."""
    id = operations.new_id()
    assert changed(changes.change(table, "cancel", of_ids(*ids), id=id)) == sorted(ids)
    return id


def restore(table: TaskTable, operation: str | None = None, ids: Sequence[str] | None = None) -> list[str]:
    selection = TaskSelection(state=CANCELLED, operation=operation, ids=ids and tuple(ids))
    return changed(changes.change(table, "restore", selection))


def kept(database: Database) -> list[str]:
    return sorted(id for (id,) in query(database, "SELECT Id FROM AsynchronousTasksCancelled"))


@pytest.mark.parametrize("by_ids", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_a_restore_after_a_cancel_is_the_identity(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch, by_ids: bool
) -> None:
    """Of every column of each unsent state, whatever the chunks are."""
    monkeypatch.setattr(changes, "CHUNK", 3)
    monkeypatch.setattr(changes, "PAGE", 4)
    insert(database, [*ROWS, row("sent", SentAt=PAST), row("large", Data=b"x" * 1_000_000)])
    before, ids = rows_of(database), [each["Id"] for each in ROWS]
    id = cancel(table, "large", *ids)
    assert [*rows_of(database)] == ["sent"]
    assert kept(database) == sorted(["large", *ids])
    assert restore(table, *([None, ["large", *ids]] if by_ids else [id])) == sorted(["large", *ids])
    assert rows_of(database) == before
    assert kept(database) == []


def test_a_chunk_that_moves_rows_has_few_bytes(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit has at most 100 MB. The tasks of a key are restored in its order, whatever their IDs and chunks are."""
    monkeypatch.setattr(changes, "CHUNK_BYTES", 5_000)
    names = [f"{9 - n}" for n in range(9)]
    rows = [row(id, OrderingKey="k", Sequence=n, Data=b"x" * 2_000) for n, id in enumerate(names)]
    insert(database, rows)
    outcomes = list(changes.change(table, "cancel", TaskSelection(state="pending"), id=(id := operations.new_id())))
    assert max(len(each.changed) for each in outcomes) == 2
    for selection in (TaskSelection(state=CANCELLED, operation=id), of_ids(*sorted(names), state=CANCELLED)):
        restored = [each.changed for each in changes.change(table, "restore", selection)]
        assert [set(chunk) for chunk in restored] == [set(names[n : n + 2]) for n in range(0, 9, 2)]
        cancel(table, *names)


def test_a_task_whose_id_exists_again_is_refused_and_counted(database: Database, table: TaskTable) -> None:
    """Also by the dry run. Of an ID that was cancelled twice, the last task is restored."""
    insert(database, [row("a"), row("b"), row("c")])
    id = cancel(table, "a", "b", "c")
    insert(database, [row("a", Topic="new")])
    selection = TaskSelection(state=CANCELLED, operation=id, as_of=table.now())
    preview = changes.preview(table, selection, "restore")
    assert (preview.tasks, preview.refused, preview.groups) == (2, {"exists": 1}, [["orders", None, 3]])
    [outcome] = [each for each in changes.change(table, "restore", selection) if each.unchanged]
    assert outcome.unchanged == {"a": "exists"}
    assert (sorted(rows_of(database)), kept(database)) == (["a", "b", "c"], ["a"])
    again = cancel(table, "a")
    assert (restore(table, id), restore(table, again)) == ([], ["a"])
    assert rows_of(database)["a"]["Topic"] == "new"
    assert changes.preview(table, of_ids("a", "x", state=CANCELLED), "restore").refused == {"missing": 2}


def test_a_dry_run_counts_the_tasks_that_later_ones_have_overtaken(database: Database, table: TaskTable) -> None:
    insert(
        database,
        [
            *line("overtaken", {}, {}, {}),
            *line("before", {}, {"SentAt": PAST}),
            *line("earlier", {}, {}),
            *line("other", {}), *line("other", {}, {}, topic="invoices"),
            row("s 1", OrderingKey="s", Sequence=1), row("s 2", OrderingKey="s", Sequence=2), row("alone"),
        ],
    )  # fmt: skip
    id = cancel(table, "overtaken 0", "overtaken 1", "before 0", "earlier 1", "other 0", "s 1", "alone")
    for sent in ("overtaken 2", "earlier 0", "invoices other 1", "s 2"):
        update(database, sent, SentAt=COMMIT_TIMESTAMP)
    for selection in (
        TaskSelection(state=CANCELLED, operation=id),
        of_ids("overtaken 0", "overtaken 1", "before 0", "s 1", state=CANCELLED),
    ):
        assert changes.preview(table, selection, "restore").overtaken == 3


#: The columns of the head of a deferred task, whether a restore releases the task, and whether a retry does.
HEADS: dict[str, tuple[dict[str, Any] | None, bool, bool]] = {
    "gone": (None, True, True),
    "dead": ({"AvailableAt": NEVER}, False, False),
    "retrying": ({"AvailableAt": FUTURE, "Attempts": 2}, False, False),
    "ready": ({}, True, False),  # a worker soon releases it
    "sent": ({"SentAt": PAST}, True, True),
    "expired": ({"ExpiresAt": PAST, "AvailableAt": NEVER}, True, True),
    "of another key": ({"OrderingKey": "l"}, True, True),
    "of another topic": ({"Topic": "invoices"}, True, True),
}


@pytest.mark.parametrize(("head", "restored", "retried"), HEADS.values(), ids=HEADS)
def test_a_deferred_task_is_released_unless_its_head_waits(
    database: Database, table: TaskTable, head: dict[str, Any] | None, restored: bool, retried: bool
) -> None:
    """By a restore and by a retry. Otherwise nothing would release it before its deferral ends."""
    deferred = {"AvailableAt": FUTURE, "BlockedBy": "head"}
    insert(database, [row("task", OrderingKey="k", **deferred)])
    insert(database, [row("head", **{"OrderingKey": "k", **head})] if head is not None else [])
    before = rows_of(database)["task"]
    assert restore(table, cancel(table, "task")) == ["task"]
    assert rows_of(database)["task"] == before | ({"AvailableAt": None, "BlockedBy": None} if restored else {})
    update(database, "task", **deferred)
    selection = TaskSelection(ids=("task",))
    assert changes.count(table, selection, exact=True).number == retried
    assert changed(changes.change(table, "retry", selection)) == ["task"] * retried
    assert (rows_of(database)["task"]["BlockedBy"] is None) == retried


def test_cancelled_tasks_are_listed_shown_and_purged(database: Database, table: TaskTable) -> None:
    """By topic, key, time and operation; pages do not repeat a task."""
    insert(database, [row(f"{n}", Topic=("orders", "bills")[n % 2], OrderingKey="k", LastError="x") for n in range(8)])
    first, second = cancel(table, "0", "1", "2"), cancel(table, "3", "4", "5", "6")
    found: list[str] = []
    after = None
    while found == [] or after:
        page = tasks.find(table, [CANCELLED], newest=True, limit=3, after=after)
        found += [each.columns["Id"] for each in page.tasks]
        after = page.next
    assert (sorted(found), set(found[:4])) == (list("0123456"), set("3456"))
    for more, expected in (
        ({"topic": "bills"}, "135"), ({"ordering_key": "l"}, ""), ({"error": "X", "id_prefix": "2"}, "2"),
        ({"operation": first}, "012"), ({"since": table.now()}, ""),
    ):  # fmt: skip
        selection = TaskSelection(state=CANCELLED, **more)  # type: ignore[arg-type]  # of several types
        listed = tasks.find(table, [CANCELLED], selection).tasks
        assert sorted(each.columns["Id"] for each in listed) == list(expected)
        assert changes.count(table, selection, exact=True).number == len(expected)
    both = tasks.find(table, [CANCELLED, "pending"], newest=False).tasks
    assert [each.state for each in both] == ["pending"] + [CANCELLED] * 7
    shown = tasks.task(table, "3")
    assert shown
    assert (shown.state, shown.columns["OperationId"], shown.columns["SentAt"]) == (CANCELLED, second, None)
    assert tasks.beginning_with(table, ["7", "6"], 9) == {"7": ["7"], "6": ["6"]}
    assert changed(changes.change(table, "purge", TaskSelection(state=CANCELLED, topic="bills"))) == list("135")
    assert (kept(database), [*rows_of(database)]) == (list("0246"), ["7"])


def test_a_task_that_a_worker_had_published_is_restored_as_sent(database: Database, table: TaskTable) -> None:
    """Its message is out, as the record of the cancel says. So no second one is published.

    One that was to be sent again is restored unsent: the worker may have published it before that.
    """
    out = row("out", AvailableAt=PAST, Attempts=2, LastError="x", DueAt=PAST)
    insert(database, [row("again"), out, row("kept")])
    update(database, "again", TimesSent=1)
    id = cancel(table, "again", "out", "kept")
    with database.batch() as batch:
        published = '{"again": "16", "out": "17"}'
        batch.update("AsynchronousTaskOperations", ("OperationId", "Published"), [(id, published)])
    assert restore(table, id) == ["again", "kept", "out"]
    after = rows_of(database)
    assert (after["again"]["SentAt"], after["kept"]["SentAt"]) == (None, None)
    sent = {name: after["out"][name] for name in ("AvailableAt", "DueAt", "Attempts", "LastError")}
    assert after["out"]["SentAt"] is not None
    assert sent == {"AvailableAt": None, "DueAt": None, "Attempts": 0, "LastError": None}
    assert query(database, "SELECT TimesSent FROM AsynchronousTasks ORDER BY Id") == [[1], [0], [1]]
