"""Exactly which requests go to Spanner, on the mock server that its Python client ships; no plan needs the optimizer.

No other test imports that module: it carries no promise of stability. Sessions are the client's default, multiplexed.
The emulator shows no plans. So each statement has to force the index or the primary key of AsynchronousTasks and the
form of its joins, and to order the rows of an index by the whole key of this index.
"""

import base64
import itertools
import re
import runpy
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from google.cloud.spanner_v1 import (
    RequestOptions,
    ResultSet,
    ResultSetMetadata,
    StructType,
    TransactionOptions,
    Type,
    TypeCode,
)
from google.cloud.spanner_v1.testing.mock_spanner import SpannerServicer, start_mock_server
from google.rpc import code_pb2, status_pb2
from google.rpc.error_details_pb2 import ResourceInfo
from grpc_status.rpc_status import to_status

import outbox
from outbox.errors import NotReached
from outbox.table.connection import LimitedDatabase, open_database
from outbox.table.ddl import Layout
from outbox.table.shared_sql import IN_ORDER_ORDER, TO_SEND_ORDER
from outbox.table.states import CANCELLED, STATES, UNSENT
from publishworker.process.app import open_store
from publishworker.process.worker_settings import WorkerSettings
from publishworker.spanner import relay_sql
from publishworker.spanner.grants import verify_grants
from publishworker.spanner.store import SpannerStore
from publishworker.spanner.write_errors import DatabaseMissing, NotWritten, StoreError, TimedOut, WriteRefused
from publishworker.turn.relay import Relay
from tests.support.fakes import FakePublisher, serialized
from tests.support.parts import poll_request, relay_of
from tests.support.processes import ROOT
from tests.support.spanner import place
from tests.support.statements import scans
from tools.benchmarks.cost import cost

NOW = "2026-01-01T00:00:00Z"
STRING, INT64, BYTES, TIMESTAMP, BOOL, ARRAY = (
    getattr(TypeCode, name) for name in ("STRING", "INT64", "BYTES", "TIMESTAMP", "BOOL", "ARRAY")
)
CANDIDATE = (STRING, STRING, INT64, INT64, TIMESTAMP, TIMESTAMP, STRING, INT64)
KEY_HEAD = (STRING, STRING, STRING, INT64, BOOL, BOOL, BOOL)
LOCKED = (STRING, STRING, BYTES, STRING, TIMESTAMP, INT64, TIMESTAMP, ARRAY)
#: Reads that a turn does not run at each poll.
INTERVAL_TAGS = ("outbox-discover",)


@pytest.fixture
def mock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SpannerServicer]:
    monkeypatch.delenv("GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW", raising=False)
    monkeypatch.setattr("publishworker.turn.in_flight.MAX_TURN_WAIT_SECONDS", 20.0)  # a turn waits for its batch
    server, servicer, _admin, port = start_mock_server()
    monkeypatch.setenv("SPANNER_EMULATOR_HOST", f"localhost:{port}")
    yield servicer
    server.stop(None).wait(5)


@pytest.fixture
def database(mock: SpannerServicer) -> LimitedDatabase:  # noqa: ARG001 - sets the address
    return open_database(place("db", project="p", instance="inst"))


def result(types: Sequence[TypeCode], rows: Sequence[Sequence[Any]]) -> ResultSet:
    of = [Type(code=code, array_element_type=Type(code=STRING) if code is ARRAY else None) for code in types]
    fields = [StructType.Field(name=f"c{n}", type_=each) for n, each in enumerate(of)]
    answer = ResultSet(metadata=ResultSetMetadata(row_type=StructType(fields=fields)))
    for row in rows:
        answer._pb.rows.add().extend(
            [each if each is None or isinstance(each, bool | list) else str(each) for each in row]
        )
    return answer


