"""The DDL, its options and its parser, and the errors of the Spanner client. No database."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from google.api_core import exceptions as google
from google.auth.exceptions import DefaultCredentialsError, RefreshError

from outbox.errors import NotReached, OutboxError, SchemaDiffers
from outbox.table import ddl, schema
from outbox.table.layouts import Layout
from outbox.table.splits import POINTS_PER_NODE, points

ROOT = Path(__file__).parents[2]
SCHEMA_SQL = (ROOT / "schema" / "schema.sql").read_text()


def shapes(**options: Any) -> dict[str, dict[str, str]]:
    return dict(map(ddl.parse, ddl.statements(**options)))


@pytest.mark.parametrize(
    ("file", "statements"),
    [
        ("A '--;#' -- it's; no end\nB; C", ["A '--;#' B", "C"]),
        ("A `x;--` /* `;\n; */ B /* - */ C", ["A `x;--` B C"]),
        (r"A 'it\';', rb'\\'; B", [r"A 'it\';', rb'\\'", "B"]),
        ("A '''it's;\n'' -- x'''; B", ["A '''it's; '' -- x'''", "B"]),
        ('A """it"s; # \\""" x"""; B', ['A """it"s; # \\""" x"""', "B"]),
        ("A 1 - - 2 / 3 * 4 @{a=b}", ["A 1 - - 2 / 3 * 4 @{a=b}"]),
        ("A 'ends with its line\n; B", ["A 'ends with its line", "B"]),
        ("CREATE/**/TABLE#;\nA--;\r\n(B); -- no end", ["CREATE TABLE A (B)"]),
        (" ;; A ;\n", ["A"]),
    ],
)
def test_statements_are_cut_where_they_end(file: str, statements: list[str]) -> None:
    assert [" ".join(each.split()) for each in ddl.cut(file)] == statements


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
    """A policy never deletes an unsent task, and None leaves it out."""
    parts = shapes(retention_days=days)["table AsynchronousTasks"]

    assert parts[ddl.RETENTION] == kept
    assert parts["deletion of unsent tasks"] == "never"
    assert ("ROW DELETION POLICY" in ddl.statements(retention_days=days)[0]) == (days is not None)


def test_further_objects_are_optional():
    """A change stream costs storage, so it must be asked for; it has inserts only. Workers need no pipeline's table."""
    *others, stream = ddl.statements(change_stream=True)

    assert others == ddl.statements()
    assert ddl.parse(stream) == ("change stream AsynchronousTasksInserts", {})
    for option in ("exclude_update = true", "exclude_delete = true", "exclude_ttl_deletes = true"):
        assert option in stream
    left_out = [each for each in ddl.statements() if each not in ddl.statements(relay_only=True)]
    assert [ddl.parse(each)[0] for each in left_out] == [
        "table AsynchronousTaskOperations", "table AsynchronousTasksCancelled",
        "index AsynchronousTasksCancelledByTime", "table ProcessedTasks",
    ]  # fmt: skip


def test_numbers_out_of_range_are_refused():
    for name, allowed, highest in (("shards", "1 to 1000", 1000), ("retention_days", "None or 1 to 3650", 3650)):
        for number in (0, highest + 1):
            with pytest.raises(ValueError, match=f"{name} is {number}. It must be {allowed}"):
                ddl.statements(**{name: number})


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE UNIQUE INDEX I ON T (A)",
        "CREATE INDEX I ON T (A) STORING (B) WHERE A = 1",
        "CREATE TABLE T (\n  A INT64\n) PRIMARY KEY (A), INTERLEAVE IN PARENT P",
        "CREATE CHANGE STREAM S FOR ALL OPTIONS (retention_period = '7d')",
        "CREATE TABLE T (\n  A INT64\n) PRIMARY KEY (A); CREATE TABLE U (\n  A INT64\n) PRIMARY KEY (A);",
    ],
)
def test_unknown_ddl_is_refused(statement: str):
    """DDL that the parser does not know is an error, never a part that is silently not compared."""
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

    with mock.patch.object(schema, "_read", return_value=found):
        assert {state for _, state in schema.apply(database, wanted)} == {"exists"}
        assert schema.differences(database, wanted) == [
            "index AsynchronousTasksToSend, state: the database has WRITE_ONLY, expected READ_WRITE",
            "index AsynchronousTasksInOrder, state: the database has WRITE_ONLY, expected READ_WRITE",
            "index AsynchronousTasksCancelledByTime, state: the database has WRITE_ONLY, expected READ_WRITE",
        ]
    database.update_ddl.assert_not_called()


@pytest.mark.parametrize(
    ("advice", "errors"),
    [
        ("not found. Create it", [google.NotFound("Database not found: d")]),
        ("roles/spanner.databaseReader", [google.PermissionDenied("no")]),
        (
            "gcloud auth application-default login",
            [google.Unauthenticated("no"), DefaultCredentialsError("none"), RefreshError("expired")],
        ),
        (
            "Spanner did not answer",
            [
                google.ServiceUnavailable("away"), google.DeadlineExceeded("late"),
                google.RetryError("Timeout of 8.0s exceeded", cause=None), google.MethodNotImplemented("a proxy"),
            ],
        ),
        ("Spanner refused", [google.FailedPrecondition("Duplicate name")]),
    ],
)  # fmt: skip
def test_errors_of_the_client_become_one_sentence(advice: str, errors: list[Exception]):
    """Users read one line with the database, the advice and the cause; `except OutboxError` catches all of them."""
    for error in errors:
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
