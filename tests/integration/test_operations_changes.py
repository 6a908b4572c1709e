"""Retry, cancel, purge and restore change the selected tasks and no others."""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from outbox.errors import NotReached
from outbox.rows import backlog
from outbox.rows.backlog import Count
from outbox.rows.task_table import TaskTable
from outbox.table.states import CANCELLED, KEY_CHECK_SECONDS, NEVER, UNSENT
from outbox_admin import operations
from outbox_admin.change_kinds import ANY_UNSENT, KINDS, MADE_UNSENT, MATCHED_LATER
from outbox_admin.changes import change_sql, chunks, execution
from outbox_admin.operations import Author
from outbox_admin.tasks import lookup, selected, task_sql
from outbox_admin.tasks.selections import TaskSelection
from outbox_admin.topics import editing
from tests.support.commands import Commands
from tests.support.operations import (
    CREATED,
    FUTURE,
    MICROSECOND,
    OF_STATES,
    PAST,
    SECOND,
    changed,
    delete,
    insert,
    line,
    row,
    rows_of,
    update,
)

KEY_CHECK = KEY_CHECK_SECONDS * SECOND
DEAD = {"AvailableAt": NEVER, "Attempts": 10, "LastError": "not_found: 404"}
EVERY = {"Sequence": 3, "AtMostOnce": True, "Priority": -1, "DueAt": PAST, "Data": b"\x00\xff no message"}
BILL = DEAD | {"Topic": "it's", "LastError": 'x Not_Found "\\ \N{GRINNING FACE}\n'}
#: Rows around both ends of a time.
EDGES = {"early": -MICROSECOND, "first": 0 * SECOND, "last": SECOND - MICROSECOND, "late": SECOND}
#: The tasks of each state, with some of other topics, keys, times and errors.
ROWS: dict[str, dict[str, dict[str, Any]]] = {
    state: {f"{state} {n}": each for n, each in enumerate(many)} for state, many in OF_STATES.items()
}
ROWS["sent"] |= {f"sent {name}": EVERY | {"SentAt": PAST + 9 * SECOND + each} for name, each in EDGES.items()}
ROWS["sent"] |= {"sent bill": {"SentAt": PAST + 9 * SECOND, "Topic": "it's"}}
ROWS["dead"] |= {f"bill {name}": BILL | {"CreatedAt": PAST + each} for name, each in EDGES.items()}
ROWS["dead"] |= {"bill no error": BILL | {"CreatedAt": PAST, "LastError": None}, "other": DEAD | EVERY}
ROWS["dead"] |= {
    "head": DEAD | {"OrderingKey": "k"},
    "k": DEAD | {"OrderingKey": "k"},
    "head of l": DEAD | {"OrderingKey": "l"},
    "in time": DEAD | {"ExpiresAt": FUTURE},
}
ROWS["expired"] = {"expired": DEAD | {"ExpiresAt": PAST, "LastError": "internal: no"}}
ROWS["retrying"] |= {"again": EVERY | {"AvailableAt": FUTURE, "Attempts": 2}}
ROWS["retrying"]["retrying 1"] = ROWS["retrying"]["retrying 1"] | {"OrderingKey": "own"}
ROWS["scheduled"] |= {"scheduled bill": {"AvailableAt": FUTURE, "Topic": "it's"}}
IDS = ("head", "again", "sent 0", "scheduled 0", "pending 0", "pending 1", "blocked 0", "expired", "missing")
WINDOW = {"topic": "it's", "since": PAST, "until": PAST + SECOND}
IN_WINDOW = ["bill first", "bill last"]
#: Change, selection, the tasks that it changes, and those that it names but does not change, by state.
Case = tuple[str, dict[str, Any], list[str], dict[str, int]]
OF_EACH_STATE: dict[str, Case] = {
    f"cancel {state}": ("cancel", {"state": state}, [*ROWS[state]], {}) for state in UNSENT if state != "dead"
}
CASES: dict[str, Case] = {
    **OF_EACH_STATE,
    "cancel dead": ("cancel", {"state": "dead"}, [*ROWS["dead"], "expired"], {}),
    "cancel in a window": ("cancel", {"state": "dead", "error": "NOT_FOUND", **WINDOW}, IN_WINDOW, {}),
    "cancel IDs": ("cancel", {"ids": IDS}, [id for id in IDS[:-1] if id != "sent 0"], {"sent": 1, "missing": 1}),
    "purge": (
        "purge", {"state": "sent", "topic": "orders", "until": PAST + 10 * SECOND},
        ["sent 0", "sent 1", "sent early", "sent first", "sent last"], {},
    ),
    "retry dead": ("retry", {"state": "dead"}, [*ROWS["dead"]], {"expired": 1}),
    "retry expired": ("retry", {"state": "dead", "include_expired": True}, [*ROWS["dead"], "expired"], {}),
    "retry of a key": ("retry", {"state": "dead", "ordering_key": "k", "id_prefix": "hea"}, ["head"], {}),
    "retry retrying": ("retry", {"state": "retrying"}, [*ROWS["retrying"]], {}),
    "retry in a window": ("retry", {"state": "dead", "error": 'not_found "\\', **WINDOW}, IN_WINDOW, {}),
    "retry sent": (
        "retry", {"state": "sent", "topic": "orders", "since": PAST + 9 * SECOND, "until": PAST + 10 * SECOND},
        ["sent first", "sent last"], {},
    ),
    "retry IDs": ("retry", {"ids": IDS}, [*IDS[:4]], {"pending": 2, "blocked": 1, "expired": 1, "missing": 1}),
    "retry IDs in a state": ("retry", {"ids": IDS[:3], "state": "dead"}, ["head"], {"retrying": 1, "sent": 1}),
}  # fmt: skip
#: Those that a selection without ids may be of.
RETRIED = ("dead", "retrying", "sent")
SENT = {"SentAt": PAST}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 3)
    monkeypatch.setattr(chunks, "PAGE_IDS", 4)


