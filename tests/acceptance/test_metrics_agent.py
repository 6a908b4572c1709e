"""Workers and their DogStatsD agent: what it hears, and that its absence costs nothing but figures."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.emulators import Emulators
from publishworker import reporting
from publishworker.telemetry import metrics as m
from tests.support.container import altered, settings
from tests.support.dogstatsd import UnixAgent
from tests.support.outages import told
from tests.support.processes import Process, run
from tests.support.proxy import silent_port
from tests.support.pubsub import Subscription
from tests.support.relays import account, insert_undecodable, register, wait_until_all_sent, worker
from tests.support.waiting import eventually

#: Reports come every 15 s; here every second.
OFTEN = "from publishworker import reporting; reporting.INTERVAL = 1.0"
SERVICE = {"DD_ENV": "test", "DD_SERVICE": "publishworker", "DD_VERSION": "1.2.3"}
TABLE = {metric.name: metric for metric in m.METRICS}
#: What every worker sends that sends tasks, and owns shard 0.
USUAL = {
    m.HEARTBEAT, m.BUILD, m.SHARDS, m.WORKERS, m.PENDING, m.TOPIC_TASKS, m.OLDEST_AGE, m.PHASE_DURATION, m.LATENCY,
    m.GROUP_SIZE, m.IN_FLIGHT, m.PUBLISHED,
}  # fmt: skip


@pytest.fixture
def agent() -> Iterator[UnixAgent]:
    """An agent that does not listen yet."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # the path of a socket must be short
        yield UnixAgent(Path(directory) / "dsd.socket")


def stop(process: Process) -> None:
    """End a worker that works."""
    process.stop()
    assert process.wait() == 0
    assert "Traceback" not in process.stderr


def test_all_that_is_sent_is_in_the_table_with_its_tags(
    emulators: Emulators, database: Database, topic: str, agent: UnixAgent, tmp_path: Path
) -> None:
    """Names, types and tags of a run with failures are those of the table, and all that every worker sends is there."""
    environment = settings(emulators, database.database_id, tmp_path / "heartbeat", **agent.environment, **SERVICE)
    with agent.listening(), altered(OFTEN, environment, "--group-size", "10") as process:
        insert_undecodable(database, "garbage", topic, "key")
        register(database, "missing-topic", 2)
        register(database, topic, 40)
        wanted = {metric.name for metric in USUAL} | {m.FAILED.name, m.DEAD.name, m.BREAKER_STATE.name}
        eventually(lambda: wanted <= {each.name for each in list(agent.heard)}, seconds=40)
        eventually(lambda: agent.total(m.PUBLISHED.name) == 40, seconds=30)
        stop(process)
    for each in agent.heard:
        metric = TABLE[each.name]
        assert each.type == metric.type, each
        assert each.keys == {*metric.tags, "env", "service", "version"}, each
        assert {"env:test", "service:publishworker", "version:1.2.3"} <= each.tags
    phases = {tag for each in agent.named(m.PHASE_DURATION.name) for tag in each.tags if tag.startswith("phase:")}
    assert phases == {f"phase:{phase}" for phase in (m.POLL, m.CLAIM, m.PUBLISH, m.COMMIT)}
    states = {tag for each in agent.named(m.TOPIC_TASKS.name) for tag in each.tags if tag.startswith("state:")}
    assert states <= {f"state:{state}" for state in m.TASK_STATES}
    assert len(agent.named(m.LATENCY.name)) == 40
    [build] = {each.tags for each in agent.named(m.BUILD.name)}
    assert {f"{key}:{value}" for key, value in reporting.BUILD_TAGS.items()} <= build


def test_counts_are_complete_after_a_stop(
    emulators: Emulators, database: Database, subscription: Subscription, agent: UnixAgent
) -> None:
    """SIGTERM as soon as the last task is marked: what was buffered is sent, and nothing is counted twice."""
    ids = register(database, subscription.topic, 130)
    with agent.listening():
        with worker(emulators, database, "--group-size", "10", **agent.environment) as process:
            wait_until_all_sent(database)
            stop(process)
        result = account(ids, subscription)
        eventually(lambda: agent.total(m.PUBLISHED.name) == 130 + result.duplicates, seconds=5)
    assert (result.lost, result.unexpected) == (frozenset(), frozenset())


@pytest.mark.extended
@pytest.mark.parametrize("there_at_the_start", [True, False])
def test_an_agent_that_comes_and_goes_is_said_once(
    emulators: Emulators,
    database: Database,
    subscription: Subscription,
    agent: UnixAgent,
    there_at_the_start: bool,
) -> None:
    """A socket that is missing or vanishes, and a new one at its path: tasks go on, counts come again, one line."""
    topic = subscription.topic
    with worker(emulators, database, **agent.environment) as process, ExitStack() as listens:
        ids = []
        if there_at_the_start:
            listens.enter_context(agent.listening())
            ids += register(database, topic, 30)
            eventually(lambda: agent.total(m.PUBLISHED.name) == 30, seconds=30)
        listens.close()
        for _ in range(3):  # again and again without anybody who listens
            ids += register(database, topic, 10)
            wait_until_all_sent(database)
        eventually(lambda: told(process, "metrics") == 1)
        heard = agent.total(m.PUBLISHED.name)
        with agent.listening():
            ids += register(database, topic, 20)
            eventually(lambda: agent.total(m.PUBLISHED.name) >= heard + 20, seconds=30)
            stop(process)
        assert told(process, "metrics") == 1
    result = account(ids, subscription)
    assert (result.lost, result.unexpected) == (frozenset(), frozenset())


@pytest.mark.extended
def test_nobody_listens_on_udp(emulators: Emulators, database: Database, subscription: Subscription) -> None:
    """Datagrams to a port that refuses them: tasks go on, and at most one line says so."""
    ids = register(database, subscription.topic, 60)
    # Nothing of UDP is bound there either.
    with (
        silent_port() as address,
        worker(emulators, database, "--group-size", "10", DD_DOGSTATSD_URL=f"udp://{address}") as process,
    ):
        wait_until_all_sent(database)
        stop(process)
        assert told(process, "metrics") <= 1
    result = account(ids, subscription)
    assert (result.lost, result.unexpected) == (frozenset(), frozenset())


@pytest.mark.parametrize(("variable", "value"), [("OUTBOX_ASSIGNMENT", "divine"), ("OUTBOX_DRAIN_TIMEOUT", "soon")])
def test_an_unknown_value_in_the_environment_is_a_sentence(variable: str, value: str) -> None:
    """Exit 2 before anything is connected, and one line that names the variable and its value."""
    required = {"OUTBOX_PROJECT": "my-project", "OUTBOX_INSTANCE": "main", "OUTBOX_DATABASE": "shop"}
    done = run("publishworker", "run", environment=required | {variable: value})
    assert done.code == 2
    [line] = done.stderr.splitlines()
    assert variable in line
    assert repr(value) in line