def prepare(mock: SpannerServicer, count: int, key: str | None = None) -> list[str]:
    """Have tasks of one topic pending; return their ids in the order of the key, which poll and lock do not keep."""
    ids = [f"task-{n:03}" for n in range(count)]
    body = base64.b64encode(serialized()).decode()
    found = [(id, "orders", 3 if key else n % 10, 50, NOW, None, key, 10) for n, id in enumerate(ids)]
    for statement in relay_sql.POLLS.values():
        mock.mock_spanner.add_result(statement, result(CANDIDATE, found))
    for statement in (relay_sql.DISCOVER, relay_sql.DISCOVER_NO_TOPICS):
        mock.mock_spanner.add_result(statement, result((ARRAY,) * 4, [([], [], [], [])]))
    locked = [(id, "orders", body, key, NOW, 0, NOW, None) for id in ids]
    mock.mock_spanner.add_result(relay_sql.LOCK, result(LOCKED, locked))
    key_heads = [("orders", key, id, 10, True, False, False) for id in reversed(ids)]
    mock.mock_spanner.add_result(relay_sql.KEY_HEADS, result(KEY_HEAD, key_heads))
    return ids[::-1]


def make_relay(
    database: LimitedDatabase | SpannerStore, batch_size: int = 100, batches: int = 1,
    publisher: FakePublisher | None = None,
) -> Relay:  # fmt: skip
    store = database if isinstance(database, SpannerStore) else SpannerStore(database, Layout(10))
    publisher = publisher or FakePublisher("orders", project="p")
    relay = relay_of(store, publisher, size=batch_size, batches=batches, discovery_seconds=1)
    relay._poller.known.note_candidates({"orders"})
    return relay


def requests(mock: SpannerServicer) -> list[Any]:
    """Return the requests, except the reads that run at an interval."""
    return [each for each in mock.requests if tag(each) not in INTERVAL_TAGS]


def tag(request: Any) -> str:
    options = getattr(request, "request_options", None)
    return getattr(options, "request_tag", "")


def names(mock: SpannerServicer) -> list[str]:
    return [type(request).__name__.removesuffix("Request") for request in requests(mock)]


def test_registering_in_a_batch_is_one_commit(mock: SpannerServicer, database: LimitedDatabase) -> None:
    """The insert travels with the caller's commit, or with its BatchWrite, which the emulator does not have."""
    with database.batch() as batch:
        outbox.register(batch, "orders", b"data")
    assert names(mock) == ["CreateSession", "Commit"]
    mock.clear_requests()
    with database.mutation_groups() as groups:
        outbox.register(groups.group(), "orders", b"data")
        list(groups.batch_write())
    assert names(mock) == ["BatchWrite"]
    [batch] = mock.requests[0].mutation_groups
    assert [mutation.insert.table for mutation in batch.mutations] == ["AsynchronousTasks"]


def test_a_batch_is_two_requests(mock: SpannerServicer, database: LimitedDatabase) -> None:
    """One more for the poll. Unless the transaction is pessimistic, the lock's hint keeps no other worker waiting."""
    prepare(mock, 100)
    turn = make_relay(database).turn()
    assert turn.published == 100
    assert names(mock) == ["CreateSession", "ExecuteSql", "ExecuteSql", "Commit"]
    _, poll, lock, commit = requests(mock)
    assert poll.transaction.single_use.read_only.strong
    assert poll.request_options.priority == RequestOptions.Priority.PRIORITY_MEDIUM
    assert poll.request_options.request_tag == "outbox-poll"
    assert poll.sql.count("AsynchronousTasks@{FORCE_INDEX=AsynchronousTasksToSend}") == 2
    assert "Data" not in poll.sql
    assert lock.sql == relay_sql.LOCK
    assert "LOCK_SCANNED_RANGES=exclusive" in lock.sql
    ids = list(lock.params["ids"])
    assert ids == sorted(ids)
    begin = lock.transaction.begin
    assert begin.isolation_level == TransactionOptions.IsolationLevel.SERIALIZABLE
    assert begin.read_write.read_lock_mode == TransactionOptions.ReadWrite.ReadLockMode.PESSIMISTIC
    assert len(commit.mutations[0].update.values) == 100
    assert list(commit.mutations[0].update.columns) == list(relay_sql.MARK_CLEAN_COLUMNS)


@pytest.mark.parametrize(("count", "key"), [(100, None), (25, None), (100, "key")])
def test_the_cost_page_counts_what_is_sent(
    mock: SpannerServicer, database: LimitedDatabase, count: int, key: str | None
) -> None:
    prepare(mock, count, key)
    publisher = FakePublisher("orders", project="p")
    assert make_relay(database, count, publisher=publisher).turn().published == count
    commits = [each for each in mock.requests if hasattr(each, "mutations")]
    marked = sum(len(mutation.update.values) for each in commits for mutation in each.mutations)
    locks = [each for each in mock.requests if tag(each) == "outbox-claim"]
    expected = cost(count, batch_size=count, tasks_per_key=count if key else 0)
    assert (len(locks), len(commits)) == (expected.lock_requests, expected.commits)
    assert len(publisher.requests) == expected.publish_requests
    assert marked == expected.mutations - count  # the other mutation of each task is its registration


