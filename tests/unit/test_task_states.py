"""Rows as any writer inserts them: decoded, in one state, and sent as they are, dead with a reason, or pending."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from google.protobuf.struct_pb2 import ListValue, Value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outbox.base.values import topic_name
from outbox.message import (
    MAX_ATTRIBUTES,
    MAX_FIELDS,
    MAX_REQUEST_BYTES,
    TASK_ID_ATTRIBUTE,
    RawPubsubMessage,
    has_too_many_fields,
    parsed,
)
from outbox.table.states import LEFT_TO_SEND, NEVER, RANGES, STATES, UNSENT, arrow_states, is_dead
from publishworker.pubsub.publisher import topic_filter
from publishworker.spanner import relay_sql
from publishworker.types import LockedRow
from tests.support.fakes import FakePublisher, FakeStore, is_refused
from tests.support.parts import relay_of

PRECISELY = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def values(*row: Any) -> list[Value]:
    created = ListValue()
    created.extend([each if each is None or isinstance(each, bool) else str(each) for each in row])
    return list(created.values)


def test_every_time_that_spanner_has_is_read() -> None:
    times = {
        "2026-01-01T12:00:00Z": datetime(2026, 1, 1, 12, tzinfo=UTC),
        "2026-01-01T12:00:00.1Z": datetime(2026, 1, 1, 12, 0, 0, 100_000, tzinfo=UTC),
        "2026-01-01T12:00:00.123456789Z": PRECISELY,  # nanoseconds are cut on both sides of a comparison
        "0001-01-01T00:00:00Z": datetime(1, 1, 1, tzinfo=UTC),
        "9999-12-31T23:59:59.999999999Z": datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    }
    found = relay_sql.candidates([values(text, "orders", 0, 0, text, text, None, 0) for text in times])
    assert {id: each.created_at for id, each in found.items()} == times
    assert {id: each.available_at for id, each in found.items()} == times


def test_a_task_is_due_or_expired_exactly_at_its_time() -> None:
    before = PRECISELY - MICROSECOND
    task = LockedRow("a", "orders", b"", None, PRECISELY, available_at=PRECISELY, sent_at=None, expires_at=PRECISELY)
    assert [task.is_due(before), task.is_due(PRECISELY)] == [False, True]
    assert [task.is_expired(before), task.is_expired(PRECISELY)] == [False, True]
    always = task._replace(available_at=None, expires_at=None)
    assert (always.is_due(before), always.is_expired(PRECISELY)) == (True, False)


def test_a_task_is_in_one_state() -> None:
    """The rule for Arrow. Tests with the emulator check that of SQL."""
    later = PRECISELY + MICROSECOND
    available_at, attempts, blocked_by, states = zip(
        (None, 0, None, "pending"),
        (PRECISELY, 3, None, "pending"),
        (PRECISELY, 0, "head", "pending"),
        (later, 0, None, "scheduled"),
        (later, -1, None, "scheduled"),
        (later, 1, None, "retrying"),
        (NEVER - MICROSECOND, 1, None, "retrying"),
        (later, 1, "head", "blocked"),
        (later, 0, "head", "blocked"),
        (NEVER, 1, "head", "dead"),
        (NEVER + MICROSECOND, 0, None, "dead"),
        strict=True,
    )
    time = pa.timestamp("us", "UTC")
    columns = {
        "SentAt": pa.nulls(len(states), time),
        "AvailableAt": pa.array(available_at, time),
        "Attempts": pa.array(attempts),
        "BlockedBy": pa.array(blocked_by, pa.string()),
        "CancelledBy": pa.nulls(len(states), pa.string()),
    }
    assert tuple(arrow_states(pc, columns, PRECISELY).to_pylist()) == states
    ended = columns | {"SentAt": pa.array([PRECISELY] * len(states), time)}
    assert {*arrow_states(pc, ended, PRECISELY).to_pylist()} == {"sent"}
    ended["CancelledBy"] = pa.array(["application"] * len(states))
    assert {*arrow_states(pc, ended, PRECISELY).to_pylist()} == {"cancelled"}
    assert [is_dead(each) for each in available_at] == [state == "dead" for state in states]


def test_all_lists_name_the_same_states() -> None:
    assert STATES == ("pending", "retrying", "scheduled", "blocked", "dead", "sent", "cancelled")
    assert tuple(RANGES) == UNSENT
    assert set(LEFT_TO_SEND) < set(UNSENT)


ATTRIBUTE = b"\x12\x06\x0a\x04abcd"
#: Of each length that a field may have.
UNKNOWN = b"\x78\x00\x79" + bytes(8) + b"\x7d" + bytes(4)


@settings(max_examples=30)
@given(st.binary(max_size=2000), st.text(max_size=9), st.integers(0, MAX_ATTRIBUTES), st.sampled_from("\x12\x92k"))
def test_every_message_that_pubsub_accepts_is_decoded(data: bytes, key: str, attributes: int, letter: str) -> None:
    """Also where the bytes of the body look like the tags of attributes."""
    message = RawPubsubMessage(data=data + b"\x12\x92" * MAX_FIELDS, ordering_key=key)
    message.attributes.update({f"{n}": letter * n for n in range(attributes)})
    message.publish_time.seconds = 1
    assert parsed(message.SerializeToString()) == message


def test_too_many_fields_are_not_decoded() -> None:
    """However they are written: each of these is a message for protobuf."""
    for name, data in {
        "many": ATTRIBUTE * (MAX_FIELDS + 1),
        "tags that are longer than they need be": b"\x92\x80\x00\x06\x0a\x04abcd" * (MAX_FIELDS + 1),
        "behind fields that no message has": UNKNOWN + ATTRIBUTE * (MAX_FIELDS + 1),
        "behind a batch": b"\x7b\x7c" + ATTRIBUTE * MAX_FIELDS + b"\x12\x00",
        "other fields": b"\x78\x12" * (MAX_FIELDS + 1),
    }.items():
        RawPubsubMessage.FromString(data)
        assert (has_too_many_fields(data), parsed(data)) == (True, None), name


@pytest.mark.parametrize("tag", [b"\x12", b"\x92\x80\x00"])
@pytest.mark.parametrize("before", [b"", UNKNOWN], ids=["alone", "behind fields that no message has"])
def test_the_max_number_of_fields_is_decoded(before: bytes, tag: bytes) -> None:
    """Pub/Sub itself may refuse these. Each has a byte more that could be an attribute's tag."""
    number = MAX_FIELDS - (3 if before else 0)
    found = parsed(before + b"".join(tag + b"\x09\x0a\x04%04d\x12\x01\x12" % each for each in range(number)))
    assert found is not None
    assert len(found.attributes) == number


