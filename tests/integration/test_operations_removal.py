"""`purge` and `discard` on Spanner delete the selected tasks and no others, whatever happens meanwhile."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.admin import changes
from outbox.admin.changes import TaskSelection
from outbox.admin.table import TaskTable
from outbox.errors import NotReached
from outbox.table.statements import FIRST_OF_KEYS
from outbox.table.states import NEVER
from tests.support.operations import FUTURE, PAST, SECOND, Watch, changed, insert, row, rows_of, update

UNTIL = PAST + 10 * SECOND
REASON = "cancelled"
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
        with pytest.raises(ValueError, match=f"purge is for sent tasks, not for {state}"):
            changes.purge(table, TaskSelection(state=state, ids=("a",)))
    monkeypatch.setattr(changes, "CHUNK", 3)
    old = [row(f"old {n}", SentAt=PAST + (n % 2) * SECOND, AvailableAt=NEVER) for n in range(30)]
    insert(database, [*old, row("new", SentAt=UNTIL), *(row(str(n), **each) for n, each in enumerate(UNSENT))])
    selection = TaskSelection(state="sent", until=UNTIL)
    outcomes = changes.purge(table, selection)
    first = next(outcomes).changed
    outcomes.close()
    assert len(rows_of(database)) == 37 - len(first)
    assert len(changed(changes.purge(table, selection))) == 30 - len(first)
    assert set(rows_of(database)) == {"new", *map(str, range(len(UNSENT)))}


def test_a_task_that_left_the_selection_meanwhile_is_not_deleted(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch
):
    """A sent task that was retried since it was found, and a dead one."""
    sent = [row(name, SentAt=PAST) for name in ("sent", "sent and retried")]
    insert(database, [*sent, row("dead", **DEAD), row("dead and retried", **DEAD)])
    before_each_transaction(monkeypatch, lambda: update(database, "sent and retried", SentAt=None))
    assert changed(changes.purge(table, TaskSelection(state="sent", until=UNTIL))) == ["sent"]
    before_each_transaction(monkeypatch, lambda: update(database, "dead and retried", AvailableAt=PAST))
    assert changed(changes.discard(table, ["dead and retried", "dead"], REASON)) == ["dead"]


def line(key: str, *columns: dict[str, Any], topic: str = "orders") -> list[dict[str, Any]]:
    return [
        row(f"{topic} {key} {n}", OrderingKey=key, Topic=topic, CreatedAt=PAST + n * SECOND, **each)
        for n, each in enumerate(columns)
    ]


@pytest.mark.parametrize("closed", [False, True])
def test_discard_releases_only_the_first_deferred_task_of_a_key(
    database: Database, watch: Watch, monkeypatch: pytest.MonkeyPatch, closed: bool
):
    """The relay releases the others. A deferred head is blocked by no task any more."""
    monkeypatch.setattr(changes, "CHUNK", 2 if closed else 500)
    insert(
        database,
        [
            *line("a", {"SentAt": PAST}, DEAD, {**DEFERRED, "Attempts": 2, "ExpiresAt": FUTURE}, DEFERRED),
            *line("b'", DEAD, DEFERRED, DEFERRED),
            *line("waits", DEAD, {"AvailableAt": FUTURE}, DEFERRED),
            *line("dies", DEAD, DEAD, DEFERRED),
            *line("alone", DEAD),
            *line("behind", DEFERRED, DEAD, DEFERRED),
            *line("behind a scheduled one", {"AvailableAt": FUTURE}, DEAD, DEFERRED),
            *line("untouched", DEFERRED, DEFERRED),
            *line("a", DEFERRED, topic="invoices"),
            row("no key", **DEAD),
            row("no key deferred", **DEFERRED),
        ],
    )
    before, begun = rows_of(database), watch.table.now()
    ids = ["a 1", "b' 0", "waits 0", "dies 0", "alone 0", "behind 1", "behind a scheduled one 1"]
    ids = [*(f"orders {id}" for id in ids), "no key"]
    outcomes = changes.discard(watch.table, ids, REASON)
    gone = ids[:2] if closed else ids
    assert sorted(next(outcomes).changed) == sorted(gone)
    if closed:
        outcomes.close()
    else:
        assert list(outcomes) == []
    after = rows_of(database)
    released = {"orders a 2", "orders b' 1"} | (set() if closed else {"orders behind 0"})
    assert {id for id in after if after[id] != before[id]} == released
    assert set(before) - set(after) == set(gone)
    for id in released:
        assert after[id] == before[id] | {"AvailableAt": after[id]["AvailableAt"], "BlockedBy": None}
        assert begun <= after[id]["AvailableAt"] <= watch.table.now()
    assert {"outbox-discard", "outbox-release"} == watch.tags() - {"outbox-now"}


def test_deleted_tasks_are_logged_before_others_are_released(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch
):
    """A second Ctrl-C during the release loses no log line."""
    insert(database, line("a", DEAD, DEFERRED))
    monkeypatch.setattr(changes, "_release_heads", mock.Mock(side_effect=KeyboardInterrupt))
    logged: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        list(changes.discard(table, ["orders a 0", "orders a 1"], REASON, logged.extend))
    assert logged == ["orders a 0"]
    assert list(rows_of(database)) == ["orders a 1"]


def test_a_release_that_fails_is_a_warning(database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch):
    """The dead task is deleted all the same; a head that was sent meanwhile is not made due."""
    insert(database, [*line("a", DEAD, DEFERRED), *line("b", DEAD, DEFERRED, DEFERRED)])
    query = TaskTable.query

    def key_heads(self: TaskTable, statement: str, *arguments: Any, **keywords: Any) -> list[list[Any]]:
        found = query(self, statement, *arguments, **keywords)
        if found == [["orders a 1"]]:
            raise NotReached("no answer")
        if statement == FIRST_OF_KEYS:
            update(database, "orders b 1", SentAt=PAST)
        return found

    monkeypatch.setattr(TaskTable, "query", key_heads)
    logged: list[str] = []
    [outcome] = changes.discard(table, ["orders a 0"], REASON, logged.extend)
    assert outcome.changed == ("orders a 0",)
    assert logged == ["orders a 0"]
    assert (
        outcome.warning
        == "tasks behind the deleted ones were not released. They are sent when their deferral ends: no answer"
    )
    assert changed(changes.discard(table, ["orders b 0"], REASON)) == ["orders b 0"]
    after = rows_of(database)
    assert after["orders b 1"]["SentAt"] == PAST
    assert {after[id]["AvailableAt"] for id in ("orders a 1", "orders b 1", "orders b 2")} == {FUTURE}