def test_an_ordered_batch_is_three_requests(mock: SpannerServicer, database: LimitedDatabase) -> None:
    """One more for the heads of its keys; the lock is of no range, so a caller's insert meets no lock of the relay."""
    ids = prepare(mock, 100, "key")
    publisher = FakePublisher("orders", project="p")
    relay = make_relay(database, publisher=publisher)
    assert relay.turn().published == 100
    assert names(mock) == ["CreateSession", "ExecuteSql", "ExecuteSql", "ExecuteSql", "Commit"]
    poll, heads, lock, commit = requests(mock)[1:]
    tags = [each.request_options.request_tag for each in (poll, heads, lock)]
    assert tags == ["outbox-poll", "outbox-order", "outbox-claim"]
    assert heads.sql == relay_sql.KEY_HEADS
    assert heads.transaction.single_use.read_only.strong
    assert heads.request_options.priority == RequestOptions.Priority.PRIORITY_MEDIUM
    assert (list(heads.params["topics"]), list(heads.params["keys"])) == (["orders"], ["key"])
    assert lock.sql == relay_sql.LOCK
    assert set(lock.params) == {"ids"}
    assert list(lock.params["ids"]) == sorted(ids)
    tables = lock.sql.partition("FROM")[2]
    assert "AsynchronousTasks@{FORCE_INDEX=_BASE_TABLE} AS task ON task.Id = wanted" in tables
    assert not [word for word in ("OrderingKey", "WHERE", "InOrder", "Topic", "<", ">") if word in tables]
    assert publisher.requests == [ids]
    assert len(commit.mutations) == 1
    mock.clear_requests()
    assert relay.turn().published == 100
    assert names(mock) == ["ExecuteSql", "ExecuteSql", "ExecuteSql", "Commit"]


def opened(monkeypatch: pytest.MonkeyPatch, **flags: str) -> SpannerStore:
    """Return the store of a worker with these flags, without the checks at its start."""
    for check in ("verified_layout", "verify_grants"):
        monkeypatch.setattr(f"publishworker.process.app.{check}", lambda _database: Layout(10))
    given = {"project": "p", "instance": "inst", "database": "db"} | flags
    return open_store(WorkerSettings.read({name: value for name, value in given.items() if value}, {}))


