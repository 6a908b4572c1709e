"""Registration in real Spanner transactions, with both clients, and the row contract of docs/reference/schema.md."""

import asyncio
import base64
import contextlib
import json
import re
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any
from unittest import mock

import pytest
from google.api_core.exceptions import AlreadyExists, DeadlineExceeded, RetryError
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, param_types
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.transaction import Transaction
from google.protobuf.json_format import ParseDict
from google.pubsub_v1.types import PubsubMessage

import outbox
from outbox.devtools.emulators import Emulators
from outbox.message import RawPubsubMessage
from outbox.registration import TASK_COLUMNS
from outbox.table import timeouts
from outbox.testing import RecordingTransaction, assert_registered
from tests.support.clients import aio
from tests.support.drivers import aborting
from tests.support.processes import ROOT
from tests.support.proxy import Proxy
from tests.support.relays import execute
from tests.support.spanner import query

ORDERS = """
CREATE TABLE Orders (
  Id STRING(36) NOT NULL, WrittenAt TIMESTAMP OPTIONS (allow_commit_timestamp=true)
) PRIMARY KEY (Id)"""


def ids(database: Database) -> list[str]:
    return [id for [id] in query(database, "SELECT Id FROM AsynchronousTasks ORDER BY Id")]


def once(transaction: Any, task_id: str = "t") -> bool:
    return outbox.register_once(transaction, "orders", b"data", task_id=task_id)


def test_business_row_and_task_have_one_commit(own_database: Database) -> None:  # OUT-LOSS-1
    """CreatedAt is the time of the caller's own commit (A03). Nothing is readable before (A01), or registered after."""
    own_database.update_ddl([ORDERS]).result(30)
    available, expires = datetime(2040, 1, 2, 3, 4, 5, 678901, tzinfo=UTC), datetime(2041, 1, 1, tzinfo=UTC)

    ended: list[Any] = []

    def work(transaction: Any, **more: Any) -> str:
        ended.append(transaction)
        before = ids(own_database)
        transaction.insert("Orders", ("Id", "WrittenAt"), [(str(len(before)), COMMIT_TIMESTAMP)])
        id = outbox.register(transaction, "orders", b"data", {"a": "b"}, priority=7, available_at=available, **more)
        assert ids(own_database) == before
        return id

    keyed = own_database.run_in_transaction(work, ordering_key="k")
    with own_database.batch() as batch:
        once_at_most = work(batch, expires_at=expires, at_most_once=True)
    columns = "Id, Topic, Priority, AvailableAt, OrderingKey, ExpiresAt, AtMostOnce, Attempts, SentAt, CreatedAt"
    [first], [second] = query(own_database, "SELECT WrittenAt FROM Orders ORDER BY Id")
    assert query(own_database, f"SELECT {columns} FROM AsynchronousTasks ORDER BY CreatedAt") == [
        [keyed, "orders", 7, available, "k", None, False, 0, None, first],
        [once_at_most, "orders", 7, available, None, expires, True, 0, None, second],
    ]
    for transaction in ended:
        with pytest.raises(outbox.InvalidTransaction, match="was committed or rolled back before"):
            outbox.register(transaction, "orders", b"")


def test_an_aborted_transaction_registers_one_task(database: Database) -> None:
    """The function runs again, and one row is committed (A10); the first attempt's tasks are forgotten."""
    attempts: list[str] = []

    def work(transaction: Any) -> None:
        attempts.append(outbox.register(transaction, "orders", b"data"))
        assert once(transaction)

    with aborting(lambda call: call == "commit" and len(attempts) == 1):
        database.run_in_transaction(work)
    assert len(attempts) > 1  # the emulator may abort further ones
    assert ids(database) == sorted([attempts[-1], "t"])


def test_a_given_id_makes_the_registration_idempotent(database: Database) -> None:
    """The second insert of the same id fails the caller's commit: AlreadyExists, which names the table."""

    def work(transaction: Any) -> None:
        transaction.insert_or_update("AsynchronousTaskTopics", ("Topic",), [("effect",)])
        outbox.register(transaction, "orders", b"", task_id="t")

    database.run_in_transaction(once)
    with pytest.raises(AlreadyExists, match="AsynchronousTasks"):
        database.run_in_transaction(work)
    assert query(database, "SELECT Topic FROM AsynchronousTaskTopics") == []
    assert ids(database) == ["t"]


