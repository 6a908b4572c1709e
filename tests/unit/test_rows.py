"""From protobuf values to tasks: NULL, times at the edges, and rows that are no tasks."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.protobuf.struct_pb2 import ListValue, Value

from publishworker.spanner import rows, statements
from publishworker.types import LockedRow, News, TopicLimit

AT = "2026-01-01T12:00:00.123456Z"
NOON = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)


def values(*row: Any) -> list[Value]:
    made = ListValue()
    made.extend([each if each is None or isinstance(each, bool) else str(each) for each in row])
    return list(made.values)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-01T12:00:00Z", datetime(2026, 1, 1, 12, tzinfo=UTC)),
        ("2026-01-01T12:00:00.1Z", datetime(2026, 1, 1, 12, 0, 0, 100_000, tzinfo=UTC)),
        ("2026-01-01T12:00:00.123456789Z", NOON),  # nanoseconds are cut: what is compared is cut on both sides
        ("0001-01-01T00:00:00Z", datetime(1, 1, 1, tzinfo=UTC)),
        ("9999-12-31T23:59:59.999999999Z", datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)),
    ],
)
def test_every_time_that_spanner_has_is_read(text: str, expected: datetime) -> None:
    [found] = rows.candidates([values("a", "orders", 0, 0, text, text, None, 0)])
    assert (found.created_at, found.available_at) == (expected, expected)


def test_a_task_of_two_ranges_comes_once_and_rows_without_id_are_news() -> None:
    """The kinds of news are told apart by the column of the shard."""
    task = values("a", "orders", 7, 50, AT, None, None, 1)
    found = [
        task,
        task,
        values(None, "found", 0, 0, None, None, None, 0),
        values(None, "found", 9, 0, None, None, None, 0),
        values(None, "paused", statements.PAUSED, 0, None, None, None, 0),
        values(None, "alive", statements.LIVING, 0, None, None, None, 0),
        values(None, "dead", statements.GONE, 0, None, None, None, 0),
        values(None, "slow", statements.LIMITED, 5, None, None, "0.5", 2),
        values(None, "wrong", statements.LIMITED, None, None, None, "nan", None),
    ]
    assert [each.id for each in rows.candidates(found)] == ["a"]
    news = rows.news(found)
    assert news.limits["slow"] == TopicLimit(rate=0.5, burst=2, in_flight=5)
    assert (str(news.limits["wrong"].rate), news.limits["wrong"].burst) == ("nan", None)
    assert replace(news, limits={}) == News(
        topics=frozenset({"found"}), paused=frozenset({"paused"}), living=frozenset({"alive"}), gone=frozenset({"dead"})
    )


def test_a_task_is_due_and_expired_at_the_moment_that_its_row_names() -> None:
    before = NOON - timedelta(microseconds=1)
    task = LockedRow("a", "orders", b"", None, NOON, available_at=NOON, sent_at=None, expires_at=NOON)
    assert (task.is_due(before), task.is_due(NOON), task.is_expired(before), task.is_expired(NOON)) == (False, True) * 2
    always = replace(task, available_at=None, expires_at=None)
    assert (always.is_due(before), always.is_expired(NOON)) == (True, False)
