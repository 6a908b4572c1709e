"""The read and the answer of `outbox.register_once`, and its refusals before the read."""

import asyncio
import gc
import inspect
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import pytest
from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1._async.batch import Batch as AsyncBatch
from google.cloud.spanner_v1._async.transaction import Transaction as AsyncTransaction
from google.cloud.spanner_v1.batch import Batch, MutationGroup
from google.cloud.spanner_v1.snapshot import Snapshot
from google.cloud.spanner_v1.transaction import Transaction

import outbox
from outbox import aio, registration
from outbox.base.values import class_name
from outbox.table import transactions
from outbox.testing import RecordingTransaction

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Recorded(RecordingTransaction):
    def __init__(self, *task_ids: str) -> None:
        super().__init__(task_ids)
        self.reads: list[Any] = []

    def read(self, table: str, columns: Any, keyset: KeySet, **options: object) -> list[list[str]]:
        self.reads.append((keyset.keys, options))
        return super().read(table, columns, keyset, **options)


def once(transaction: Any, task_id: str = "t", message: bytes = b"", **options: Any) -> bool:
    return outbox.register_once(transaction, "orders", message, task_id=task_id, **options)


def test_a_new_task_is_one_read_by_key_and_one_insert() -> None:
    times = {"available_at": NOW, "expires_at": NOW + timedelta(hours=1)}
    options: dict[str, Any] = {"priority": 7, "at_most_once": True, "task_id": "t", **times}
    transaction, plain = Recorded(), Recorded()

    assert outbox.register_once(transaction, "orders", b"data", {"a": "b"}, **options) is True

    outbox.register(plain, "orders", b"data", {"a": "b"}, **options)
    [(keys, sent)] = transaction.reads
    assert (keys, plain.reads) == ([["t"]], [])
    assert (sent["request_options"], sent["timeout"]) == ({"request_tag": "outbox-register-once"}, 30)
    assert transaction.tasks == plain.tasks
    assert [each[:2] for each in transaction.inserts] == [("AsynchronousTasks", registration.COLUMNS)]


@pytest.mark.parametrize("function", [outbox.register_once, aio.register_once])
def test_register_once_has_the_arguments_of_register(function: Callable[..., Any]) -> None:
    """Also those in `Options`, whose defaults are the same."""
    ours, of_register = (list(inspect.signature(each).parameters) for each in (function, outbox.register))
    assert [*ours[:-1], *registration.Options.__annotations__] == [
        *of_register[:4], "task_id", *(name for name in of_register[4:] if name != "task_id"),
    ]  # fmt: skip


SESSION = mock.Mock()


@pytest.mark.parametrize(
    "transaction",
    [None, object(), Batch(SESSION), MutationGroup(SESSION), Snapshot(SESSION), AsyncTransaction(SESSION)],
    ids=lambda each: type(each).__name__,
)
def test_an_object_that_cannot_read_and_insert_is_a_type_error(transaction: object) -> None:
    """The sentence names the type and the remedy. The read of an asynchronous Transaction would have to be awaited."""
    with pytest.raises(TypeError) as caught:
        once(transaction)
    assert str(caught.value) == (
        f"transaction is {class_name(transaction)}. It must be a Spanner Transaction, because register_once reads "
        "before it writes: call it in a function given to database.run_in_transaction, or use register. For the "
        "transaction of an AsyncClient, await outbox.aio.register_once"
    )


ENDINGS: list[dict[str, Any]] = [{"committed": NOW}, {"rolled_back": True}]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("make", [Batch, Transaction, AsyncBatch, AsyncTransaction])
def test_a_transaction_that_has_ended_is_refused(
    make: type[Any], ending: dict[str, Any], set_metrics: Callable[[Any], None]
) -> None:
    """The client would buffer the insert, and never send it."""
    counter, transaction = mock.Mock(), make(SESSION)
    set_metrics(counter)
    vars(transaction).update(ending)
    calls: list[Callable[[], object]] = [
        lambda: outbox.register(transaction, "orders", b""),
        lambda: outbox.register_many(transaction, []),
    ]
    if make is Transaction:
        calls += [lambda: once(transaction), lambda: outbox.cancel(transaction, "t")]
    if make is AsyncTransaction:
        calls.append(lambda: asyncio.run(aio.register_once(transaction, "orders", b"", task_id="t")))
        calls.append(lambda: asyncio.run(aio.cancel(transaction, "t")))
    for call in calls:
        with pytest.raises(outbox.InvalidTransaction, match="was committed or rolled back before"):
            call()
    assert len(transaction._mutations) == counter.increment.call_count == 0


def test_only_a_new_task_is_registered_and_counted(set_metrics: Callable[[Any], None]) -> None:
    counter = mock.Mock()
    set_metrics(counter)
    transaction = Recorded("there")
    assert [once(transaction, id) for id in ("new", "new", "there")] == [True, False, False]
    assert [task.id for task in transaction.tasks] == ["new"]
    with pytest.raises(outbox.InvalidMessage):
        once(transaction, "")
    counter.increment.assert_called_once_with("outbox.registered_task_count", 1, ["topic:orders"])


def test_ids_are_forgotten_with_their_transaction() -> None:
    """An application that runs for years keeps nothing."""
    gc.collect()  # of transactions of other tests
    before = len(transactions._inserted)
    transaction = Transaction(mock.Mock())
    outbox.register(transaction, "orders", b"", task_id="t")
    assert transactions._inserted[transaction] == {("t",)}
    del transaction
    gc.collect()
    assert len(transactions._inserted) == before