def test_ids_spread_evenly_over_the_shards(database: Database) -> None:
    """Chi-square (A09). `MOD(ABS(..))` would overflow for the smallest of the 2^64 hashes."""
    [[expression]] = query(
        database,
        "SELECT GENERATION_EXPRESSION FROM INFORMATION_SCHEMA.COLUMNS "
        "WHERE TABLE_NAME = 'AsynchronousTasks' AND COLUMN_NAME = 'Shard'",
    )
    hashed = "FARM_FINGERPRINT(COALESCE(OrderingKey, Id))"
    assert hashed in expression
    assert query(database, f"SELECT {expression.replace(hashed, str(-(2**63)))}") == [[8]]
    each_id = "(SELECT Id, CAST(NULL AS STRING) AS OrderingKey FROM UNNEST(@ids) AS Id)"
    drawn = [str(uuid.uuid4()) for _ in range(10_000)]
    counts = dict(query(database, f"SELECT {expression}, COUNT(*) FROM {each_id} GROUP BY 1", ids=drawn))
    assert counts.keys() == set(range(10))
    # 9 degrees of freedom, 0.01 %.
    assert sum((count - 1_000) ** 2 / 1_000 for count in counts.values()) < 33.7


def test_one_of_two_concurrent_transactions_registers(database: Database) -> None:
    """Another one commits the same id after our read: ours is aborted, runs again and sees it."""
    ours: list[bool] = []
    others: list[bool] = []

    def work(transaction: Any) -> None:
        ours.append(once(transaction))
        if len(ours) == 1:
            others.append(pool.submit(database.run_in_transaction, once).result())

    def all_of_them() -> list[bool]:
        return [database.run_in_transaction(once, task_id=f"t{n}") for n in range(5)]

    with ThreadPoolExecutor(2) as pool:
        database.run_in_transaction(work)
        assert others == [True]
        assert (ours[0], ours[-1]) == (True, False)
        assert ids(database) == ["t"]
        first, second = (pool.submit(all_of_them) for _ in range(2))
        answers = list(zip(first.result(), second.result(), strict=True))
    assert all(sorted(pair) == [False, True] for pair in answers), answers
    assert len(ids(database)) == 6


#: How often an asyncio task is cancelled, the n-th time after 1.25 ** n steps of its loop.
MOMENTS = 40


async def once_async(transaction: Any, task_id: str = "t") -> bool:
    return await aio.register_once(transaction, "orders", b"data", {"a": "b"}, task_id=task_id)


def test_register_and_register_many_work_as_they_are(run_async: Callable[..., Any], database: Database) -> None:
    """In a transaction and in a batch. `register_once` knows what this transaction and others have registered."""

    async def in_transaction(transaction: Any) -> list[bool]:
        outbox.register(transaction, "orders", b"", task_id="single")
        outbox.register_many(transaction, [outbox.Task("orders", b"", task_id="many")])
        return [await once_async(transaction, id) for id in ("single", "many", "new", "new", "before")]

    async def work(asynchronous: Any) -> Any:
        async with asynchronous.batch() as batch:
            outbox.register(batch, "orders", b"", task_id="batch")
        with pytest.raises(outbox.InvalidTransaction, match="was committed or rolled back before"):
            outbox.register(batch, "orders", b"")
        assert await asynchronous.run_in_transaction(once_async, "before")
        return await asynchronous.run_in_transaction(in_transaction)

    assert run_async(work) == [False, False, True, False, False]
    assert {task.id for task in assert_registered(database, times=5)} == {"batch", "single", "many", "new", "before"}
    assert {task.message.data for task in assert_registered(database, times=2, attributes={"a": "b"})} == {b"data"}


