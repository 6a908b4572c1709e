"""Creating and checking the tables on the emulator: created objects, refusals, allowed differences, wrong databases."""

import functools
import re
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
from google.cloud.spanner_admin_database_v1 import DatabaseDialect
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.instance import Instance

import outbox
from outbox.devtools.emulators import Emulators
from outbox.errors import NotReached, OutboxError, SchemaDiffers
from outbox.rows.task_table import TaskTable
from outbox.table import applying, ddl, schema
from outbox.table.ddl import Layout
from outbox_admin.schema.reshard import Resharding
from publishworker.process import app, commands
from publishworker.process.worker_settings import WorkerSettings
from tests.support.operations import opened
from tests.support.spanner import INSTANCE, PROJECT, query

SCHEMA = Path(__file__).parents[2] / "schema"

ARTICLE_TABLE = """
CREATE TABLE AsynchronousTasks (
  Id        STRING({id_length}) NOT NULL,
  Topic     STRING(255) NOT NULL,
  Data      BYTES(MAX) NOT NULL,
  Priority  INT64 NOT NULL,
  Shard     INT64 {shard_null} AS ({shard}) STORED,
  CreatedAt TIMESTAMP NOT NULL OPTIONS (allow_commit_timestamp = {commit_timestamps}),
  SentAt    TIMESTAMP OPTIONS (allow_commit_timestamp = {commit_timestamps})
) PRIMARY KEY (Id);
CREATE INDEX AsynchronousTasksByShardSentAtPriorityCreatedAt
  ON AsynchronousTasks (Shard, SentAt, Priority DESC, CreatedAt)"""
MODULO_LAST = "ABS(MOD(FARM_FINGERPRINT(Id), 10))"
MODULO_FIRST = "MOD(ABS(FARM_FINGERPRINT(Id)), 10)"
#: The retention of tables without SentAt, and the name of a change stream.
NOT_COMPARED = {"retentionofsenttasks", "deletionofunsenttasks", "name"}

OLD_COLUMNS = ["Id", "Topic", "Data", "Priority", "CreatedAt", "SentAt"]

ALL = [title for title, _ in map(ddl.parse, ddl.statements())]


def change(database: Database, *statements: str) -> None:
    database.update_ddl(statements).result()


def tables(database: Database) -> set[str]:
    rows = query(database, "SELECT TABLE_NAME FROM INFORMATION_SCHEMA.TABLES WHERE TABLE_SCHEMA = ''")
    return {name for (name,) in rows}


def rewritten(statements: list[str], *pieces: tuple[str, str]) -> list[str]:
    """Return the DDL with each piece replaced."""
    for ours, theirs in pieces:
        changed = [each.replace(ours, theirs) for each in statements]
        assert changed != statements
        statements = changed
    return statements


@pytest.mark.parametrize(
    "options",
    [
        {}, {"shards": 1, "retention_days": 3650}, {"shards": 1000, "retention_days": None},
        {"shards": 7, "retention_days": 1, "change_stream": True},
    ],
)  # fmt: skip
def test_apply_creates_everything_once(empty_database: Database, options: dict[str, Any]) -> None:
    """The shapes parsed from the DDL are those that INFORMATION_SCHEMA shows, so a comparison means something."""
    wanted = ddl.statements(**options)
    names = [*ALL, *(["change stream AsynchronousTasksInserts"] if "change_stream" in options else [])]
    assert applying.apply(empty_database, wanted) == [(name, "created") for name in names]
    assert applying.apply(empty_database, wanted) == [(name, "exists") for name in names]
    assert schema.differences(empty_database, wanted, free=()) == []
    shapes = dict(map(ddl.parse, wanted))
    found = schema.read_parts(empty_database, shapes, {})
    for title, expected in shapes.items():
        parts = found[ddl.normalized(title)]
        assert {name: parts.get(ddl.normalized(name)) for name in expected} == expected
        further = set(parts) - {ddl.normalized(name) for name in expected}
        assert further <= NOT_COMPARED
    assert schema.layout(empty_database).shards == options.get("shards", 10)


