"""`purge` and `discard` on Spanner delete the selected tasks and no others, whatever happens meanwhile."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet
from google.cloud.spanner_v1.database import Database
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from outbox.admin import changes
from outbox.admin.changes import Outcome, TaskSelection
from outbox.admin.table import TaskTable
from outbox.errors import NotReached
from outbox.table.statements import FIRST_OF_KEYS
from outbox.table.states import NEVER
from tests.support.operations import FUTURE, MICROSECOND, PAST, SECOND, Watch, changed, insert, row, rows_of, update

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


TASK = st.fixed_dictionaries(
    {
        "columns": st.sampled_from(UNSENT),
        "sent": st.sampled_from([None, *(UNTIL + delta for delta in (-SECOND, -MICROSECOND, 0 * SECOND, MICROSECOND))]),
        "topic": st.sampled_from(["orders", "invoices"]),
        "meanwhile": st.sampled_from(["", "", "unsent", "sent later", "deleted"]),
    }
)


@pytest.mark.extended
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TASK, min_size=1, max_size=12), st.sampled_from([None, "orders"]), st.integers(0, 6))
@example([{"columns": {}, "sent": PAST, "topic": "orders", "meanwhile": "unsent"}] * 3, None, 0)
@example([{"columns": {}, "sent": UNTIL, "topic": "orders", "meanwhile": ""}] * 3, None, 6)
def test_purge_keeps_unsent_and_recently_sent_tasks(
    database: Database, table: TaskTable, tasks: list[dict[str, Any]], topic: str | None, early: int
):
    """Also a task that was sent before the time when it was found, and that an operator retried since."""
    with database.batch() as batch:
        batch.delete("AsynchronousTasks", KeySet(all_=True))
    rows = [row(str(n), **each["columns"], Topic=each["topic"], SentAt=each["sent"]) for n, each in enumerate(tasks)]
    insert(database, rows)
    happen = [(str(n), each["meanwhile"]) for n, each in enumerate(tasks) if each["meanwhile"] and each["sent"]]
    first, later = happen[:early], happen[early:]
    kept: dict[str, dict[str, Any]] = {}

    def act() -> None:
        # Some when the first chunk is found, the others when the second is.
        now, first[:], later[:] = first[:], later[:], []
        there = rows_of(database)
        with database.batch() as batch:
            for id, what in now:
                if what == "deleted":
                    batch.delete("AsynchronousTasks", KeySet(keys=[[id]]))
                elif id in there:
                    value = None if what == "unsent" else COMMIT_TIMESTAMP
                    batch.update("AsynchronousTasks", ("Id", "SentAt"), [(id, value)])
        kept.update(rows_of(database))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "CHUNK", 4)
        before_each_transaction(patch, act)
        deleted = changed(changes.purge(table, TaskSelection(state="sent", until=UNTIL, topic=topic)))
    after = rows_of(database)
    assert not set(deleted) & set(after)
    for id in deleted:
        assert kept[id]["SentAt"] < UNTIL
        assert topic in (None, kept[id]["Topic"])
        assert tasks[int(id)]["sent"] is not None
    for n, each in enumerate(tasks):
        if each["sent"] is None or each["sent"] >= UNTIL:
            assert str(n) in after or each["meanwhile"] == "deleted"
        elif topic in (None, each["topic"]):
            assert str(n) not in after or each["meanwhile"]
    assert changed(changes.purge(table, TaskSelection(state="sent", until=PAST))) == []


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


def test_discard_deletes_dead_tasks_only(database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch):
    """Others are left and named with their states, as are missing ones; also one that was retried meanwhile is left."""
    insert(database, [row(str(n), **each) for n, each in enumerate(UNSENT)])
    insert(database, [row("sent", SentAt=PAST, AvailableAt=NEVER), row("almost", AvailableAt=NEVER - MICROSECOND)])
    insert(database, [row("retried", AvailableAt=NEVER)])
    before = rows_of(database)
    before_each_transaction(monkeypatch, lambda: update(database, "retried", AvailableAt=PAST))
    [outcome] = changes.discard(table, [*map(str, range(6)), "sent", "almost", "missing", "retried"], REASON)
    assert outcome == Outcome(
        ("5",),
        {
            "0": "pending", "1": "pending", "2": "scheduled", "3": "retrying", "4": "blocked", "sent": "sent",
            "almost": "scheduled", "retried": "pending",
        },
        ("missing",),
        heads=frozenset({"head"}),
    )  # fmt: skip
    before["retried"]["AvailableAt"] = PAST
    assert rows_of(database) == {id: each for id, each in before.items() if id != "5"}


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
