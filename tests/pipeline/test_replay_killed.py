"""The command `replay`, killed while it writes, and resumed."""

import pytest
from google.cloud.spanner_v1.database import Database
from pyspark.sql import SparkSession

import outbox
from outbox.emulators import Emulators
from outbox.settings import DatabaseSettings
from outbox_pipeline.jobs.replay import run
from outbox_pipeline.spanner import table_of
from tests.support.archives import DAY, MICROSECOND, sent
from tests.support.operations import insert
from tests.support.processes import kill_family, started
from tests.support.pubsub import Subscription
from tests.support.relays import unsent, worker
from tests.support.replays import noted, replay_settings
from tests.support.spanner import INSTANCE, PROJECT
from tests.support.waiting import eventually

#: Seconds in which Spark starts, and does the work; a machine may be slow.
SECONDS = 200.0
TASKS = 600


def send(emulators: Emulators, database: Database) -> None:
    """Let a worker send all that is unsent."""
    with worker(emulators, database, command="drain") as process:
        assert process.wait(SECONDS) == 0


@pytest.mark.timeout(2 * SECONDS)
def test_a_replay_that_was_killed_is_resumed_and_sends_each_task_once(  # noqa: PLR0917 - fixtures
    spark: SparkSession,
    emulators: Emulators,
    target: DatabaseSettings,
    database: Database,
    topic: str,
    subscription: Subscription,
) -> None:
    """Though a worker has sent a part of them in between, and others were sent by themselves."""
    insert(database, [sent(f"{number:05d}", DAY + MICROSECOND * number, Topic=topic) for number in range(TASKS)])
    command = (
        "outbox_pipeline", "replay", "--project", PROJECT, "--instance", INSTANCE, "--database", database.database_id,
        "--topic", topic, "--max-rows-per-second", "200",
    )  # fmt: skip
    with started(*command, environment=emulators.environment()) as process:
        eventually(lambda: len(unsent(database)) > 0, seconds=SECONDS, message="some tasks are unsent")
        kill_family(process.pid)
        said = process.stderr
    [note] = noted(database)
    assert (note["FinishedAt"], note["Tasks"]) == (None, None)
    assert f"--resume {note['ReplayId']} goes on with it" in said
    send(emulators, database)
    insert(database, [sent("new", table_of(target).now(), Topic=topic)])

    done = run(spark, replay_settings(target), resume=note["ReplayId"])
    assert done.replay_id == note["ReplayId"]
    assert (done.selected, done.waiting, done.missing) == (TASKS, 0, 0)
    assert 0 < done.changed < TASKS, "the kill was to come in the middle"
    assert done.replayed == TASKS - done.changed
    send(emulators, database)
    received = [message.attributes[outbox.TASK_ID_ATTRIBUTE] for message in subscription.pull_until(TASKS, SECONDS)]
    received += [message.attributes[outbox.TASK_ID_ATTRIBUTE] for message in subscription.drain(0.5)]
    assert sorted(received) == [f"{number:05d}" for number in range(TASKS)]
    [ended] = noted(database)
    assert ended == note | {"FinishedAt": ended["FinishedAt"], "Tasks": TASKS}
    assert ended["FinishedAt"] is not None
