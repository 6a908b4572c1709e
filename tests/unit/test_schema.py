"""The DDL and its parser, errors of the client, the steps of a reshard, and query plans. No database."""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from google.api_core import exceptions as google
from google.auth.exceptions import DefaultCredentialsError, RefreshError
from google.cloud.spanner_v1 import PlanNode, QueryPlan

from outbox.errors import NotReached, OutboxError, SchemaDiffers
from outbox.program import channels
from outbox.rows.task_table import TaskTable
from outbox.table import applying, ddl, schema
from outbox.table.ddl import Layout, by_layout
from outbox_admin.operations import Operation
from outbox_admin.schema.query_plans import lines, problems
from outbox_admin.schema.reshard import (
    POLLED,
    RETIRED,
    LayoutStates,
    RecordedReshard,
    Resharding,
    Step,
    _polled_by,
    next_step,
)
from outbox_admin.schema.schema_commands import POINTS_PER_NODE, points

ROOT = Path(__file__).parents[2]
SCHEMA_SQL = (ROOT / "schema" / "schema.sql").read_text()


def shapes(**options: Any) -> dict[str, dict[str, str]]:
    return dict(map(ddl.parse, ddl.statements(**options)))


def test_statements_are_cut_where_they_end() -> None:
    statements = {
        "A '--;#' -- it's; no end\nB; C": ["A '--;#' B", "C"],
        "A `x;--` /* `;\n; */ B /* - */ C": ["A `x;--` B C"],
        r"A 'it\';', rb'\\'; B": [r"A 'it\';', rb'\\'", "B"],
        "A '''it's;\n'' -- x'''; B": ["A '''it's; '' -- x'''", "B"],
        'A """it"s; # \\""" x"""; B': ['A """it"s; # \\""" x"""', "B"],
        "A 1 - - 2 / 3 * 4 @{a=b}": ["A 1 - - 2 / 3 * 4 @{a=b}"],
        "A 'ends with its line\n; B": ["A 'ends with its line", "B"],
        "CREATE/**/TABLE#;\nA--;\r\n(B); -- no end": ["CREATE TABLE A (B)"],
        " ;; A ;\n": ["A"],
    }
    assert {file: [" ".join(each.split()) for each in ddl.cut(file)] for file in statements} == statements


@pytest.mark.timeout(10)
@pytest.mark.parametrize("piece", [" ", "\n", "/* ", "--", "'", '"""', "`", "\\", "\\'", '\\"', "/**/", " ;"])
def test_a_long_file_is_cut_in_linear_time(piece: str):
    """Whatever it repeats, also if it never ends."""
    text = "CREATE TABLE T (A INT64)" + piece * 50_000 + "x"
    assert ddl.cut(text)[0].startswith("CREATE TABLE T (A INT64)")


def test_the_default_is_schema_sql_without_comments():
    """Apply sends the file, so reading the file is enough."""
    created = ddl.statements()
    code = [line.partition("--")[0].split() for line in SCHEMA_SQL.splitlines()]
    assert " ".join(created).split() == [word.rstrip(";") for line in code for word in line if word != ";"]
    assert not [statement for statement in created if "--" in statement or ";" in statement]
    # Tools that split the files at semicolons get whole statements.
    for path in (ROOT / "schema").rglob("*.sql"):
        assert not [comment for comment in re.findall("--.*", path.read_text()) if re.search("[;'\"]", comment)]


def test_the_number_of_shards_is_in_the_generated_column_only():
    other, ours = shapes(shards=32), shapes()

    assert other["table AsynchronousTasks"].pop(ddl.SHARD_COUNT) == "32"
    assert ours["table AsynchronousTasks"].pop(ddl.SHARD_COUNT) == "10"
    assert other == ours
    assert "FARM_FINGERPRINT(COALESCE(OrderingKey, Id)), 32)" in ddl.statements(shards=32)[0]


@pytest.mark.parametrize(("days", "kept"), [(7, "7 days"), (1, "1 days"), (None, "for ever")])
def test_the_retention_is_of_sent_tasks_only(days: int | None, kept: str):  # OUT-LOSS-7
    """A policy never deletes an unsent task, and None leaves it out. Only the inbox has another policy."""
    parts = shapes(retention_days=days)["table AsynchronousTasks"]

    assert parts[ddl.RETENTION] == kept
    assert parts["deletion of unsent tasks"] == "never"
    policies = [ddl.parse(each)[0] for each in ddl.statements(retention_days=days) if "ROW DELETION POLICY" in each]
    assert policies == [*(["table AsynchronousTasks"] if days else []), "table ProcessedTasks"]


