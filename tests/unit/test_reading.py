"""Positions and pages of `outbox.reader`, on a model of the table: marks get commit timestamps, reads wait for them."""

from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any
from unittest import mock

import pytest

from outbox import reading
from outbox.admin import operator_sql
from outbox.reading import Position, Reader, Row, SentTasks
from tests.support.operations import CREATED, MICROSECOND

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Table:
    """Sent tasks. A read sees the marks that were committed up to its timestamp, and any tasks of the last SentAt."""

    shards = range(10)

    def __init__(self, random: Random) -> None:
        self.random, self.now, self.rows = random, NOON, list[Row]()

    def mark(self, number: int) -> None:
        """Commit the marks of a batch, after every earlier read, perhaps by the smallest possible time."""
        self.now += self.random.choice((1, 1, 1000)) * MICROSECOND
        for _ in range(number):
            columns = {"Id": f"task {len(self.rows)}", "SentAt": self.now, "Topic": self.random.choice("ab")}
            created, sequence = self.random.randrange(3), self.random.choice((None, -1, 0, 1, 2))
            row = {"CreatedAt": CREATED + timedelta(seconds=created), "Sequence": sequence}
            self.rows.append(dict.fromkeys(operator_sql.SENT_COLUMNS) | columns | row)

    def strong_query(self, _statement: str, _tag: str, values: dict[str, Any]) -> tuple[list[list[Any]], datetime]:
        self.now += self.random.choice((0, 0, 1, 1000)) * MICROSECOND
        self.random.shuffle(self.rows)
        topic = values.get("topic")
        found = [row for row in self.rows if row["SentAt"] >= values["after"] and topic in (None, row["Topic"])]
        found = sorted(found, key=lambda row: row["SentAt"])[: values["limit"]]
        self.random.shuffle(found)
        return [[row[name] for name in operator_sql.SENT_COLUMNS] for row in found], self.now


def place(row: Row) -> tuple[Any, ...]:
    sequence = row["Sequence"]
    return row["SentAt"], row["CreatedAt"], sequence is not None, sequence or 0, row["Id"]


def test_a_position_in_the_future_stays() -> None:
    """It may come from a database that was restored. Tasks that are sent before it are not returned."""
    table: Any = Table(Random(1))
    future = Position(NOON + timedelta(hours=1))
    sent = SentTasks(table, future, None)
    assert sent.page().end == future
    table.mark(1)
    page = sent.page()
    assert (page.rows, page.end) == ([], future)


@pytest.mark.parametrize("seed", range(12))
def test_pages_have_each_task_once_in_order_while_batches_are_marked(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the size of pages and batches. A reader stops within a page, and goes on from a stored position."""
    random = Random(seed)
    monkeypatch.setattr(reading, "PAGE_ROWS", random.choice((1, 2, 5, 100)))
    table: Any = Table(random)
    table.mark(random.randrange(8))
    topic = random.choice((None, "a"))
    position, found, more = Position(), list[Row](), True
    for step in range(200):
        if step < 60 and random.random() < 0.5:
            table.mark(random.randrange(8))
        sent = SentTasks(table, Position.read(str(position)), topic)
        sent._check_retention = mock.Mock()  # type: ignore[method-assign]  # asks Spanner
        page = sent.page()
        taken = page.rows[: random.randrange(len(page.rows) + 1)] if step < 60 else page.rows
        found += taken
        position = page.end if len(taken) == len(page.rows) else Position.of(taken[-1]) if taken else position
        more = page.more
    assert not more
    expected = [row for row in table.rows if topic in (None, row["Topic"])]
    assert found == sorted(expected, key=place)
    assert len({row["Id"] for row in found}) == len(found) > 20


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
