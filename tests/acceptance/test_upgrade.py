"""Older and newer workers, applications and tables side by side: docs/operations/upgrade.md."""

import contextlib
from pathlib import Path

import pytest
from google.cloud.spanner_v1.database import Database

import outbox
from outbox.admin.reshard import POLLED, Resharding
from outbox.admin.table import TaskTable
from outbox.devtools.emulators import Emulators
from outbox.table.connection import open_database
from outbox.table.layouts import Layout
from tests.support.older import older_version
from tests.support.pubsub import Subscription
from tests.support.relays import EACH_ONCE, account, divided, first_deliveries, register, wait_until_all_sent, worker
from tests.support.spanner import ADMIN_SECONDS, place, query
from tests.support.waiting import eventually

pytestmark = pytest.mark.xdist_group("upgrade")  # the older version is installed once


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return older_version(tmp_path_factory.mktemp("older"))


@pytest.mark.extended
def test_older_and_newer_workers_share_a_table(
    emulators: Emulators, database: Database, topic: str, subscription: Subscription, older: Path
) -> None:
    """An update and a rollback: they divide the shards, no task is lost or published twice, keys keep their order."""
    ids, ordered = [], []

    def work() -> None:
        ids.extend(register(database, topic, 60))
        ordered.extend(register(database, topic, 30, ordering_key="key"))

    with contextlib.ExitStack() as stack:
        old = [stack.enter_context(worker(emulators, database, directory=older)) for _ in range(2)]
        eventually(lambda: divided(old), seconds=30, message="two older workers divide the shards")
        work()
        new = stack.enter_context(worker(emulators, database))
        eventually(lambda: divided([*old, new]), seconds=30, message="a newer one takes its part")
        work()
        old[0].stop()
        work()
        assert old[0].wait() == 0
        eventually(lambda: divided([old[1], new]), seconds=30, message="an older and a newer one divide the shards")
        work()
        old[1].stop()
        assert old[1].wait() == 0
        eventually(lambda: divided([new]), seconds=30, message="the newer one has all")
        work()
        back = stack.enter_context(worker(emulators, database, directory=older))
        eventually(lambda: divided([new, back]), seconds=30, message="the older one is back")
        work()
        wait_until_all_sent(database)
        for each in (new, back):
            each.end()
    messages = subscription.pull_until(len(ids) + len(ordered))
    assert first_deliveries(messages)["key"] == ordered
    received = [message.attributes[outbox.TASK_ID_ATTRIBUTE] for message in messages]
    assert sorted(received) == sorted(ids + ordered)


def test_a_worker_runs_on_a_table_of_a_later_version(
    emulators: Emulators, own_database: Database, topic: str, subscription: Subscription
) -> None:
    """First the migration, then the workers: it ignores unknown columns."""
    own_database.update_ddl(
        [
            "ALTER TABLE AsynchronousTasks ADD COLUMN Region STRING(20)",
            "ALTER TABLE AsynchronousTaskWorkers ADD COLUMN Version STRING(20)",
            "CREATE INDEX AsynchronousTasksByRegion ON AsynchronousTasks (Region, SentAt)",
            "CREATE TABLE AsynchronousTaskRegions (Region STRING(20)) PRIMARY KEY (Region)",
        ]
    ).result(timeout=ADMIN_SECONDS)
    ids = register(own_database, topic, 20)
    with own_database.batch() as batch:
        batch.update("AsynchronousTasks", ("Id", "Region"), [(ids[0], "north")])
    with worker(emulators, own_database) as running:
        wait_until_all_sent(own_database)
        running.end()
    assert account(ids, subscription) == EACH_ONCE
    assert query(own_database, "SELECT Region FROM AsynchronousTasks WHERE Region IS NOT NULL") == [["north"]]


def test_a_newer_worker_on_an_old_table_names_missing_objects(emulators: Emulators, own_database: Database) -> None:
    """Exit code 3, so a rolling update stops at its first pod while the older workers continue."""
    own_database.update_ddl(["DROP INDEX AsynchronousTasksInOrder"]).result(timeout=ADMIN_SECONDS)
    with worker(emulators, own_database) as running:
        assert running.wait() == 3
        assert "index AsynchronousTasksInOrder is missing" in running.stderr


@pytest.mark.extended
def test_a_worker_of_an_older_version_delays_a_change_of_the_shards(
    emulators: Emulators, own_database: Database, topic: str, older: Path
) -> None:
    """It polls the first column only, and sends every task until it is replaced."""
    resharding = Resharding(TaskTable(open_database(place(own_database.database_id))))
    with worker(emulators, own_database, directory=older) as old:
        old.wait_for_text("relaying")
        steps = resharding.run(resharding.target(4))
        assert any("also polls Shard4" in line for line in steps)  # waits
        register(own_database, topic, 20)
        wait_until_all_sent(own_database)
        assert resharding.snapshot().layout_state(Layout(10)) == POLLED
        old.end()
    assert list(steps)[-1] == "Remove Shard from AsynchronousTaskShards"