@pytest.mark.parametrize("case", CASES)
def test_a_change_counts_changes_and_records_the_selected_tasks(
    database: Database, table: TaskTable, case: str
) -> None:
    """Chunk by chunk. A retry writes nothing else, keeps the age of a retried task, and an ExpiresAt in the future.

    A cancel releases the next task of the key, and nothing else.
    """
    name, given, ids, refused = CASES[case]
    insert(database, [row(id, **each) for of_state in ROWS.values() for id, each in of_state.items()])
    before, begun = rows_of(database), table.now()
    selection = TaskSelection(**{"include_expired": name != "retry"} | given)
    at = table.now()
    selection = dataclasses.replace(
        selection, state=selection.state or KINDS[name].of_ids, as_of=at, until=selection.until or at
    )
    preview = chunks.preview(table, selection, name)
    assert (preview.tasks, preview.refused) == (len(ids), refused)
    assert sum(number for *_, number in preview.groups) == preview.tasks
    assert changed(execution.change(table, name, selection, Author(reason="why"))) == sorted(ids)
    after = rows_of(database)
    if name == "retry":
        for id in ids:
            assert begun <= after[id]["AvailableAt"] <= table.now()
            new = {"SentAt": None, "BlockedBy": None, "Attempts": 0, "AvailableAt": after[id]["AvailableAt"]}
            new["ExpiresAt"] = before[id]["ExpiresAt"] if id == "in time" else None
            before[id] |= new | {"DueAt": (before[id]["DueAt"] or CREATED) if id in ROWS["retrying"] else None}
    if name == "cancel" and "head" in ids:
        before[min({*ROWS["blocked"]} - {*ids})] |= {"AvailableAt": None, "BlockedBy": None}
    if name == "cancel":
        for id in ids:
            assert None not in (after[id]["SentAt"], after[id]["CancelledBy"])
            after[id] |= {"SentAt": None, "CancelledBy": None}
            if id in ROWS["blocked"]:  # it may have been released before
                after[id] |= {name: before[id][name] for name in ("AvailableAt", "BlockedBy")}
    assert after == {id: each for id, each in before.items() if name != "purge" or id not in ids}
    [operation] = operations.latest(table, 9)
    assert (operation.operation, operation.tasks, operation.reason) == (name, len(ids), "why")
    assert operation.finished_at is not None


