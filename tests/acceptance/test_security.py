"""The promises of docs/security.md about a running worker and about every statement."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from google.cloud.spanner_v1 import ExecuteBatchDmlRequest, ExecuteSqlRequest, PartitionQueryRequest
from google.cloud.spanner_v1.database import Database

import outbox
from outbox.devtools.emulators import Emulators
from outbox.message import MAX_REQUEST_BYTES, RawPubsubMessage
from tests.support.commands import Commands
from tests.support.operations import insert, row, rows_of
from tests.support.relays import unsent, worker
from tests.support.rpc import Forwarding
from tests.support.waiting import eventually

#: In everything that must not be logged, and in every value that must not become a part of a statement.
SECRET = "s3cr3t'\"`;--"
_STATEMENTS: dict[str, Any] = {
    "ExecuteSql": ExecuteSqlRequest,
    "ExecuteStreamingSql": ExecuteSqlRequest,
    "PartitionQuery": PartitionQueryRequest,
}


class Reading(Forwarding):
    """Keeps the statements that go to Spanner."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.statements: set[str] = set()

    def forward(self, method: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        name = method.rpartition("/")[2]
        if name in _STATEMENTS:
            message: Any = _STATEMENTS[name].pb().FromString(request)
            self.statements.add(message.sql)
        elif name == "ExecuteBatchDml":
            batch: Any = ExecuteBatchDmlRequest.pb().FromString(request)
            self.statements |= {each.sql for each in batch.statements}
        return super().forward(method, request, context)


def listening(pid: int) -> set[str]:
    inodes = {str(link.readlink()) for link in (Path("/proc") / str(pid) / "fd").iterdir() if link.is_symlink()}
    found = set()
    for kind in ("tcp", "tcp6"):
        for line in (Path("/proc") / str(pid) / "net" / kind).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1])
    return found


def test_a_worker_opens_no_port_and_logs_no_secret(emulators: Emulators, database: Database, topic: str) -> None:
    """While it sends and while messages fail in each way, at the level DEBUG; nor does it log its credentials."""
    with database.batch() as batch:
        outbox.register(batch, topic, SECRET.encode(), {"card": SECRET})
    message = RawPubsubMessage(data=SECRET.encode(), attributes={"card": SECRET})
    data = message.SerializeToString()
    message.data += bytes(MAX_REQUEST_BYTES)
    wrong = {
        "undecodable": row("cut", Topic=topic, Data=data[:-2]),
        "too_large": row("large", Topic=topic, Data=message.SerializeToString()),
        "invalid_topic": row("no topic", Topic="no topic", Data=data),
        "topic_not_allowed": row("not allowed", Topic="another", Data=data),
        "expired": row("expired", Topic=topic, Data=data, ExpiresAt=datetime(2026, 1, 1, tzinfo=UTC)),
        "not_found": row("missing", Topic="a-missing-topic", Data=data),
    }
    insert(database, list(wrong.values()))
    flags = ("--log-level", "debug", "--backoff-initial", "0.05", "--allowed-topics", f"{topic},a-missing-topic")
    with worker(emulators, database, *flags, SOME_TOKEN=SECRET, DD_API_KEY=SECRET) as process:
        eventually(lambda: len(unsent(database)) == len(wrong), seconds=30, message="one is sent")

        def failed() -> bool:
            errors = {str(each["LastError"]).partition(":")[0] for each in rows_of(database).values()}
            return errors >= wrong.keys() and all(reason in process.stderr for reason in wrong)

        eventually(failed, seconds=30)
        assert listening(process.pid) == set()
        process.end()
        output = process.stdout + process.stderr
    assert "s3cr3t" not in output
    assert not [each for each in rows_of(database).values() if "s3cr3t" in str(each["LastError"])]


def test_no_value_becomes_a_part_of_a_statement(emulators: Emulators, database: Database) -> None:
    """Values of users and of rows are sent as parameters and keys."""
    insert(database, [row(SECRET, Topic=SECRET, OrderingKey=SECRET)])
    for words in (
        ("list", "--topic", SECRET),
        ("list", "--error", SECRET),
        ("show", SECRET),
        ("retry", SECRET),
        ("retry", "--state", "dead", "--topic", SECRET, "--yes"),
        ("purge", "--topic", SECRET, "--state", "sent", "--until", "1d", "--yes"),
        ("status",),
        ("topics",),
        ("cancel", SECRET, "--reason", SECRET),
    ):
        with Reading(emulators.spanner_host) as proxy:
            done = Commands(emulators, database, spanner_host=proxy.address).here(*words)
        assert "Traceback" not in done.stderr
        assert proxy.statements, done
        assert not [each for each in proxy.statements if "s3cr3t" in each], words
