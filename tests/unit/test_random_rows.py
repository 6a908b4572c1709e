"""Rows as hostile and buggy writers insert them: sent as they are, dead with a reason, or pending."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outbox.base.values import topic_name
from outbox.message import MAX_REQUEST_BYTES, TASK_ID_ATTRIBUTE, RawPubsubMessage, parsed
from outbox.table.states import NEVER
from publishworker.pubsub.messages import topic_filter
from publishworker.pubsub.publisher import PubSubPublisher
from tests.simulation.pubsub import Refused
from tests.support.fakes import FakeStore
from tests.support.parts import relay_of

ALLOWED = "orders,pay*,projects/partner/topics/shared"
EXISTS = {f"projects/test-project/topics/{name}" for name in ("orders", "payments")} | {
    "projects/partner/topics/shared"
}
EDGES = [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), NEVER]
times = st.none() | st.datetimes(timezones=st.just(UTC)) | st.sampled_from(EDGES)
ends = st.sampled_from([2**63 - 1, 2**63 - 2, -1, -(2**63)]) | st.integers(-(2**63), 2**63 - 1)
texts = st.text(max_size=30) | st.sampled_from(["\x00", "é" * 600, "x" * 1025])
good = st.builds(
    lambda data, attributes: RawPubsubMessage(data=data, attributes=attributes).SerializeToString(),
    st.binary(max_size=50),
    st.dictionaries(texts, texts, max_size=3),
)
#: A map's entry whose value is no UTF-8, one field of the wrong type, a message that says another id, a giant, too many
#: attributes for Pub/Sub and for the worker.
CRAFTED = [
    b"\x12\x06\x0a\x01a\x12\x01\xff",
    b"\x0a\xff\xff\xff\xff\x0f",
    RawPubsubMessage(attributes={TASK_ID_ATTRIBUTE: "another"}, message_id="1", ordering_key="x").SerializeToString(),
    RawPubsubMessage(data=b"x" * (10 * 1024 * 1024)).SerializeToString(),
    RawPubsubMessage(attributes={str(number): "" for number in range(101)}).SerializeToString(),
    RawPubsubMessage(attributes={str(number): "" for number in range(300)}).SerializeToString(),
]
topics = (
    st.sampled_from(["orders", "payments", "secrets", "projects/partner/topics/shared", "projects/evil/topics/orders"])
    | texts | st.from_regex(r"projects/[^/]{0,9}/topics/[^/]{0,9}", fullmatch=True)
)  # fmt: skip
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "topic": st.sampled_from(["orders", "payments", "projects/partner/topics/shared"]), "data": good,
    "ordering_key": st.none() | st.sampled_from(["k", "l"]), "priority": st.just(50), "attempts": st.just(0),
    "created_at": st.just(NOON - timedelta(minutes=1)), "available_at": st.none(), "expires_at": st.none(),
    "at_most_once": st.just(False), "times_sent": st.just(0), "sequence": st.none(), "blocked_by": st.none(),
    "last_error": st.none(),
}  # fmt: skip
WILD: dict[str, st.SearchStrategy[Any]] = {
    "topic": topics, "data": st.binary(max_size=60) | st.sampled_from(CRAFTED), "ordering_key": texts.filter(bool),
    "priority": ends, "attempts": st.sampled_from([1, 9]) | ends,
    "created_at": times.filter(lambda time: time is not None), "available_at": times, "expires_at": times,
    "at_most_once": st.just(True), "times_sent": ends, "sequence": ends, "blocked_by": texts, "last_error": texts,
}  # fmt: skip


@st.composite
def _rows(draw: st.DrawFn) -> dict[str, Any]:
    wild = draw(st.sets(st.sampled_from(sorted(WILD)), max_size=3))
    return {name: draw((WILD if name in wild else GOOD)[name]) for name in GOOD}


class Service:
    """Pub/Sub, as strict as the real one: a transport, and its channel."""

    def __init__(self) -> None:
        self.published: list[tuple[str, Any]] = []
        calls = {"future": self.future, "with_call": lambda request, **_more: (None, self.future(request))}
        sends = {f"unary_unary.return_value.{name}.side_effect": call for name, call in calls.items()}
        self.grpc_channel = mock.Mock(**sends)

    def future(self, request: Any, **_more: Any) -> Any:
        assert request.ByteSize() <= MAX_REQUEST_BYTES
        keys = {message.ordering_key for message in request.messages}
        answer = mock.Mock()
        answer.add_done_callback.side_effect = lambda callback: callback(answer)
        if request.topic not in EXISTS:
            answer.exception.return_value = Refused(grpc.StatusCode.NOT_FOUND)
        elif len(keys) > 1 or any(_is_refused(message) for message in request.messages):
            answer.exception.return_value = Refused(grpc.StatusCode.INVALID_ARGUMENT)
        else:
            answer.exception.return_value = None
            self.published += [(request.topic, message) for message in request.messages]
            answer.result.return_value.message_ids = [str(number) for number in range(len(request.messages))]
        return answer


def _is_refused(message: Any) -> bool:
    sizes = [(len(key.encode()), len(value.encode())) for key, value in message.attributes.items()]
    bad = any(not 0 < key <= 256 or value > 1024 for key, value in sizes)
    return bad or len(sizes) > 100 or len(message.ordering_key.encode()) > 1024


@given(st.lists(_rows(), min_size=1, max_size=8))
def _relayed(given: list[dict[str, Any]]) -> None:
    store, service = FakeStore(), Service()
    transport: Any = service
    publisher = PubSubPublisher(transport, "test-project", topic_filter(ALLOWED, "test-project"))
    relay = relay_of(store, publisher, batch_bytes=8_000_000, retries={"max_attempts": 3, "dead_after": 0})
    for number, columns in enumerate(given):
        store.insert(f"{number}", **columns)
    for _ in range(60):
        turn = relay.turn()
        store.now += timedelta(hours=3)
        if not (turn.made_progress or turn.polled or turn.in_flight):
            break
    relay.finish()
    rows = {f"{number}": columns for number, columns in enumerate(given)}
    sent = []
    for topic, message in service.published:
        sent.append(id := message.attributes[TASK_ID_ATTRIBUTE])
        assert topic in EXISTS
        assert topic_filter(ALLOWED, "test-project")(topic)
        assert message == _wanted(id, rows[id])
        assert not _has_expired(rows[id])
        assert not _is_dead(rows[id]["available_at"])
    assert sorted(sent) == sorted(id for id, row in store.rows.items() if row.sent_at)
    bad = {(each["topic"], each["ordering_key"]) for id, each in rows.items() if not _must_go(id, each)}
    for id, columns in rows.items():
        row = store.rows[id]
        loose = columns["ordering_key"] is None
        if _must_go(id, columns):
            assert row.sent_at or (not loose and (row.topic, row.ordering_key) in bad), row
        elif row.sent_at is None and _is_dead(row.available_at) and not _is_dead(columns["available_at"]):
            assert re.match("expired: " if _has_expired(columns) else "[a-z_]+: ", str(row.last_error)), row
        elif row.sent_at is None and loose:
            waits = row.available_at is not None and row.available_at > store.now - timedelta(hours=3)
            assert waits, row


def _is_dead(available_at: datetime | None) -> bool:
    return available_at is not None and available_at >= NEVER


def _has_expired(columns: dict[str, Any]) -> bool:
    return columns["expires_at"] is not None and columns["expires_at"] <= NOON


def _wanted(id: str, columns: dict[str, Any]) -> Any:
    message = parsed(columns["data"])
    if message is not None:
        message.ClearField("message_id")
        message.ClearField("publish_time")
        message.attributes[TASK_ID_ATTRIBUTE] = id
        message.ordering_key = columns["ordering_key"] or ""
    return message


def _must_go(id: str, columns: dict[str, Any]) -> bool:
    """Return whether nothing is wrong with the row, so that the relay sends it in any case."""
    message = _wanted(id, columns)
    if message is None or topic_name(columns["topic"], "test-project") not in EXISTS or _is_refused(message):
        return False
    due = columns["available_at"] is None or columns["available_at"] <= NOON
    expires = columns["expires_at"] is not None and columns["expires_at"] < NOON + timedelta(days=30)
    return due and not expires and message.ByteSize() < MAX_REQUEST_BYTES - 1000


@pytest.mark.timeout(3600)
def test_no_inserted_row_stops_the_relay(long: bool) -> None:
    """No message is altered or goes to a topic that is not allowed, and a row that cannot be sent has the reason."""
    checks, cases = list(HealthCheck), 25_000 if long else 50
    settings(max_examples=cases, derandomize=not long, database=None, deadline=None, suppress_health_check=checks)(
        _relayed
    )()