@pytest.mark.parametrize("call", [once_async, aio.cancel])
def test_an_outage_ends_a_call(
    run_async: Callable[..., Any], emulators: Emulators, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any]
) -> None:
    """The client itself would repeat the request for ever, without a pause."""
    monkeypatch.setattr(timeouts, "IN_TRANSACTION_SECONDS", 1.0)
    with Proxy(emulators.spanner_host) as proxy:
        monkeypatch.setenv("SPANNER_EMULATOR_HOST", proxy.address)

        async def in_outage(transaction: Any) -> None:
            proxy.refuse()
            async with asyncio.timeout(60):
                await call(transaction, task_id="t")

        async def work(asynchronous: Any) -> None:
            with pytest.raises((RetryError, DeadlineExceeded)):
                await asynchronous.run_in_transaction(in_outage)

        run_async(work)


@pytest.mark.skipif(isinstance(aio, mock.Mock), reason="a client without AsyncClient")
@pytest.mark.parametrize("transaction", [Transaction(mock.Mock()), RecordingTransaction(), None])
def test_another_transaction_is_a_type_error(transaction: Any) -> None:
    with pytest.raises(TypeError, match=r"transaction of a Spanner AsyncClient\. With .* use outbox\.register_once"):
        asyncio.run(once_async(transaction))


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "in a batch"])
def test_each_message_is_processed_once(run_async: Callable[..., Any], database: Database, together: bool) -> None:
    """With its changes in the same transaction."""
    messages = [PubsubMessage(attributes={outbox.TASK_ID_ATTRIBUTE: f"task-{n}"}) for n in (1, 2, 1)]

    async def process(transaction: Any, some: list[PubsubMessage]) -> list[bool]:
        new = [await aio.process_once(transaction, each, consumer="billing") for each in some]
        for _ in filter(None, new):
            outbox.register(transaction, "orders", b"")
        return new

    async def work(asynchronous: Any) -> list[bool]:
        batches = [messages] if together else [[each] for each in messages]
        return [new for some in batches for new in await aio.run_in_transaction(asynchronous, process, some)]

    assert run_async(work) == [True, True, False]
    assert_registered(database, times=2)
    assert query(database, "SELECT Consumer, TaskId FROM ProcessedTasks ORDER BY 2") == [
        ["billing", "task-1"], ["billing", "task-2"]
    ]  # fmt: skip


def test_a_cancelled_asyncio_task_leaves_no_half_transaction_and_no_lock(
    run_async: Callable[..., Any], database: Database
) -> None:
    """Whenever it is cancelled: in each request, between them, in the commit."""
    begun: list[Any] = []

    async def work(transaction: Any, name: str) -> None:
        begun.append(transaction)
        await once_async(transaction, f"{name}-a")
        await aio.process_once(transaction, PubsubMessage(attributes={outbox.TASK_ID_ATTRIBUTE: name}), consumer="c")
        outbox.register(transaction, "orders", b"", task_id=f"{name}-b")
        await asyncio.sleep(0)

    async def cancelled(asynchronous: Any, name: str, steps: int) -> bool:
        task = asyncio.ensure_future(aio.run_in_transaction(asynchronous, work, name))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return task.cancelled()

    async def all_moments(asynchronous: Any) -> list[bool]:
        await aio.run_in_transaction(asynchronous, work, "first")
        ended = []
        for moment in range(MOMENTS):
            ended.append(await cancelled(asynchronous, f"n{moment:02}", int(1.25**moment)))
            await aio.run_in_transaction(asynchronous, work, f"m{moment:02}")
        return ended

    assert {*run_async(all_moments)} == {True, False}
    assert [each for each in begun if each._transaction_id and not (each.committed or each.rolled_back)] == []
    written = query(
        database,
        "SELECT SUBSTR(Id, 1, 3), COUNT(*), (SELECT COUNT(*) FROM ProcessedTasks WHERE TaskId = SUBSTR(Id, 1, 3)) "
        "FROM AsynchronousTasks WHERE Id LIKE 'm%' OR Id LIKE 'n%' GROUP BY 1, 3",
    )
    assert {tuple(counts) for _, *counts in written} == {(2, 1)}
    assert sum(name.startswith("m") for name, *_ in written) == MOMENTS


