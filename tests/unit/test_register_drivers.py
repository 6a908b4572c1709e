"""Transactions that DB-API connections replay, and requests of the Spanner client. Without a server."""

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from google.api_core.exceptions import (
    Aborted,
    AlreadyExists,
    DeadlineExceeded,
    InvalidArgument,
    RetryError,
    ServiceUnavailable,
)
from google.auth.exceptions import TransportError
from google.cloud.spanner_dbapi import Connection, Cursor, IntegrityError
from google.cloud.spanner_dbapi.parse_utils import get_param_types
from google.cloud.spanner_v1._helpers import _make_value_pb
from google.cloud.spanner_v1.session import Session
from google.cloud.spanner_v1.types import ExecuteSqlRequest
from google.protobuf.struct_pb2 import Struct
from sqlalchemy import create_engine
from sqlalchemy.orm import Session as OrmSession
from sqlalchemy.orm import sessionmaker

import outbox
from outbox.ext import dbapi, sqlalchemy
from outbox.table.connection import Deadline
from outbox.table.ddl import Layout
from outbox.table.own_transactions import transact
from publishworker.spanner.store import SpannerStore
from publishworker.spanner.write_errors import NotWritten
from tests.support import spanner


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Connection:
    """A connection with a session, which sends no commit."""
    database = spanner.client("host:1").instance("instance").database("database")
    session = Session(database)
    session._session_id = "session"
    monkeypatch.setattr(Connection, "commit", lambda _: None)
    created = Connection(database._instance, database)
    created._session = session
    return created


@pytest.mark.parametrize(
    ("sizes", "statements"),
    [
        ([80_000] * 100, [92, 8]),
        ([7_400_000, 1, 7_400_000], [2, 1]),
        ([7_498_000] * 2, [1, 1]),
        ([1] * 201, [100, 100, 1]),
    ],
)
def test_each_statement_of_a_driver_fits_into_a_request(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, sizes: list[int], statements: list[int]
) -> None:
    """Of 10 MiB, with data in base64 and long names. See https://cloud.google.com/spanner/quotas#request-limits."""
    requests: list[ExecuteSqlRequest] = []

    def execute(_cursor: Cursor, sql: str, params: dict[str, Any]) -> None:
        values = Struct(fields={name: _make_value_pb(value) for name, value in params.items()})
        requests.append(ExecuteSqlRequest(sql=sql, params=values, param_types=get_param_types(params)))

    monkeypatch.setattr(Cursor, "execute", execute)
    topic = f"projects/{'p' * 100}/topics/{'t' * 255}"
    tasks = [
        outbox.Task(topic, bytes(size), ordering_key=f"{n:01024}", task_id=f"\U0001f4e6{n:060}")
        for n, size in enumerate(sizes)
    ]
    half = len(tasks) // 2
    registered = [*dbapi.register_many(connection, tasks[:half]), *dbapi.register_many(connection, tasks[half:])]
    assert registered == [task.task_id for task in tasks]
    assert requests == []
    connection.commit()
    assert [request.sql.count("PENDING_COMMIT_TIMESTAMP") for request in requests] == statements
    assert all(ExecuteSqlRequest.pb(request).ByteSize() < 10 * 2**20 for request in requests)


def test_a_message_that_no_statement_can_hold_is_refused(connection: Connection) -> None:
    """Before anything is executed."""
    small, large = outbox.Task("orders", b""), outbox.Task("orders", bytes(8_000_000))
    with pytest.raises(
        outbox.InvalidMessage, match=r"^tasks\[1\]: the message has 8,000,\d+ bytes; at most 7,500,000 with"
    ):
        dbapi.register_many(connection, [small, large])
    for call in (dbapi.register, dbapi.register_once):
        with pytest.raises(outbox.InvalidMessage, match=r"^the message has 8,000,"):
            call(connection, "orders", bytes(8_000_000), task_id="t")
    assert not connection._spanner_transaction_started


@pytest.mark.parametrize(
    "begin", ["begin", "START TRANSACTION", "-- a\nBEGIN", "# a\nbegin", "/* a */ START TRANSACTION"]
)
def test_begin_in_autocommit_mode_is_accepted_if_a_cursor_executed_it(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, begin: str
) -> None:
    """A replay repeats it, unlike `connection.begin()`. The driver accepts a comment before it."""
    statements: list[str] = []
    connection.autocommit = True
    connection.cursor().execute(begin)
    monkeypatch.setattr(Cursor, "execute", lambda _, sql, __: statements.append(sql))
    dbapi.register(connection, "orders", b"")
    connection.commit()
    assert [sql[:6] for sql in statements] == ["INSERT"]


def began(connection: Connection) -> None:
    connection.autocommit = True
    connection.begin()


def start_batch(connection: Connection) -> None:
    connection.cursor().execute("START BATCH DML")


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        ([Connection.close], "the connection is closed"),
        ([lambda it: setattr(it, "read_only", True)], "the connection is read-only"),
        ([lambda it: setattr(it, "autocommit", True)], "the connection is in autocommit mode"),
        ([began], r"connection\.begin\(\), which a replay does not repeat"),
        ([began, start_batch], "which a replay does not repeat"),
        ([start_batch], "the connection is collecting a batch of DML"),
    ],
)
def test_wrong_uses_of_dbapi(connection: Connection, prepare: list[Callable[[Any], object]], sentence: str) -> None:
    for each in prepare:
        each(connection)
    for call in (dbapi.register, dbapi.register_once):
        with pytest.raises(outbox.InvalidTransaction, match=sentence):
            call(connection, "orders", b"", task_id="t")
    with pytest.raises(outbox.InvalidTransaction, match=sentence):
        dbapi.register_many(connection, [])
    assert not connection._spanner_transaction_started