def test_further_objects_are_optional():
    """A change stream costs storage, so it must be asked for; it has inserts only. Workers need no pipeline's table."""
    *others, stream = ddl.statements(change_stream=True)

    assert others == ddl.statements()
    assert ddl.parse(stream) == ("change stream AsynchronousTasksInserts", {})
    for option in ("exclude_update = true", "exclude_delete = true", "exclude_ttl_deletes = true"):
        assert option in stream
    left_out = [each for each in ddl.statements() if each not in ddl.statements(relay_only=True)]
    assert [ddl.parse(each)[0] for each in left_out] == [
        "table AsynchronousTaskOperations", "table ProcessedTasks",
    ]  # fmt: skip


def test_numbers_out_of_range_are_refused():
    for name, allowed, highest in (("shards", "1 to 1000", 1000), ("retention_days", "None or 1 to 3650", 3650)):
        for number in (0, highest + 1):
            with pytest.raises(ValueError, match=f"{name} is {number}. It must be {allowed}"):
                ddl.statements(**{name: number})


def test_unknown_ddl_is_refused():
    """DDL that the parser does not know is an error, never a part that is silently not compared."""
    table = "CREATE TABLE T (\n  A INT64\n) PRIMARY KEY (A)"
    for statement in (
        "CREATE UNIQUE INDEX I ON T (A)",
        "CREATE INDEX I ON T (A) STORING (B) WHERE A = 1",
        f"{table}, INTERLEAVE IN PARENT P",
        "CREATE CHANGE STREAM S FOR ALL OPTIONS (retention_period = '7d')",
        f"{table}; {table};",
    ):
        with pytest.raises(ValueError, match="not a statement"):
            ddl.parse(statement)


def test_an_expression_may_be_written_in_another_way():
    """The service may give an expression back with other case, spaces and parentheses."""
    expected = {"table T": {"column Shard": shapes()["table AsynchronousTasks"]["column Shard"]}}
    for written in (
        "int64 not null as (abs(mod(farm_fingerprint(coalesce(orderingkey, id)), n))) stored",
        "INT64 NOT NULL AS ((ABS( MOD( FARM_FINGERPRINT( COALESCE( OrderingKey,Id ) ),\n  N ) ))) STORED",
    ):
        other = re.sub("finger", "x", written, flags=re.IGNORECASE)
        assert list(ddl.compare(expected, {"tablet": {"columnshard": written}}, ())) == []
        assert len(list(ddl.compare(expected, {"tablet": {"columnshard": other}}, ()))) == 1


def test_an_index_that_is_being_filled_exists_but_is_not_ready():
    """Apply again during a long backfill is no error, while the relay's check says why it cannot start."""
    wanted = ddl.statements()
    found = {
        ddl.normalized(title): {ddl.normalized(name): text for name, text in (parts | {"state": "WRITE_ONLY"}).items()}
        for title, parts in shapes().items()
    }
    database = mock.Mock()

    with mock.patch.object(schema, "read_parts", return_value=found):
        assert {state for _, state in applying.apply(database, wanted)} == {"exists"}
        assert schema.differences(database, wanted) == [
            "index AsynchronousTasksToSend, state: the database has WRITE_ONLY, expected READ_WRITE",
            "index AsynchronousTasksInOrder, state: the database has WRITE_ONLY, expected READ_WRITE",
            "index AsynchronousTasksToRestore, state: the database has WRITE_ONLY, expected READ_WRITE",
        ]
    database.update_ddl.assert_not_called()


def test_roles_are_created_once_and_granted_again():
    """The emulator has no roles, so this is the only test of the statements. `outbox verify` runs them twice."""
    database, statements = mock.Mock(), ddl.cut(ddl.text("roles.sql"))
    for existing in ([], [["PublishWorker"], ["public"]], [[each.split()[-1]] for each in statements]):
        with mock.patch.object(schema, "query", return_value=existing):
            states = dict(applying.apply_roles(database))
        [sent] = database.update_ddl.call_args.args
        created = [f"CREATE ROLE {role.removeprefix('role ')}" for role, state in states.items() if state == "created"]
        here = {role.casefold() for [role] in existing}
        assert created == [
            each for each in statements if each.startswith("CREATE") and each.split()[-1].casefold() not in here
        ]
        assert sent == [*created, *(each for each in statements if not each.startswith("CREATE"))]


LOGIN, NO_ANSWER = "gcloud auth application-default login", "Spanner did not answer"


