"""Every statement that is sent to Spanner, captured from the client, has a plan that does not depend on the optimizer.

The emulator shows no plans. So each statement has to force the index or the primary key of AsynchronousTasks and the
form of its joins, and to order the rows of an index by the whole key of this index.
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.admin import backlog, changes, operations, operator_sql, tasks, topics
from outbox.admin.changes import TaskSelection
from outbox.admin.table import TaskTable
from outbox.reading import Position, SentTasks
from outbox.table.connection import open_database
from outbox.table.layouts import Layout
from outbox.table.shared_sql import IN_ORDER_ORDER, TO_SEND_ORDER
from outbox.table.states import CANCELLED, STATES, UNSENT
from publishworker.spanner.store import SpannerStore
from publishworker.spanner.unsent import any_to_send, topics_in_use
from publishworker.types import TopicKey
from tests.support.operations import FUTURE, PAST, insert, row
from tests.support.parts import poll_request
from tests.support.spanner import place, record_requests
from tests.support.statements import scans

#: The tables with one row for each controlled topic, worker or operation are read as a whole.
SMALL = ("AsynchronousTaskTopics", "AsynchronousTaskWorkers", "AsynchronousTaskShards")
#: Statements that sort a bounded number of rows: the result of a list, a window of sent tasks, one page of IDs.
SORTED = {"SentAt DESC, CreatedAt DESC, Id DESC", "SentAt, CreatedAt, Id", "Id", "StartedAt DESC, OperationId"}


def problems(statement: str) -> Iterator[str]:
    """Yield what leaves the plan of a statement to the optimizer."""
    for table, hint in re.findall(r"\b(AsynchronousTask\w+)(@\{FORCE_INDEX=\w+\})?", statement):
        if not hint and table not in SMALL and not statement.startswith(("UPDATE", "DELETE")):
            yield f"no index is forced for {table}"
    for join in re.findall(r"\bJOIN\b(?!@\{[^}]*JOIN_METHOD=APPLY_JOIN)[^,]{0,40}", statement):
        if "UNNEST" not in join:
            yield f"the form is not forced of {join}"
    yield from (f"a scan: {part}" for part in scans(statement))
    for hint, order in re.findall(
        r"FROM AsynchronousTasks@\{FORCE_INDEX=(\w+)\}[^()]*?ORDER BY ([\w ,]+?) LIMIT", statement
    ):
        whole = {"AsynchronousTasksToSend": TO_SEND_ORDER, "AsynchronousTasksInOrder": IN_ORDER_ORDER}.get(hint, order)
        if order.removesuffix(", Id") != whole.removesuffix(", Id") and order not in SORTED:
            yield f"{order} is not the key of {hint}"


@pytest.fixture
def statements(database: Database) -> list[str]:
    """What the relay and all commands send, with and without each narrowing condition."""
    insert(database, [row("dead", AvailableAt=FUTURE, OrderingKey="k", BlockedBy="head"), row("sent", SentAt=PAST)])
    ours = open_database(place(database.database_id))
    sent = record_requests(ours, "execute_streaming_sql")
    store, table = SpannerStore(ours, Layout(10)), TaskTable(ours)
    for due in (False, True):
        for below_priority in (None, 50):
            store.poll(poll_request("orders", due=due, below_priority=below_priority))
    store.discover(range(10), {"orders"})
    any_to_send(store), topics_in_use(store)
    store.key_heads({TopicKey("orders", "k"): 3}, 10, skip_dead=True)
    store.claim(["sent"], lambda _rows, _now: {})
    backlog.read(table), backlog.oldest_ages(table), operations.latest(table, 5)
    operations.latest(table, 5, operation="retry", topic="orders", principal="jane")
    tasks.errors(table, backlog.read(table)), tasks.blocked_heads(table, backlog.read(table))
    narrowed = {"topic": "orders", "since": PAST, "until": datetime.now(UTC), "error": "x"}
    of_key = {"ordering_key": "k", "id_prefix": "d"}
    operations.operation(table, "x"), changes.preview(table, TaskSelection(ids=("dead",)))
    for state in (*STATES, CANCELLED):
        changes.preview(table, TaskSelection(state=state, include_expired=False))
        for more in ({}, narrowed, of_key):
            tasks.find(table, [state], TaskSelection(**more), newest=not more)
            tasks.find(table, [state], TaskSelection(**more), newest=bool(more))
            changes.count(table, TaskSelection(state=state, **more), exact=True)
    for state in ("dead", "retrying", "scheduled"):
        list(changes.change(table, "retry", TaskSelection(state=state)))
        list(changes.change(table, "retry", TaskSelection(state=state, **of_key)))
    list(changes.change(table, "retry", TaskSelection(ids=("dead",))))
    list(changes.change(table, "purge", TaskSelection(state="sent", until=PAST)))
    for more in ({"topic": "orders"}, narrowed, of_key):
        table.query(operator_sql.sent_places(TaskSelection(**more).names), "x", more | {"shard": 0})
    for statement in (operator_sql.PLACES, operator_sql.messages("TRUE")):
        table.query(statement, "x", {"ids": ["sent"]})
    for selection in (TaskSelection(state="unsent", ids=("dead",)), *(TaskSelection(state=state) for state in UNSENT)):
        list(changes.change(table, "cancel", selection))
    for selection in (TaskSelection(state=CANCELLED, ids=("dead",)), TaskSelection(state=CANCELLED, operation="1")):
        changes.preview(table, selection, "restore"), list(changes.change(table, "restore", selection))
    list(changes.change(table, "purge", TaskSelection(state=CANCELLED)))
    (
        tasks.task(table, "sent"),
        tasks.beginning_with(table, ["se"], 3),
        SentTasks(table, Position(PAST), "orders").page(),
    )
    topics.unknown(table, ["orders"])
    statements = (" ".join(request.sql.split()) for _, request in sent)
    return [each for each in statements if "INFORMATION_SCHEMA" not in each.upper()]


@pytest.mark.extended
def test_no_plan_depends_on_the_optimizer(statements: list[str]) -> None:
    assert len(set(statements)) > 40
    assert {statement: found for statement in statements if (found := list(problems(statement)))} == {}
