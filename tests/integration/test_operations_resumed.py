"""A recorded retry, purge or cancel: previewed, begun, stopped, continued by another process. No task changes twice."""

import itertools
import re
from datetime import timedelta
from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.admin import changes, operations
from outbox.admin.changes import TaskSelection
from outbox.admin.operations import RECORDED_IDS, Author, NotContinued, Operation
from outbox.admin.table import TaskTable
from outbox.devtools.emulators import Emulators
from outbox.errors import NotReached, OutboxError
from outbox.table.states import CANCELLED, NEVER
from tests.support.commands import Commands
from tests.support.operations import FUTURE, PAST, changed, insert, opened, row, rows_of

DEAD = {"AvailableAt": NEVER, "Attempts": 9, "LastError": "not_found: no topic\nmore"}
JANE, JOHN = Author("jane@example.com", "the topic exists now"), Author("john@example.com", "wait for the fix")
NAMES = [f"{n:02}" for n in range(24)]
ID = "00000000-0000-0000-0000-000000000001"
CASES = [
    ("retry", TaskSelection(state="dead", until=FUTURE), DEAD),
    ("retry", TaskSelection(ids=tuple(NAMES)), DEAD),
    ("retry", TaskSelection(state="sent", until=PAST + timedelta(hours=1)), {"SentAt": PAST}),
    ("cancel", TaskSelection(state="dead", until=FUTURE), DEAD),
    ("purge", TaskSelection(state="sent", until=FUTURE), {"SentAt": PAST}),
    ("restore", TaskSelection(state=CANCELLED, since=PAST), {}),
]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "CHUNK", 3)
    monkeypatch.setattr(changes, "PAGE", 4)


def fill(database: Database, columns: dict[str, Any]) -> None:
    insert(database, [row(id, **columns, OrderingKey="k" if int(id) % 4 else None) for id in NAMES])


def begin(table: TaskTable, selection: TaskSelection, name: str = "retry", id: str = ID) -> None:
    assert changes.begin(table, name, selection, JANE, id=id, selected=len(NAMES))


def found(table: TaskTable, id: str = ID) -> Operation:
    operation = operations.operation(table, id)
    assert operation is not None
    return operation


def dead_again(database: Database, ids: tuple[str, ...]) -> None:
    """What a worker does if the reason of the failure remains."""
    with database.batch() as batch:
        batch.update("AsynchronousTasks", ("Id", "AvailableAt"), [(id, NEVER) for id in ids])


@pytest.mark.parametrize(("name", "selection", "columns"), CASES)
def test_a_change_that_lost_its_process_continues_after_its_last_chunk(
    database: Database, table: TaskTable, name: str, selection: TaskSelection, columns: dict[str, Any]
):
    """No task is left out, and a retried task that is dead again is not retried twice."""
    fill(database, columns)
    if name == "restore":
        list(changes.change(table, "cancel", TaskSelection(state="unsent", ids=tuple(NAMES))))
    begin(table, selection, name)
    done: list[str] = []
    for chunks in (1, 2, 4, 100):
        process = changes.resume(TaskTable(opened(database)), ID)
        for outcome in itertools.islice(process, chunks):
            done += outcome.changed
            if name == "retry" and selection.state != "sent":
                dead_again(database, outcome.changed)
        assert found(table).tasks == len(done)
        assert (found(table).finished_at is None) == (chunks < 100)
    assert sorted(done) == NAMES
    operation = found(table)
    assert (operation.principal, operation.reason, operation.selected) == (JANE.principal, JANE.reason, len(NAMES))
    assert operation.state(table.now()) == "finished"
    with pytest.raises(NotContinued):
        operations.proceed(table, ID, JOHN)
    with pytest.raises(NotContinued):
        list(changes.resume(table, ID))


def test_a_commit_without_an_answer_is_not_repeated(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch
):
    fill(database, DEAD)
    begin(table, TaskSelection(state="dead"))
    original, calls = TaskTable.transact, itertools.count(1)

    def unanswered(self: TaskTable, tag: str, work: Any) -> Any:
        result = original(self, tag, work)
        if next(calls) == 2:
            raise NotReached("Spanner did not answer")
        return result

    monkeypatch.setattr(TaskTable, "transact", unanswered)
    done: list[str] = []
    with pytest.raises(NotReached):
        done += changed(changes.resume(table, ID))
    retried = {id for id, columns in rows_of(database).items() if columns["AvailableAt"] != NEVER}
    assert len(retried) == found(table).tasks < len(NAMES)
    dead_again(database, tuple(retried))
    done = changed(changes.resume(table, ID))
    assert sorted([*done, *retried]) == NAMES


def test_two_processes_that_continue_one_operation_share_its_chunks_once(database: Database, table: TaskTable):
    """The one that comes second with a chunk ends, and the record counts each task once."""
    fill(database, DEAD)
    begin(table, TaskSelection(state="dead"))
    first, second = changes.resume(table, ID), changes.resume(TaskTable(opened(database)), ID)
    done = list(next(first).changed)
    with pytest.raises(NotContinued, match="continued by another process"):
        next(second)
    second = changes.resume(table, ID)
    done += next(second).changed
    with pytest.raises(NotContinued):
        next(first)
    done += changed(second)
    assert sorted(done) == NAMES
    assert found(table).tasks == len(NAMES)


def test_an_operation_that_cannot_be_continued_says_why(database: Database, table: TaskTable, emulators: Emulators):
    """And stays stopped."""
    ids = tuple(map(str, range(RECORDED_IDS + 1)))
    begin(table, TaskSelection(ids=ids), id="too many")
    begin(table, TaskSelection(state="dead"), id="other layout")
    with database.batch() as batch:
        rows = [("other layout", '{"column": "Shard32", "shard": 3, "after": "x"}')]
        batch.update("AsynchronousTaskOperations", ("OperationId", "Position"), rows)
    for id in ("too many", "other layout"):
        operations.stop(table, id, JOHN)
    stop = operations.latest(table, 1)[0]
    assert (stop.operation, stop.selection) == ("stop", '{"operation": "other layout"}')
    for id, reason in (
        ("too many", "operation too many cannot be continued: its record does not contain the whole selection"),
        ("other layout", "number of shards was changed"),
        (stop.id, "is not a retry, resend, purge, cancel or restore"),
        ("gone", "does not exist"),
    ):
        with pytest.raises(OutboxError, match=reason):
            list(changes.resume(table, id))
        for flags in ([], ["--dry-run"]):
            refused = Commands(emulators, database).here("operations", "continue", id, *flags)
            assert (refused.code, refused.stdout) == (1, "")
            assert re.search(reason, refused.stderr)
    for id in ("too many", "other layout"):
        assert found(table, id).stopped_at is not None, "the note of the stop"
    for change, id in itertools.product((operations.stop, operations.proceed), (stop.id, "gone")):
        with pytest.raises(NotContinued, match="is finished, or does not exist"):
            change(table, id, JOHN)
