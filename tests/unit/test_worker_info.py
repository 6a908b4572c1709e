"""What a worker says of itself with its heartbeat, and what operators read of it."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outbox import __version__
from outbox.rows.workers import SeenWorker
from publishworker.process.gauges import MAX_OTHER_BYTES, worker_info
from publishworker.telemetry.history import WorkerHistory
from publishworker.topics.availability import CircuitState
from publishworker.types import Failed
from tests.support.parts import worker_settings, working_relay

NOW = datetime(2026, 11, 26, 12, 0, 30, tzinfo=UTC)


MISSING = CircuitState(Failed("not_found", "404 Topic not found"), 25.04, 3.21)


def worker(info: Any, id: str = "a", age: float = 2) -> SeenWorker:
    """Return a worker whose Info went through the database."""
    return SeenWorker(id, age, NOW, NOW - timedelta(seconds=age), json.loads(json.dumps(info)))


def test_a_worker_says_what_it_does() -> None:
    changed = worker_settings(batch_size="100", wake="change-stream", poll_interval="1.0", heartbeat_file="/tmp/mine")
    info = worker_info(changed, working_relay(orders=MISSING), WorkerHistory(), (0, 1, 2, 5, 32000))
    host = info.pop("host")
    assert isinstance(host, str)
    assert info.pop("history")["all"] == {}
    assert info == {
        "version": __version__,
        "shards": [(0, 2), (5, 5), (32000, 32000)],
        "shards_left_out": 0,
        "in_flight": 3,
        "utilization": 0.38,
        "settings": {"batch_size": 100, "wake": "change-stream"},
        "circuits": [
            {"topic": "orders", "reason": "not_found", "error": "404 Topic not found", "open_seconds": 25.0,
             "seconds_to_probe": 3.2},
        ],
        "circuits_left_out": 0,
    }  # fmt: skip


@pytest.mark.parametrize("error", ["e" * 1_000, "\N{GRINNING FACE}" * 1_000], ids=["ascii", "emoji"])
def test_lists_that_do_not_fit_are_cut_and_counted(error: str) -> None:
    """With every second shard of 1,000, a long setting and a hundred circuits: never more than 2.5 kB without it."""
    circuits = {f"topic-{n}": CircuitState(Failed("not_found", error), 1, 1) for n in range(100)}
    info = worker_info(
        worker_settings(allowed_topics=",".join(["orders-*"] * 500)),
        working_relay(**circuits),
        WorkerHistory(),
        range(0, 1000, 2),
    )
    del info["history"]
    assert len(json.dumps(info, separators=(",", ":"))) <= MAX_OTHER_BYTES
    shown = worker(info)
    assert len(shown.shards) + shown.number("shards_left_out") == 500
    assert len(shown.circuits) + shown.number("circuits_left_out") == 100
    assert error.isascii() == (len(shown.circuits) > 0)
    assert 100 < len(shown.shards) < 500


def test_an_info_that_no_worker_writes_breaks_no_command() -> None:
    """Any program may write the column."""
    for info, topics in (
        ({"shards": 5, "circuits": 5, "settings": 5, "in_flight": "x", "host": None}, []),
        ({"shards": [5, [1], [1, "2"], [0, 10**9], [5, 1], [True, 2]], "circuits": [5, None], "in_flight": -1}, []),
        ({"circuits": [{"topic": 5, "open_seconds": 1e300, "seconds_to_probe": None}]}, ["5"]),
    ):
        found = worker(info)
        assert (found.shards, found.settings, found.number("in_flight")) == ([], {}, 0)
        assert [(each.topic, each.since) for each in found.circuits] == [(topic, found.seen_at) for topic in topics]


def test_a_worker_tells_no_secret() -> None:
    """Endpoints are hosts and ports: a setting refuses anything else. The file of one worker is not compared."""
    own = worker_settings(pubsub_endpoint="10.0.0.1:443", heartbeat_file="/tmp/x")
    assert worker_info(own, working_relay(), WorkerHistory(), ())["settings"] == {"pubsub_endpoint": "10.0.0.1:443"}