def test_no_task_is_left_in_a_batch_that_does_not_run(connection: Connection) -> None:
    """The batch would take the INSERT before the commit, and the commit would leave it out without an error."""
    dbapi.register(connection, "orders", b"")
    connection.cursor().execute("START BATCH DML")
    with pytest.raises(outbox.InvalidTransaction, match='"RUN BATCH" first'):
        connection.commit()


def test_an_abandoned_session_returns_its_connection_to_the_pool(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of SQLAlchemy. Otherwise its locks would stay, and the pool would run out of connections."""
    monkeypatch.setattr(Connection, "_release_session", lambda _: None)
    url = "spanner+spanner:///projects/project/instances/instance/databases/database"
    engine = create_engine(url, creator=lambda: connection, _initialize=False)  # the dialect would ask a server

    def abandon() -> None:
        orm = OrmSession(engine)
        orm.connection()
        sqlalchemy.register(orm, "orders", b"")

    abandon()
    gc.collect()
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # of a QueuePool


def transaction_with(**behavior: Any) -> mock.Mock:
    return mock.Mock(spec_set=["execute_sql", "rollback"], **behavior)


def database_of(transaction: mock.Mock, commit_error: Exception | None = None) -> Any:
    """Return a database that runs a function like the client, and then fails the commit if there is an error."""

    def run(work: Callable[[Any], Any], **_options: Any) -> Any:
        result = work(transaction)
        if commit_error:
            raise commit_error
        return result

    return mock.Mock(run_in_transaction=run)


@pytest.mark.parametrize(
    ("error", "rollbacks"),
    [(InvalidArgument("refused"), 1), (ServiceUnavailable("the outcome is unknown"), 0), (Aborted("again"), 0)],
)
def test_only_a_refused_commit_is_rolled_back(error: Exception, rollbacks: int) -> None:
    """A commit without an answer may still be executed."""
    transaction = transaction_with()
    with pytest.raises(type(error)):
        transact(database_of(transaction, error), lambda _begun: None)
    assert transaction.rollback.call_count == rollbacks


def test_a_rollback_that_fails_does_not_hide_the_error() -> None:
    transaction = transaction_with(**{"rollback.side_effect": ServiceUnavailable("no answer")})
    with pytest.raises(InvalidArgument):
        transact(database_of(transaction), mock.Mock(side_effect=InvalidArgument("first")))
    transaction.rollback.assert_called_once_with()


def test_a_duplicate_of_the_application_is_not_said_to_be_that_of_a_task() -> None:
    for id, remedy in (("task-1", ". Use another ID, or register_once"), ("order-1", "")):
        with pytest.raises(IntegrityError) as caught, dbapi.errors("AsynchronousTasks", ids=["task-1"]):
            raise IntegrityError from AlreadyExists(f"Row [{id}] already exists.")
        assert str(caught.value) == f"Row [{id}] already exists{remedy}"


def test_a_bind_that_is_not_of_sqlalchemy_is_named() -> None:
    engine = create_engine("sqlite://")
    database = spanner.client("host:1").instance("instance").database("database")
    for bind, kind in ((database, "google"), (OrmSession(engine), "sqlalchemy.orm"), ("spanner+spanner:///", "str")):
        with pytest.raises(TypeError, match=rf"^bind is {kind}.*\. It must be an Engine, .*, or a sessionmaker\. With"):
            sqlalchemy.run_in_transaction(bind, pytest.fail)  # type: ignore[arg-type]  # wrong on purpose
    assert sqlalchemy.run_in_transaction(sessionmaker(engine), lambda _, answer: answer, 7) == 7


def test_a_deadline_includes_all_restarts_of_a_stream() -> None:
    """The client restarts a broken stream with the full timeout; the deadline passes only the time that remains."""
    now, seen = [0.0], list[float]()
    deadline = Deadline(10, lambda: now[0])

    def note(timeout: float) -> None:
        seen.append(timeout)

    call = deadline(note)
    call()
    now[0] = 9.999
    call()
    now[0] = 10.0
    with pytest.raises(DeadlineExceeded):
        call()
    with pytest.raises(DeadlineExceeded):
        deadline(note)()
    assert seen == [10.0, pytest.approx(0.001)]


@pytest.mark.parametrize(
    "error", [DeadlineExceeded("a lock"), RetryError("no answer", None), TransportError("no token")]
)
def test_a_lock_query_that_fails_has_written_nothing(error: Exception) -> None:
    """Also after an abort. Otherwise at-most-once tasks would count as perhaps lost, although they are sent later."""
    store = SpannerStore(database_of(transaction_with(**{"execute_sql.side_effect": error})), Layout(10))
    with pytest.raises(NotWritten):
        store.claim(["a"], lambda _rows, _now: {})
