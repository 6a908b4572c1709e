"""How the counts of a backlog are read and added up."""

from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

from outbox.admin import backlog
from outbox.admin.backlog import Backlog, BacklogCounter, Line

NOW = datetime(2026, 11, 21, 13, tzinfo=UTC)


def test_a_request_has_a_limited_number_of_ranges():
    """Spanner limits a request to 10 MiB. The rows of all requests are added up."""
    numbers: list[int] = []

    def ask(_statement: str, **parameters: Any) -> list[list[Any]]:
        shards, topics = parameters["range_shards"], parameters["range_topics"]
        assert len(shards) == len(topics) == len(parameters["max_priorities"])
        numbers.append(len(shards))
        return [[shards[0], topics[0], 50, "pending", 1, NOW, None, 0]]

    ranges = [(shard, f"topic-{number}") for number in range(1_000) for shard in range(25)]
    counter = backlog.BacklogCounter(1)
    with mock.patch.object(backlog, "MAX_QUERIES", 1):
        left = backlog._add_ready(counter, ask, ranges, 1)
    assert numbers == [10_000, 10_000, 5_000]
    assert left == [(0, "topic-0", 49), (0, "topic-400", 49), (0, "topic-800", 49)]
    assert [line.pending for line in counter.lines(())] == [1, 1, 1]


def test_counts_below_the_last_query_are_lower_bounds():
    """Also those of a priority that another shard or state has shown."""
    counter = BacklogCounter(2)
    left = counter.add_ready([[0, "a", 9, "pending", 2, NOW, None, 0]])
    assert left == [(0, "a", 8)]
    counter.mark_incomplete(left)
    counter.add([[shard, "a", priority, "dead", 1, None, None, 0] for shard, priority in ((1, 8), (2, 10))], "dead")
    assert {line.priority: line.at_least for line in counter.lines(())} == {
        10: set(), 9: {"pending"}, 8: {"pending", "registered_last_minute"},
    }  # fmt: skip


def test_pending_tasks_of_a_paused_topic_are_in_no_total():
    """Neither their count, nor their age, nor an early stop; the others are added up by topic."""
    second = timedelta(seconds=1)
    lines = [
        Line("a", 9, pending=2, dead=1, oldest=NOW - second),
        Line("a", 1, pending=1, oldest=NOW - 2 * second, next_due=NOW + second, at_least={"dead"}),
        Line("b", 0, paused=True, pending=7, dead=3, oldest=NOW - 9 * second, at_least={"pending"}),
    ]
    found = Backlog(NOW, (), lines)
    total = found.total
    assert (total.pending, total.dead, total.oldest, total.at_least) == (3, 4, NOW - 2 * second, {"dead"})
    assert (found.oldest, found.age(found.oldest)) == (lines[1], 2.0)
    assert found.topics() == {
        "a": Line("a", 9, pending=3, dead=1, oldest=NOW - 2 * second, next_due=NOW + second, at_least={"dead"}),
        "b": lines[2],
    }


def test_an_empty_backlog_has_no_age():
    empty = Backlog(NOW, (), [])
    assert (empty.total, empty.oldest, empty.topics(), empty.age(None)) == (Line("", 0), None, {}, 0.0)
    assert empty.age(Line("a", 0)) == 0.0
    assert empty.age(Line("a", 0, oldest=NOW + timedelta(seconds=1))) == 0.0
