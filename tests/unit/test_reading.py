"""What `outbox.reader` refuses, how its position is written, and that it never goes back."""

from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import pytest

from outbox import reading
from outbox.reading import Position, Reader, SentTasks
from tests.support.operations import CREATED

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def test_a_position_in_the_future_stays() -> None:
    """It may come from a database that was restored."""
    future, table = Position(NOON + timedelta(hours=1)), mock.Mock(shards=range(10))
    table.strong_query.return_value = [], NOON
    assert SentTasks(table, future, None).page().end == future


def test_what_no_task_can_match_is_refused() -> None:
    for options in ({"topic": "bad topic"}, {"topic": 7}, {"since": "2026-01-01"}):
        with pytest.raises(ValueError, match=r"^(topic|since) .* It must be"):
            reading.reader(mock.Mock(), **options)


@pytest.mark.parametrize("timeout", [float("nan"), "1", timedelta(seconds=1)])
def test_a_read_refuses_a_timeout_that_is_no_number(timeout: Any) -> None:
    """With nan, it would never end."""
    with (
        Reader(mock.Mock()) as reader,
        pytest.raises(ValueError, match=r"^timeout is .* It must be a number of seconds, or None$"),
    ):
        reader.read(timeout=timeout)


def test_the_end_of_the_block_closes_a_reader() -> None:
    with Reader(mock.Mock()) as reader:
        pass
    assert reader.read() is None
    assert list(reader) == []


def test_a_position_is_a_text() -> None:
    """Also for an ID with spaces. A reader that has reached the end has only a time, so nothing can strip the text."""
    for position in (
        Position(NOON), Position(), Position(NOON, CREATED, 7, " a b "),
        Position.of({"SentAt": NOON, "CreatedAt": CREATED, "Sequence": None, "Id": "a"}),
    ):  # fmt: skip
        assert Position.read(str(position)) == position
    assert str(Position(NOON)) == "2026-01-01T12:00:00.000000Z"
