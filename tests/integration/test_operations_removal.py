"""`purge` and `cancel` on Spanner delete the selected tasks and no others, whatever happens meanwhile."""

from collections.abc import Callable
from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.admin import changes
from outbox.admin.changes import Outcome, TaskSelection
from outbox.admin.table import TaskTable
from outbox.errors import OutboxError
from outbox.table.states import NEVER
from tests.support.operations import (
    FUTURE,
    OF_STATES,
    PAST,
    SECOND,
    Watch,
    changed,
    insert,
    row,
    rows_of,
    update,
)

UNTIL = PAST + 10 * SECOND
DEFERRED = {"AvailableAt": FUTURE, "BlockedBy": "head"}
DEAD = {"AvailableAt": NEVER, "Attempts": 9}
UNSENT: list[dict[str, Any]] = [
    {}, {"AvailableAt": PAST}, {"AvailableAt": FUTURE}, {"AvailableAt": FUTURE, "Attempts": 2},
    {"OrderingKey": "k", **DEFERRED}, DEAD,
]  # fmt: skip


def before_each_transaction(patch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Call `act` after the tasks were found and before the transaction that changes them."""
    transact = TaskTable.transact

    def meanwhile(self: TaskTable, tag: str, work: Any) -> Any:
        act()
        return transact(self, tag, work)

    patch.setattr(TaskTable, "transact", meanwhile)


def test_purge_continues_where_it_stopped(database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch):
    """Chunk by chunk, of many tasks of one SentAt, too; younger tasks stay. Only sent tasks can be selected."""
    for state in (None, "dead", "pending", "retrying", "scheduled"):
        with pytest.raises(OutboxError, match=f"purge is for tasks that are sent, not for {state or 'any'}"):
            changes.change(table, "purge", TaskSelection(state=state, ids=("a",)))
    monkeypatch.setattr(changes, "CHUNK", 3)
    old = [row(f"old {n}", SentAt=PAST + (n % 2) * SECOND, AvailableAt=NEVER) for n in range(30)]
    insert(database, [*old, row("new", SentAt=UNTIL), *(row(str(n), **each) for n, each in enumerate(UNSENT))])
    selection = TaskSelection(state="sent", until=UNTIL)
    outcomes = changes.change(table, "purge", selection)
    first = next(outcomes).changed
    outcomes.close()
    assert len(rows_of(database)) == 37 - len(first)
    assert len(changed(changes.change(table, "purge", selection))) == 30 - len(first)
    assert set(rows_of(database)) == {"new", *map(str, range(len(UNSENT)))}


def test_cancel_deletes_the_selected_unsent_tasks_only(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch
):
    """Others are left and named with their states, as are missing ones; also one that was sent meanwhile is left."""
    with pytest.raises(OutboxError, match=r"cancel is for tasks that are .*, not for sent"):
        list(changes.change(table, "cancel", TaskSelection(state="sent", ids=("a",))))
    with pytest.raises(OutboxError, match=r"cancel is for tasks that are .*, not for any"):
        list(changes.change(table, "cancel", TaskSelection(ids=("a",))))
    insert(database, [row(str(n), **each) for n, each in enumerate(UNSENT)])
    insert(database, [row("sent", SentAt=PAST), row("meanwhile"), row("other"), row("dead", **DEAD)])
    before = rows_of(database)
    before_each_transaction(monkeypatch, lambda: update(database, "meanwhile", SentAt=PAST))
    [dead] = changes.change(table, "cancel", TaskSelection(state="dead", ids=("0", "5")))
    assert dead == Outcome(("5",), {"0": "pending"}, ())
    [outcome, *rest] = changes.change(table, "cancel", of_ids(*map(str, range(5)), "sent", "missing", "meanwhile"))
    assert rest == []
    assert sorted(outcome.changed) == [*map(str, range(5))]
    assert (outcome.unchanged, outcome.missing) == (dict.fromkeys(["sent", "meanwhile"], "sent"), ("missing",))
    before["meanwhile"]["SentAt"] = PAST
    assert rows_of(database) == {id: before[id] for id in ("sent", "meanwhile", "other", "dead")}


@pytest.mark.parametrize("state", ["pending", "retrying", "scheduled", "blocked", "dead"])
def test_cancel_selects_by_state_and_continues_where_it_stopped(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch, state: str
):
    """Chunk by chunk; tasks of other states, of other topics, and from after `until` stay."""
    monkeypatch.setattr(changes, "CHUNK", 2)
    monkeypatch.setattr(changes, "PAGE", 4)
    columns = [{"CreatedAt": PAST - SECOND} | each for each in OF_STATES[state]]
    gone = [row(f"{n} {m}", **each) for n in range(3) for m, each in enumerate(columns)]
    kept = [row(f"{name} {n}", **each) for name in OF_STATES.keys() - {state} for n, each in enumerate(OF_STATES[name])]
    kept += [row(f"late {n}", **each | {"CreatedAt": PAST}) for n, each in enumerate(columns)]
    insert(database, [*gone, *kept, *(row(f"other {n}", **each, Topic="bills") for n, each in enumerate(columns))])
    selection = TaskSelection(state=state, topic="orders", until=PAST)
    assert changes.count(table, selection, exact=True).number >= len(gone)
    outcomes = changes.change(table, "cancel", selection)
    first = next(outcomes).changed
    outcomes.close()
    left = {each["Id"] for each in gone} - {*first}
    assert left <= {*changed(changes.change(table, "cancel", selection))}
    after = rows_of(database).keys()
    assert {f"{name} {n}" for name in ("late", "other") for n in range(len(columns))} <= after
    assert after.isdisjoint(each["Id"] for each in gone)


def of_ids(*ids: str) -> TaskSelection:
    return TaskSelection(state=changes.ANY_UNSENT, ids=ids)


def line(key: str, *columns: dict[str, Any], topic: str = "orders") -> list[dict[str, Any]]:
    return [
        row(f"{topic} {key} {n}", OrderingKey=key, Topic=topic, CreatedAt=PAST + n * SECOND, **each)
        for n, each in enumerate(columns)
    ]


@pytest.mark.parametrize("closed", [False, True])
def test_cancel_releases_only_the_first_deferred_task_of_a_key(
    database: Database, watch: Watch, monkeypatch: pytest.MonkeyPatch, closed: bool
):
    """The relay releases the others. A deferred head is blocked by no task any more, and a dead task hides none."""
    monkeypatch.setattr(changes, "CHUNK", 2 if closed else 500)
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
    ids = ["a 1", "b' 0", "waits 0", "two 0", "two 1", "alone 0", "behind 1", "behind a scheduled one 1"]
    ids = [*(f"orders {id}" for id in ids), "no key"]
    outcomes = changes.change(watch.table, "cancel", of_ids(*ids))
    gone = ids[:2] if closed else ids
    assert sorted(next(outcomes).changed) == sorted(gone)
    if closed:
        outcomes.close()
    else:
        assert list(outcomes) == []
    after = rows_of(database)
    released = {"orders a 2", "orders b' 1"} | (set() if closed else {"orders behind 0", "orders two 2"})
    assert {id for id in after if after[id] != before[id]} == released
    assert set(before) - set(after) == set(gone)
    for id in released:
        assert after[id] == before[id] | {"AvailableAt": None, "BlockedBy": None}
    assert watch.tags() == {"outbox-cancel"} | (set() if closed else {"outbox-operations"})