def test_errors_of_the_client_become_one_sentence():
    """Users read one line with the database, the advice and the cause; `except OutboxError` catches all of them."""
    for error, advice in (
        (google.NotFound("Database not found: d"), "not found. Create it"),
        (google.PermissionDenied("no"), "roles/spanner.databaseReader"),
        (google.Unauthenticated("no"), LOGIN),
        (DefaultCredentialsError("none"), LOGIN),
        (RefreshError("expired"), LOGIN),
        (google.ServiceUnavailable("away"), NO_ANSWER),
        (google.ServiceUnavailable("Getting metadata from plugin failed with error: ('invalid_rapt')"), LOGIN),
        (google.DeadlineExceeded("late"), NO_ANSWER),
        (google.RetryError("Timeout of 8.0s exceeded", cause=None), NO_ANSWER),
        (google.MethodNotImplemented("a proxy"), NO_ANSWER),
        (google.FailedPrecondition("Duplicate name"), "Spanner refused"),
    ):
        with pytest.raises(OutboxError) as caught, schema.service_errors("database orders"):
            raise error
        assert type(caught.value) is (OutboxError if advice == "Spanner refused" else NotReached)
        text = str(caught.value)
        assert text.startswith("database orders")
        assert advice in text
        assert str(error).partition("\n")[0] in text
    # A difference, and a defect, keep their own error.
    for error in (SchemaDiffers("x"), KeyError("x")):
        with pytest.raises(type(error)) as kept, schema.service_errors("database orders"):
            raise error
        assert kept.value is error


@pytest.mark.parametrize("content", [None, "no JSON", '{"type": "service_account"}'])
def test_a_path_of_credentials_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    """A directory, and two files that are no credentials."""
    path = tmp_path / "key.json"
    if content is None:
        path.mkdir()
    else:
        path.write_text(content, encoding="utf-8")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    with pytest.raises(NotReached, match="Spanner: no credentials found"):
        channels.credentials("Spanner", plaintext=None)


def test_split_points_are_between_the_shards_and_among_the_ids() -> None:
    """Each has the whole key of its table or index, as Spanner requires, and no shard is divided."""
    of_kind: dict[str, list[str]] = {}
    for line in points(Layout.added(12), 3):
        kind, name, key = line.split(" ")
        of_kind.setdefault(f"{kind} {name}", []).append(key)
    to_send, in_order, table = of_kind.values()
    assert [*of_kind] == [
        "INDEX AsynchronousTasksToSend12",
        "INDEX AsynchronousTasksInOrder12",
        "TABLE AsynchronousTasks",
    ]
    assert [key.split(",")[0] for key in to_send] == [f"('{shard}'" for shard in range(11)]
    assert [key.split(",")[0] for key in in_order] == [f"('{shard}'" for shard in range(1, 12)]
    assert {key.count(",") for key in to_send + in_order} == {5}
    assert table == sorted({*table})
    assert len(to_send + in_order + table) <= POINTS_PER_NODE * 3


FIRST, NEW = Layout(10), Layout(32, "32")
COMPLETE = dict.fromkeys(ddl.INDEXES, "READ_WRITE")


def test_a_layout_is_retired_and_dropped_when_no_live_worker_depends_on_it() -> None:
    for recorded, polls, expected in (
        (POLLED, "Shard", ("wait", NEW, "Waiting until w also polls Shard32")),  # as of a worker without `Polls`
        (POLLED, "Shard,Shard32", ("set", FIRST, "Let workers stop polling Shard")),
        (RETIRED, "Shard,Shard32", ("wait", FIRST, "Waiting until w no longer polls Shard")),
        (RETIRED, "Shard32", ("drop", FIRST, "Drop the indexes of Shard and the column")),
    ):
        workers = {"w": frozenset(polls.split(","))}
        step = next_step(LayoutStates({FIRST: COMPLETE, NEW: COMPLETE}, {FIRST: recorded, NEW: POLLED}, workers), NEW)
        assert step is not None
        assert (step.kind, step.layout, step.text) == expected


def test_statements_and_shard_ids_name_the_layout() -> None:
    sql = "SELECT Shard, in_shard FROM AsynchronousTasks@{FORCE_INDEX=AsynchronousTasksToSend}, AsynchronousTaskShards"
    assert FIRST.sql(sql) == sql
    assert NEW.sql(sql) == sql.replace("Shard,", "Shard32,").replace("ToSend", "ToSend32")
    first, new = by_layout([9, 32_031, 0, 32_000])
    assert (first.numbers, first.first_id, first.sql(sql)) == ([9, 0], 0, sql)
    assert (new.numbers, new.first_id, new.sql(sql)) == ([31, 0], 32_000, NEW.sql(sql))
    assert [shard in new for shard in (0, 32_000, 33_000)] == [False, True, False]
    for layout in (Layout(1000), Layout.added(1), Layout.added(1000)):
        [shards] = by_layout(layout.ids)
        assert (shards.numbers, shards.first_id) == ([*range(layout.shards)], layout.ids[0])
        assert shards.sql("Shard") == layout.column


