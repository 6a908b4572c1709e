"""Rows as Spanner sends them: any value is read as it was stored."""

from base64 import b64encode
from datetime import UTC, datetime
from typing import Any

import pytest
from google.protobuf.struct_pb2 import NULL_VALUE, Value
from hypothesis import given
from hypothesis import strategies as st

from publishworker.spanner import rows
from publishworker.task import Candidate, Key, Row, Waiting
from tests.fuzz.conftest import Fuzz

EARLIEST, LATEST = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
texts = st.text(st.characters(codec="utf-8"), max_size=12)
numbers = st.integers(-(2**63), 2**63 - 1)
#: Cut to microseconds, as all times are that are compared.
times = st.datetimes(timezones=st.just(UTC)) | st.sampled_from([EARLIEST, LATEST])
maybe_times = st.none() | times


def sent(value: Any) -> Value:
    """Return a value as it is on the wire: https://cloud.google.com/spanner/docs/reference/rest/v1/TypeCode."""
    match value:
        case None:
            return Value(null_value=NULL_VALUE)
        case bool():
            return Value(bool_value=value)
        case bytes():
            return Value(string_value=b64encode(value).decode())
        case datetime():
            return Value(string_value=value.replace(tzinfo=None).isoformat(timespec="microseconds") + "789Z")
    return Value(string_value=str(value))


@given(st.lists(st.tuples(texts, texts, st.integers(0, 63), numbers, times, maybe_times, texts | st.none(), numbers)))
def _candidates(found: list[tuple[Any, ...]]) -> None:
    expected = {each[0]: Candidate(*each[:6], each[6] or None, each[7]) for each in found}
    assert rows.candidates([sent(value) for value in each] for each in found) == tuple(expected.values())


@given(
    st.lists(
        st.builds(
            Row, texts, texts, st.binary(), texts.map(lambda key: key or None), times, maybe_times, maybe_times,
            st.booleans(), numbers, maybe_times, st.booleans(), st.booleans(),
        ),
        max_size=5,
    ),
    times,
)  # fmt: skip
def _locked(stored: list[Row], now: datetime) -> None:
    names = Row.__slots__
    found, at = rows.locked([*(sent(getattr(each, name)) for name in names), sent(now)] for each in stored)
    assert found == stored
    assert at == (now if stored else EARLIEST)


@given(st.lists(st.tuples(texts, texts, texts, numbers, st.booleans(), st.booleans(), st.booleans())))
def _fronts(found: list[tuple[Any, ...]]) -> None:
    expected: dict[Key, list[Waiting]] = {}
    for topic, key, id, size, due, parked, expired in found:
        task = Waiting(id, size, due or (parked and not expired), parked, expired and not due)
        expected.setdefault(Key(topic, key), []).append(task)
    assert rows.fronts([sent(value) for value in each] for each in found) == expected


@pytest.mark.parametrize("decoded", [_candidates, _locked, _fronts])
def test_what_is_read_is_what_was_stored(decoded: Any, fuzz: Fuzz) -> None:
    """Byte for byte, in order, with empty names, and with counts and times at their edges."""
    fuzz(decoded, 100, 5_000)
