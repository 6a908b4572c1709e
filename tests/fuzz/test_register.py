"""`outbox.register` with anything: a row with exactly the given values, or a refusal that names the wrong argument."""

import base64
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

from google.protobuf import struct_pb2
from google.pubsub_v1.types import PubsubMessage
from hypothesis import given
from hypothesis import strategies as st

import outbox
from outbox.message import RawPubsubMessage
from outbox.testing import RecordingTransaction
from tests.fuzz.conftest import Check

texts = st.text(max_size=40) | st.text(st.characters(codec=None), max_size=8) | st.sampled_from(["", "\x00", "\ud800"])
long_texts = st.builds(lambda text, times: text * times, st.text(min_size=1, max_size=3), st.integers(1, 1500))
anything = (
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary(max_size=20)
    | st.lists(texts, max_size=3) | st.dictionaries(texts, texts, max_size=3)
)  # fmt: skip
attributes = (
    st.dictionaries(
        texts | long_texts | st.sampled_from(["asynchronous_task_id", "googx"]), texts | long_texts, max_size=6
    )
    | st.builds(lambda count: {f"a{n}": "" for n in range(count)}, st.integers(95, 105))
    | anything
)
large = st.sampled_from([b"x" * n for n in (9_999_000, 9_999_600, 10_000_001)])
#: A large one takes the time of a hundred others, so one of ten is large.
bodies = st.tuples(st.integers(0, 9), st.binary(max_size=300), large).map(lambda drawn: drawn[1 + (drawn[0] == 5)])
messages = (
    bodies | st.builds(bytearray, bodies) | st.builds(memoryview, bodies) | anything
    | st.builds(PubsubMessage, data=bodies, ordering_key=st.text(max_size=5))
    | st.builds(lambda text: struct_pb2.Value(string_value=text), st.text(max_size=9))
)  # fmt: skip
zones = st.none() | st.just(UTC) | st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
EDGES = [datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999_999)]  # noqa: DTZ001 - without a zone, on purpose
times = st.none() | st.datetimes(timezones=zones) | st.sampled_from(EDGES) | anything
topics = st.from_regex(r"(projects/[a-z]{3,9}/topics/)?[a-z][a-z0-9-]{2,9}", fullmatch=True) | texts | anything
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "topic": st.sampled_from(["orders", "projects/my-project/topics/orders"]),
    "message": bodies,
    "attributes": st.none() | st.dictionaries(st.text("abc", min_size=1), st.text(max_size=9), max_size=3),
    "priority": st.integers(-(2**63), 2**63 - 1),
    "ordering_key": st.text(max_size=9),
    "available_at": st.none(),
    "expires_at": st.none(),
    "at_most_once": st.just(False),
    "task_id": st.none(),
}
WILD: dict[str, st.SearchStrategy[Any]] = {
    "topic": topics, "message": messages, "attributes": attributes, "priority": st.integers() | anything,
    "ordering_key": texts | long_texts | anything, "available_at": times, "expires_at": times,
    "at_most_once": anything, "task_id": texts | long_texts | anything,
}  # fmt: skip
#: How a refusal names an argument, where not by its name. A large message may be too large for its attributes.
WORDS = {"attributes": "attribute", "ordering_key": "ordering"}


@st.composite
def _calls(draw: st.DrawFn) -> tuple[dict[str, Any], set[str]]:
    """Return a call's arguments, and which of them are wild: few, because the first refusal hides the others."""
    wild = draw(st.sets(st.sampled_from(sorted(WILD)), max_size=3))
    return {name: draw((WILD if name in wild else GOOD)[name]) for name in GOOD}, wild


@given(_calls())
def _registered(call: tuple[dict[str, Any], set[str]]) -> None:
    given, wild = call
    transaction = RecordingTransaction()
    try:
        id = outbox.register(transaction, **given)
    except (outbox.InvalidMessage, TypeError) as error:
        refused = str(error)
        assert not transaction.inserts
        assert any(WORDS.get(name, name) in refused for name in wild | {"message"}), (refused, wild)
        assert len(refused) < 600
        return
    [(_, columns, [values])] = transaction.inserts
    # Columns with their default are left out.
    row: Any = dict.fromkeys(("AvailableAt", "ExpiresAt", "OrderingKey")) | {"AtMostOnce": False}
    row |= dict(zip(columns, values, strict=True))
    stored = RawPubsubMessage.FromString(base64.b64decode(row["Data"], validate=True))
    message = given["message"]
    if isinstance(message, PubsubMessage):
        message = message.data
    elif isinstance(message, struct_pb2.Value):
        message = message.SerializeToString()
    assert stored.data == bytes(message)
    assert dict(stored.attributes) == {**(given["attributes"] or {}), outbox.TASK_ID_ATTRIBUTE: id}
    assert (row["Id"], row["Topic"], row["Priority"]) == (id, given["topic"], int(given["priority"]))
    assert (row["AvailableAt"], row["ExpiresAt"]) == (given["available_at"], given["expires_at"])
    assert row["OrderingKey"] == (stored.ordering_key or None)
    assert row["AtMostOnce"] is given["at_most_once"]


def test_register_stores_the_given_values_or_refuses_them(check: Check) -> None:
    """No other error, no altered byte, nothing added when it is refused."""
    check(_registered, 200, 70_000)
