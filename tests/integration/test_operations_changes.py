"""`retry`, `purge` and `cancel` on Spanner change the selected tasks and no others, whatever happens meanwhile."""

import itertools
from datetime import UTC, datetime
from typing import Any

import pytest
from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database

from outbox.admin import changes, statements
from outbox.admin.changes import Count, Outcome, TaskSelection
from outbox.admin.table import TaskTable
from outbox.errors import OutboxError
from outbox.table.states import NEVER
from tests.support.operations import (
    CREATED,
    FUTURE,
    MICROSECOND,
    OF_STATES,
    PAST,
    SECOND,
    Watch,
    changed,
    insert,
    line,
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
DEFERRED = {"AvailableAt": FUTURE, "BlockedBy": "head"}
DEAD = {"AvailableAt": NEVER, "Attempts": 9}
UNSENT: list[dict[str, Any]] = [
    {}, {"AvailableAt": PAST}, {"AvailableAt": FUTURE}, {"AvailableAt": FUTURE, "Attempts": 2},
    {"OrderingKey": "k", **DEFERRED}, DEAD,
]  # fmt: skip
#: Those that a selection without ids may be of.
RETRIED = ("dead", "retrying", "sent")


def selected(state: str, **more: Any) -> TaskSelection:
    return TaskSelection(state=state, **({"until": datetime.now(UTC)} if state == "sent" else {}) | more)


def touched(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> set[str]:
    """Return the ids of the rows that differ; each must be as a retry leaves it."""
    found = {id for id in after if after[id] != before[id]}
    for id in found:
        created = {"SentAt": None, "ExpiresAt": None, "Attempts": 0}
        created |= {name: after[id][name] for name in ("AvailableAt", "DueAt")}
        assert after[id] == before[id] | created
    return found


def test_retry_writes_no_other_column(database: Database, table: TaskTable):
    """Due at the database's now, all attempts new, no end, not sent; all else stays, also the error and other rows.

    A task that the workers still retried keeps its age, and the age of the others begins anew.
    """
    more = {"OrderingKey": "k", "Sequence": 3, "AtMostOnce": True, "Priority": -1, "ExpiresAt": PAST, "DueAt": PAST}
    names = [(state, by) for by in ("ids", "state") for state in RETRIED]
    insert(
        database, [row(f"{state} {by}", **STATES[state], **more, Data=b"\x00\xff no message") for state, by in names]
    )
    insert(database, [row(f"other {state}", **STATES[state]) for state in ("scheduled", "ready", "due")])
    for state, by in names:
        id, before, begun = f"{state} {by}", rows_of(database), table.now()
        selection = TaskSelection(ids=(id,)) if by == "ids" else selected(state)
        assert list(changes.change(table, "retry", selection)) == [Outcome((id,), {}, ())]
        after = rows_of(database)
        assert touched(before, after) == {id}
        assert begun <= after[id]["AvailableAt"] <= table.now()
        assert after[id]["DueAt"] == (PAST if state == "retrying" else None)
        assert changes.count(table, selection, exact=True) == Count(0)


def test_retry_of_ids_leaves_pending_tasks_and_names_missing_ones(database: Database, table: TaskTable):
    """A state, an error and times narrow ids, too; a scheduled task is sent early if it is named."""
    insert(database, [row(state, **columns) for state, columns in STATES.items()])
    before = rows_of(database)
    [outcome] = changes.change(table, "retry", TaskSelection(state="dead", ids=tuple(STATES)))
    assert outcome.changed == ("dead",)
    assert outcome.unchanged == {
        "retrying": "retrying", "sent": "sent", "scheduled": "scheduled", "ready": "pending", "due": "pending",
    }  # fmt: skip
    [outcome] = changes.change(
        table, "retry", TaskSelection(ids=("sent", "retrying"), error="UNAVAIL", until=CREATED + SECOND)
    )
    assert (outcome.changed, outcome.unchanged) == (("retrying",), {"sent": "sent"})
    [outcome] = changes.change(table, "retry", TaskSelection(ids=("ready", "gone", "sent", "due", "it's", "scheduled")))
    assert sorted(outcome.changed) == ["scheduled", "sent"]
    assert outcome.unchanged == {"ready": "pending", "due": "pending"}
    assert outcome.missing == ("gone", "it's")
    assert touched(before, rows_of(database)) == {"dead", "retrying", "scheduled", "sent"}


def test_a_selection_combines_all_filters(database: Database, table: TaskTable):
    """Topic, time and error; its beginning is inclusive, its end is not, as of a list."""
    for state in RETRIED:
        time = "SentAt" if state == "sent" else "CreatedAt"
        right = STATES[state] | {"Topic": "it's", "LastError": "Not_Found", time: PAST}
        others: dict[str, dict[str, Any]] = {
            "right": {}, "last": {time: PAST + SECOND - MICROSECOND}, "early": {time: PAST - MICROSECOND},
            "late": {time: PAST + SECOND}, "topic": {"Topic": "its"}, "error": {"LastError": "not-found"},
            "no error": {"LastError": None},
        }  # fmt: skip
        insert(database, [row(f"{state} {name}", **right | columns) for name, columns in others.items()])
    for state in RETRIED:
        before = rows_of(database)
        selection = TaskSelection(state=state, topic="it's", since=PAST, until=PAST + SECOND, error="not_found")
        assert changes.count(table, selection, exact=False) == Count(2)
        assert changed(changes.change(table, "retry", selection)) == [f"{state} last", f"{state} right"]
        assert touched(before, rows_of(database)) == {f"{state} last", f"{state} right"}


def test_a_task_that_is_dead_or_sent_again_is_not_selected_twice(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch
):
    """A selection of sent tasks has an end, so later ones are not in it."""
    monkeypatch.setattr(changes, "CHUNK", 3)
    for state in RETRIED:
        names = [f"{state} {n:02}" for n in range(12)]
        insert(database, [row(name, **STATES[state], OrderingKey="one shard") for name in names])
        selection = selected(state)
        done: list[str] = []
        for outcome in changes.change(table, "retry", selection):
            done += outcome.changed
            assert len(done) <= len(names)
            # The retry's own AvailableAt is later than the selection's end.
            again = STATES[state] | ({"SentAt": table.now()} if state == "sent" else {})
            with database.batch() as batch:
                batch.update("AsynchronousTasks", ("Id", *again), [(id, *again.values()) for id in outcome.changed])
            if state == "sent":
                insert(database, [row(f"new {len(done)}", SentAt=table.now(), OrderingKey="one shard")])
        assert sorted(done) == names
    with pytest.raises(OutboxError, match="a retry of sent tasks needs `until`"):
        changes.change(table, "retry", TaskSelection(state="sent"))
    with pytest.raises(OutboxError, match="retry is for tasks that are dead, sent, retrying, scheduled, not for any"):
        changed(changes.change(table, "retry", TaskSelection()))


def test_tasks_that_left_the_selection_meanwhile_are_not_changed(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch
):
    """The rows are read again under the lock: in between, one was sent or retried, another one deleted."""
    transact, found = TaskTable.transact, changes._selected_ids
    monkeypatch.setattr(
        changes, "_selected_ids", lambda *all: iter([("{}", [id for _, ids in found(*all) for id in ids])])
    )
    for state, change in [*((state, "retry") for state in RETRIED), ("sent", "purge")]:
        stays, leaves, goes = names = [f"{change} {state} {name}" for name in ("stays", "leaves", "goes")]
        insert(database, [row(name, **STATES[state], Topic="t") for name in names])

        def meanwhile(self: TaskTable, *arguments: Any, leaves: str = leaves, goes: str = goes) -> Any:
            update(database, leaves, SentAt=None, AvailableAt=None)
            with database.batch() as batch:
                batch.delete("AsynchronousTasks", KeySet(keys=[[goes]]))
            return transact(self, *arguments)

        monkeypatch.setattr(TaskTable, "transact", meanwhile)
        [outcome] = changes.change(table, change, selected(state))
        assert outcome == Outcome((stays,), {leaves: "pending"}, (goes,))
        assert rows_of(database)[leaves]["AvailableAt"] is None


@pytest.mark.parametrize(
    "head",
    [None, {"SentAt": PAST}, {"ExpiresAt": PAST, "AvailableAt": NEVER}, {"OrderingKey": "l"}, {"Topic": "invoices"}],
    ids=["gone", "sent", "expired", "of another key", "of another topic"],
)
def test_a_deferred_task_whose_head_no_longer_blocks_is_retried(
    database: Database, table: TaskTable, head: dict[str, Any] | None
):
    """Nothing else would release it before its deferral ends, and there is no head to retry."""
    deferred = row("deferred", OrderingKey="k", AvailableAt=FUTURE, BlockedBy="head")
    insert(database, [deferred, *([row("head", **{"OrderingKey": "k", **head})] if head else [])])
    selection = TaskSelection(ids=("deferred",))
    assert changes.count(table, selection, exact=True).number == 1
    [outcome] = changes.change(table, "retry", selection)
    assert outcome == Outcome(("deferred",), {}, ())
    after = rows_of(database)["deferred"]
    assert (after["BlockedBy"], after["AvailableAt"] < FUTURE) == (None, True)


def test_expired_tasks_are_sent_again_only_if_asked_for(database: Database, table: TaskTable):
    """Whatever LastError says. A retry keeps an ExpiresAt in the future."""
    dead = {"AvailableAt": NEVER, "Attempts": 1}
    insert(
        database,
        [
            row("expired", ExpiresAt=PAST, LastError="expired: at 12:00", **dead),
            row("failed", ExpiresAt=PAST, LastError="internal: no", **dead),
            row("in time", ExpiresAt=FUTURE, LastError="internal: no", **dead),
            row("without", **dead),
        ],
    )
    unexpired = TaskSelection(state="dead", include_expired=False)
    assert changes.count(table, unexpired, exact=True).number == 2
    with_ids = TaskSelection(ids=("expired", "failed", "in time"), include_expired=False)
    assert changes.count(table, with_ids, exact=True).number == 1
    [outcome] = changes.change(table, "retry", with_ids)
    assert (outcome.changed, outcome.unchanged) == (("in time",), {"expired": "expired", "failed": "expired"})
    assert {id for each in changes.change(table, "retry", unexpired) for id in each.changed} == {"without"}
    assert {id for each in changes.change(table, "retry", TaskSelection(state="dead")) for id in each.changed} == {
        "expired",
        "failed",
    }
    found = {id: columns["ExpiresAt"] for id, columns in rows_of(database).items()}
    assert found == {"expired": None, "failed": None, "in time": FUTURE, "without": None}


@pytest.mark.parametrize("state", ["dead", "retrying", "scheduled"])
def test_all_counts_of_a_preview_are_those_of_one_time(state: str) -> None:
    """Otherwise, if they take long, fewer tasks can match with the expired ones than without them."""
    for statement in (statements.count_of_state(state, {"unexpired"}), statements.grouped(state, {"unexpired"})):
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
    monkeypatch.setattr(changes, "COUNT_LIMIT", 10)
    for state in limited:
        assert changes.count(table, TaskSelection(state=state), exact=False) == Count(10, at_least=True)
        assert changes.count(table, TaskSelection(state=state), exact=True) == Count(15)
    assert str(Count(1)) == "1 task"
    assert str(Count(100_000, at_least=True)) == "at least 100,000 tasks"


def test_cancel_deletes_the_selected_unsent_tasks_only(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch
):
    """Others are left and named with their states, as are missing ones; also one that was sent meanwhile is left."""
    insert(database, [row(str(n), **each) for n, each in enumerate(UNSENT)])
    insert(database, [row("sent", SentAt=PAST), row("meanwhile"), row("other"), row("dead", **DEAD)])
    before = rows_of(database)
    transact = TaskTable.transact

    def meanwhile(self: TaskTable, tag: str, work: Any) -> Any:
        update(database, "meanwhile", SentAt=PAST)
        return transact(self, tag, work)

    monkeypatch.setattr(TaskTable, "transact", meanwhile)
    [dead] = changes.change(table, "cancel", TaskSelection(state="dead", ids=("0", "5")))
    assert dead == Outcome(("5",), {"0": "pending"}, ())
    [outcome, *rest] = changes.change(table, "cancel", of_ids(*map(str, range(5)), "sent", "missing", "meanwhile"))
    assert rest == []
    assert sorted(outcome.changed) == [*map(str, range(5))]
    assert (outcome.unchanged, outcome.missing) == (dict.fromkeys(["sent", "meanwhile"], "sent"), ("missing",))
    before["meanwhile"]["SentAt"] = PAST
    assert rows_of(database) == {id: before[id] for id in ("sent", "meanwhile", "other", "dead")}


@pytest.mark.parametrize("state", OF_STATES)
def test_a_selection_by_state_is_deleted_chunk_by_chunk(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch, state: str
):
    """Sent tasks by `purge`, also many of one SentAt. Tasks of other states and topics, and from `until` on, stay."""
    monkeypatch.setattr(changes, "CHUNK", 2)
    monkeypatch.setattr(changes, "PAGE", 4)
    change, time = ("purge", "SentAt") if state == "sent" else ("cancel", "CreatedAt")
    columns = OF_STATES[state]
    gone = [row(f"{n} {m}", **each | {time: PAST - SECOND}) for n in range(3) for m, each in enumerate(columns)]
    rest = {name: of for name, of in OF_STATES.items() if name != state}
    others = [row(f"{name} {n}", **each) for name, of in rest.items() for n, each in enumerate(of)]
    late = [row(f"late {n}", **each | {time: PAST}) for n, each in enumerate(columns)]
    kept = [*late, *(row(f"other {n}", **each, Topic="bills") for n, each in enumerate(columns))]
    insert(database, [*gone, *others, *kept])
    selection = TaskSelection(state=state, topic="orders", until=PAST)
    done = changed(changes.change(table, change, selection))
    assert {*done} >= {each["Id"] for each in gone}
    left = rows_of(database).keys()
    assert left == {each["Id"] for each in (*gone, *others, *kept)} - {*done}
    assert left >= {each["Id"] for each in kept}


@pytest.mark.parametrize(
    ("name", "wrong"), [("purge", (None, "dead", "pending", "retrying", "scheduled")), ("cancel", (None, "sent"))]
)
def test_a_state_that_a_change_is_not_for_is_refused(table: TaskTable, name: str, wrong: tuple[str | None, ...]):
    for state in wrong:
        with pytest.raises(OutboxError, match=f"{name} is for tasks that are .*, not for {state or 'any'}"):
            changes.change(table, name, TaskSelection(state=state, ids=("a",)))


def of_ids(*ids: str) -> TaskSelection:
    return TaskSelection(state=changes.ANY_UNSENT, ids=ids)


def test_cancel_releases_only_the_first_deferred_task_of_a_key(database: Database, watch: Watch):
    """The relay releases the others. A deferred head is blocked by no task any more, and a dead task hides none."""
    insert(
        database,
        [
            *line("a", {"SentAt": PAST}, DEAD, {**DEFERRED, "Attempts": 2, "ExpiresAt": FUTURE}, DEFERRED),
            *line("b'", DEAD, DEFERRED, DEFERRED),
            *line("waits", DEAD, {"AvailableAt": FUTURE}, DEFERRED),
            *line("two", DEAD, DEAD, DEFERRED, DEFERRED),
            *line("alone", DEAD),
            *line("behind", DEFERRED, DEAD, DEFERRED),
            *line("behind a scheduled one", {"AvailableAt": FUTURE}, DEAD, DEFERRED),
            *line("untouched", DEFERRED, DEFERRED),
            *line("a", DEFERRED, topic="invoices"),
            row("no key", **DEAD),
            row("no key deferred", **DEFERRED),
        ],
    )
    before = rows_of(database)
    ids = ["a 1", "b' 0", "waits 0", "two 0", "two 1", "alone 0", "behind 1", "behind a scheduled one 1", "no key"]
    assert changed(changes.change(watch.table, "cancel", of_ids(*ids))) == sorted(ids)
    after = rows_of(database)
    released = {"a 2", "b' 1", "behind 0", "two 2"}
    assert {id for id in after if after[id] != before[id]} == released
    assert set(before) - set(after) == set(ids)
    for id in released:
        assert after[id] == before[id] | {"AvailableAt": None, "BlockedBy": None}
    assert watch.tags() == {"outbox-cancel", "outbox-count", "outbox-now", "outbox-operations"}


def test_a_cancel_of_blocked_tasks_takes_all_of_them(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch
):
    """Each chunk leaves the next one blocked, because the head of the key still blocks it. Nothing else is released."""
    monkeypatch.setattr(changes, "CHUNK", 2)
    monkeypatch.setattr(changes, "PAGE", 4)
    insert(database, [*line("a", DEAD, *[DEFERRED] * 11), *line("b", {"AvailableAt": FUTURE}, *[DEFERRED] * 5)])
    insert(database, line("a", DEAD, DEFERRED, topic="invoices"))
    before = rows_of(database)
    assert len(changed(changes.change(table, "cancel", TaskSelection(state="blocked", topic="orders")))) == 16
    assert rows_of(database) == {id: before[id] for id in ("a 0", "b 0", "invoices a 0", "invoices a 1")}


SENT = {"SentAt": PAST}


@pytest.mark.parametrize("how", ["change", "begin", "continue"])
@pytest.mark.parametrize(
    ("name", "state", "columns"),
    [("retry", "dead", DEAD), ("retry", "sent", SENT), ("cancel", "dead", DEAD), ("purge", "sent", SENT)],
)
def test_a_change_takes_tasks_that_matched_at_the_preview_and_still_match(  # noqa: PLR0917 - cases
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch, how: str, name: str, state: str,
    columns: dict[str, Any],
):  # fmt: skip
    """By filter and by IDs, on many pages of one SentAt, at once, later, and continued by another process."""
    monkeypatch.setattr(changes, "CHUNK", 2)
    monkeypatch.setattr(changes, "PAGE", 2)
    for of_ids in (False, True):
        stay, leave, come = ([f"{of_ids} {n} {kind}" for n in range(7)] for kind in ("stays", "leaves", "comes"))
        insert(database, [row(id, **columns, OrderingKey="one shard") for id in (*stay, *leave)])
        insert(database, [row(id, OrderingKey="one shard") for id in come])
        at = table.now()
        ids = tuple(sorted([*stay, *leave, *come])) if of_ids else None
        selection = TaskSelection(state=state, ids=ids, as_of=at, until=at)
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
        unchanged = {id: state for outcome in outcomes for id, state in outcome.unchanged.items()}
        came = dict.fromkeys(come if of_ids else (), changes.NEWCOMER)
        assert unchanged == dict.fromkeys(leave, "pending") | came
        after = rows_of(database)
        assert all(after[id][column] == value for id in come for column, value in columns.items())