def change(former: int, target: int, *, aborts: bool = False) -> RecordedReshard:
    """Return a change that is under way."""
    since = datetime(2026, 11, 21, tzinfo=UTC)
    operation = Operation("", "reshard", since, *[None] * 2, "{}", *[None] * 5)
    return RecordedReshard(former, target, operation, aborts)


@pytest.fixture
def resharding(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Resharding]:
    """Return a Resharding of a database with these layouts."""

    def create(
        found: dict[Layout, dict[str, str]],
        latest: RecordedReshard | None = None,
        recorded: dict[Layout, str] | None = None,
    ) -> Resharding:
        table = mock.Mock(TaskTable)
        table.name = "shop"
        table.database = mock.Mock()
        monkeypatch.setattr(Resharding, "snapshot", lambda _self: LayoutStates(found, recorded or {}, {}))
        monkeypatch.setattr(Resharding, "_latest", lambda _self: latest)
        monkeypatch.setattr(schema, "layouts", lambda _database: dict(found))
        return Resharding(table)

    return create


BOTH = {Layout(32, "32"): COMPLETE, Layout(16, "16"): COMPLETE}


def test_a_change_under_way_is_reported_with_its_direction(resharding: Callable[..., Resharding]) -> None:
    """Not in the order of the names of the columns, which is Shard16 before Shard32."""
    sentence = "a change from 32 to 16 shards is under way. Continue it with --shards 16, or end it with --abort"
    with pytest.raises(OutboxError, match=sentence):
        resharding(BOTH, change(32, 16)).target(64)


def test_an_abort_that_was_interrupted_is_continued(resharding: Callable[..., Resharding]) -> None:
    """And is not aborted in turn."""
    for latest in (change(32, 16), change(16, 32, aborts=True)):
        assert resharding(BOTH, latest).former().shards == 32


@pytest.mark.parametrize(
    "indexes", [{"AsynchronousTasksToSend": "READ_WRITE"}, COMPLETE | {"AsynchronousTasksToSend": "WRITE_ONLY"}]
)
def test_the_only_layout_must_be_complete(indexes: dict[str, str], resharding: Callable[..., Resharding]) -> None:
    """The error says what to do, and nothing is written."""
    its = resharding({FIRST: indexes})
    with pytest.raises(OutboxError, match=r"an index of Shard is missing .* Run `outbox schema apply`"):
        list(its.run(its.target(10)))


def test_the_only_layout_is_completed_if_a_change_added_it(resharding: Callable[..., Resharding]) -> None:
    """As by `outbox schema apply`."""
    its = resharding({NEW: {"AsynchronousTasksInOrder32": "READ_WRITE"}}, recorded={NEW: POLLED})
    assert next(iter(its.run(NEW))) == "Add column Shard32 and its indexes; all tasks are written to them"


def test_a_layout_that_another_run_dropped_is_not_dropped_again(resharding: Callable[..., Resharding]) -> None:
    its = resharding({NEW: COMPLETE})
    its._do(Step("drop", FIRST, "Drop"), NEW)
    its._table.database.update_ddl.assert_not_called()
    its._do(Step("drop", NEW, "Drop"), FIRST)
    its._table.database.update_ddl.assert_called_once()


def test_an_update_that_is_refused_after_another_one_is_no_error(resharding: Callable[..., Resharding]) -> None:
    """Such as that of an earlier run, which was queued before it. It is one if nothing has changed."""
    found: dict[Layout, dict[str, str]] = {FIRST: COMPLETE}
    its = resharding(found)

    def refuse(_statements: list[str]) -> None:
        found[NEW] = COMPLETE
        raise google.FailedPrecondition("Duplicate name in schema: Shard32.")  # type: ignore[no-untyped-call]  # no types

    its._table.database.update_ddl.side_effect = refuse
    its._do(Step("build", NEW, "Add"), NEW)
    with pytest.raises(OutboxError, match="Duplicate name"):
        its._do(Step("drop", FIRST, "Drop"), NEW)


def test_a_worker_counts_for_twice_its_liveness_timeout() -> None:
    """A slow worker must not be overlooked. One that has not written Polls polls the first layout."""
    rows = [
        ["late", 27_999, 14, "Shard,Shard32"],
        ["gone", 28_000, 14, "Shard"],
        ["fresh", 0, 14, None],
        ["off", 0, 0, ""],
    ]
    assert _polled_by(rows) == {"late": {"Shard", "Shard32"}, "fresh": {"Shard"}}


