"""`outbox.aio` on a fake of an AsyncClient: inserts and cancels, calls without `await`, the end of asyncio tasks."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from unittest import mock

import pytest
from google.api_core.exceptions import NotFound
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.pubsub_v1.types import PubsubMessage

import outbox
from outbox import aio
from outbox.table.shared_sql import LAYOUTS, LOCK_UNSENT
from outbox.testing import RecordingTransaction
from tests.support import spanner


async def _rows(found: Sequence[Any]) -> AsyncIterator[Any]:
    for each in found:
        await asyncio.sleep(0)
        yield each


class Recorded(RecordingTransaction):
    """The transaction of an AsyncClient. Tasks with the IDs that it is given exist. With `key`, all have this one."""

    def __init__(self, *ids: str, key: str | None = None, error: Exception | None = None) -> None:
        super().__init__(ids)
        self._key, self._error = key, error

    async def read(self, *arguments: Any, **options: Any) -> Any:
        if self._error:
            raise self._error
        return _rows(super().read(*arguments, **options))

    async def execute_sql(self, sql: str, **options: Any) -> Any:
        if sql == LOCK_UNSENT:
            [[is_unsent, _]] = super().execute_sql(sql, **options)
            return _rows([[is_unsent, self._key]])
        return _rows([["Shard", 10]] if sql == LAYOUTS else [["next", None]])


def test_a_task_is_registered_once_in_a_transaction(counter: mock.Mock) -> None:
    async def all_at_once() -> list[bool]:
        calls = (aio.register_once(transaction, "orders", b"data", task_id=id) for id in ("new", "there", "new"))
        return [*await asyncio.gather(*calls)]

    transaction = Recorded("there")
    assert asyncio.run(all_at_once()) == [True, False, False]
    [task] = transaction.tasks
    assert (task.id, task.topic, task.message.data) == ("new", "orders", b"data")
    counter.increment.assert_called_once_with("outbox.registered_task_count", 1, ["topic:orders"])


def test_a_message_is_processed_once_by_its_task_or_its_message_id() -> None:
    def message(**attributes: str) -> PubsubMessage:
        return PubsubMessage(message_id="7", attributes=attributes)

    async def process(given: PubsubMessage, **options: Any) -> bool:
        return await aio.process_once(transaction, given, consumer="billing", **options)

    transaction = Recorded("there")
    tasks = [message(**{outbox.TASK_ID_ATTRIBUTE: id}) for id in ("new", "new", "there")]
    assert [asyncio.run(process(each)) for each in tasks] == [True, False, False]
    assert [asyncio.run(process(message(), key="message_id")) for _ in range(2)] == [True, False]
    with pytest.raises(outbox.MissingTaskId):
        asyncio.run(process(message()))
    keys = [rows[0][:2] for _, _, rows in transaction.inserts]
    assert keys == [("billing", "new"), ("billing", mock.ANY)]
    assert keys[1][1].endswith("-message-7")
    transaction = Recorded(error=NotFound("Table not found: ProcessedTasks"))
    with pytest.raises(outbox.OutboxError, match="table ProcessedTasks is missing"):
        asyncio.run(process(tasks[0]))


@pytest.mark.parametrize(("key", "released"), [(None, []), ("customer-1", ["next"])])
def test_a_cancelled_task_releases_the_next_one_of_its_key(key: str | None, released: list[str]) -> None:
    transaction = Recorded("there", key=key)
    assert [asyncio.run(aio.cancel(transaction, id)) for id in ("there", "there", "absent")] == [True, False, False]
    written = [row for each in transaction.mutations for row in each.values]
    assert written == [*((id, None, None) for id in released), ("there", COMMIT_TIMESTAMP, "application")]


def test_a_task_of_the_same_transaction_is_not_cancelled() -> None:
    transaction = Recorded()
    id = outbox.register(transaction, "orders", b"")
    with pytest.raises(outbox.InvalidTransaction, match="was registered by the same transaction"):
        asyncio.run(aio.cancel(transaction, id))
    assert len(transaction.mutations) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda: aio.register_once(None, "orders", b"", task_id="t"),
        lambda: aio.process_once(None, None, consumer="billing"),
        lambda: aio.cancel(None, "t"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_call_without_await_is_neither_true_nor_false(call: Callable[[], Any]) -> None:
    """`if aio.process_once(...):` would be true each time. A task of asyncio accepts the call as a coroutine."""

    async def as_task() -> None:
        await asyncio.create_task(call())

    with pytest.raises(TypeError, match=r"outbox\.aio\.\w+ was not awaited, so nothing has happened"):
        bool(call())
    with pytest.raises(TypeError, match="transaction is NoneType"):
        asyncio.run(as_task())


class CommittingDatabase:
    """That of an AsyncClient. A task with the ID "there" exists."""

    def __init__(self) -> None:
        self.committed = False

    async def run_in_transaction(self, function: Callable[[Any], Any]) -> Any:
        result = await function(Recorded("there"))
        self.committed = True
        return result


def once(transaction: Any) -> Any:
    return aio.register_once(transaction, "orders", b"", task_id="there")


async def statement(transaction: Any) -> None:
    assert not await once(transaction)
    once(transaction)


async def returned(transaction: Any) -> Any:
    return aio.cancel(transaction, "t")


async def left_to_a_task(transaction: Any) -> Any:
    task = asyncio.create_task(once(transaction))
    await asyncio.sleep(0)
    return task


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (statement, r"outbox\.aio\.register_once was not awaited, so nothing has happened"),
        (returned, r"outbox\.aio\.cancel was not awaited"),
        (left_to_a_task, r"outbox\.aio\.register_once was not awaited"),
        (lambda _: None, r"<lambda> returned NoneType\. It must be `async def`"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_call_that_nothing_awaits_is_never_committed(function: Any, sentence: str) -> None:
    database = CommittingDatabase()
    with pytest.raises(TypeError, match=sentence):
        asyncio.run(aio.run_in_transaction(database, function))
    assert not database.committed


def test_a_call_is_awaited_in_any_way() -> None:
    """Also cancelled before it has begun."""

    async def ways(transaction: Any) -> list[bool]:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(once(transaction), 0)
        return [*await asyncio.gather(once(transaction), asyncio.create_task(once(transaction)))]

    database = CommittingDatabase()
    assert asyncio.run(aio.run_in_transaction(database, ways)) == [False, False]
    assert database.committed
    assert asyncio.run(aio.run_in_transaction(database, once)) is False


async def opened() -> None:
    """Like `instance.database(...)` of an AsyncClient."""


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_database_that_is_not_that_of_an_async_client_is_named() -> None:
    for database, kind in (
        (opened(), "coroutine"),
        (spanner.client("host:1").instance("instance").database("database"), r"google\.cloud\.spanner\S+\.Database"),
    ):
        with pytest.raises(TypeError, match=rf"^database is {kind}\. It must be .* as from `await instance.database"):
            asyncio.run(aio.run_in_transaction(database, returned))


def test_a_second_cancel_does_not_cut_the_rollback_short() -> None:
    """Of an asyncio task: AnyIO cancels until the task ends, and an event loop that stops cancels once more."""
    steps: list[str] = []

    class AsyncDatabase:
        async def run_in_transaction(self, function: Callable[[Any], Any]) -> None:
            try:
                await function(None)
            except Exception:
                for _ in range(5):  # like a request
                    await asyncio.sleep(0)
                steps.append("rolled back")
                raise

    async def work(_transaction: Any) -> None:
        steps.append("begun")
        await asyncio.Event().wait()

    async def main() -> bool:
        task = asyncio.ensure_future(aio.run_in_transaction(AsyncDatabase(), work))
        while not task.done():
            await asyncio.sleep(0)
            if steps:
                task.cancel()
        return task.cancelled()

    assert asyncio.run(main())
    assert steps == ["begun", "rolled back"]
