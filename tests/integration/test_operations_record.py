"""Each change of an operator is recorded in the transactions that make it: who, when, the selection and the count."""

import itertools
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
from outbox.base.values import shown
from outbox.errors import NotReached
from outbox.table.states import NEVER
from tests.support.operations import FUTURE, insert, row, rows_of

DEAD = {"AvailableAt": NEVER, "Attempts": 9}


def recorded(table: TaskTable) -> list[Operation]:
    """Return all operations, the oldest first."""
    return operations.latest(table, 100)[::-1]


def test_each_change_has_a_record(database: Database, table: TaskTable):
    """One that changes nothing has one, too. They are listed by operation, topic and person."""
    insert(database, [row("pending")])
    before, person = table.now(), Author("jane@example.com", "no invoices today")
    assert [each.changed for each in changes.change(table, "retry", TaskSelection(ids=("pending", "missing")))] == [()]
    list(changes.change(table, "purge", TaskSelection(state="sent", topic="orders", until=FUTURE)))
    topics.change(table, "pause", ["orders", "bills"], {"paused": True}, person)
    for _ in range(2):  # the second one changes nothing
        topics.change(table, "controls", ["orders"], {"rate_per_second": 0.5, "burst": 3, "max_in_flight": None})
    found = recorded(table)
    assert [(each.operation, each.tasks) for each in found] == [
        ("retry", 0), ("purge", 0), ("pause", None), ("controls", None)
    ]  # fmt: skip
    purged, paused = (json.loads(each.selection) for each in found[1:3])
    assert datetime.fromisoformat(purged.pop("as_of")) < found[1].started_at
    assert purged == {"state": "sent", "topic": "orders", "until": shown(FUTURE), "include_expired": True}
    assert paused == {"topics": {each: {"paused": [None, True]} for each in ("orders", "bills")}}
    assert [each.principal for each in found] == [*[table.principal] * 2, person.principal, table.principal]
    times = [time for each in found for time in (each.started_at, each.finished_at)]
    assert times == sorted(times, key=lambda time: time or FUTURE)
    assert before < times[0]
    assert [each.id for each in operations.latest(table, 2)] == [found[3].id, found[2].id]
    assert operations.latest(table, 9, at=before) == []
    for narrowed, ids in (
        ({"operation": "pause"}, [2]),
        ({"topic": "orders"}, [3, 2, 1]),
        ({"topic": "order"}, []),
        ({"topic": "orders", "operation": "controls"}, [3]),
        ({"principal": "JANE"}, [2]),
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


def test_an_operation_that_could_not_be_recorded_as_finished_is_continued(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch
):
    """Its tasks are changed, and are not changed again."""
    insert(database, [row("a", **DEAD)])
    original, calls = TaskTable.transact, itertools.count(1)

    def fail(self: TaskTable, tag: str, work: Any) -> Any:
        if next(calls) == 3:
            raise NotReached("Spanner did not answer")
        return original(self, tag, work)

    monkeypatch.setattr(TaskTable, "transact", fail)
    with pytest.raises(NotReached):
        list(changes.change(table, "retry", TaskSelection(ids=("a",))))
    [record] = recorded(table)
    assert (record.tasks, record.finished_at) == (1, None)
    assert list(changes.resume(table, record.id)) == []
    assert recorded(table)[0].finished_at is not None
