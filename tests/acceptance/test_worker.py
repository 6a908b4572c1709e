"""`publishworker` as a process: what it sends, and no task is lost when it stops; audited from outside."""

import json
import re
import signal
from datetime import UTC, datetime, timedelta

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from tests.support.proxy import Proxy
from tests.support.pubsub import Subscription
from tests.support.relays import EACH_ONCE, account, register, unsent, wait_until_all_sent, worker
from tests.support.spanner import ADMIN_SECONDS, INSTANCE, PROJECT, count, query
from tests.support.waiting import eventually


def test_sigterm_finishes_the_in_flight_batches(
    emulators: Emulators, database: Database, topic: str, subscription: Subscription
) -> None:  # OUT-LOSS-5
    """Exit 0, and every task is either published and marked, or neither: no duplicate from the next worker."""
    ids = register(database, topic, 300)
    with worker(emulators, database, "--batch-size", "10") as first:
        eventually(lambda: len(unsent(database)) < 280, seconds=30)
        first.end()
        assert "Transaction not found" not in first.stderr  # the emulator's word for a transaction that it ended
    assert unsent(database)
    with worker(emulators, database, command="drain") as second:
        assert second.wait(60) == 0
    assert account(ids, subscription) == EACH_ONCE


def test_drain_empties_the_backlog_and_names_remaining_tasks(
    emulators: Emulators, database: Database, topic: str, subscription: Subscription
) -> None:
    """Scheduled, dead and paused tasks stay, and are named; exit 0."""
    ids = register(database, topic, 30)
    register(database, topic, 2, available_at=datetime(2090, 1, 1, tzinfo=UTC))
    register(database, "paused-topic", 3)
    with database.batch() as batch:
        batch.insert("AsynchronousTaskTopics", ("Topic", "Paused"), [("paused-topic", True)])
    with worker(emulators, database, command="drain") as process:
        assert process.wait(60) == 0
        assert process.stdout.splitlines() == [
            "3 paused in topic paused-topic",
            f"2 scheduled in topic {topic}",
            "drained",
        ]
    assert account(ids, subscription).lost == frozenset()


def test_drain_ends_at_an_invalid_route(
    emulators: Emulators, database: Database, topic: str, subscription: Subscription
) -> None:
    """It sends all else. Then exit 4, and the tasks of the topic and the reason are named."""
    ids = register(database, topic, 3)
    register(database, "misrouted", 2)
    with database.batch() as batch:
        batch.insert("AsynchronousTaskTopics", ("Topic", "PublishTo"), [("misrouted", "no topic")])
    with worker(emulators, database, command="drain") as process:
        assert process.wait(60) == 4
        assert process.stdout.splitlines() == [
            "2 pending in topic misrouted",
            "not drained: a topic with tasks has an invalid route, see the log",
        ]
        assert "Topic misrouted counts as paused: publish_to is 'no topic'" in process.stderr
    assert account(ids, subscription) == EACH_ONCE


def test_drain_gives_up_at_its_deadline(emulators: Emulators, database: Database) -> None:
    """A task that cannot be sent: exit 4, and the count of remaining tasks."""
    register(database, "missing-topic", 1)
    with worker(emulators, database, "--deadline", "1", command="drain") as process:
        assert process.wait(30) == 4
        # Retrying if a probe was recorded within the second.
        assert re.search(r"^1 (pending|retrying) in topic missing-topic$", process.stdout, re.MULTILINE)
        assert "not drained" in process.stdout
        assert (
            f"outbox emulators --create {PROJECT}/{INSTANCE}/{database.database_id} --topic missing-" in process.stderr
        )


def test_a_stopped_drain_is_no_success(emulators: Emulators, database: Database) -> None:
    """SIGTERM with work left is exit 4: a job that runs it must not count as done."""
    register(database, "missing-topic", 1)
    with worker(emulators, database, command="drain") as process:
        process.wait_for_text('"outcome": "retrying"')
        process.stop()
        assert process.wait(30) == 4
        assert "not drained" in process.stdout