def test_only_missing_objects_are_created_in_one_update(
    own_database: Database, emulators: Emulators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers do not miss the table of operations, which only commands need: its migration may come later."""
    with mock.patch.object(own_database, "update_ddl") as update:
        applying.apply(own_database, ddl.statements())
    update.assert_not_called()
    change(own_database, "DROP TABLE AsynchronousTaskOperations")
    assert app.verified_layout(cast("Any", own_database)) == Layout(10)
    monkeypatch.setenv("SPANNER_EMULATOR_HOST", emulators.spanner_host)
    names = {"project": PROJECT, "instance": INSTANCE, "database": own_database.database_id}
    verdicts = {verdict for verdict, _ in commands._database(WorkerSettings.read(names, {}), set())}
    assert verdicts == {"ok", "warning"}, "it has no task yet"
    change(own_database, "DROP INDEX AsynchronousTasksInOrder", "DROP TABLE AsynchronousTaskTopics")
    missing = ["index AsynchronousTasksInOrder", "table AsynchronousTaskTopics", "table AsynchronousTaskOperations"]
    assert schema.differences(own_database, ddl.statements()) == [f"{name} is missing" for name in missing]
    with mock.patch.object(own_database, "update_ddl", wraps=own_database.update_ddl) as update:
        applied = applying.apply(own_database, ddl.statements())
    assert [name for name, state in applied if state == "created"] == missing
    assert update.call_count == 1
    assert schema.differences(own_database, ddl.statements()) == []


def test_the_names_of_a_reshard_are_used(own_database: Database) -> None:
    """A deployment that applies the schema each time also does so after a change of the number of shards."""
    list(Resharding(TaskTable(opened(own_database))).run(Layout.added(3)))
    change(own_database, "DROP INDEX AsynchronousTasksInOrder3")
    applied = applying.apply(own_database, ddl.statements(), free=ddl.OWN_CHOICES)
    created = [name for name, state in applied if state == "created"]
    assert (created, len(applied)) == (["index AsynchronousTasksInOrder3"], len(ALL))
    with pytest.raises(SchemaDiffers, match="shard count: the database has 3, expected 10"):
        applying.apply(own_database, ddl.statements())


TABLE, TO_SEND = "table AsynchronousTasks", "index AsynchronousTasksToSend"
KEY = "ON AsynchronousTasks (Shard, SentAt, Topic, AvailableAt, Priority DESC, CreatedAt)"
#: A piece of our DDL, another one; the part, what the database has, what was expected.
DIFFERENT = [
    ("Id          STRING(64)", "Id          STRING(36)", f"{TABLE}, column Id", "STRING(36) NOT NULL",
     "STRING(64) NOT NULL"),
    ("Priority    INT64       NOT NULL,", "Priority    INT64,", f"{TABLE}, column Priority", "INT64", "INT64 NOT NULL"),
    ("Attempts    INT64       NOT NULL DEFAULT (0)", "Attempts INT64 NOT NULL DEFAULT (1)",
     f"{TABLE}, column Attempts", "INT64 NOT NULL DEFAULT (1)",
     "INT64 NOT NULL DEFAULT (0)"),
    ("COALESCE(OrderingKey, Id)", "Id", f"{TABLE}, column Shard",
     "INT64 NOT NULL AS (ABS(MOD(FARM_FINGERPRINT(Id), N))) STORED",
     "INT64 NOT NULL AS (ABS(MOD(FARM_FINGERPRINT(COALESCE(OrderingKey, Id)), N))) STORED"),
    ("(BYTE_LENGTH(Data)) STORED", "(BYTE_LENGTH(Data))", f"{TABLE}, column Bytes",
     "INT64 NOT NULL AS (BYTE_LENGTH(Data))", "INT64 NOT NULL AS (BYTE_LENGTH(Data)) STORED"),
    ("SentAt      TIMESTAMP   OPTIONS (allow_commit_timestamp = true)", "SentAt      TIMESTAMP",
     f"{TABLE}, column SentAt", "TIMESTAMP", "TIMESTAMP OPTIONS (allow_commit_timestamp = true)"),
    ("PRIMARY KEY (Id)", "PRIMARY KEY (Id DESC)", f"{TABLE}, primary key", "Id DESC", "Id"),
    ("OLDER_THAN(SentAt", "OLDER_THAN(CreatedAt", f"{TABLE}, deletion of unsent tasks",
     "OLDER_THAN(CreatedAt, INTERVAL 7 DAY)", "never"),
    # Polls could not use it, because SentAt is NULL until a task is sent.
    ("CREATE INDEX AsynchronousTasksToSend", "CREATE NULL_FILTERED INDEX AsynchronousTasksToSend",
     f"{TO_SEND}, definition", f"{KEY} NULL_FILTERED", KEY),
    ("Burst                 INT64", "Burst FLOAT64", "table AsynchronousTaskTopics, column Burst", "FLOAT64", "INT64"),
]  # fmt: skip


def test_each_difference_is_named_and_everything_else_is_created(empty_database: Database) -> None:
    """A second run has nothing more to create, and says the same."""
    wanted = ddl.statements(change_stream=True)
    other = [statement for statement in wanted if "AsynchronousTaskWorkers" not in statement]
    change(empty_database, *rewritten(other, *(pieces[:2] for pieces in DIFFERENT)))
    sentences = [f"{part}: the database has {has}, expected {expected}" for _, _, part, has, expected in DIFFERENT]
    for done in (
        "changed: table AsynchronousTaskWorkers (created). These parts",
        "nothing is missing, but these parts",
    ):
        with pytest.raises(SchemaDiffers, match=re.escape(done)) as caught:
            applying.apply(empty_database, wanted)
        assert [each for each in sentences if each not in str(caught.value)] == []
    assert sorted(schema.differences(empty_database, wanted)) == sorted(sentences)


def test_another_object_of_our_name_is_refused(empty_database: Database) -> None:
    """An index on another table is named, and does not change. Without a required column, nothing is created."""
    change(empty_database, "CREATE TABLE AsynchronousTasks (Id STRING(64) NOT NULL) PRIMARY KEY (Id)")
    with pytest.raises(SchemaDiffers, match="AsynchronousTasks, column Priority is missing: expected INT64 NOT NULL"):
        applying.apply(empty_database, ddl.statements())
    assert tables(empty_database) == {"AsynchronousTasks"}
    change(empty_database, "DROP TABLE AsynchronousTasks", "CREATE TABLE T (A INT64) PRIMARY KEY (A)")
    change(empty_database, "CREATE INDEX AsynchronousTasksToSend ON T (A)")
    with pytest.raises(SchemaDiffers, match=r"index AsynchronousTasksToSend, definition: the database has ON T \(A\)"):
        applying.apply(empty_database, ddl.statements())
    assert tables(empty_database) == {"T", *ddl.tables()}


def test_missing_columns_and_constraints_are_added(empty_database: Database) -> None:
    """Columns with a default too, and before the index that stores one. Rows and other columns stay."""
    wanted = ddl.statements()
    gone = [
        ("  Info                   JSON", ""), ("  Polls                  STRING(64),\n", "  Polls STRING(64)\n"),
        ("  Attempts    INT64       NOT NULL DEFAULT (0),\n", ""),
        ("  LastError   STRING(MAX),\n", "  Tenant STRING(MAX),\n"),
        ("  CONSTRAINT AsynchronousTasksOrderingKey CHECK (OrderingKey != '')", "  CHECK (OrderingKey != 'none')"),
    ]  # fmt: skip
    change(empty_database, *rewritten([each for each in wanted if TO_SEND[6:] not in each], *gone))
    with empty_database.batch() as batch:
        batch.insert("AsynchronousTasks", OLD_COLUMNS[:5], [["a", "orders", b"YWI=", 1, COMMIT_TIMESTAMP]])
    parts = ("column Attempts", "column LastError", "constraint AsynchronousTasksOrderingKey")
    added = [(f"{TABLE}, {part}", "added") for part in parts]
    assert applying.apply(empty_database, wanted) == [
        *((name, "created" if name == TO_SEND else "exists") for name in ALL),
        *added,
        ("table AsynchronousTaskWorkers, column Info", "added"),
    ]
    assert schema.differences(empty_database, wanted, free=()) == []
    assert query(empty_database, "SELECT Attempts, LastError, Tenant FROM AsynchronousTasks") == [[0, None, None]]


def test_the_tables_of_an_earlier_version_get_what_they_lack(empty_database: Database) -> None:
    """A column, and the same column in the index, which keeps its backfilled entries."""
    wanted = ddl.statements()
    without = (("  DueAt       TIMESTAMP,\n", ""), (", DueAt, CancelledBy)", ", CancelledBy)"))
    change(empty_database, *rewritten(wanted, *without))
    with pytest.raises(NotReached, match=r"column DueAt is missing.*stored column DueAt is missing"):
        app.verified_layout(cast("Any", empty_database))
    added = [(f"{TABLE}, column DueAt", "added"), (f"{TO_SEND}, stored column DueAt", "added")]
    assert applying.apply(empty_database, wanted) == [*((name, "exists") for name in ALL), *added]
    assert schema.differences(empty_database, wanted, free=()) == []


def test_additional_parts_and_objects_are_left_alone(
    own_database: Database, emulators: Emulators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a newer version: another column, also stored in an index, another index, a longer text, a default.

    A worker starts, `check` says ok, and `apply` changes nothing.
    """
    change(
        own_database,
        "ALTER TABLE AsynchronousTasks ADD COLUMN Tenant STRING(36)",
        "ALTER INDEX AsynchronousTasksToSend ADD STORED COLUMN Tenant",
        "CREATE INDEX AsynchronousTasksByTenant ON AsynchronousTasks (Tenant)",
        "ALTER TABLE AsynchronousTaskWorkers ADD COLUMN Zone STRING(36) NOT NULL DEFAULT ('')",
        "ALTER TABLE AsynchronousTaskWorkers ALTER COLUMN Polls STRING(MAX)",
        "ALTER TABLE AsynchronousTaskOperations ALTER COLUMN Operation STRING(64) NOT NULL",
        "ALTER TABLE AsynchronousTasks ALTER COLUMN Priority SET DEFAULT (50)",
        "CREATE TABLE Orders (OrderId STRING(36)) PRIMARY KEY (OrderId)",
    )
    own_database.reload()
    before = own_database.ddl_statements
    assert {state for _, state in applying.apply(own_database, ddl.statements())} == {"exists"}
    assert schema.differences(own_database, ddl.statements(), free=()) == []
    own_database.reload()
    assert own_database.ddl_statements == before
    monkeypatch.setenv("SPANNER_EMULATOR_HOST", emulators.spanner_host)
    names = {"project": PROJECT, "instance": INSTANCE, "database": own_database.database_id}
    settings = WorkerSettings.read(names, {})
    app.open_store(settings).heartbeat("me", datetime.now(UTC), (), info={})
    assert {verdict for verdict, _ in commands._database(settings, set())} == {"ok", "warning"}, "it has no task yet"


def test_no_key_begins_with_a_time(database: Database) -> None:
    """The first column of a primary key or an index is never a timestamp: no hot spot (A13)."""
    types = query(
        database,
        """
        SELECT c.SPANNER_TYPE FROM INFORMATION_SCHEMA.INDEX_COLUMNS AS i
        JOIN INFORMATION_SCHEMA.COLUMNS AS c USING (TABLE_SCHEMA, TABLE_NAME, COLUMN_NAME)
        WHERE i.TABLE_SCHEMA = '' AND i.ORDINAL_POSITION = 1""",
    )
    assert len(types) == 9
    assert ["TIMESTAMP"] not in types


@pytest.mark.parametrize(
    "article",
    [
        {"id_length": 36, "shard": MODULO_FIRST, "shard_null": "NOT NULL", "commit_timestamps": "true"},
        {"id_length": 64, "shard": MODULO_LAST, "shard_null": "", "commit_timestamps": "false"},
    ],
)
def test_the_documented_path_from_the_article(empty_database: Database, article: dict[str, Any]) -> None:
    """Rows stay intact, and old writers and the old relay's query work until the second step, writers also afterwards.

    Applying by mistake lists what the guide would change.
    """
    change(empty_database, *ddl.cut(ARTICLE_TABLE.format(**article)))
    with pytest.raises(SchemaDiffers, match="column OrderingKey is missing") as caught:
        applying.apply(empty_database, ddl.statements())
    assert "column Topic: the database has STRING(255) NOT NULL" in str(caught.value)
    assert tables(empty_database) == {"AsynchronousTasks"}
    then = datetime(2026, 1, 2, tzinfo=UTC)
    rows = [["sent", "orders", b"YWI=", 1, then, then], ["unsent", "orders", b"YWJj", 2, then, None]]
    with empty_database.batch() as batch:
        batch.insert("AsynchronousTasks", OLD_COLUMNS, rows)
    old_poll = (
        "SELECT Id FROM AsynchronousTasks@{FORCE_INDEX=AsynchronousTasksByShardSentAtPriorityCreatedAt} "
        "WHERE Shard BETWEEN 0 AND 9 AND SentAt IS NULL ORDER BY Priority DESC, CreatedAt"
    )
    change(empty_database, *ddl.cut((SCHEMA / "migrations" / "from-article-1.sql").read_text()))
    between = ["between", "orders", b"YWJj", 3, then, None]
    with empty_database.batch() as batch:
        batch.insert("AsynchronousTasks", OLD_COLUMNS, [between])
    assert query(empty_database, old_poll) == [["between"], ["unsent"]]
    with empty_database.batch() as batch:
        batch.delete("AsynchronousTasks", KeySet(keys=[["between"]]))
    change(empty_database, *ddl.cut((SCHEMA / "migrations" / "from-article-2.sql").read_text()))
    assert applying.apply(empty_database, ddl.statements()) == [(name, "exists") for name in ALL]
    assert query(empty_database, f"SELECT {', '.join(OLD_COLUMNS)} FROM AsynchronousTasks ORDER BY Id") == rows
    added = query(empty_database, "SELECT Bytes, AtMostOnce, TimesSent FROM AsynchronousTasks ORDER BY Id")
    assert added == [[2, False, 0], [3, False, 0]]
    with empty_database.batch() as batch:
        batch.insert("AsynchronousTasks", OLD_COLUMNS[:5], [["old-writer", "orders", b"YWI=", 1, COMMIT_TIMESTAMP]])
        outbox.register(batch, "orders", b"new", ordering_key="key")
    expected = "Shard = ABS(MOD(FARM_FINGERPRINT(IFNULL(OrderingKey, Id)), 10))"
    assert query(empty_database, f"SELECT COUNT(*), COUNTIF({expected}) FROM AsynchronousTasks") == [[4, 4]]


def test_a_postgresql_database_is_refused(spanner_instance: Instance) -> None:
    """The dialect is named instead of a syntax error in a statement that the user did not write."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    database = spanner_instance.database(name, database_dialect=DatabaseDialect.POSTGRESQL)
    database.create().result()
    try:
        for call in (applying.apply, schema.differences):
            with pytest.raises(SchemaDiffers, match=f"{name} has the PostgreSQL dialect: use a database"):
                call(database, ddl.statements())
    finally:
        database.drop()


def test_a_missing_database_or_table_is_not_reached(spanner_instance: Instance, empty_database: Database) -> None:
    """The sentence has the name. A relay does not guess how many shards a foreign table has."""
    absent = spanner_instance.database("not-there")
    for call in (applying.apply, schema.differences):
        with pytest.raises(NotReached, match=r"databases/not-there not found. Create it"):
            call(absent, ddl.statements())
    with pytest.raises(NotReached, match="table AsynchronousTasks is missing; run `outbox schema apply`"):
        schema.layout(empty_database)
    table = "CREATE TABLE AsynchronousTasks (Id STRING(64), Shard INT64) PRIMARY KEY (Id)"
    empty_database.update_ddl([table]).result()
    with pytest.raises(SchemaDiffers, match="the number of shards cannot be read from column Shard"):
        schema.layout(empty_database)


def test_an_update_that_spanner_refuses_is_one_sentence(database: Database) -> None:
    """Two deployments that create the tables at once do not end in a traceback."""
    just_before = mock.patch.object(schema, "read_parts", return_value={})
    with just_before, pytest.raises(OutboxError, match="Duplicate name in schema: AsynchronousTasks") as caught:
        applying.apply(database, ddl.statements())
    assert database.name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_worker_starts_if_the_schema_takes_too_long_to_read(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a database with very many objects. An unavailable Spanner still stops the start."""
    monkeypatch.setattr(schema, "differences", functools.partial(schema.differences, timeout=0.001))
    assert app.verified_layout(cast("Any", database)) == Layout(10)
    assert "The schema was not compared with the DDL" in caplog.text
    unavailable = mock.Mock(side_effect=NotReached("Spanner did not answer"))
    monkeypatch.setattr(schema, "differences", unavailable)
    with pytest.raises(NotReached):
        app.verified_layout(cast("Any", database))
