"""`purge` and `cancel` on Spanner delete the selected tasks and no others, whatever happens meanwhile."""

from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.admin import changes
from outbox.admin.changes import Outcome, TaskSelection
from outbox.admin.table import TaskTable
from outbox.errors import OutboxError
from outbox.table.states import NEVER, STATES
from tests.support.operations import (
    FUTURE,
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

DEFERRED = {"AvailableAt": FUTURE, "BlockedBy": "head"}
DEAD = {"AvailableAt": NEVER, "Attempts": 9}
UNSENT: list[dict[str, Any]] = [
    {}, {"AvailableAt": PAST}, {"AvailableAt": FUTURE}, {"AvailableAt": FUTURE, "Attempts": 2},
    {"OrderingKey": "k", **DEFERRED}, DEAD,
]  # fmt: skip


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


@pytest.mark.parametrize("state", STATES)
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
    assert watch.tags() == {"outbox-cancel", "outbox-operations"}