STATES: dict[str, dict[str, Any]] = {
    "dead": DEAD,
    "retrying": {"AvailableAt": FUTURE, "Attempts": 2, "LastError": "unavailable"},
    "sent": {"SentAt": PAST, "AvailableAt": PAST, "Attempts": 0, "LastError": "an old one"},
    "scheduled": {"AvailableAt": FUTURE},
    "ready": {},
    "due": {"AvailableAt": PAST, "Attempts": 1},
}


@pytest.mark.parametrize("state", ["dead", "pending", "sent"])
def test_a_preview_counts_all_tasks_in_one_statement(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Also those of groups that it leaves out, and the expired ones. Of none, the number is 0."""
    columns: list[dict[str, Any]] = {"dead": [DEAD], "pending": [{}, {"AvailableAt": PAST}], "sent": [SENT]}[state]
    groups = {"a": 3, "b": 2, "c": 1}
    for topic, number in groups.items():
        more = {"Topic": topic, "LastError": f"no {topic}"}
        insert(database, [row(f"{topic}{n}", **columns[n % len(columns)] | more) for n in range(number)])
        insert(database, [row(f"{topic} expired", **columns[0] | more, ExpiresAt=PAST)])
    insert(database, [row("only expired", **columns[0], Topic="d", ExpiresAt=PAST)])
    queries, query = list[str](), TaskTable.query

    def recorded(self: TaskTable, statement: str, tag: str, *more: Any, **others: Any) -> list[list[Any]]:
        queries.extend([statement] if tag == selected.COUNT_TAG else [])
        return query(self, statement, tag, *more, **others)

    monkeypatch.setattr(TaskTable, "query", recorded)
    monkeypatch.setattr(chunks, "GROUPS", 2)
    expired = 0 if state == "sent" else 4
    found = chunks.preview(table, TaskSelection(state=state, include_expired=False))
    assert (found.tasks, found.refused) == (10 - expired, {"expired": expired} if expired else {})
    of_sent = 1 if state == "sent" else 0
    assert found.groups == [["a", "no a", 3 + of_sent], ["b", "no b", 2 + of_sent]]
    assert chunks.preview(table, TaskSelection(state=state)).tasks == 10
    assert chunks.preview(table, TaskSelection(state=state, topic="none")) == chunks.Preview(0, [], {})
    assert len(queries) == 3


@pytest.mark.parametrize("state", ["dead", "retrying", "scheduled"])
def test_all_counts_of_a_preview_are_those_of_one_time(state: str) -> None:
    """Otherwise, if they take long, fewer tasks can match with the expired ones than without them."""
    for statement in (*task_sql.counts_of_state(state, {"unexpired"}), change_sql.grouped(state, {"unexpired"})):
        assert ("ExpiresAt <= @now" in statement, "CURRENT_TIMESTAMP" in statement) == (True, False)


def test_a_count_is_exact_or_stops_early(database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch):
    """In each shard and topic, of sent tasks in each shard; it says so. Ids are counted whole, in as many chunks."""
    limited = (*RETRIED, "scheduled")
    for state in limited:
        insert(database, [row(f"{state} {n}", **STATES[state], OrderingKey="one shard") for n in range(15)])
    insert(database, [row(f"pending {n}", AvailableAt=(None, PAST)[n % 2]) for n in range(15)])
    for state in (*limited, "pending"):
        assert selected.count(table, TaskSelection(state=state), exact=False) == Count(15)
        assert selected.count(table, TaskSelection(state=state, topic="other"), exact=True) == Count(0)
    ids = tuple(f"{state} {n}" for state in (*limited, "pending") for n in range(15))
    assert selected.count(table, TaskSelection(ids=(*ids, "missing")), exact=False) == Count(60)
    assert selected.count(table, TaskSelection(ids=ids, state="dead"), exact=False) == Count(15)
    for name in ("MAX_TOTAL", "COUNT_LIMIT", "MIN_COUNT_LIMIT"):
        monkeypatch.setattr(backlog, name, 10)
    for state in limited:
        assert selected.count(table, TaskSelection(state=state), exact=False) == Count(10, at_least=True)
        assert selected.count(table, TaskSelection(state=state), exact=True) == Count(15)
    assert str(Count(1)) == "1 task"
    assert str(Count(100_000, at_least=True)) == "at least 100,000 tasks"


@pytest.mark.parametrize(
    ("how", "name", "state", "columns"),
    [
        ("change", "retry", "dead", DEAD), ("continue", "cancel", "dead", DEAD), ("continue", "purge", "sent", SENT),
        pytest.param("change", "retry", "sent", SENT, marks=pytest.mark.extended),
        pytest.param("begin", "retry", "dead", DEAD, marks=pytest.mark.extended),
    ],
)  # fmt: skip
def test_a_change_takes_tasks_that_matched_at_the_preview_and_still_match(  # noqa: PLR0917 - cases
    database: Database, table: TaskTable, how: str, name: str, state: str, columns: dict[str, Any]
):  # fmt: skip
    """By filter and by IDs, on many pages of one SentAt, at once, later, and continued by another process."""
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
            outcomes = list(execution.change(table, name, selection))
        else:
            execution.begin(table, name, selection, execution.UNNAMED, id=f"{of_ids}", selected=14)
            chunks = 1 if how == "continue" else 100
            outcomes = list(itertools.islice(execution.resume(table, f"{of_ids}"), chunks))
            outcomes += execution.resume(table, f"{of_ids}") if how == "continue" else ()
        assert changed(outcomes) == stay
        unchanged = {id: state for outcome in outcomes for id, state in outcome.unchanged.items()}
        came = dict.fromkeys(come if of_ids else (), MATCHED_LATER)
        assert unchanged == dict.fromkeys(leave, "pending") | came | dict.fromkeys(go, "missing")
        operation = operations.operation(table, f"{of_ids}") or operations.latest(table, 1)[0]
        assert operation.unchanged == Counter(unchanged.values())
        after = rows_of(database)
        assert all(after[id][column] == value for id in come for column, value in columns.items())


#: Every unsent state, with all columns.
KEPT = [
    *(
        row(f"{state} {n}", **{**each, "OrderingKey": "k" if state == "blocked" else None})
        for state in UNSENT
        for n, each in enumerate(OF_STATES[state])
    ),
    *(
        row(f"{state} every", **{**OF_STATES[state][0], **EVERY, "ExpiresAt": FUTURE})
        for state in UNSENT
        if state != "blocked"
    ),
    row("head", OrderingKey="k", AvailableAt=NEVER, CreatedAt=CREATED - SECOND),
]


def update_rows(database: Database, **columns: Any) -> None:
    """Update all rows, as SQL by hand does."""
    for id in rows_of(database):
        update(database, id, **columns)


def of_ids(*ids: str, state: str = ANY_UNSENT) -> TaskSelection:
    return TaskSelection(state=state, ids=ids)


def cancel(table: TaskTable, *ids: str) -> str:
    """Cancel tasks; return the operation."""
    id = operations.new_id()
    assert changed(execution.change(table, "cancel", of_ids(*ids), id=id)) == sorted(ids)
    return id


def restore(table: TaskTable, operation: str | None = None, ids: Sequence[str] | None = None) -> list[str]:
    selection = TaskSelection(state=CANCELLED, cancelled_by=operation, ids=ids and tuple(ids))
    return changed(execution.change(table, "restore", selection))


def cancelled(database: Database) -> list[str]:
    return sorted(id for id, each in rows_of(database).items() if each["CancelledBy"])


@pytest.mark.parametrize("by_ids", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_a_restore_after_a_cancel_is_the_identity(database: Database, table: TaskTable, by_ids: bool) -> None:
    """Of every column of each unsent state. Only a deferral ends within a minute, so that its key is read again.

    A dead task stays dead, also if another program has left its BlockedBy.
    """
    kept = [*KEPT, row("dead, with a head", AvailableAt=NEVER, BlockedBy="k", OrderingKey="k")]
    insert(database, [*kept, row("sent", SentAt=PAST)])
    before, ids = rows_of(database), [each["Id"] for each in kept]
    id = cancel(table, *ids)
    assert cancelled(database) == sorted(ids)
    soon = table.now() + KEY_CHECK
    assert restore(table, *([None, ids] if by_ids else [id])) == sorted(ids)
    after = rows_of(database)
    for each in (each for each in after.values() if each["BlockedBy"] and before[each["Id"]]["AvailableAt"] != NEVER):
        assert soon <= each["AvailableAt"] <= table.now() + KEY_CHECK
        each["AvailableAt"] = before[each["Id"]]["AvailableAt"]
    assert after == before


def test_a_key_that_nothing_holds_is_read_within_a_minute(database: Database, table: TaskTable) -> None:
    """Also if the tasks whose deferrals would have ended first are cancelled. The next one stays in its selection.

    One of them was cancelled before, and another program has made it unsent.
    """
    later = {"AvailableAt": FUTURE, "BlockedBy": "k 0"}
    insert(database, line("k", {"AvailableAt": NEVER}, *[later] * 4))
    update(database, "k 2", CancelledBy="application")
    soon = table.now() + KEY_CHECK
    cancel(table, "k 1", "k 2")
    for id in ("k 3", "k 4"):
        each = rows_of(database)[id]
        assert (each["AvailableAt"] <= table.now() + KEY_CHECK, each["BlockedBy"]) == (id == "k 3", "k 0")
    assert rows_of(database)["k 3"]["AvailableAt"] >= soon
    assert changed(execution.change(table, "cancel", TaskSelection(state="blocked"))) == ["k 3", "k 4"]


@pytest.mark.parametrize("name", ["resend", "restore", "purge", "retry"])
def test_what_the_preview_counted_and_the_change_leaves_out_is_an_error(
    emulators: Emulators, database: Database, table: TaskTable, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the command, by reason, and in the record. Another change comes between the preview and the first chunk.

    If the last count, of tasks that match now, fails, that is a note: the change is made.
    """
    insert(database, [row(f"{n}", **STATES["dead" if name == "retry" else "sent"]) for n in range(5)])
    if name == "restore":
        update_rows(database, CancelledBy="an operation")
    counted = selected.count

    def count(table: TaskTable, selection: TaskSelection, **options: Any) -> Count:
        if selection.as_of is None:
            raise NotReached("Spanner did not answer")
        found = counted(table, selection, **options)
        delete(database, "1")
        update(database, "3", SentAt=None, CancelledBy=None, AvailableAt=None)
        return found

    monkeypatch.setattr(selected, "count", count)
    if name == "resend":
        monkeypatch.setattr("outbox_admin.changes.resending.opened", lambda *_: lambda _messages: {})
        monkeypatch.setattr(editing, "check_destinations", lambda *_, **__: None)
    words = {"resend": ["--to=other", "--topic=orders"], "restore": ["--state=cancelled"], "retry": ["--state=dead"]}
    arguments = [*words.get(name, ["--state=sent", "--until=1m"]), "--yes", "--reason=why"]
    done = Commands(emulators, database).here(name, *arguments)
    assert done.code == 1
    assert done.stdout.endswith(": 3 tasks\n")
    [operation] = operations.latest(table, 1)
    assert (operation.tasks, operation.selected, sum(operation.unchanged.values())) == (3, 5, 2)
    assert len(re.findall("not (?:changed|published)", done.stderr)) == len(operation.unchanged)


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
        TaskSelection(state=CANCELLED, cancelled_by=id),
        of_ids("overtaken 0", "overtaken 1", "before 0", "s 1", state=CANCELLED),
    ):
        assert chunks.preview(table, selection, "restore").overtaken == 3
        assert chunks.preview(table, selection, "restore", 6).overtaken == (None if selection.cancelled_by else 3)