def test_an_endless_number_is_not_a_message() -> None:
    for name, data in {
        "ends with the row": b"\x12\x09\x0a\x04abcd\x12\x01\x12" * 150 + b"\x80",
        "begins late": b"\x12" * 300 + b"\x80" * 5_000_000,
        "never ends": b"\xff" * 5_000_000 + b"\x12" * 300,
    }.items():
        assert parsed(data) is None, name


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


@given(st.lists(_rows(), min_size=1, max_size=8))
def _relayed(given: list[dict[str, Any]]) -> None:
    store, publisher = FakeStore(), FakePublisher(*EXISTS, allowed=topic_filter(ALLOWED, "test-project"))
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
    for topic, id, message in publisher.published:
        sent.append(id)
        assert topic in EXISTS
        assert message == _wanted(id, rows[id])
        assert not _has_expired(rows[id])
        assert not is_dead(rows[id]["available_at"])
    assert sorted(sent) == sorted(id for id, row in store.rows.items() if row.sent_at)
    bad = {(each["topic"], each["ordering_key"]) for id, each in rows.items() if not _must_go(id, each)}
    for id, columns in rows.items():
        row = store.rows[id]
        loose = columns["ordering_key"] is None
        if _must_go(id, columns):
            assert row.sent_at or (not loose and (row.topic, row.ordering_key) in bad), row
        elif row.sent_at is None and is_dead(row.available_at) and not is_dead(columns["available_at"]):
            assert re.match("expired: " if _has_expired(columns) else "[a-z_]+: ", str(row.last_error)), row
        elif row.sent_at is None and loose:
            waits = row.available_at is not None and row.available_at > store.now - timedelta(hours=3)
            assert waits, row


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
    if message is None or topic_name(columns["topic"], "test-project") not in EXISTS or is_refused(message):
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
