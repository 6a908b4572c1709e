"""Tasks on the emulators, workers as processes, and an account of received messages: from outside of the relay."""

import contextlib
import json
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database
from google.pubsub_v1.types import PubsubMessage

import outbox
from outbox.devtools.emulators import Emulators
from tests.specification.conformance import conform
from tests.support.processes import Process, started
from tests.support.pubsub import Subscription
from tests.support.spanner import query, variables
from tests.support.waiting import eventually

#: Where the workers of a test write their traces, if anywhere.
traces: Path | None = None
#: A value of AsynchronousTasks.Data that is no PubsubMessage, encoded as the client wants it.
UNDECODABLE = b"////"
SHARDS = 10


def register(database: Database, topic: str, count: int, data: bytes = b"x" * 300, **options: Any) -> list[str]:
    ids: list[str] = []
    while len(ids) < count:
        with database.batch() as batch:
            ids += [outbox.register(batch, topic, data, **options) for _ in range(min(50, count - len(ids)))]
    return ids


def unsent(database: Database) -> list[str]:
    return [id for [id] in query(database, "SELECT Id FROM AsynchronousTasks WHERE SentAt IS NULL")]


def wait_until_all_sent(database: Database) -> None:
    eventually(lambda: not unsent(database), seconds=60, message="all tasks marked as sent")


@dataclass(frozen=True, slots=True)
class Account:
    """The messages of a subscriber, compared with the registered tasks."""

    lost: frozenset[str]
    unexpected: frozenset[str]
    duplicates: int


#: No task is lost, unexpected or duplicated.
EACH_ONCE = Account(frozenset(), frozenset(), 0)


def compare(trace: Path) -> None:
    """Compare the traces of workers with the specification."""
    with trace.open(encoding="utf-8") as lines:
        found = conform(json.loads(line) for line in lines if line.endswith("}\n"))  # a killed worker may leave a part
    print(f"{found.workers} workers, {found.transactions:,} transactions, {found.skipped} not specified")
    assert not found.differences, found.differences[0]


def account(registered: Sequence[str], subscription: Subscription) -> Account:
    expected = set(registered)
    received = Counter(message.attributes[outbox.TASK_ID_ATTRIBUTE] for message in subscription.drain(0.5))
    return Account(
        lost=frozenset(expected - set(received)),
        unexpected=frozenset(set(received) - expected),
        duplicates=sum(count - 1 for count in received.values()),
    )


def insert_undecodable(database: Database, id: str, topic: str, key: str, **columns: Any) -> None:
    row = {"Id": id, "Topic": topic, "Data": UNDECODABLE, "Priority": 50, "OrderingKey": key, **columns}
    with database.batch() as batch:
        batch.insert("AsynchronousTasks", ("CreatedAt", *row), [(COMMIT_TIMESTAMP, *row.values())])


def execute(database: Database, statement: str) -> int:
    changed: int = database.run_in_transaction(lambda transaction: transaction.execute_update(statement))
    return changed


def key_orders(database: Database, topic: str) -> dict[str, list[str]]:
    statement = """
SELECT OrderingKey, Id FROM AsynchronousTasks
WHERE OrderingKey IS NOT NULL AND Topic IN UNNEST(@topics) ORDER BY CreatedAt, Sequence, Id"""
    orders: dict[str, list[str]] = {}
    for key, id in query(database, statement, topics=[topic]):
        orders.setdefault(key, []).append(id)
    return orders


def first_deliveries(messages: Iterable[PubsubMessage]) -> dict[str, list[str]]:
    """Return the ids of each ordering key in the order in which they came first; repeats are left out."""
    orders: dict[str, dict[str, None]] = {}
    for message in messages:
        if message.ordering_key:
            orders.setdefault(message.ordering_key, {})[message.attributes[outbox.TASK_ID_ATTRIBUTE]] = None
    return {key: [*ids] for key, ids in orders.items()}


def shards_of(process: Process) -> set[int]:
    lines = [json.loads(line) for line in process.stderr.splitlines() if '"assigned"' in line]
    if not lines:
        return set(range(SHARDS))
    return {int(shard) for shard in lines[-1]["message"].rpartition("shards ")[2].split(",")}


def divided(workers: Sequence[Process]) -> bool:
    parts = [shards_of(each) for each in workers]
    sizes = [len(part) for part in parts]
    return set().union(*parts) == set(range(SHARDS)) and sum(sizes) == SHARDS and max(sizes) - min(sizes) <= 1


@contextlib.contextmanager
def worker(
    emulators: Emulators,
    database: Database,
    *arguments: str,
    command: str = "run",
    trace: Path | None = None,
    **environment: str,
) -> Iterator[Process]:
    """Start `publishworker` on a database; its environment is that of `outbox emulators`, except for one variable.

    `run` writes its steps to `trace`, or else to `traces`.
    """
    heartbeat = Path("/tmp") / f"publishworker-{uuid.uuid4().hex}.heartbeat"
    settings = variables(database.database_id, emulators) | {"OUTBOX_HEARTBEAT_FILE": str(heartbeat)}
    try:
        environment, module = settings | environment, "publishworker"
        if (trace := trace or traces) is not None and command == "run":
            environment, module = environment | {"TRACE_FILE": str(trace)}, "tests.support.traced_worker"
        with started(module, command, *arguments, environment=environment) as process:
            yield process
    finally:
        heartbeat.unlink(missing_ok=True)