#: The columns of the head of a deferred task, and whether a retry releases the task.
HEADS: dict[str, tuple[dict[str, Any] | None, bool]] = {
    "gone": (None, True),
    "dead": ({"AvailableAt": NEVER}, False),
    "retrying": ({"AvailableAt": FUTURE, "Attempts": 2}, False),
    "ready": ({}, False),  # a worker soon releases it
    "sent": ({"SentAt": PAST}, True),
    "expired": ({"ExpiresAt": PAST, "AvailableAt": NEVER}, True),
    "of another key": ({"OrderingKey": "l"}, True),
    "of another topic": ({"Topic": "invoices"}, True),
}


@pytest.mark.parametrize(("head", "retried"), HEADS.values(), ids=HEADS)
def test_a_retry_releases_a_deferred_task_unless_its_head_waits(
    database: Database, table: TaskTable, head: dict[str, Any] | None, retried: bool
) -> None:
    insert(database, [row("task", OrderingKey="k", AvailableAt=FUTURE, BlockedBy="head")])
    insert(database, [row("head", **{"OrderingKey": "k", **head})] if head is not None else [])
    selection = TaskSelection(ids=("task",))
    assert selected.count(table, selection, exact=True).number == retried
    assert changed(execution.change(table, "retry", selection)) == ["task"] * retried
    assert (rows_of(database)["task"]["BlockedBy"] is None) == retried


