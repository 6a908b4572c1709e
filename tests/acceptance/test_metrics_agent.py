"""The metrics of a worker, as a DogStatsD agent receives them."""

from pathlib import Path

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from publishworker.telemetry import metrics as m
from tests.support.container import altered, settings
from tests.support.dogstatsd import UnixAgent
from tests.support.relays import insert_undecodable, register
from tests.support.waiting import eventually

#: Reports come every 15 s; here every second.
OFTEN = "from publishworker.process import gauges; gauges.REPORT_SECONDS = 1.0"
SERVICE = {"DD_ENV": "test", "DD_SERVICE": "publishworker", "DD_VERSION": "1.2.3"}
TABLE = {metric.name: metric for metric in m.METRICS}
#: The metrics of every worker that sends tasks and polls shard 0.
USUAL = {
    m.HEARTBEAT, m.WORKERS, m.PENDING, m.TOPIC_TASKS, m.OLDEST_AGE, m.TOPIC_OLDEST_AGE,
    m.PHASE_DURATION, m.LATENCY, m.IN_FLIGHT, m.PUBLISHED,
}  # fmt: skip


@pytest.mark.extended
def test_every_sent_metric_is_documented_with_its_tags(
    emulators: Emulators, database: Database, topic: str, tmp_path: Path
) -> None:
    """Names, types and tags of a run with failures match the table. Each metric that every worker sends was sent."""
    agent = UnixAgent(tmp_path / "dsd.socket")
    environment = settings(emulators, database.database_id, tmp_path / "heartbeat", **agent.environment, **SERVICE)
    with agent.listening(), altered(OFTEN, environment, "--batch-size", "10") as process:
        insert_undecodable(database, "garbage", topic, "key")
        register(database, "missing-topic", 2)
        register(database, topic, 40)
        wanted = {metric.name for metric in USUAL} | {m.FAILED.name, m.DEAD.name, m.CIRCUIT_STATE.name}
        eventually(lambda: wanted <= {each.name for each in list(agent.heard)}, seconds=40)
        eventually(lambda: agent.counts[m.PUBLISHED.name] == 40, seconds=30)
        process.end()
        assert "Traceback" not in process.stderr
    for each in agent.heard:
        metric = TABLE[each.name]
        assert each.type == metric.type, each
        without = {"topic"} if each.name == m.PHASE_DURATION.name and "phase:publish" not in each.tags else set()
        assert each.keys == {*metric.tags, "env", "service", "version"} - without, each
        assert {"env:test", "service:publishworker", "version:1.2.3"} <= each.tags
    phases = {tag for each in agent.named(m.PHASE_DURATION.name) for tag in each.tags if tag.startswith("phase:")}
    assert phases == {f"phase:{phase}" for phase in m.PHASES}
    states = {tag for each in agent.named(m.TOPIC_TASKS.name) for tag in each.tags if tag.startswith("state:")}
    assert states <= {f"state:{state}" for state in m.TASK_STATES}
    assert len(agent.named(m.LATENCY.name)) == 40
