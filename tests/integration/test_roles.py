"""schema/roles.sql: the emulator has no roles, so each request to it is compared with the grants."""

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import pytest
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.instance import Instance
from google.pubsub_v1.types import PubsubMessage

import outbox
from outbox import inbox
from outbox.reading import Position, SentTasks
from outbox.rows import backlog
from outbox.rows.task_table import TaskTable
from outbox.table import ddl, schema
from outbox.table.connection import open_database
from outbox.table.states import CANCELLED, NEVER, STATES
from outbox_admin import operations
from outbox_admin.changes import chunks, execution
from outbox_admin.status import live_workers
from outbox_admin.tasks import lookup, selected
from outbox_admin.tasks.selections import TaskSelection
from outbox_admin.topics import editing
from publishworker.spanner.grants import verify_grants
from publishworker.spanner.store import any_to_send, topics_to_send
from publishworker.types import Deferred, NotSent, Published, TopicKey
from tests.support import real
from tests.support.operations import FUTURE, PAST, insert, row
from tests.support.parts import poll_request
from tests.support.roles import ALL, Grants, Heard, grants, refused, statements
from tests.support.spanner import place

TASK = {outbox.TASK_ID_ATTRIBUTE: "task-1"}
of_emulator = pytest.mark.emulator_only("its database has no roles, and only the emulator accepts any name")
of_workers = pytest.mark.parametrize("role", ["publishworker", "outbox_pipeline"])
TABLES = ("AsynchronousTasks", "AsynchronousTaskTopics", "AsynchronousTaskWorkers", "AsynchronousTaskShards")


def allowed_all(role: str, heard: Heard, *, optional: bool = False) -> Grants:
    """Return the grants of a role, which allow each request."""
    allowed = grants(role, optional=optional)
    assert list(refused(allowed, heard.commits)) == []
    assert {("SELECT", table) for table in heard.tables} <= allowed.keys()
    return allowed


def written(heard: Heard, kind: str) -> set[str]:
    """Return the columns of all mutations of a kind. A grant of another column would be one that nothing needs."""
    return {column for commit in heard.commits for each in commit.mutations for column in getattr(each, kind).columns}


def test_every_statement_is_a_role_or_a_grant_of_existing_objects() -> None:
    """Roles before their grants; tables and columns as in the DDL."""
    tables = " ".join(ddl.statements())
    created: list[str] = []
    for statement in statements(optional=True):
        if creation := re.fullmatch(r"CREATE ROLE (\w+)", statement):
            created.append(creation[1])
            continue
        role = statement.rpartition(" ")[2]
        assert role in created
        for (_, table), columns in grants(role, optional=True).items():
            assert f"CREATE TABLE {table} " in tables
            assert all(re.search(rf"\b{column}\b", tables) for column in columns - ALL)
    assert created == [
        "publishworker", "outbox_operator", "outbox_viewer", "outbox_application", "outbox_subscriber",
        "outbox_pipeline",
    ]  # fmt: skip


@of_emulator
@of_workers
def test_the_relay_stays_within_its_role(database: Database, role: str) -> None:
    """All that a store does, in sessions of that role: the worker's, and that of a drain by Spark."""
    insert(database, [row(id, OrderingKey="k") for id in ("clean", "recorded", "deferred", "old")])
    ours = open_database(place(database.database_id, database_role=role))
    heard = Heard(ours)
    schema.differences(ours, ddl.statements())
    verify_grants(ours)
    store = real.Store(ours, schema.layout(ours))
    store.poll(poll_request("orders", per_range=9, due=True, below_priority=0))
    store.discover(range(10), ())
    store.key_heads({TopicKey("orders", "k"): 0}, 9, skip_dead=True)

    marks = {"clean": Published("1"), "old": Published("2"), "recorded": NotSent(1, NEVER, None, "error")}
    marks["deferred"] = Deferred(FUTURE, "recorded")
    store.claim(list(marks), lambda _rows, _now: marks)
    store.claim(["recorded"], lambda _rows, _now: {"recorded": Published("3")})
    store.heartbeat("me", datetime.now(UTC), (), remove=["gone"])
    store.delete_heartbeat("me")
    any_to_send(store), topics_to_send(store), backlog.read_unsent(TaskTable(store.database))
    allowed = allowed_all(role, heard)
    without = {**allowed, ("UPDATE", "AsynchronousTasks"): allowed["UPDATE", "AsynchronousTasks"] - {"Attempts"}}
    assert "UPDATE ['Attempts'] of AsynchronousTasks" in set(refused(without, heard.commits))
    assert len(heard.commits) == 6
    assert heard.tables == set(TABLES)
    assert heard.roles == {role}
    assert ours.renewed().database_role == role  # also after its session was lost
    assert written(heard, "update") == allowed["UPDATE", "AsynchronousTasks"]


