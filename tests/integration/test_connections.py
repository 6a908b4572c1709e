"""A server that limits the concurrent requests of a connection, as Spanner does: heartbeats wait for no other request.

The server is scripted, because the emulator has no such limit and too few partitions.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest
from google.cloud.spanner_v1 import (
    CommitRequest,
    CommitResponse,
    CreateSessionRequest,
    ExecuteSqlRequest,
    PartialResultSet,
    Session,
)
from google.protobuf.json_format import ParseDict

from outbox.table.layouts import Layout
from publishworker.process import app
from publishworker.process.settings import WorkerSettings
from publishworker.spanner import change_stream
from publishworker.spanner.change_stream import MAX_STREAMS, ChangeStream
from publishworker.spanner.store import SpannerStore
from publishworker.spanner.unsent import UnsentTasks
from publishworker.types import Heartbeat
from tests.support.waiting import eventually

#: Requests of a connection that are open at once. Others wait in the client.
LIMIT = 20
PARTITIONS = 2 * MAX_STREAMS
_TIME = {"code": "TIMESTAMP"}
_TEXT = {"code": "STRING"}


def array(element: Any) -> Any:
    return {"code": "ARRAY", "array_element_type": element}


def struct(*types: Any) -> Any:
    return {
        "code": "STRUCT",
        "struct_type": {"fields": [{"name": f"f{n}", "type": each} for n, each in enumerate(types)]},
    }


_CHILD = struct(_TIME, _TEXT, array(struct(_TEXT, array(_TEXT))))
_RECORDS = array(struct(array(struct(_TEXT)), array(struct(_TIME)), array(_CHILD)))


def answer(kind: Any, value: Any) -> Any:
    fields = [{"name": "", "type": kind}]
    return ParseDict({"metadata": {"row_type": {"fields": fields}}, "values": [value]}, PartialResultSet.pb()())


class Limited:
    """Answers CreateSession, Commit, the time and the change stream. Any other query hangs until the end."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        self.open, self.most, self.hanging = 0, 0, 0
        self.ended = threading.Event()
        self._lock = threading.Lock()

    def handlers(self) -> Any:
        def unary(respond: Any, request: Any, response: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(
                lambda sent, _: respond(sent), request.pb().FromString, response.pb().SerializeToString
            )

        methods = {
            "CreateSession": unary(self._session, CreateSessionRequest, Session),
            "Commit": unary(lambda _: CommitResponse.pb()(), CommitRequest, CommitResponse),
            "ExecuteStreamingSql": grpc.unary_stream_rpc_method_handler(
                self._execute, ExecuteSqlRequest.pb().FromString, PartialResultSet.pb().SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler("google.spanner.v1.Spanner", methods)

    def _session(self, request: Any) -> Any:
        return Session.pb(Session(name=f"{request.database}/sessions/{time.monotonic_ns()}", multiplexed=True))

    def _execute(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        if "READ_" in request.sql:
            yield from self._changes(dict(request.params), context)
        elif request.sql == "SELECT CURRENT_TIMESTAMP()":
            yield answer(_TIME, datetime.now(UTC).isoformat())
        else:
            self.hanging += 1
            self.ended.wait(30)

    def _changes(self, values: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        if values["token"] is None:
            children = [[str(number), []] for number in range(PARTITIONS)]
            yield answer(_RECORDS, [[[], [], [[values["start"], "1", children]]]])
            return
        with self._counted(values["token"]):
            while context.is_active() and datetime.now(UTC) < datetime.fromisoformat(values["end"]):
                yield answer(_RECORDS, [[[], [[values["start"]]], []]])
                self.ended.wait(0.1)

    @contextlib.contextmanager
    def _counted(self, token: str) -> Iterator[None]:
        with self._lock:
            self.reads[token] += 1
            self.open += 1
            self.most = max(self.most, self.open)
        try:
            yield
        finally:
            with self._lock:
                self.open -= 1


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Limited]:
    limited = Limited()
    options = [("grpc.max_concurrent_streams", LIMIT)]
    with ThreadPoolExecutor(4 * LIMIT) as pool:
        running = grpc.server(pool, handlers=[limited.handlers()], options=options)
        port = running.add_insecure_port("127.0.0.1:0")
        running.start()
        monkeypatch.setenv("SPANNER_EMULATOR_HOST", f"127.0.0.1:{port}")
        yield limited
        limited.ended.set()
        running.stop(None).wait(5)


@pytest.fixture
def store(server: Limited, monkeypatch: pytest.MonkeyPatch) -> SpannerStore:  # noqa: ARG001 - sets the address
    for check in ("verified_layout", "verify_grants"):
        monkeypatch.setattr(app, check, lambda _database: Layout(10))
    return app.open_store(WorkerSettings.read({"project": "my-project", "instance": "main", "database": "shop"}, {}))


def write_heartbeats(store: SpannerStore) -> None:
    for _ in range(3):
        store.heartbeat(Heartbeat("me", datetime.now(UTC), ()))


def test_heartbeats_do_not_wait_for_requests_that_hang(server: Limited, store: SpannerStore) -> None:
    """As many as the connection allows. Each --concurrency may be slow at once, up to 100."""
    with ThreadPoolExecutor(2 * LIMIT) as pool:
        for _ in range(2 * LIMIT):
            pool.submit(UnsentTasks(store).topics)
        eventually(lambda: server.hanging == LIMIT)
        write_heartbeats(store)
        server.ended.set()


def test_all_partitions_of_a_change_stream_are_read_although_a_connection_is_limited(
    server: Limited, store: SpannerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partitions take turns, at most MAX_STREAMS at once, and nothing else waits for them."""
    monkeypatch.setattr(change_stream, "REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(change_stream, "TURN_SECONDS", 0.2)
    stream = ChangeStream(store.database.on_own_connection(), lambda: None)
    stream.start()
    for turns in (1, 3):
        eventually(lambda least=turns: len(server.reads) == PARTITIONS and min(server.reads.values()) >= least)  # type: ignore[misc]  # a default of a lambda
        write_heartbeats(store)
    assert stream.works
    stream.stop()
    assert server.most == MAX_STREAMS < LIMIT
