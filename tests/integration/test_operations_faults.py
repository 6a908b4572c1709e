"""What the operators' commands say of a Spanner that goes away, and of a table of another shape."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.emulators import Emulators
from outbox.errors import NotReached, OutboxError
from outbox.operations import backlog, changes, table, tasks
from outbox.operations import database as opening
from outbox.operations.changes import Selection
from outbox.operations.table import TaskTable
from outbox.operations.tasks import Position
from outbox.states import NEVER
from tests.support.operations import FUTURE, PAST, Watch, insert, opened, row, rows_of
from tests.support.proxy import Proxy

#: Seconds in the place of a minute, and of five.
SHORT = 1.0
QUERY, COMMIT = "execute_streaming_sql", "commit"


@pytest.fixture
def full(database: Database) -> Database:
    """A task of each kind."""
    every: list[dict[str, Any]] = [{"SentAt": PAST}, {"AvailableAt": NEVER}, {"AvailableAt": FUTURE, "Attempts": 1}, {}]
    insert(database, [row(str(n), **each) for n, each in enumerate(every)])
    return database


def selected(state: str) -> Selection:
    """Return a selection of a state."""
    return Selection(state=state, until=FUTURE)


WORK: dict[str, Callable[[TaskTable], Any]] = {
    "status": backlog.read,
    "status --exact": lambda table: backlog.read(table, exact=True),
    "list": lambda table: tasks.listed(table, Selection(), 10),
    "show": lambda table: tasks.task(table, "0"),
    "tail": lambda table: tasks.sent_after(table, Position(PAST), None, 10),
    "count": lambda table: changes.count(table, selected("dead"), exact=True),
    "retry": lambda table: list(changes.retry(table, selected("dead"))),
    "retry ids": lambda table: list(changes.retry(table, Selection(ids=("1",)))),
    "purge": lambda table: list(changes.purge(table, selected("sent"))),
    "discard": lambda table: list(changes.discard(table, ["1"])),
}


@pytest.mark.parametrize(
    ("work", "call", "number", "fault"),
    [
        ("status", QUERY, 4, Proxy.hang),
        ("list", QUERY, 3, Proxy.refuse),
        ("tail", QUERY, 1, Proxy.hang),
        ("count", QUERY, 3, Proxy.refuse),
        ("retry", QUERY, 5, Proxy.hang),
        ("retry ids", COMMIT, 1, Proxy.refuse),
        ("purge", COMMIT, 1, Proxy.hang),
        ("discard", COMMIT, 1, Proxy.mute),
    ],
)
def test_nothing_waits_for_a_spanner_that_goes_away(  # noqa: PLR0917 - pytest names them
    emulators: Emulators,
    full: Database,
    monkeypatch: pytest.MonkeyPatch,
    work: str,
    call: str,
    number: int,
    fault: Callable[[Proxy], None],
):
    """In the middle of the work: it is told within the limit of the call, and a task is either changed or it is not."""
    for module in (backlog, changes, table, tasks):
        monkeypatch.setattr(module, "LOOK_SECONDS", SHORT)
    monkeypatch.setattr(changes, "COUNT_SECONDS", SHORT)
    monkeypatch.setattr(opening, "CALL_SECONDS", SHORT)
    monkeypatch.setitem(TaskTable.query.__kwdefaults__, "seconds", SHORT)
    before = rows_of(full)
    with Proxy(emulators.spanner_host) as proxy:
        monkeypatch.setenv("SPANNER_EMULATOR_HOST", proxy.address)
        ours = opened(full)
        opened_table = TaskTable(ours)
        WORK[work](TaskTable(ours)) if work in ("list", "tail", "count") else opened_table.now()
        calls, original = 0, getattr(ours.spanner_api, call)

        def fail(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                fault(proxy)
            return original(*arguments, **keywords)

        monkeypatch.setattr(ours.spanner_api, call, fail)
        begun = time.monotonic()
        with pytest.raises(NotReached, match="Spanner did not answer"):
            WORK[work](opened_table)
        assert time.monotonic() - begun < 8 * SHORT
        assert calls >= number
    after = rows_of(full)
    if fault is not Proxy.mute:  # then the commit came through, and only its answer did not
        assert after == before
    else:
        assert after == {id: each for id, each in before.items() if id != "1"}


@pytest.mark.parametrize("work", ["status --exact", "list", "tail", "count", "retry", "purge"])
def test_a_missing_index_is_named(full: Database, work: str):
    """Every look is forced to it: the user hears what to do, and nothing reads the whole table instead."""
    opened_table = TaskTable(opened(full))
    full.update_ddl(["DROP INDEX AsynchronousTasksToSend"]).result()
    with pytest.raises(NotReached, match=r"index AsynchronousTasksToSend is missing.*See `outbox schema apply`"):
        WORK[work](opened_table)


@pytest.mark.parametrize("work", ["show", "retry ids"])
def test_work_by_ids_needs_no_index(full: Database, work: str):
    """It goes by the primary key."""
    opened_table = TaskTable(opened(full))
    full.update_ddl(["DROP INDEX AsynchronousTasksToSend"]).result()
    assert WORK[work](opened_table)


def test_a_column_that_is_missing_is_named(full: Database):
    """Also where the transaction meets it, which then holds no locks and has changed nothing."""
    opened_table = TaskTable(opened(full))
    full.update_ddl(["ALTER TABLE AsynchronousTasks DROP COLUMN LastError"]).result()
    for work in ("show", "retry ids", "list"):
        with pytest.raises(NotReached, match=r"LastError.*See `outbox schema apply`"):
            WORK[work](opened_table)
    with full.batch() as batch:
        batch.update("AsynchronousTasks", ("Id", "Attempts"), [("1", 5)])


@pytest.fixture
def dropped(full: Database) -> Iterator[TaskTable]:
    """A table that is dropped after it was opened."""
    opened_table = TaskTable(opened(full))
    names = ("INDEX AsynchronousTasksToSend", "INDEX AsynchronousTasksInOrder", "TABLE AsynchronousTasks")
    full.update_ddl([f"DROP {name}" for name in names]).result()
    return opened_table


def test_a_table_that_is_gone_is_named(dropped: TaskTable):
    """Whatever the command does, but for `status`, which is of ten seconds ago."""
    for work in set(WORK) - {"status"}:
        with pytest.raises(NotReached, match=r"AsynchronousTasks.* is missing"):
            WORK[work](dropped)


def test_a_refusal_that_is_of_no_schema_is_told_as_it_is(database: Database):
    """The table is as it should be, so nobody is sent to `outbox schema apply`."""
    opened_table = TaskTable(opened(database))
    with pytest.raises(OutboxError, match="Spanner refused") as raised:
        opened_table.query("SELECT FROM", "outbox-test")
    assert "schema apply" not in str(raised.value)
    with pytest.raises(OutboxError, match="Spanner refused") as raised:
        opened_table.transact("outbox-test", lambda transaction: transaction.query("SELECT no", {}))
    assert "schema apply" not in str(raised.value)
    assert opened_table.now()


def test_every_request_is_of_low_priority_and_tagged(full: Database):
    """Reads, those of a transaction, and its commit: whoever looks at Spanner's statistics sees whose they are."""
    watch = Watch(full)
    for work in WORK.values():
        work(watch.table)
    parked = {"AvailableAt": FUTURE, "LastError": "parked: x", "OrderingKey": "k"}
    insert(full, [row("head", AvailableAt=NEVER, OrderingKey="k"), row("parked", **parked)])
    list(changes.discard(watch.table, ["head"]))
    watch.check()
    assert watch.tags() == {
        "outbox-now", "outbox-status", "outbox-topics", "outbox-list", "outbox-show", "outbox-tail", "outbox-count",
        "outbox-retry", "outbox-purge", "outbox-discard", "outbox-wake",
    }  # fmt: skip
    tags = {request.request_options.transaction_tag for name, request in watch.requests if name == "commit"}
    assert tags == {"outbox-retry", "outbox-purge", "outbox-discard", "outbox-wake"}
    locking = [
        request.request_options.request_tag
        for name, request in watch.requests
        if name != "commit" and "single_use" not in request.transaction
    ]
    assert set(locking) == tags