@of_emulator
def test_operators_stay_within_their_role(database: Database) -> None:
    """All commands that change something, and those that look at everything."""
    insert(database, [row(id, AvailableAt=NEVER, OrderingKey="k") for id in ("dead", "dead too")])
    behind = row("behind", AvailableAt=FUTURE, OrderingKey="k", BlockedBy="dead")
    insert(database, [behind, row("sent", SentAt=PAST)])
    role = "outbox_operator"
    table = TaskTable(open_database(place(database.database_id, database_role=role)))
    heard = Heard(table.database)
    backlog.read(table)
    backlog.oldest_ages(table)
    lookup.task(table, "sent")
    assert operations.latest(table, 1) == []
    works: Sequence[Callable[[], object]] = [
        lambda: list(execution.change(table, "retry", TaskSelection(ids=("dead",)))),
        lambda: list(execution.change(table, "cancel", TaskSelection(state="dead", ids=("dead too",)))),
        lambda: list(execution.change(table, "purge", TaskSelection(state="sent", until=datetime.now(UTC)))),
        lambda: editing.change(table, "pause", ["orders"], {"paused": True}),
        lambda: execution.begin(
            table, "cancel", TaskSelection(state="blocked"), operations.UNNAMED, id="1", selected=1
        ),
        lambda: operations.stop(table, "1", operations.UNNAMED),
        lambda: operations.proceed(table, "1", operations.UNNAMED),
        lambda: list(execution.resume(table, "1")),
        lambda: operations.begin(table, "view", {"ids": ["behind"]}),
        lambda: list(execution.change(table, "restore", TaskSelection(state=CANCELLED, ids=("dead too",)))),
        lambda: list(execution.change(table, "cancel", TaskSelection(state="unsent", ids=("dead too",)))),
        lambda: list(execution.change(table, "purge", TaskSelection(state=CANCELLED))),
    ]
    for work in works:
        before = len(heard.commits)
        work()
        assert len(heard.commits) > before
    assert written(heard, "update") >= allowed_all(role, heard)["UPDATE", "AsynchronousTasks"]
    assert heard.roles <= {role}


def test_viewers_read_all_but_the_messages(own_database: Database) -> None:
    """Every function that only reads, except the one that returns a message."""
    insert(own_database, [row("dead", AvailableAt=NEVER), row("behind", AvailableAt=FUTURE, BlockedBy="dead")])
    heard = Heard(own_database)
    table = TaskTable(own_database)
    seen = backlog.read(table)
    backlog.oldest_ages(table), operations.latest(table, 1), table.controls(), editing.unknown(table, ["a"])
    lookup.errors(table, seen), lookup.blocked_heads(table, seen), lookup.find(table, STATES), lookup.find(table)
    lookup.find(table, [CANCELLED]), lookup.task(table, "none", data=False)
    chunks.preview(table, TaskSelection(state=CANCELLED), "restore")
    lookup.beginning_with(table, ["dead"], 2), SentTasks(table, Position(PAST), None).page()
    selected.count(table, TaskSelection(ids=("dead",)), exact=True)
    live_workers.shards_without_worker(table, [], table.now())
    found = lookup.task(table, "dead", data=False)
    assert found
    allowed = grants("outbox_viewer")
    assert allowed["SELECT", "AsynchronousTasks"] == found.columns.keys() == ddl.columns().keys() - {"Data"}
    assert {("SELECT", table) for table in heard.tables} == allowed.keys()
    assert not any(re.search(r"\bData\b", sql) for sql in heard.sql)
    lookup.task(table, "dead")
    assert any(re.search(r"\bData\b", sql) for sql in heard.sql)


def test_applications_stay_within_their_role(database: Database, spanner_instance: Instance) -> None:
    """Registered once, or twice, they read nothing but the id."""
    ours = spanner_instance.database(database.database_id)
    heard = Heard(ours)
    for more in ({"ordering_key": "k", "available_at": PAST, "expires_at": FUTURE}, {"at_most_once": True}):
        ours.run_in_transaction(outbox.register, "orders", b"", **more)
    ours.run_in_transaction(lambda transaction: outbox.register_once(transaction, "orders", b"", task_id="1"))
    allowed = allowed_all("outbox_application", heard)
    assert (heard.tables, allowed["SELECT", "AsynchronousTasks"]) == ({"AsynchronousTasks"}, {"Id"})
    assert written(heard, "insert") == allowed["INSERT", "AsynchronousTasks"]


def test_applications_that_cancel_need_the_optional_grants(database: Database, spanner_instance: Instance) -> None:
    """The task has a key, so that the next task is released."""
    insert(database, [row("a", OrderingKey="k"), row("b", OrderingKey="k", AvailableAt=FUTURE, BlockedBy="a")])
    ours = spanner_instance.database(database.database_id)
    heard = Heard(ours)
    assert ours.run_in_transaction(outbox.cancel, "a")
    allowed, without = allowed_all("outbox_application", heard, optional=True), grants("outbox_application")
    assert {("SELECT", table) for table in heard.tables} == {each for each in allowed if each[0] == "SELECT"}
    assert allowed.keys() - without.keys() == {
        ("SELECT", "AsynchronousTaskShards"), ("UPDATE", "AsynchronousTasks"),
    }  # fmt: skip
    assert written(heard, "update") == allowed["UPDATE", "AsynchronousTasks"]


def test_subscribers_stay_within_their_role(own_database: Database) -> None:
    heard = Heard(own_database)
    inbox.Handler(own_database, consumer="billing")(lambda *_: None).process(PubsubMessage(attributes=TASK))
    allowed_all("outbox_subscriber", heard)
    assert heard.tables == {"ProcessedTasks"}
