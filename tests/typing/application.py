"""An application's calls of `outbox`, right and wrong. Only type checkers read it: test_application.py."""

import json
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from google.cloud.spanner_v1._async.database import Database as AsyncDatabase
from google.cloud.spanner_v1.batch import Batch, MutationGroup
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.snapshot import Snapshot
from google.cloud.spanner_v1.transaction import Transaction
from google.protobuf import struct_pb2
from google.protobuf.message import Message as ProtobufMessage
from google.pubsub_v1.types import PubsubMessage, Topic
from sqlalchemy.orm import Session

import outbox
from outbox import aio, inbox
from outbox.ext import sqlalchemy as outbox_sqlalchemy
from outbox.testing import RecordingTransaction, RedeliveringSubscriber, assert_registered
from publishworker.testing import Drained, Migrate, OutboxRelay, Published


def correct(transaction: Transaction, batch: Batch, group: MutationGroup, message: ProtobufMessage) -> str:
    outbox.register(batch, "orders", b"")
    outbox.register(group, "orders", bytearray(), {"kind": "placed"}, priority=outbox.Priority.HIGH)
    outbox.register(transaction, "orders", memoryview(b""), available_at=datetime.now(UTC) + timedelta(days=3))
    outbox.register(transaction, "orders", PubsubMessage(data=b""), ordering_key="k", priority=7)
    outbox.register(transaction, "orders", PubsubMessage.pb(PubsubMessage()))
    outbox.register(transaction, "orders", Topic(name="t"))
    outbox.register(transaction, "orders", struct_pb2.Value(string_value="hello"))
    outbox.register(transaction, "orders", message, expires_at=None, at_most_once=True)
    outbox.register_many(batch, [outbox.Task("orders", b""), outbox.Task("orders", message, {"a": "b"}, priority=7)])
    outbox.register_many(transaction, tuple(outbox.Task("orders", b"", task_id=str(n)) for n in range(3)))
    outbox.register_many(transaction, {n: outbox.Task("orders", b"") for n in range(3)}.values())
    if outbox.register_once(transaction, "orders", b"", task_id=str(uuid.uuid4())):
        return "first"
    return outbox.register(transaction, "orders", b"", task_id="t")


def correct_test(database: Database) -> int:
    transaction = RecordingTransaction(["t"])
    correct(transaction, Batch(None), MutationGroup(None), PubsubMessage.pb(PubsubMessage()))
    assert_registered(transaction, topic="orders", attributes={"kind": "placed"}, times=2)
    [task] = assert_registered(database)
    method, table, columns, _ = transaction.mutations[0]
    return len(task.message.data) + len(method) + len(table) + len(columns)


def correct_inbox(
    transaction: Transaction, database: Database, received: inbox.PulledMessage, message: PubsubMessage
) -> bool:
    @inbox.Handler(database, consumer="billing", missing_task_id="raise", timeout_secs=5)
    def charge(transaction: inbox.Transaction, message: inbox.ReceivedMessage) -> None:
        order: str = json.loads(message.data)["order"]
        transaction.insert("Invoices", ["OrderId"], [[order]])
        outbox.cancel(transaction, message.attributes[outbox.TASK_ID_ATTRIBUTE])
        correct(transaction, Batch(None), MutationGroup(None), PubsubMessage.pb(PubsubMessage()))

    @inbox.BatchHandler(database, consumer="billing")
    def charge_all(transaction: inbox.Transaction, messages: list[inbox.ReceivedMessage]) -> None:
        outbox.register_many(transaction, [outbox.Task("orders", each.data) for each in messages])

    charge(received)
    charge_all(received)
    inbox.process_once(transaction, received, consumer="billing", key="message_id")
    inbox.process_once(RecordingTransaction(), inbox.pushed_message({}), consumer="billing")
    return charge.process(message)


def correct_callback(message: inbox.PulledMessage, session: Session) -> None:
    if outbox_sqlalchemy.process_once(session, message, consumer="billing"):
        message.ack()


def correct_drivers(session: Session) -> bool:
    task_id: str = outbox_sqlalchemy.register(session, "orders", b"", priority=7)
    outbox_sqlalchemy.register_many(session, [outbox.Task("orders", b"")])
    answer: bool = outbox_sqlalchemy.run_in_transaction(session.get_bind().engine, correct_drivers)
    return answer and outbox_sqlalchemy.cancel(session, task_id)


async def correct_aio(transaction: aio.Transaction, message: inbox.ReceivedMessage) -> bool:
    transaction.insert("Invoices", ["OrderId"], [["order-1"]])
    await transaction.execute_update("DELETE FROM Invoices WHERE TRUE")
    if await aio.process_once(transaction, message, consumer="billing"):
        await aio.cancel(transaction, outbox.register(transaction, "orders", b""))
    return await aio.register_once(transaction, "orders", b"", task_id="t", priority=7)


