"""The subscriber of tests: every message at least twice, in another order, the order of a key kept."""

from collections import Counter
from itertools import count

import pytest
from google.pubsub_v1.types import PubsubMessage

from outbox import TASK_ID_ATTRIBUTE, inbox
from outbox.testing import RedeliveringSubscriber
from tests.unit.test_inbox import Database


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
    with pytest.raises(AssertionError, match=r"in 10 deliveries$"):  # without an error of this call
        RedeliveringSubscriber(tasks(1)).deliver(lambda message: message.nack())
    with pytest.raises(AssertionError, match=r"The last one failed: Consumer billing: task without an ID"):
        RedeliveringSubscriber(messages("")).deliver(inbox.Handler(Database(), consumer="billing")(handle))


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
