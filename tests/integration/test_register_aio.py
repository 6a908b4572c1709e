"""Registration with the client's experimental AsyncClient, on the emulator."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from google.api_core.exceptions import DeadlineExceeded, RetryError
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.transaction import Transaction
from google.pubsub_v1.types import PubsubMessage

import outbox
from outbox import aio
from outbox.devtools.emulators import Emulators
from outbox.testing import RecordingTransaction, assert_registered
from tests.support.proxy import Proxy
from tests.support.spanner import query

#: How often an asyncio task is cancelled, the n-th time after 1.25 ** n steps of its loop.
MOMENTS = 40


async def once(transaction: Any, task_id: str = "t") -> bool:
    return await aio.register_once(transaction, "orders", b"data", {"a": "b"}, task_id=task_id)


def test_register_once_registers_in_the_first_transaction_only(
    run_async: Callable[..., Any], database: Database
) -> None:
    async def work(asynchronous: Any) -> list[bool]:
        return [await asynchronous.run_in_transaction(once) for _ in range(2)]

    assert run_async(work) == [True, False]
    [task] = assert_registered(database, topic="orders", attributes={"a": "b"})
    assert (task.id, task.message.data) == ("t", b"data")


def test_register_and_register_many_work_as_they_are(run_async: Callable[..., Any], database: Database) -> None:
    """In a transaction and in a batch; and `register_once` knows what the same transaction has registered."""

    async def in_transaction(transaction: Any) -> list[bool]:
        outbox.register(transaction, "orders", b"", task_id="single")
        outbox.register_many(transaction, [outbox.Task("orders", b"", task_id="many")])
        return [await once(transaction, id) for id in ("single", "many", "new", "new")]

    async def work(asynchronous: Any) -> Any:
        async with asynchronous.batch() as batch:
            outbox.register(batch, "orders", b"", task_id="batch")
        with pytest.raises(outbox.InvalidTransaction, match="was committed or rolled back before"):
            outbox.register(batch, "orders", b"")
        return await asynchronous.run_in_transaction(in_transaction)

    assert run_async(work) == [False, False, True, False]
    assert {task.id for task in assert_registered(database, times=4)} == {"batch", "single", "many", "new"}


def test_one_of_two_concurrent_calls_registers(run_async: Callable[..., Any], database: Database) -> None:
    async def twice(transaction: Any) -> list[bool]:
        assert await once(transaction, "first")
        return await asyncio.gather(once(transaction), once(transaction))

    assert sorted(run_async(lambda asynchronous: asynchronous.run_in_transaction(twice))) == [False, True]
    assert {task.id for task in assert_registered(database, times=2)} == {"first", "t"}


@pytest.mark.parametrize("call", [once, aio.cancel])
def test_an_outage_ends_a_call(
    run_async: Callable[..., Any], emulators: Emulators, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any]
) -> None:
    """The client itself would repeat the request for ever, without a pause."""
    monkeypatch.setattr(aio, "IN_TRANSACTION_SECONDS", 1.0)
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


@pytest.mark.parametrize("transaction", [Transaction(mock.Mock()), RecordingTransaction(), None])
def test_another_transaction_is_a_type_error(transaction: Any) -> None:
    with pytest.raises(TypeError, match=r"transaction of a Spanner AsyncClient\. With .* use outbox\.register_once"):
        asyncio.run(once(transaction))


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "in a batch"])
def test_each_message_is_processed_once(run_async: Callable[..., Any], database: Database, together: bool) -> None:
    """With its changes in the same transaction. A message without a task ID is an error."""
    messages = [PubsubMessage(attributes={outbox.TASK_ID_ATTRIBUTE: f"task-{n}"}) for n in (1, 2, 1)]

    async def process(transaction: Any, some: list[PubsubMessage]) -> list[bool]:
        new = [await aio.process_once(transaction, each, consumer="billing") for each in some]
        for _ in filter(None, new):
            outbox.register(transaction, "orders", b"")
        return new

    async def work(asynchronous: Any) -> list[bool]:
        with pytest.raises(outbox.MissingTaskId):
            await asynchronous.run_in_transaction(process, [PubsubMessage()])
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
        await once(transaction, f"{name}-a")
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
