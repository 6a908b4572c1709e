"""Operators' commands while Spanner is unavailable, or if the table has another shape."""

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.admin import backlog, changes, tasks, topics
from outbox.admin.changes import TaskSelection
from outbox.admin.table import TaskTable
from outbox.devtools.emulators import Emulators
from outbox.errors import NotReached, OutboxError
from outbox.reading import Position, SentTasks
from outbox.table.connection import UNARY_SECONDS
from outbox.table.states import NEVER
from outbox.table.transactions import retry_and_timeout
from tests.support.operations import FUTURE, PAST, Watch, insert, opened, row, rows_of, update
from tests.support.proxy import Proxy

QUERY, READ, COMMIT = "execute_streaming_sql", "streaming_read", "commit"
#: Seconds for a call to an unavailable Spanner, in place of its own limit.
SHORT = 0.3


def fill(database: Database) -> None:
    every: list[dict[str, Any]] = [{"SentAt": PAST}, {"AvailableAt": NEVER}, {"AvailableAt": FUTURE, "Attempts": 1}, {}]
    insert(database, [row(str(n), **each) for n, each in enumerate(every)])


def selected(state: str) -> TaskSelection:
    return TaskSelection(state=state, until=FUTURE)


WORK: dict[str, Callable[[TaskTable], Any]] = {
    "status": backlog.read,
    "status --exact": lambda table: backlog.read(table, exact=True),
    "list": tasks.find,
    "show": lambda table: tasks.task(table, "0"),
    "tail": lambda table: SentTasks(table, Position(PAST), None).page(),
    "count": lambda table: changes.count(table, selected("dead"), exact=True),
    "retry": lambda table: list(changes.change(table, "retry", selected("dead"))),
    "retry ids": lambda table: list(changes.change(table, "retry", TaskSelection(ids=("1",)))),
    "purge": lambda table: list(changes.change(table, "purge", selected("sent"))),
    "cancel": lambda table: list(changes.change(table, "cancel", TaskSelection(state="unsent", ids=("1",)))),
    "waiting topics": lambda table: topics.waiting(table, ["orders"]),
    "pause": lambda table: topics.change(table, "pause", ["orders"], {"paused": True}),
}


@pytest.mark.parametrize(
    ("work", "call", "number", "fault"),
    [
        ("status", QUERY, 4, Proxy.hang),
        ("tail", QUERY, 1, Proxy.hang),
        ("retry", QUERY, 5, Proxy.hang),
        ("retry ids", COMMIT, 2, Proxy.refuse),
        ("cancel", COMMIT, 2, Proxy.mute),
        ("pause", READ, 1, Proxy.refuse),
        ("pause", COMMIT, 1, Proxy.hang),
    ],
)
def test_no_command_hangs_when_spanner_becomes_unavailable(  # noqa: PLR0917 - pytest names them
    emulators: Emulators,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    work: str,
    call: str,
    number: int,
    fault: Callable[[Proxy], None],
):
    """In the middle of the work: every call has a limit, after which it fails. A task is either changed or not."""
    fill(database)
    before = rows_of(database)
    with Proxy(emulators.spanner_host) as proxy:
        monkeypatch.setenv("SPANNER_EMULATOR_HOST", proxy.address)
        ours = opened(database)
        table = TaskTable(ours)
        WORK[work](table) if work == "tail" else table.now()
        seen: list[str] = []

        def limited(name: str, original: Any, *arguments: Any, **keywords: Any) -> Any:
            if name == call:
                seen.append(name)
                if len(seen) == number:
                    fault(proxy)
            assert name in UNARY_SECONDS or keywords["timeout"] == keywords["retry"]._timeout <= 600
            away = len(seen) >= number
            return original(*arguments, **(keywords | retry_and_timeout(SHORT) if away else keywords))

        for name in (QUERY, READ, *UNARY_SECONDS):
            original = getattr(ours.spanner_api, name)
            monkeypatch.setattr(ours.spanner_api, name, functools.partial(limited, name, original))
        begun = time.monotonic()
        with pytest.raises(NotReached, match="Spanner did not answer"):
            WORK[work](table)
        assert time.monotonic() - begun < 8
        assert len(seen) >= number
    after = rows_of(database)
    if fault is not Proxy.mute:  # then the commit came through, and only its answer did not
        assert after == before
    else:
        assert after == {id: each for id, each in before.items() if id != "1"}


@pytest.mark.extended
def test_a_missing_index_is_named(own_database: Database):
    """A missing column as well; a transaction that meets it holds no locks and has changed nothing."""
    fill(own_database)
    table = TaskTable(opened(own_database))
    own_database.update_ddl(["ALTER TABLE AsynchronousTasks DROP COLUMN ExpiresAt"]).result()
    for work in ("show", "retry ids", "list"):
        with pytest.raises(NotReached, match=r"ExpiresAt.*See `outbox schema apply`"):
            WORK[work](table)
    with own_database.batch() as batch:
        batch.update("AsynchronousTasks", ("Id", "Attempts"), [("1", 5)])
    column = "ALTER TABLE AsynchronousTasks ADD COLUMN ExpiresAt TIMESTAMP"
    own_database.update_ddl([column, "DROP INDEX AsynchronousTasksToSend"]).result()
    for work in ("status --exact", "list", "tail", "count", "retry", "purge"):
        with pytest.raises(NotReached, match=r"index AsynchronousTasksToSend is missing.*See `outbox schema apply`"):
            WORK[work](table)
    assert all(WORK[work](table) for work in ("show", "retry ids"))  # by the primary key
    own_database.update_ddl(["DROP TABLE AsynchronousTaskOperations"]).result()
    update(own_database, "1", AvailableAt=NEVER)
    before = rows_of(own_database)
    for work in ("pause", "cancel"):  # nothing is changed without its record
        with pytest.raises(NotReached, match=r"AsynchronousTaskOperations is missing.*See `outbox schema apply`"):
            WORK[work](table)
    assert (rows_of(own_database), table.controls()) == (before, {})


def test_a_refusal_unrelated_to_the_schema_is_reported_as_it_is(database: Database):
    """The table is as it should be, so `outbox schema apply` is not recommended."""
    table = TaskTable(opened(database))
    for refused in (
        lambda: table.query("SELECT FROM", "outbox-test"),
        lambda: table.transact("outbox-test", lambda transaction: transaction.query("SELECT no", {})),
    ):
        with pytest.raises(OutboxError, match="Spanner refused") as raised:
            refused()
        assert "schema apply" not in str(raised.value)
    assert table.now()


def test_every_request_has_low_priority_and_a_tag(database: Database, watch: Watch):
    """Spanner's statistics show which requests are the commands'. `watch` sees each."""
    fill(database)
    for work in WORK.values():
        work(watch.table)
    assert watch.tags() >= {"outbox-status", "outbox-topics", "outbox-list", "outbox-show", "outbox-reader"}
    tags = {request.request_options.transaction_tag for name, request in watch.requests if name == "commit"}
    assert tags == {"outbox-retry", "outbox-purge", "outbox-cancel", "outbox-topics"}