INDEX, TABLE = "AsynchronousTasksToSend", "AsynchronousTasks"
POLL = f"SELECT Id FROM {TABLE}@{{FORCE_INDEX={INDEX}}} WHERE Shard = 1"
LOCK = f"SELECT Id FROM UNNEST(@ids) AS i JOIN {TABLE}@{{FORCE_INDEX=_BASE_TABLE}} ON Id = i"


def plan(*nodes: tuple[str, dict[str, Any], tuple[int, ...], str]) -> QueryPlan:
    """Each node has a name, metadata, the indexes of its children, and a seek condition or an empty text."""
    found = []
    conditions = []
    for index, (name, metadata, children, seek) in enumerate(nodes):
        links = [PlanNode.ChildLink(child_index=child) for child in children]
        if seek:
            links.append(PlanNode.ChildLink(child_index=len(nodes) + len(conditions), type_="Seek Condition"))
            conditions.append(seek)
        kind = PlanNode.Kind.RELATIONAL
        found.append(PlanNode(index=index, kind=kind, display_name=name, child_links=links, metadata=metadata))
    for index, text in enumerate(conditions, len(nodes)):
        short = PlanNode.ShortRepresentation(description=text)
        found.append(PlanNode(index=index, kind=PlanNode.Kind.SCALAR, short_representation=short))
    return QueryPlan(plan_nodes=found)


def scan(target: str, **more: Any) -> tuple[str, dict[str, Any], tuple[int, ...], str]:
    kind = "TableScan" if target == TABLE else "IndexScan"
    return "Scan", {"scan_type": kind, "scan_target": target, **more}, (), ""


SEEK = ("Filter Scan", {}, (2,), "($Shard = 1) AND IS_NULL($SentAt)")
GOOD = plan(("Distributed Union", {}, (1,), ""), SEEK, scan(INDEX))


@pytest.mark.parametrize(
    ("statement", "bad", "sentence"),
    [
        (POLL, plan(("Distributed Union", {}, (1,), ""), scan(INDEX, **{"Full scan": "true"})), "a full scan"),
        (POLL, plan(("Distributed Union", {}, (1,), ""), scan(INDEX)), "a scan without a seek condition"),
        (POLL, plan(("Sort Limit", {}, (1,), ""), SEEK, scan(INDEX)), "Sort Limit reads all rows of the range"),
        (
            POLL,
            plan(("Hash Join", {}, (1, 3), ""), SEEK, scan(INDEX), ("Filter Scan", {}, (4,), "x"), scan(INDEX)),
            "JOIN_METHOD=APPLY_JOIN had no effect",
        ),
        (
            POLL,
            plan(
                ("Distributed Cross Apply", {}, (1, 3), ""), SEEK, scan(INDEX),
                ("Filter Scan", {}, (4,), "($Id = $Id_1)"), scan(TABLE),
            ),
            "AsynchronousTasks: a join back to the table",
        ),
        (LOCK, plan(("Distributed Union", {}, (1,), ""), SEEK, scan("ByTopic")), "forces AsynchronousTasks"),
    ],
    ids=["full scan", "no seek", "sort", "hash join", "back join", "another index"],
)  # fmt: skip
def test_a_bad_plan_is_named(statement: str, bad: QueryPlan, sentence: str) -> None:
    assert [each for each in problems(bad, statement) if sentence in each], problems(bad, statement)


def test_a_good_plan_has_no_problem() -> None:
    limited = plan(("Sort", {}, (1,), ""), ("Limit", {}, (2,), ""), ("Filter Scan", {}, (3,), "x"), scan(INDEX))
    small = "AsynchronousTaskTopics"
    for name, statement, good in (
        ("seek", POLL, GOOD),
        ("sort of a limited range", POLL, limited),
        ("sort of rows by key", LOCK, plan(("Sort", {}, (1,), ""), SEEK, scan(TABLE))),
        ("small table", f"SELECT 1 FROM {small}", plan(scan(small, **{"Full scan": "true"}))),
        ("none, as of the emulator", POLL, QueryPlan()),
    ):
        assert problems(good, statement) == [], name


def test_a_plan_is_shown_as_a_tree() -> None:
    assert list(lines(GOOD)) == [
        "Distributed Union",
        "  Filter Scan (Seek Condition: ($Shard = 1) AND IS_NULL($SentAt))",
        f"    Scan (scan_target: {INDEX}, scan_type: IndexScan)",
    ]