@pytest.mark.parametrize("name", ["", "low", "medium", "high"])
def test_the_request_priority_is_that_of_the_flag(
    mock: SpannerServicer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of all requests of a turn, the commit too. A heartbeat is HIGH, which is the default, whatever the flag says."""
    ids = prepare(mock, 2, "key")
    store = opened(monkeypatch, request_priority=name)
    assert make_relay(store).turn().published == len(ids)
    store.heartbeat("me", datetime.now(UTC), (), info={"host": "node-1"})
    *sent, heartbeat = [each for each in mock.requests if hasattr(each, "request_options")]
    assert {tag(each) for each in sent} == {"outbox-poll", "outbox-order", "outbox-claim", *INTERVAL_TAGS, ""}
    assert {each.request_options.priority.name for each in sent} == {f"PRIORITY_{(name or 'medium').upper()}"}
    assert [each.request_options.transaction_tag for each in sent if not tag(each)] == ["outbox-relay"]
    assert heartbeat.request_options.priority.name in ("PRIORITY_UNSPECIFIED", "PRIORITY_HIGH")


@pytest.mark.parametrize(
    ("key", "value", "delay"), [(None, "", 0.05), (None, "0.5", 0.5), (None, "0", 0), ("key", "", 0)]
)
def test_only_marks_that_nothing_waits_for_are_delayed(
    mock: SpannerServicer, monkeypatch: pytest.MonkeyPatch, key: str | None, value: str, delay: float
) -> None:
    """Spanner may write them together with other commits. The next task of an ordering key waits for the mark."""
    prepare(mock, 2, key)
    assert make_relay(opened(monkeypatch, commit_delay=value)).turn().published == 2
    [commit] = [each for each in mock.requests if hasattr(each, "mutations")]
    assert commit.max_commit_delay.total_seconds() == delay


#: With this message, the client itself would repeat a commit that is INTERNAL for two minutes.
RESET = "Received RST_STREAM with error code 2"


def error(code: int, message: str = "broken") -> Any:
    return to_status(status_pb2.Status(code=code, message=message))


#: Spanner's error for a session that it has deleted.
LOST_SESSION = error(code_pb2.NOT_FOUND, "Session not found: projects/p/instances/inst/...")


def with_resource(type: str) -> Any:
    """Return NOT_FOUND of a resource of this type, with a text that does not name it."""
    status = status_pb2.Status(code=code_pb2.NOT_FOUND, message="was concurrently deleted")
    status.details.add().Pack(ResourceInfo(resource_type=f"type.googleapis.com/google.spanner.{type}"))
    return to_status(status)


def test_a_batch_aborted_at_commit_is_published_and_marked_once(
    mock: SpannerServicer, database: LimitedDatabase
) -> None:  # OUT-TWICE-2
    """The transaction runs again: lock, commit; nothing is published again."""
    prepare(mock, 10)
    publisher = FakePublisher("orders", project="p")
    relay = make_relay(database, publisher=publisher)
    mock.mock_spanner.add_error("Commit", error(code_pb2.ABORTED))
    mock.mock_spanner.add_error("Commit", error(code_pb2.ABORTED))
    turn = relay.turn()
    assert (turn.published, turn.uncommitted) == (10, 0)
    assert len(publisher.published) == 10
    assert names(mock)[1:] == ["ExecuteSql", *["ExecuteSql", "Commit"] * 3]


def test_a_surely_failed_commit_differs_from_an_unknown_outcome(
    mock: SpannerServicer, database: LimitedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the rows were not locked, or Spanner has refused the commit; else the outcome is not known.

    A refusal says nothing about an attempt before it that had no answer.
    """
    prepare(mock, 1)
    store = SpannerStore(database, Layout(10))
    monkeypatch.setattr("publishworker.spanner.store.ABORTED_SECONDS", 0.0)
    refusals = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE", "ALREADY_EXISTS")
    unknown = ("UNKNOWN", "INTERNAL", "CANCELLED", "DATA_LOSS")
    for request, codes, kind in (
        ("ExecuteStreamingSql", ["INTERNAL"], NotWritten),
        ("ExecuteStreamingSql", ["INVALID_ARGUMENT"], NotWritten),
        *(("Commit", [code], NotWritten) for code in ("ABORTED", "PERMISSION_DENIED", "UNAUTHENTICATED")),
        ("Commit", ["NOT_FOUND"], DatabaseMissing),
        *(("Commit", [code], WriteRefused) for code in refusals),
        *(("Commit", [code], StoreError) for code in unknown),
        ("Commit", ["DEADLINE_EXCEEDED"], TimedOut),
        *(("Commit", ["UNAVAILABLE", code], StoreError) for code in (*refusals, "NOT_FOUND", "PERMISSION_DENIED")),
    ):
        for code in codes:
            text = RESET if request == "Commit" else "broken"
            mock.mock_spanner.add_error(request, error(code_pb2.Code.Value(code), text))
        with pytest.raises(StoreError) as caught:
            store.claim(["task-000"], lambda _rows, _now: {})
        assert caught.type is kind, codes
    mock.mock_spanner.add_error("ExecuteStreamingSql", error(code_pb2.DEADLINE_EXCEEDED))
    with pytest.raises(TimedOut):
        store.poll(poll_request("orders"))


@pytest.mark.parametrize("lost", [LOST_SESSION, with_resource("v1.Session")])
def test_a_lost_session_is_replaced(mock: SpannerServicer, database: LimitedDatabase, lost: Any) -> None:
    """The client would use it for ever; the next turn has a new one. A missing database is not a lost session."""
    prepare(mock, 1)
    relay = make_relay(database)
    mock.mock_spanner.add_error("ExecuteStreamingSql", with_resource("admin.database.v1.Database"))
    with pytest.raises(DatabaseMissing):
        relay.turn()
    assert names(mock).count("CreateSession") == 1
    mock.mock_spanner.add_error("ExecuteStreamingSql", lost)
    with pytest.raises(StoreError, match=r"Session not found|was concurrently deleted") as caught:
        relay.turn()
    assert caught.type is not DatabaseMissing
    assert relay.turn().published == 1
    assert names(mock).count("CreateSession") >= 2


def test_missing_grants_are_found_before_a_task_is_published(mock: SpannerServicer, database: LimitedDatabase) -> None:
    """Two reads, and two commits that change nothing: Spanner answers NOT_FOUND if the columns may be written."""
    columns = len(relay_sql.MARK_COLUMNS) + len(relay_sql.READ_COLUMNS)
    mock.mock_spanner.add_result(relay_sql.CHECK_COLUMNS, result((STRING,) * columns, []))
    mock.mock_spanner.add_result(relay_sql.DISCOVER_NO_TOPICS, result((STRING,) * 4, []))
    absent, denied = error(code_pb2.NOT_FOUND, "Row not found"), error(code_pb2.PERMISSION_DENIED, "Role r: no")
    mock.mock_spanner.add_error("Commit", absent)
    verify_grants(database)
    [mark, heartbeat] = [each for each in mock.requests if type(each).__name__ == "CommitRequest"]
    update, [insert, delete] = mark.mutations[0].update, heartbeat.mutations
    assert (update.table, *update.columns) == ("AsynchronousTasks", *relay_sql.MARK_COLUMNS)
    row = insert.insert_or_update
    assert (row.table, *row.columns) == ("AsynchronousTaskWorkers", *relay_sql.HEARTBEAT_COLUMNS)
    assert delete.delete.key_set.keys[0][0] == row.values[0][0]
    for request, verb in (("ExecuteStreamingSql", "read"), ("Commit", "update")):
        mock.mock_spanner.add_error(request, denied)
        sentence = rf"may not {verb} Id, SentAt, TimesSent.*BlockedBy.* of AsynchronousTasks\..*roles.sql.*Role r: no"
        with pytest.raises(NotReached, match=sentence):
            verify_grants(database)


#: The tables with one row for each controlled topic, worker or operation are read as a whole.
SMALL = ("AsynchronousTaskTopics", "AsynchronousTaskWorkers", "AsynchronousTaskShards")
#: Statements that sort a bounded number of rows: the result of a list, a window of sent tasks, one page of IDs.
SORTED = {"SentAt DESC, CreatedAt DESC, Id DESC", "SentAt, CreatedAt, Id", "Id", "StartedAt DESC, OperationId"}
#: The names of parameters that narrow a selection.
NARROWED = ((), ("topic", "since", "until", "error"), ("ordering_key", "id_prefix"), ("unexpired",))


def problems(statement: str) -> Iterator[str]:
    """Yield what leaves the plan of a statement to the optimizer."""
    for table, hint in re.findall(r"\b(AsynchronousTask\w+)(@\{FORCE_INDEX=\w+\})?", statement):
        if not hint and table not in SMALL:
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


def test_no_plan_depends_on_the_optimizer() -> None:
    """Of the statements on the page, with and without each narrowing condition."""
    page, statements = runpy.run_path(str(ROOT / "docs/statements.py"))["page"], set[str]()
    for state, names, newest in itertools.product(STATES, NARROWED, (False, True)):
        states = [state] if state in UNSENT else ["dead"]
        given = {
            "state": state,
            "states": states,
            "ended": CANCELLED if newest else "sent",
            "names": names,
            "newest": newest,
            "by_key": newest,
        }
        page.__globals__["EXAMPLES"] |= given | {"attempts": not newest}
        blocks = re.findall(r"^```sql\n(.*?)^```", page(), re.MULTILINE | re.DOTALL)
        statements |= {" ".join(each.split()) for each in blocks}
    assert len(statements) > 100
    assert {statement: found for statement in statements if (found := list(problems(statement)))} == {}


def test_every_statement_on_tasks_is_on_the_page() -> None:
    """Apart from that of `outbox verify`, which the role must be refused, and that of the pytest plugin."""
    files = [
        file
        for package in ("outbox", "publishworker", "outbox_admin", "outbox_pipeline")
        for file in (ROOT / package).rglob("*.py")
    ]
    pattern = r"(FROM|JOIN|UPDATE) AsynchronousTask"
    writers = {file.name for file in files if file.stem.endswith("_sql") or re.search(pattern, file.read_text())}
    assert writers - {"verify.py", "relay.py"} == {
        "relay_sql.py", "shared_sql.py", "counts_sql.py", "task_sql.py", "change_sql.py", "operation_sql.py",
    }  # fmt: skip
