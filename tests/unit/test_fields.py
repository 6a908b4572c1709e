"""The decoding of a row's `Data`: every message that Pub/Sub accepts, and none that would fill the memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.message import MAX_ATTRIBUTES, MAX_FIELDS, RawPubsubMessage, has_too_many_fields, parsed

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


@pytest.mark.parametrize(
    "data",
    {
        "many": ATTRIBUTE * (MAX_FIELDS + 1),
        "tags that are longer than they need be": b"\x92\x80\x00\x06\x0a\x04abcd" * (MAX_FIELDS + 1),
        "behind fields that no message has": UNKNOWN + ATTRIBUTE * (MAX_FIELDS + 1),
        "behind a batch": b"\x7b\x7c" + ATTRIBUTE * MAX_FIELDS + b"\x12\x00",
        "other fields": b"\x78\x12" * (MAX_FIELDS + 1),
    }.items(),
    ids=lambda item: item[0],
)
def test_too_many_fields_are_not_decoded(data: tuple[str, bytes]) -> None:
    """However they are written: each of these is a message for protobuf."""
    RawPubsubMessage.FromString(data[1])
    assert has_too_many_fields(data[1])
    assert parsed(data[1]) is None


@pytest.mark.parametrize("tag", [b"\x12", b"\x92\x80\x00"])
@pytest.mark.parametrize("before", [b"", UNKNOWN], ids=["alone", "behind fields that no message has"])
def test_the_max_number_of_fields_is_decoded(before: bytes, tag: bytes) -> None:
    """Pub/Sub itself may refuse these. Each has a byte more that could be an attribute's tag."""
    number = MAX_FIELDS - (3 if before else 0)
    found = parsed(before + b"".join(tag + b"\x09\x0a\x04%04d\x12\x01\x12" % each for each in range(number)))
    assert found is not None
    assert len(found.attributes) == number


@pytest.mark.parametrize(
    "data",
    [
        b"\x12\x09\x0a\x04abcd\x12\x01\x12" * 150 + b"\x80",
        b"\x12" * 300 + b"\x80" * 5_000_000,
        b"\xff" * 5_000_000 + b"\x12" * 300,
    ],
    ids=["ends with the row", "begins late", "never ends"],
)
def test_an_endless_number_is_not_a_message(data: bytes) -> None:
    assert parsed(data) is None