async def correct_run(database: AsyncDatabase, message: inbox.ReceivedMessage) -> str:
    answer: bool = await aio.run_in_transaction(database, correct_aio, message)
    return "first" if answer else "second"


def correct_fixtures(
    outbox_database: Database, outbox_relay: OutboxRelay, published: Published, outbox_migrate: Migrate
) -> bytes:
    assert_registered(outbox_database)
    done: Drained = outbox_relay.drain(now=datetime.now(UTC))
    with outbox_relay.losing_publish_answers():
        outbox_relay.drain()
    [message] = published("orders", foreign=None)
    RedeliveringSubscriber(published("orders")).deliver(lambda delivered: delivered.ack())
    return message.data if done.published and outbox_migrate else b""


async def wrong_aio(transaction: aio.AsyncTransaction, batch: Batch) -> None:
    await aio.register_once(batch, "orders", b"", task_id="t")  # error
    await aio.register_once(transaction, "orders", b"")  # error
    _: bool = aio.cancel(transaction, "t")  # error


def wrong_inbox(transaction: Transaction, batch: Batch, database: Database, message: PubsubMessage) -> None:
    inbox.process_once(batch, message, consumer="billing")  # error
    inbox.process_once(transaction, b"", consumer="billing")  # error
    inbox.process_once(transaction, message)  # error
    inbox.process_once(transaction, message, consumer="billing", key="id")  # error
    inbox.Handler(database, consumer="billing", missing_task_id="drop")  # error

    def of_batch(transaction: inbox.Transaction, messages: list[inbox.ReceivedMessage]) -> None: ...
    def of_text(transaction: inbox.Transaction, message: str) -> None: ...
    def of_one(transaction: inbox.Transaction, message: inbox.ReceivedMessage) -> None: ...
    def of_three(transaction: inbox.Transaction, message: inbox.ReceivedMessage, database: Database) -> None: ...

    inbox.Handler(database, consumer="billing")(of_batch)  # error
    inbox.Handler(database, consumer="billing")(of_text)  # error
    inbox.Handler(database, consumer="billing")(of_three)  # error
    inbox.BatchHandler(database, consumer="billing")(of_one)  # error


class Fake:
    def insert(self, table: str, columns: Sequence[str], values: Sequence[Sequence[object]]) -> None: ...


def place(transaction: outbox.SupportsInsert, message: outbox.Message) -> str:
    return outbox.register(transaction, "orders", message)


def correct_annotations(transaction: Transaction, batch: Batch) -> None:
    place(transaction, b"")
    place(batch, PubsubMessage())
    place(Fake(), bytearray())


def wrong_test(batch: Batch) -> None:
    RecordingTransaction(1)  # error
    assert_registered(batch, topic="orders")  # error
    assert_registered(RecordingTransaction(), topics="orders")  # error
    assert_registered(RecordingTransaction(), attributes={"kind": 1})  # error


def wrong(transaction: Transaction, batch: Batch, database: Database, snapshot: Snapshot) -> None:
    outbox.register("orders", "orders", b"")  # error
    outbox.register(None, "orders", b"")  # error
    outbox.register([], "orders", b"")  # error
    outbox.register(database, "orders", b"")  # error
    outbox.register(snapshot, "orders", b"")  # error
    outbox.register(transaction, b"orders", b"")  # error
    outbox.register(transaction, "orders", "text")  # error
    outbox.register(transaction, "orders", {"order": "1"})  # error
    outbox.register(transaction, "orders", 7)  # error
    outbox.register(transaction, "orders", None)  # error
    outbox.register(transaction, "orders", datetime.now(UTC))  # error
    outbox.register(transaction, "orders", b"", {"kind": 1})  # error
    outbox.register_once(batch, "orders", b"", task_id="t")  # error
    outbox.register_once(snapshot, "orders", b"", task_id="t")  # error
    outbox.register_once(transaction, "orders", b"")  # error
    outbox.register_many(transaction, outbox.Task("orders", b""))  # error
    outbox.register_many(transaction, [("orders", b"")])  # error
    outbox.register_many(transaction, (outbox.Task("orders", b"") for _ in range(3)))  # error
    outbox.register_many(transaction, map(outbox.Task, ["orders"], [b""]))  # error
    outbox.Task("orders", b"", {}, 7)  # error
    outbox.Task("orders", "text")  # error
    place("orders", b"")  # error
    place(transaction, "text")  # error
    outbox.register_once(Fake(), "orders", b"", task_id="t")  # error
    _: int = outbox.register(transaction, "orders", b"")  # error
