"""Workers on the table of another version: docs/operations/upgrade.md."""

from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from tests.support.pubsub import Subscription
from tests.support.relays import EACH_ONCE, account, register, wait_until_all_sent, worker
from tests.support.spanner import ADMIN_SECONDS, query


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
    for command in ("run", "check"):
        with worker(emulators, own_database, command=command) as running:
            assert running.wait() == 3
            assert "index AsynchronousTasksInOrder is missing" in running.stderr + running.stdout
