"""`outbox.testing`: a transaction that records, assertions, and a subscriber that gets every message twice."""

import contextlib
import inspect
import warnings
from collections import Counter
from itertools import count
from uuid import uuid4

import pytest
from google.api_core.exceptions import AlreadyExists, InvalidArgument
from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.transaction import Transaction
from google.pubsub_v1.types import PubsubMessage

import outbox
from outbox import TASK_ID_ATTRIBUTE, inbox
from outbox.testing import RecordingTransaction, RedeliveringSubscriber, assert_registered, faults
from tests.unit.test_inbox import Database

RECORDED = ["insert", "update", "insert_or_update", "replace", "delete", "read", "execute_sql", "execute_update"]


@pytest.mark.parametrize("method", ["insert", "delete", "read", "execute_update", "batch_update"])
def test_a_method_has_the_parameters_of_the_client(method: str) -> None:
    """It accepts each of them by name, and refuses others."""
    given = {"table": "ProcessedTasks", "columns": ["Line"], "keyset": KeySet(), "dml": ""}
    names = list(inspect.signature(getattr(Transaction, method)).parameters)[1:]
    options = {name: given.get(name, [] if name in {"values", "statements"} else None) for name in names}
    call = getattr(RecordingTransaction(), method)
    call(**options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'wrong'"):
        call(**options, wrong=1)


def test_cancel_finds_given_tasks_until_they_are_cancelled() -> None:
    """As in a database, a task of the same transaction is refused."""
    transaction = RecordingTransaction(["there"])
    outbox.register(transaction, "orders", b"", task_id="new")
    assert [outbox.cancel(transaction, id) for id in ("there", "there", "unknown")] == [True, False, False]
    with pytest.raises(outbox.InvalidTransaction, match="'new' was registered by the same transaction"):
        outbox.cancel(transaction, "new")
    assert [each.method for each in transaction.mutations] == ["insert", "update"]


def test_every_mutation_and_statement_is_recorded_in_order() -> None:
    transaction, gone = RecordingTransaction(), KeySet(keys=[["1"]])
    for method in RECORDED[:4]:
        getattr(transaction, method)("Orders", ["Id", "Cents"], [["1", 5], ["2", 6]])
    transaction.delete("Orders", gone)
    assert transaction.execute_update("UPDATE Orders SET Cents = @n WHERE true", {"n": 7}) == 1
    status, counts = transaction.batch_update(["DELETE FROM Orders WHERE true", ("INSERT", {"a": 1}, {})])
    assert (status.code, counts) == (0, [1, 1])
    rows = [("1", 5), ("2", 6)]
    written = [(method, "Orders", ("Id", "Cents"), rows) for method in RECORDED[:4]]
    assert transaction.mutations == [*written, ("delete", "Orders", (), gone)]
    assert transaction.statements == [
        ("UPDATE Orders SET Cents = @n WHERE true", {"n": 7}),
        ("DELETE FROM Orders WHERE true", {}),
        ("INSERT", {"a": 1}),
    ]


def test_a_value_that_the_client_cannot_send_is_refused() -> None:
    transaction = RecordingTransaction()
    for use in (
        lambda: transaction.insert("Orders", ["Id"], [[object()]]),
        lambda: transaction.execute_update("DELETE", {"a": object()}),
        lambda: transaction.batch_update([("DELETE", {"a": object()}, {})]),
    ):
        with pytest.raises(ValueError, match="Unknown type"):
            use()
        assert transaction.mutations == transaction.statements == []


def test_what_spanner_would_refuse_in_the_commit_is_refused() -> None:
    """An ID that exists or is registered twice, and a row without a value for each column."""
    transaction = RecordingTransaction(["there"])
    outbox.register(transaction, "orders", b"", task_id="new")
    for id in ("there", "new"):
        with pytest.raises(AlreadyExists, match=f"Row \\[{id}\\] in table AsynchronousTasks already exists"):
            outbox.register(transaction, "orders", b"", task_id=id)
    with pytest.raises(InvalidArgument, match="Orders: 1 values for the 2 columns Id, Cents"):
        transaction.insert("Orders", ["Id", "Cents"], [["1"]])
    assert [task.id for task in transaction.tasks] == ["new"]
    with pytest.raises(outbox.InvalidMessage, match=r"task_id is uuid\.UUID\. It must be a str"):
        RecordingTransaction([uuid4()])  # type: ignore[list-item]  # wrong on purpose


def test_a_statement_of_a_batch_without_the_types_of_its_parameters_is_refused() -> None:
    """As by the client."""
    with pytest.raises(ValueError, match="unpack"):
        RecordingTransaction().batch_update([("DELETE", {"a": 1})])


def test_what_needs_a_database_is_an_error_with_the_remedy() -> None:
    transaction = RecordingTransaction()
    for use, problem in {
        lambda: transaction.read("Orders", ["Id", "Cents"], KeySet(all_=True)): "has no rows of Orders",
        lambda: transaction.execute_sql("SELECT 1"): "runs no queries",
        lambda: transaction.rollback() or transaction.commit(): "has no session, and so no '_database'",
    }.items():
        sentence = rf"^RecordingTransaction {problem}: use a database of the emulator"
        with pytest.raises((LookupError, AttributeError), match=sentence):
            use()


def test_assert_registered_returns_the_tasks_that_match() -> None:
    transaction = RecordingTransaction()
    outbox.register(transaction, "orders", b"0", {"kind": "placed", "a": "b"})
    outbox.register(transaction, "orders", b"1")
    outbox.register(transaction, "invoices", b"2", {"kind": "placed"})
    for found, options in {
        b"012": {"times": 3},
        b"01": {"topic": "orders", "times": 2},
        b"2": {"topic": "invoices"},
        b"02": {"attributes": {"kind": "placed"}, "times": 2},
        b"0": {"topic": "orders", "attributes": {"kind": "placed", "a": "b"}},
        b"": {"topic": "missing", "times": 0},
    }.items():
        assert b"".join(task.message.data for task in assert_registered(transaction, **options)) == found


def test_a_failed_assertion_lists_the_registered_tasks() -> None:
    transaction = RecordingTransaction()
    with pytest.raises(AssertionError) as none:
        assert_registered(transaction)
    nothing = "0 of 0 registered tasks match topic=None, attributes=None; expected 1. Registered:"
    assert str(none.value) == nothing
    with pytest.raises(AssertionError, match=r"expected '0'\. Registered:"):
        assert_registered(transaction, times="0")  # type: ignore[arg-type]  # a text, which no number equals
    for n in range(21):
        outbox.register(transaction, "orders", bytes([65 + n]) * 101, {"n": str(n)}, task_id=f"t{n}")
    with pytest.raises(AssertionError) as many:
        assert_registered(transaction, topic="order", attributes={"n": "0"})
    first, *lines = str(many.value).splitlines()
    assert first == "0 of 21 registered tasks match topic='order', attributes={'n': '0'}; expected 1. Registered:"
    assert lines[0] == f"  orders {{'n': '0'}} b'{'A' * 100}' (task t0)"
    assert (len(lines), lines[-1]) == (21, "  and 1 more")


def messages(*keys: str) -> list[PubsubMessage]:
    return [PubsubMessage(message_id=f"{number}", ordering_key=key) for number, key in enumerate(keys)]


def tasks(number: int) -> list[PubsubMessage]:
    return [PubsubMessage(message_id=f"{n}", attributes={TASK_ID_ATTRIBUTE: f"task-{n}"}) for n in range(number)]


def test_each_message_comes_twice_in_an_order_that_the_seed_decides() -> None:
    orders = []
    for seed in (1, 1, 2):
        received: list[str] = []
        RedeliveringSubscriber(messages(*[""] * 20), seed=seed).deliver(
            lambda message, received=received: (received.append(message.message_id), message.ack())
        )
        assert set(Counter(received).values()) == {2}
        orders.append(received)
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:20] != [f"{number}" for number in range(20)]