@pytest.mark.extended
def test_a_drain_keeps_its_deadline_while_spanner_is_unavailable(emulators: Emulators, database: Database) -> None:
    """It neither hangs nor claims success: exit 3."""
    with Proxy(emulators.spanner_host) as proxy:
        register(database, "missing-topic", 1)
        environment = {"SPANNER_EMULATOR_HOST": proxy.address}
        with worker(emulators, database, "--deadline", "4", command="drain", **environment) as process:
            process.wait_for_text('"outcome": "retrying"')
            proxy.refuse()
            assert process.wait(30) == 3
            assert "Traceback" not in process.stderr


def test_a_bad_task_delays_no_other(
    emulators: Emulators, database: Database, topic: str, subscription: Subscription
) -> None:  # OUT-DELAY-1
    """Another writer's bytes and an unknown topic: a clear line each, no stack trace, the others are sent."""
    columns = ("Id", "Topic", "Data", "Priority", "CreatedAt")
    with database.batch() as batch:
        batch.insert("AsynchronousTasks", columns, [("garbage", topic, b"////", 100, COMMIT_TIMESTAMP)])
    register(database, "missing-topic", 3, priority=100)
    ids = register(database, topic, 20)
    with worker(emulators, database) as process:
        eventually(lambda: not set(unsent(database)) & set(ids), seconds=30)
        process.wait_for_text("undecodable")
        process.wait_for_text("not_found")
        process.end()
        lines = [json.loads(line) for line in process.stderr.splitlines()]
    failures = [line["message"] for line in lines if line.get("outcome") == "dead" or line["action"] == "circuit_open"]
    assert any("garbage" in message and "undecodable" in message for message in failures)
    create = f"outbox emulators --create {PROJECT}/{INSTANCE}/{database.database_id} --topic missing-topic"
    assert any(
        f"not_found: projects/{PROJECT}/topics/missing-topic" in message and create in message for message in failures
    )
    assert not any("error.stack" in line for line in lines)
    assert len(unsent(database)) == 4
    assert account(ids, subscription).lost == frozenset()


def test_a_scheduled_task_is_sent_when_it_is_due_and_not_before(
    emulators: Emulators, database: Database, topic: str, subscription: Subscription
) -> None:  # OUT-ORDER-2
    """By the publish time that Pub/Sub gave each message; tasks that are scheduled for later stay."""
    register(database, topic, 20, available_at=datetime(2090, 1, 1, tzinfo=UTC))
    with worker(emulators, database) as process:
        process.wait_for_text('"start"')
        due = datetime.now(UTC) + timedelta(seconds=3)
        register(database, topic, 20, available_at=due)
        register(database, topic, 1)
        early, *rest = subscription.pull_until(21, seconds=30)
        process.end()
    assert early.publish_time < due
    late = [(message.publish_time - due).total_seconds() for message in rest]
    assert min(late) >= 0
    print(f"sent {min(late):.2f} to {max(late):.2f} s after they were due")
    assert count(database, "SentAt IS NOT NULL") == 21
    assert count(database, "SentAt IS NULL AND AvailableAt > '2089-01-01'") == 20


def test_a_second_signal_ends_a_worker_at_once(emulators: Emulators, database: Database, topic: str) -> None:
    """For operators who cannot wait until a hanging batch ends."""
    register(database, topic, 5)
    with Proxy(emulators.pubsub_host) as proxy:
        proxy.hang()
        with worker(emulators, database, PUBSUB_EMULATOR_HOST=proxy.address) as process:
            eventually(lambda: proxy.accepted, seconds=20)
            process.stop()
            process.wait_for_text("A second signal ends the process")
            process.stop()
            assert process.wait(5) == 128 + signal.SIGTERM


@pytest.mark.extended
@pytest.mark.parametrize(("command", "code"), [("run", 1), ("drain", 4)])
def test_an_exceeded_shutdown_timeout_is_logged(
    emulators: Emulators, database: Database, topic: str, command: str, code: int
) -> None:
    """Work in flight after --shutdown-timeout: a line that says so, and the exit code of work that is left."""
    register(database, topic, 5)
    with Proxy(emulators.pubsub_host) as proxy:
        proxy.hang()
        words = ("--shutdown-timeout", "0.2")
        with worker(emulators, database, *words, command=command, PUBSUB_EMULATOR_HOST=proxy.address) as process:
            eventually(lambda: proxy.accepted, seconds=20)
            process.stop()
            assert process.wait(7) == code
            assert "shutdown_timeout" in process.stderr


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
