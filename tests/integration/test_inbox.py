"""The inbox on the emulators: one effect for each task, however often and by whom its message is delivered."""

import base64
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from google.api_core.exceptions import Aborted, NotFound, ServiceUnavailable
from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.transaction import Transaction
from google.pubsub_v1.types import PubsubMessage
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import outbox
from outbox import inbox
from tests.support.drivers import DbApi, aborting
from tests.support.pubsub import PubSub, pulling
from tests.support.spanner import query, record_requests
from tests.support.waiting import eventually

pytestmark = pytest.mark.filterwarnings("ignore:This method is non-operational:UserWarning")

PROCESSED = "SELECT TaskId FROM ProcessedTasks WHERE Consumer = 'billing' ORDER BY 1"
#: Seconds between two attempts of an aborted transaction; the emulator says none.
FAST = {"default_retry_delay": 0.02}
CALLS = ("begin_transaction", "streaming_read", "execute_streaming_sql", "execute_sql", "commit", "rollback")


@pytest.fixture
def account(shop: Database) -> str:
    """A new account, without money."""
    id = str(uuid.uuid4())
    with shop.batch() as batch:
        batch.insert("Accounts", ("AccountId", "Cents"), [(id, 0)])
    return id


def cents(shop: Database, account: str) -> int:
    [[value]] = query(shop, "SELECT Cents FROM Accounts WHERE AccountId IN UNNEST(@ids)", ids=[account])
    return int(value)


def pays(account: str) -> inbox.Handle:
    """Return a function that adds one cent: a second effect shows."""

    def handle(transaction: Any, _message: Any) -> None:
        [[before]] = transaction.read("Accounts", ("Cents",), KeySet(keys=[[account]]))
        transaction.update("Accounts", ("AccountId", "Cents"), [(account, before + 1)])

    return handle


def message(task_id: str) -> Any:
    return PubsubMessage(attributes={outbox.TASK_ID_ATTRIBUTE: task_id}, message_id=f"{uuid.uuid4()}")


def task() -> str:
    return str(uuid.uuid4())


def published(ids: list[str], keys: int = 0) -> list[dict[str, Any]]:
    """Return the messages of tasks, with so many ordering keys in turn. The data is the number of a message."""
    attributes = [{outbox.TASK_ID_ATTRIBUTE: id} for id in ids]
    return [
        {"data": str(n).encode(), "attributes": each, "ordering_key": f"k{n % keys}" if keys else ""}
        for n, each in enumerate(attributes)
    ]


def test_concurrent_deliveries_have_one_effect(shop: Database, account: str) -> None:
    """Among them a handler that outlives its acknowledgement deadline: its message is delivered again meanwhile."""
    receive = inbox.Handler(shop, consumer="billing", **FAST)(pays(account))
    id = task()
    with ThreadPoolExecutor(4) as threads:
        assert sorted(threads.map(receive.process, [message(id) for _ in range(4)])) == [False, False, False, True]
    assert cents(shop, account) == 1


def test_a_failure_rolls_back_and_leaves_no_lock(shop: Database, account: str) -> None:
    """Also an error of a Google client, after which the Spanner client does not roll back. An abort runs again."""
    aborted: Any = Aborted  # its constructor has no types
    errors = [LookupError(), NotFound("no topic"), aborted("x", errors=[ServiceUnavailable("x")])]
    attempts: list[Any] = []

    def fails_at_first(transaction: Any, of: Any) -> None:
        attempts.append(transaction)
        pays(account)(transaction, of)
        if errors:
            raise errors.pop(0)

    receive = inbox.Handler(shop, consumer="billing", **FAST)(fails_at_first)
    id = task()
    for expected in (LookupError, NotFound):
        # A rollback may last longer than its 2 s on a slow machine.
        with mock.patch.object(Transaction, "rollback", autospec=True, side_effect=Transaction.rollback) as rollback:
            with pytest.raises(expected):
                receive.process(message(id))
            rollback.assert_called_once_with(attempts[-1])
        assert [id] not in query(shop, PROCESSED)
    assert cents(shop, account) == 0
    assert receive.process(message(id)) is True
    assert cents(shop, account) == 1
    assert not errors