@pytest.mark.parametrize("refuse", [lambda message: message.nack(), lambda _message: None])
def test_a_refused_message_of_a_key_comes_again_before_those_behind_it(refuse: object) -> None:
    received: list[str] = []

    def callback(message: object) -> None:
        received.append(message.message_id)
        refuse(message) if len(received) == 2 else message.ack_with_response()

    RedeliveringSubscriber(messages("key", "key", "key")).deliver(callback)
    assert received == ["0", "1", "1", "2", "0", "1", "2"]


def test_a_message_that_is_never_acknowledged_is_an_error_that_names_it() -> None:
    subscriber = RedeliveringSubscriber(messages("", "a", "a"))
    with pytest.raises(AssertionError, match=r"message '2' .* not acknowledged in 10 deliveries"):
        subscriber.deliver(lambda message: message.nack() if message.message_id == "2" else message.ack())


def test_a_handler_that_always_fails_is_named_with_one_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """Although each error has another text, and the log has a line for each delivery."""
    runs = count()

    def handle(_transaction: object, message: PubsubMessage) -> None:
        raise LookupError(f"no order {message.message_id} in run {next(runs)}")

    with pytest.raises(AssertionError, match=r"in 10 deliveries. The last one failed: LookupError\('no order \d in"):
        RedeliveringSubscriber(tasks(5)).deliver(inbox.Handler(Database(), consumer="billing")(handle))
    assert len(caplog.records) == next(runs) >= 10
    assert caplog.text.count("Traceback") == 1
    caplog.clear()
    with pytest.raises(AssertionError, match=r"in 10 deliveries$"):  # without an error of the call before
        RedeliveringSubscriber(tasks(1)).deliver(lambda message: message.nack())
    with pytest.raises(AssertionError, match=r"The last one failed: MissingTaskId\("):
        RedeliveringSubscriber(messages("")).deliver(inbox.Handler(Database(), consumer="billing")(handle))


