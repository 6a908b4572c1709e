"""Each change of an operator is recorded in the transactions that make it: who, when, the selection and the count."""

import json
import uuid
from datetime import datetime
from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.admin import changes, operations, topics
from outbox.admin.changes import TaskSelection
from outbox.admin.operations import Author, Operation
from outbox.admin.table import TaskTable
from outbox.base.times import shown
from outbox.errors import NotReached
from outbox.table.states import NEVER
from tests.support.operations import FUTURE, PAST, insert, row, rows_of

DEAD = {"AvailableAt": NEVER, "Attempts": 9}


def recorded(table: TaskTable) -> list[Operation]:
    """Return all operations, the oldest first."""
    return operations.latest(table, 100)[::-1]


def seen(each: Operation) -> tuple[str, Any, int | None]:
    selection = json.loads(each.selection)
    if as_of := selection.pop("as_of", None):  # the preview
        assert datetime.fromisoformat(as_of) < each.started_at
    return each.operation, selection, each.tasks


def test_each_change_has_a_record(database: Database, table: TaskTable):
    """One that changes nothing has one, too."""
    insert(database, [row("a", **DEAD), row("b", **DEAD), row("sent", SentAt=PAST), row("pending")])
    before = table.now()
    assert [len(each.changed) for each in changes.change(table, "retry", TaskSelection(ids=("a", "pending")))] == [1]
    assert [each.changed for each in changes.change(table, "retry", TaskSelection(ids=("pending", "missing")))] == [()]
    wrong, person = Author(reason="it's wrong"), Author("jane@example.com", "no invoices today")
    list(changes.change(table, "cancel", TaskSelection(state="dead", ids=("b",)), wrong))
    list(changes.change(table, "purge", TaskSelection(state="sent", topic="orders", until=FUTURE)))
    topics.change(table, "pause", ["orders", "bills"], {"paused": True}, person)
    for _ in range(2):
        topics.change(table, "controls", ["orders"], {"rate_per_second": 0.5, "burst": 3, "max_in_flight": None})
    found = recorded(table)
    assert [seen(each) for each in found] == [
        ("retry", {"ids": ["a", "pending"], "include_expired": True}, 1),
        ("retry", {"ids": ["pending", "missing"], "include_expired": True}, 0),
        ("cancel", {"state": "dead", "ids": ["b"], "include_expired": True}, 1),
        ("purge", {"state": "sent", "topic": "orders", "until": shown(FUTURE), "include_expired": True}, 1),
        ("pause", {"topics": {each: {"paused": [None, True]} for each in ("orders", "bills")}}, None),
        ("controls", {"topics": {"orders": {"rate_per_second": [None, 0.5], "burst": [None, 3]}}}, None),
    ]
    assert [each.reason for each in found] == [None, None, wrong.reason, None, person.reason, None]
    assert [each.principal for each in found] == [*[table.principal] * 4, person.principal, table.principal]
    assert len({each.id for each in found}) == 6
    times = [time for each in found for time in (each.started_at, each.finished_at)]
    assert times == sorted(times, key=lambda time: time or FUTURE)
    assert before < times[0]
    assert [each.id for each in operations.latest(table, 2)] == [found[5].id, found[4].id]
    assert operations.latest(table, 9, at=before) == []
    for narrowed, ids in (
        ({"operation": "pause"}, [4]),
        ({"topic": "orders"}, [5, 4, 3]),
        ({"topic": "order"}, []),
        ({"topic": "orders", "operation": "controls"}, [5]),
        ({"principal": "JANE"}, [4]),
    ):
        assert operations.latest(table, 9, **narrowed) == [found[number] for number in ids], narrowed


def test_a_list_compares_the_last_operations_of_each_range_of_ids(
    table: TaskTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here all IDs have the same first digit, so they are in one range."""
    monkeypatch.setattr(operations, "new_id", iter("7" * number for number in range(50, 0, -1)).__next__)
    ids = [operations.begin(table, name, {}).id for name in ("cancel", *["view"] * 4)]
    assert [each.id for each in operations.latest(table, 3)] == ids[:1:-1]
    for compared, found in ((4, []), (5, ids[:1])):
        monkeypatch.setattr(operations, "COMPARED", compared)
        assert [each.id for each in operations.latest(table, 1, operation="cancel")] == found


def test_an_id_begins_with_a_random_digit_and_then_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = []
    for number in range(200):
        monkeypatch.setattr(operations.time, "time", lambda number=number: 2e9 + number / 1_000)
        ids.append(operations.new_id())
    assert all(str(uuid.UUID(id)) == id for id in ids)
    assert {id[0] for id in ids} == set("0123456789abcdef")
    assert [id[1:] for id in ids] == sorted((id[1:] for id in ids), reverse=True)
    assert all(id[1:] < "01" and uuid.UUID(id).version == 4 for id in ids)


def test_no_task_is_changed_without_a_record(database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch):
    """A transaction that is aborted counts once."""
    insert(database, [row("a", **DEAD)])
    original = TaskTable.transact

    def twice(self: TaskTable, tag: str, work: Any) -> Any:
        def again(transaction: Any) -> Any:
            work(transaction)  # what Spanner does after an abort, except that it drops these mutations
            transaction._transaction._mutations.clear()
            return work(transaction)

        return original(self, tag, again)

    monkeypatch.setattr(TaskTable, "transact", twice)
    list(changes.change(table, "retry", TaskSelection(ids=("a",))))
    [record] = recorded(table)
    assert record.tasks == 1

    before = rows_of(database)
    monkeypatch.setattr("outbox.admin.operations.as_json", lambda _selection: None)  # the column is NOT NULL
    insert(database, [row("b", **DEAD)])
    with pytest.raises(Exception, match="Selection"):
        list(changes.change(table, "cancel", TaskSelection(state="dead", ids=("b",))))
    assert rows_of(database).keys() == before.keys() | {"b"}


def test_changed_tasks_without_an_end_are_a_warning(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch
):
    """The tasks are changed, so the command does not fail."""
    insert(database, [row("a", **DEAD)])
    original = TaskTable.transact

    def fail(self: TaskTable, tag: str, work: Any) -> Any:
        if tag == "outbox-operations":
            raise NotReached("Spanner did not answer")
        return original(self, tag, work)

    monkeypatch.setattr(TaskTable, "transact", fail)
    *_, last = changes.change(table, "retry", TaskSelection(ids=("a",)))
    assert last.warning is not None
    assert "not recorded as finished: Spanner did not answer" in last.warning
