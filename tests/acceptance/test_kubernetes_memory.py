"""The memory of a worker with default settings, against the 512 MB that the manifest allows.

The emulator cannot hold 60 tasks of 9 MB, as it reads the whole table for each lock and allows 128 MB for that; and it
runs one transaction at a time. So a gateway before it answers the locks with large rows, and as many at once as a
worker asks for, as Spanner does.
"""

import base64
import itertools
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.cloud.spanner_v1 import CommitRequest, ExecuteSqlRequest, PartialResultSet, TypeCode
from google.cloud.spanner_v1.database import Database
from google.pubsub_v1 import PubsubMessage, SubscriberClient
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

import outbox
from outbox.devtools.emulators import Emulators
from tests.support.container import MEMORY_LIMIT, altered, peak_memory, settings
from tests.support.pubsub import Subscription
from tests.support.relays import register, unsent, worker
from tests.support.rpc import Forwarding
from tests.support.spanner import count
from tests.support.waiting import eventually

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

TASKS, TASK_BYTES = 60, 9_000_000
BACKLOG = 10_000
#: Characters of one piece of a row on its way.
PIECE = 1_000_000
ANY_SIZE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
OURS = b"large-"
#: The types of the lock query's columns.
LOCKED = (
    ("STRING",) * 2 + ("BYTES", "STRING") + ("TIMESTAMP",) * 3 + ("BOOL", "INT64", "TIMESTAMP", "BOOL", "BOOL")
    + ("TIMESTAMP",)
)  # fmt: skip
#: A worker that knows nothing of the emulator, and so locks several batches at once.
NO_EMULATOR = """
from publishworker.process import app
app.EmulatorStore = app.SpannerStore
"""


class Gateway(Forwarding):
    def __init__(self, target: str, topic: str) -> None:
        super().__init__(target)
        self._topic = topic
        data = PubsubMessage.pb()(data=bytes(TASK_BYTES)).SerializeToString()
        self._data, self._size = base64.b64encode(data).decode(), str(len(data))
        self._numbers = itertools.count()
        self._guard = threading.Lock()
        self._open = 0
        self.most_open = 0

    def forward(self, method: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answer the locks, enlarge the polls, commit rows locked here in a transaction of their own."""
        name = method.rpartition("/")[2]
        query = ExecuteSqlRequest.pb().FromString(request) if name == "ExecuteStreamingSql" else None
        tag = query.request_options.request_tag if query else ""
        if tag == "outbox-claim":
            return self._locked(query)
        if tag == "outbox-poll":
            return self._enlarged(super().forward(method, request, context))
        if name == "Commit":
            return self._committed(method, request, context)
        return super().forward(method, request, context)

    def _enlarged(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        column, is_task = itertools.cycle(range(8)), False
        for part in parts:
            answer = PartialResultSet.pb().FromString(part)
            for value in answer.values:
                place = next(column)
                is_task = bool(value.string_value) if place == 0 else is_task
                if place == 7 and is_task:
                    value.string_value = self._size
            yield answer.SerializeToString()

    def _locked(self, query: Any) -> Iterator[bytes]:
        part = PartialResultSet.pb()()
        for type_ in LOCKED:
            part.metadata.row_type.fields.add().type_.code = TypeCode[type_]
        if query.transaction.HasField("begin"):
            part.metadata.transaction.id = OURS + str(next(self._numbers)).encode()
        with self._guard:
            self._open += 1
            self.most_open = max(self.most_open, self._open)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        for id in (value.string_value for value in query.params.fields["ids"].list_value.values):
            _add(part, id, self._topic)
            for start in range(0, len(self._data), PIECE):
                _add(part, self._data[start : start + PIECE])
                if start + PIECE < len(self._data):
                    part.chunked_value = True
                    yield part.SerializeToString()
                    part = PartialResultSet.pb()()
            _add(part, None, now, None, None, True, "0", None, False, False, now)
        yield part.SerializeToString()

    def _committed(self, method: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        commit = CommitRequest.pb().FromString(request)
        if commit.transaction_id.startswith(OURS):
            with self._guard:
                self._open -= 1
            commit.single_use_transaction.read_write.SetInParent()
        while True:
            try:
                yield self._channel.unary_unary(method)(commit.SerializeToString(), timeout=30)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.ABORTED:
                    context.abort(error.code(), error.details())
                threading.Event().wait(0.02)  # its turn will come: the emulator commits one at a time
            else:
                return


def _add(part: Any, *values: object) -> None:
    for each in values:
        value = part.values.add()
        if each is None:
            value.null_value = 0
        elif isinstance(each, bool):
            value.bool_value = each
        else:
            value.string_value = each


def received(host: str, subscription: Subscription, ids: list[str]) -> None:
    """Pull few messages at a time, until each task has come, whole; raise AssertionError if one comes twice."""
    channel = grpc.insecure_channel(host, options=ANY_SIZE)
    client = SubscriberClient(transport=SubscriberGrpcTransport(channel=channel))
    found: list[str] = []

    def all_here() -> bool:
        request = {"subscription": subscription.name, "max_messages": 4, "return_immediately": True}
        messages = client.pull(request, timeout=30).received_messages
        if messages:
            client.acknowledge(subscription=subscription.name, ack_ids=[each.ack_id for each in messages], timeout=30)
        assert all(len(each.message.data) == TASK_BYTES for each in messages)
        found.extend(each.message.attributes[outbox.TASK_ID_ATTRIBUTE] for each in messages)
        return len(found) >= len(ids)

    eventually(all_here, seconds=60)
    assert sorted(found) == sorted(ids)


@pytest.mark.long("a backlog of many small tasks has the same limit")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of return_immediately
def test_tasks_of_9_mb(emulators: Emulators, database: Database, subscription: Subscription, tmp_path: Path) -> None:
    """60 of them, three at a time, as more would be too many bytes: all arrive, within the limit."""
    ids = register(database, subscription.topic, TASKS, b"")
    with Gateway(emulators.spanner_host, subscription.topic) as spanner:
        environment = settings(
            emulators, database.database_id, tmp_path / "heartbeat", SPANNER_EMULATOR_HOST=spanner.address
        )
        with altered(NO_EMULATOR, environment) as process:
            eventually(lambda: not unsent(database), seconds=200)
            peak = peak_memory(process)
            process.end()
    received(emulators.pubsub_host, subscription, ids)
    print(f"{TASKS} tasks of {TASK_BYTES / 1e6:g} MB, {spanner.most_open} at a time: {peak / 2**20:.0f} MiB")
    assert spanner.most_open > 1
    assert peak < MEMORY_LIMIT


def test_a_backlog_of_10_000_tasks(
    emulators: Emulators, database: Database, topic: str, tmp_path: Path, long: bool
) -> None:
    """The first tenth of it is sent within the limit; all of it with `--long`."""
    register(database, topic, BACKLOG)
    left = 0 if long else BACKLOG * 9 // 10
    with worker(emulators, database, OUTBOX_HEARTBEAT_FILE=str(tmp_path / "heartbeat")) as process:
        eventually(lambda: count(database, "SentAt IS NULL") <= left, seconds=200)
        peak = peak_memory(process)
        process.end()
    print(f"a backlog of {BACKLOG:,} tasks: {peak / 2**20:.0f} MiB")
    assert peak < MEMORY_LIMIT