PAGE = (ROOT / "docs/reference/schema.md").read_text(encoding="utf-8")
GOLDEN = json.loads((ROOT / "docs/reference/row-contract.json").read_text(encoding="utf-8"))
HELLO, WHOLE = re.findall(r"^```sql\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
TYPES = {
    "Data": param_types.BYTES, "Priority": param_types.INT64, "Sequence": param_types.INT64,
    "AvailableAt": param_types.TIMESTAMP, "ExpiresAt": param_types.TIMESTAMP, "AtMostOnce": param_types.BOOL,
}  # fmt: skip
#: `register` does not write a column that has its default.
DEFAULTS = {"OrderingKey": None, "AvailableAt": None, "ExpiresAt": None, "AtMostOnce": False}
each_row = pytest.mark.parametrize("golden", GOLDEN["rows"], ids=lambda golden: golden["name"])


def arguments(golden: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `register`, from JSON."""
    times = {name: datetime.fromisoformat(value) for name, value in golden["arguments"].items() if name.endswith("_at")}
    return golden["arguments"] | {"message": base64.b64decode(golden["arguments"]["message"])} | times


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its message decoded, and without the two columns that differ from row to row."""
    times = {name: row[name] and datetime.fromisoformat(str(row[name])) for name in ("AvailableAt", "ExpiresAt")}
    message = RawPubsubMessage.FromString(base64.b64decode(row["Data"]))
    same = {name: value for name, value in row.items() if name not in ("Sequence", "CreatedAt")}
    return same | times | {"Data": message}


@each_row
def test_register_writes_the_golden_rows(golden: dict[str, Any]) -> None:
    transaction = RecordingTransaction()
    outbox.register(transaction, **arguments(golden))
    [(_, columns, [values])] = transaction.inserts
    row, written = golden["row"], DEFAULTS | dict(zip(columns, values, strict=True))
    assert comparable(written) == comparable(row)
    assert comparable(row)["Data"] == ParseDict(golden["message"], RawPubsubMessage())
    assert (written["CreatedAt"], row["CreatedAt"]) == (COMMIT_TIMESTAMP, COMMIT_TIMESTAMP)
    assert list(row) == list(TASK_COLUMNS)


@each_row
def test_the_statement_writes_the_row_of_register(database: Database, golden: dict[str, Any]) -> None:
    """In every column, also in those that neither of them names."""

    def insert(transaction: Any) -> None:
        params = {name: value for name, value in golden["row"].items() if name != "CreatedAt"}
        types = {name: TYPES.get(name, param_types.STRING) for name in params}
        assert transaction.execute_update(WHOLE, params=params, param_types=types) == 1

    def stored() -> dict[str, Any]:
        with database.snapshot() as snapshot:
            result = snapshot.execute_sql("SELECT * FROM AsynchronousTasks")
            [row] = result.to_dict_list()
        return comparable(row)

    database.run_in_transaction(insert)
    inserted = stored()
    execute(database, "DELETE FROM AsynchronousTasks WHERE TRUE")
    database.run_in_transaction(lambda transaction: outbox.register(transaction, **arguments(golden)))
    assert inserted == stored() | {"Bytes": inserted["Bytes"]}
    assert inserted["Bytes"] == len(base64.b64decode(golden["row"]["Data"]))


def test_the_short_statement_writes_a_whole_task(database: Database) -> None:
    database.run_in_transaction(lambda transaction: transaction.execute_update(HELLO))
    [task] = assert_registered(database, topic="orders")
    assert (task.message.data, task.priority, task.at_most_once) == (b"hello", outbox.Priority.NORMAL, False)


def test_the_page_names_every_column(database: Database) -> None:
    """The columns to write are those of `register`, and the page has the version of the golden rows."""
    write, omit = (re.split(r"^### .*\n", PAGE, flags=re.MULTILINE)[n] for n in (1, 2))
    named = {
        column for line in re.findall(r"^\| (`[^|]*)\|", omit, re.MULTILINE) for column in re.findall(r"\w+", line)
    }
    columns = "SELECT COLUMN_NAME FROM INFORMATION_SCHEMA.COLUMNS WHERE TABLE_NAME = 'AsynchronousTasks'"
    assert sorted(re.findall(r"^\| `(\w+)`", write, re.MULTILINE)) == sorted(TASK_COLUMNS)
    assert named == {name for [name] in query(database, columns)} - set(TASK_COLUMNS)
    assert f"version {GOLDEN['version']} of the contract" in PAGE