def test_what_is_no_subscriber_and_no_message_is_named() -> None:
    """Such as `process` instead of the handler, and a topic instead of its messages."""
    handler = inbox.Handler(Database(), consumer="billing")(lambda *_: None)
    sentence = r"in 10 deliveries\. The callback calls neither ack nor nack: pass the inbox\.Handler, not its process$"
    with pytest.raises(AssertionError, match=sentence):
        RedeliveringSubscriber(tasks(1)).deliver(handler.process)
    transaction = RecordingTransaction()
    outbox.register(transaction, "orders", b"")
    of_kinds = (("orders", "str"), (messages, "function"), (transaction.tasks, r"outbox\.testing\.RegisteredTask"))
    for given, kind in of_kinds:
        with pytest.raises(TypeError, match=rf"^messages has {kind}\. Pass PubsubMessages, as from published"):
            RedeliveringSubscriber(given)  # type: ignore[arg-type]  # wrong on purpose


def test_a_fault_without_with_is_a_warning_at_its_line() -> None:
    for call in (faults.abort_next_commit, faults.delay_commits):
        with pytest.warns(RuntimeWarning, match=rf"^{call.__name__} was called without `with`") as caught:
            call(1)
        assert [each.filename for each in caught] == [__file__]
        with warnings.catch_warnings(action="error"), contextlib.suppress(AssertionError), call(1):
            pass


def test_a_callback_may_extend_the_deadline_before_it_acknowledges() -> None:
    received: list[str] = []
    RedeliveringSubscriber(messages("")).deliver(
        lambda message: (received.append(message.message_id), message.modify_ack_deadline(60), message.ack())
    )
    assert received == ["0", "0"]


async def coroutine(_message: object) -> None:
    """Acknowledges nothing, because it is never run."""


@pytest.mark.filterwarnings("ignore:coroutine 'coroutine' was never awaited")
def test_a_callback_that_must_be_awaited_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="the callback returned a coroutine, so its work may not be done"):
        RedeliveringSubscriber(messages("")).deliver(coroutine)
    RedeliveringSubscriber(messages("")).deliver(lambda message: message.ack_with_response())


def test_an_exception_of_the_callback_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        RedeliveringSubscriber(messages("")).deliver(lambda _message: 1 / 0)


def test_a_subscriber_without_messages_is_no_success() -> None:
    """After a forgotten `drain` or a wrong topic, `published` returns no message."""
    with pytest.raises(AssertionError, match=r"there is no message to deliver\. Call outbox_relay\.drain"):
        RedeliveringSubscriber([]).deliver(print)