def test_a_missing_table_is_named(empty_database: Database, run_async: Callable[..., Any]) -> None:
    """By each function that reads. With `register`, the client raises its own error from the commit."""
    receive = inbox.Handler(empty_database, consumer="billing")(lambda *_: None)
    with pytest.raises(outbox.OutboxError, match="table ProcessedTasks is missing"):
        receive(message(task()))

    works: tuple[Callable[[Any, Any], Any], ...] = (
        lambda of, transaction: of.register_once(transaction, "orders", b"", task_id="t"),
        lambda of, transaction: of.cancel(transaction, "t"),
    )
    for work in works:
        with pytest.raises(outbox.OutboxError, match="table AsynchronousTasks is missing"):
            empty_database.run_in_transaction(partial(work, outbox))
        with pytest.raises(outbox.OutboxError, match="table AsynchronousTasks is missing"):
            run_async(
                lambda ours, work=work: ours.run_in_transaction(partial(work, outbox.aio)), empty_database.database_id
            )


def test_a_thread_recovers_from_a_session_that_was_refused(
    shop: Database, account: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client would refuse all later transactions of this thread."""
    receive = inbox.Handler(shop, consumer="billing", **FAST)(pays(account))
    with monkeypatch.context() as patched:
        manager = SimpleNamespace(get_session=lambda _: (_ for _ in ()).throw(ServiceUnavailable("away")))
        patched.setattr(shop, "_sessions_manager", manager)
        with pytest.raises(ServiceUnavailable):
            receive.process(message(task()))
    assert receive.process(message(task())) is True
    with pytest.raises(RuntimeError, match="nested"):  # which is still refused
        shop.run_in_transaction(lambda _: receive.process(message(task())))


@pytest.mark.parametrize("kind", ["unordered", "ordered", "exactly once"])
def test_a_streaming_pull(shop: Database, account: str, pubsub: PubSub, outcomes: list[str], kind: str) -> None:
    """Each task is sent twice, and the first delivery of each fails; messages of a key arrive in their order."""
    topic, ordered = pubsub.new_topic(), kind == "ordered"
    subscription = pubsub.new_subscription(topic, ordered=ordered, exactly_once=kind == "exactly once")
    failed, order = set[str](), list[bytes]()

    @inbox.Handler(shop, consumer="billing", **FAST)
    def receive(transaction: Any, of: Any) -> None:
        if of.message_id not in failed and not ordered:
            failed.add(of.message_id)
            raise LookupError("the first delivery fails")
        order.append(of.data)
        pays(account)(transaction, of)

    messages = published([task() for _ in range(5)], keys=int(ordered))
    with pulling(subscription.name, receive):
        pubsub.publisher.publish(topic=topic, messages=messages)
        pubsub.publisher.publish(topic=topic, messages=messages)
        # The emulator may redeliver an acknowledged message, and then there are more duplicates.
        eventually(lambda: outcomes.count("processed") == 5 <= outcomes.count("duplicate"), seconds=60)
    assert outcomes.count("processed") == 5
    assert outcomes.count("failed") >= len(failed)
    assert cents(shop, account) == 5
    assert not ordered or sorted(set(order)) == list(dict.fromkeys(order))


def pays_each(shop: Database, order: dict[str, list[int]], **options: Any) -> inbox.BatchReceiver:
    """Return a subscriber with batches: each task makes an account, and a second one of it fails."""

    @inbox.BatchHandler(shop, consumer="billing", **FAST, **options)
    def receive(transaction: Any, messages: Any) -> None:
        for of in messages:
            order.setdefault(of.ordering_key, []).append(int(of.data))
        rows = [(of.attributes[outbox.TASK_ID_ATTRIBUTE], 1) for of in messages]
        transaction.insert("Accounts", ("AccountId", "Cents"), rows)

    return receive


def test_a_batch_costs_one_read_and_one_commit(shop: Database, pubsub: PubSub, outcomes: list[str]) -> None:
    topic, order, ids = pubsub.new_topic(), dict[str, list[int]](), [task() for _ in range(50)]
    subscription = pubsub.new_subscription(topic)
    query(shop, "SELECT 1")  # connects
    requests = record_requests(shop, *CALLS)
    pubsub.publisher.publish(topic=topic, messages=published(ids))
    with pulling(subscription.name, pays_each(shop, order, max_batch=50, max_delay=60.0)):
        eventually(lambda: outcomes.count("processed") == 50, seconds=60)
    assert [name for name, _ in requests] == ["streaming_read", "commit"]
    assert sorted(order[""]) == [*range(50)]
    assert {cents(shop, id) for id in ids} == {1}


def test_the_messages_of_an_ordering_key_keep_their_order(shop: Database, pubsub: PubSub, outcomes: list[str]) -> None:
    topic, order, ids = pubsub.new_topic(), dict[str, list[int]](), [task() for _ in range(40)]
    subscription = pubsub.new_subscription(topic, ordered=True)
    for key in range(4):
        some = [each for each in published(ids, keys=4) if each["ordering_key"] == f"k{key}"]
        pubsub.publisher.publish(topic=topic, messages=some)
    with pulling(subscription.name, pays_each(shop, order, max_batch=10, max_delay=0.05)):
        eventually(lambda: outcomes.count("processed") == 40, seconds=60)
    assert {key: sorted(numbers) for key, numbers in order.items()} == order
    assert {cents(shop, id) for id in ids} == {1}


def test_the_trace_continues(shop: Database, spans: InMemorySpanExporter) -> None:
    """A task that the handler registers belongs to the trace of the task that it received."""
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    of = message(task())
    of.attributes["googclient_traceparent"] = f"00-{trace_id}-b7ad6b7169203331-01"
    registered: list[str] = []

    @inbox.Handler(shop, consumer="billing", **FAST)
    def receive(transaction: Any, _message: Any) -> None:
        registered.append(outbox.register(transaction, "mails", b""))

    assert receive.process(of) is True
    span = next(each for each in spans.get_finished_spans() if each.name == "process billing")
    assert f"{span.context.trace_id:032x}" == trace_id
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"  # type: ignore[union-attr]  # a root span fails, too
    [[data]] = query(shop, "SELECT Data FROM AsynchronousTasks WHERE Id IN UNNEST(@ids)", ids=registered)
    assert trace_id.encode() in base64.b64decode(data)


def test_drivers(stack: DbApi, shop: Database, account: str) -> None:
    """Record and effect are committed or rolled back together, also after an abort. A second message is recognized."""
    id = task()
    due: list[str] = []

    def process(task_id: str, *, fails: bool = False, **options: Any) -> bool:
        with stack.transaction() as handle:
            first: bool = stack.call("process_once", handle, message(task_id), consumer="billing", **options)
            if task_id:
                assert not stack.call("process_once", handle, message(task_id), consumer="billing")
            if first:
                stack.execute(handle, "UPDATE Accounts SET Cents = Cents + 1 WHERE AccountId = %s", account)
            due.append("commit")
            if fails:
                raise LookupError
        return first

    with pytest.raises(LookupError):
        process(id, fails=True)
    assert cents(shop, account) == 0
    due.clear()
    with aborting(lambda call: call in due and due.pop() == call) as aborted:
        assert [process(id), process(id)] == [True, False]
    assert aborted["commit"] == 2
    assert cents(shop, account) == 1
    assert [id] in query(shop, PROCESSED)
    with pytest.raises(outbox.MissingTaskId):
        process("")
    assert process("", key="message_id") is True
    with stack.transaction() as handle:
        transaction = stack.connection(handle)
        stack.execute(handle, "UPDATE Accounts SET Cents = 0 WHERE AccountId = %s", account)
        with pytest.raises(outbox.InvalidTransaction, match=r"Use process_once of outbox\.ext\.sqlalchemy"):
            inbox.process_once(transaction.transaction_checkout(), message(id), consumer="billing")