def test_a_cancelled_task_that_sql_made_unsent_is_restored_or_cancelled_again(
    database: Database, table: TaskTable
) -> None:
    """A retry does not promise to send it, and a purge deletes no unsent task."""
    insert(database, [row("a", AvailableAt=NEVER), row("b", AvailableAt=NEVER), row("sent", SentAt=PAST)])
    cancel(table, "a", "b")
    update_rows(database, SentAt=None)
    for name, state in (("retry", "dead"), ("purge", CANCELLED)):
        [outcome] = execution.change(table, name, of_ids("a", "b", state=state))
        assert (outcome.changed, {*outcome.unchanged.values()}) == ((), {MADE_UNSENT})
    assert changed(execution.change(table, "cancel", of_ids("a"))) == ["a"]
    assert restore(table, ids=["a", "b"]) == ["a", "b"]
    assert {id for id, each in rows_of(database).items() if each["SentAt"] or each["CancelledBy"]} == set()


def test_cancelled_tasks_are_listed_shown_and_purged(database: Database, table: TaskTable) -> None:
    """By topic, key, time and operation; pages do not repeat a task."""
    insert(database, [row(f"{n}", Topic=("orders", "bills")[n % 2], OrderingKey="k", LastError="x") for n in range(8)])
    first, second = cancel(table, "0", "1", "2"), cancel(table, "3", "4", "5", "6")
    found: list[str] = []
    after = None
    while found == [] or after:
        page = lookup.find(table, [CANCELLED], newest=True, limit=3, after=after)
        found += [each.columns["Id"] for each in page.tasks]
        after = page.next
    assert (sorted(found), set(found[:4])) == (list("0123456"), set("3456"))
    for more, expected in (
        ({"topic": "bills"}, "135"), ({"ordering_key": "l"}, ""), ({"error": "X", "id_prefix": "2"}, "2"),
        ({"cancelled_by": first}, "012"), ({"since": table.now()}, ""),
    ):  # fmt: skip
        selection = TaskSelection(state=CANCELLED, **more)  # type: ignore[arg-type]  # of several types
        listed = lookup.find(table, [CANCELLED], selection).tasks
        assert sorted(each.columns["Id"] for each in listed) == list(expected)
        assert selected.count(table, selection, exact=True).number == len(expected)
    both = lookup.find(table, [CANCELLED, "pending"], newest=False).tasks
    assert [each.state for each in both] == ["pending"] + [CANCELLED] * 7
    shown = lookup.task(table, "3")
    assert shown
    assert (shown.state, shown.columns["CancelledBy"]) == (CANCELLED, second)
    assert lookup.beginning_with(table, ["7", "6"], 9) == {"7": ["7"], "6": ["6"]}
    assert changed(execution.change(table, "purge", TaskSelection(state=CANCELLED, topic="bills"))) == list("135")
    assert (cancelled(database), sorted(rows_of(database))) == (list("0246"), list("02467"))
