"""The counts of unsent tasks: the ranges of the requests, and what is added up."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from outbox.rows import backlog
from outbox.rows.backlog import Backlog, Line

NOW = datetime(2026, 11, 26, 12, 0, 30, tzinfo=UTC)


def test_a_request_has_a_limited_number_of_ranges():
    """Spanner limits a request to 10 MiB. The rows of all requests are added up."""
    numbers: list[int] = []

    def query(_statement: str, parameters: Mapping[str, Any]) -> list[list[Any]]:
        shards, topics = parameters["range_shards"], parameters["range_topics"]
        assert len(shards) == len(topics)
        numbers.append(len(shards))
        return [[shards[0], topics[0], topics[0], "pending", 1, NOW, None, 0]]

    ranges = [(shard, f"topic-{number}") for number in range(1_000) for shard in range(25)]
    rows, full = backlog.count(query, "", ranges, 1)
    assert numbers == [10_000, 10_000, 5_000]
    assert full == {(0, "topic-0"), (0, "topic-400"), (0, "topic-800")}
    assert sum(row.number for row in rows) == 3


@pytest.mark.parametrize(("shards", "topics", "large"), [(10, 1, 1), (10, 1_000, 1), (400, 100, 1), (400, 100, 100)])
def test_the_autoscaler_can_request_a_worker_for_each_shard(shards: int, topics: int, large: int):
    """Small topics do not reduce what is counted of others. Reads stay bounded: a part of the large ones at most."""
    waiting = {f"topic-{number}": 10**6 if number < large else 3 for number in range(topics)}
    read: list[int] = []

    def query(_statement: str, values: Mapping[str, Any]) -> list[list[Any]]:
        places = zip(values["range_shards"], values["range_topics"], strict=True)
        rows = [
            (*place, place[1], "pending", min(values["limit"], waiting[place[1]]), NOW, None, 0) for place in places
        ]
        read.append(sum(row[4] for row in rows))
        return [list(row) for row in rows]

    ranges = [(shard, topic) for shard in range(shards) for topic in waiting]
    rows, full = backlog.count(query, "", ranges)
    path = Path(__file__).parents[2] / "k8s/components/autoscaling/horizontalpodautoscaler.yaml"
    [metric] = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]["metrics"]
    target = int(metric["external"]["target"]["averageValue"])
    assert sum(row.number for row in rows) >= shards * target
    assert {topic for _, topic in full} == {topic for topic, number in waiting.items() if number > 3}
    assert sum(read) <= 2 * max(backlog.MAX_TOTAL, shards * backlog.COUNT_LIMIT) + len(ranges) * backlog.MIN_COUNT_LIMIT


def test_pending_tasks_of_a_paused_topic_are_in_no_total():
    """Neither their count, nor their age, nor an early stop."""
    second = timedelta(seconds=1)
    lines = [
        Line("a", pending=2, dead=1, oldest=NOW - second),
        Line("b", pending=1, oldest=NOW - 2 * second, next_due=NOW + second, at_least={"dead"}),
        Line("c", paused=True, pending=7, dead=3, oldest=NOW - 9 * second, at_least={"pending"}),
    ]
    found = Backlog(NOW, (), lines)
    total = found.total
    assert (total.pending, total.dead, total.oldest, total.at_least) == (3, 4, NOW - 2 * second, {"dead"})
    assert (found.oldest, found.age(found.oldest)) == (lines[1], 2.0)
