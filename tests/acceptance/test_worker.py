"""`publishworker` as a process: what it sends, in which order, and no task is lost when it stops; and wrong set-ups."""

import json
import re
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database
from google.pubsub_v1 import Topic

import outbox
from outbox.devtools.emulators import Emulators
from outbox.table.states import NEVER
from tests.support.commands import TRACE
from tests.support.operations import control, pause, update
from tests.support.processes import Finished, run
from tests.support.proxy import Proxy
from tests.support.pubsub import PubSub, Subscription
from tests.support.relays import (
    EACH_ONCE,
    account,
    execute,
    first_deliveries,
    insert_undecodable,
    register,
    unsent,
    wait_until_all_sent,
    worker,
)
from tests.support.rpc import PubSubServer, refuse
from tests.support.spanner import ADMIN_SECONDS, INSTANCE, PROJECT, count, query, variables
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
    pause(database, "paused-topic")
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
    control(database, "misrouted", PublishTo="no topic")
    with worker(emulators, database, command="drain") as process:
        assert process.wait(60) == 4
        assert process.stdout.splitlines() == [
            "2 pending in topic misrouted",
            "not drained: a topic with tasks has an invalid route, see the log",
        ]
        assert "Topic misrouted counts as paused: PublishTo is 'no topic'" in process.stderr
    assert account(ids, subscription) == EACH_ONCE


@pytest.mark.parametrize("end", ["deadline", "SIGTERM", pytest.param("outage", marks=pytest.mark.extended)])
def test_a_drain_that_leaves_tasks_is_no_success(emulators: Emulators, database: Database, end: str) -> None:
    """A job that runs it must not count as done: exit 4 with the remaining tasks, or 3 if Spanner is unavailable."""
    register(database, "missing-topic", 1)
    flags = [] if end == "SIGTERM" else ["--deadline", "1" if end == "deadline" else "4"]
    with (
        Proxy(emulators.spanner_host) as proxy,
        worker(emulators, database, *flags, command="drain", SPANNER_EMULATOR_HOST=proxy.address) as process,
    ):
        if end != "deadline":
            process.wait_for_text('"outcome": "retrying"')
            process.stop() if end == "SIGTERM" else proxy.refuse()
        assert process.wait(30) == (3 if end == "outage" else 4)
        create = f"outbox emulators --create {PROJECT}/{INSTANCE}/{database.database_id} --topic missing-topic"
        assert (create in process.stderr, "Traceback" in process.stderr) == (True, False)
        if end != "outage":
            # Retrying if a probe was recorded before the end.
            left = r"1 (pending|retrying) in topic missing-topic\nnot drained.*\n"
            assert re.fullmatch(left, process.stdout)


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


@pytest.mark.extended
def test_a_worker_without_metrics_counts_the_backlog_for_the_console(
    emulators: Emulators, database: Database, topic: str
) -> None:
    register(database, topic, 3, available_at=datetime(2090, 1, 1, tzinfo=UTC))

    def noted() -> dict[str, Any]:
        rows = query(database, "SELECT TO_JSON_STRING(Info) FROM AsynchronousTaskWorkers")
        histories = [json.loads(info).get("history", {}) for (info,) in rows if info]
        counted = (each["all"] for each in histories if {"oldest", "unsent"} <= each["all"].keys())
        # The first count may be as of a time before the tasks were registered.
        return next((each for each in counted if each["unsent"][-1]), {})

    with worker(emulators, database) as process:
        found = eventually(noted, seconds=60)
        process.end()
    assert {name: found[name][-1] for name in ("pending", "unsent", "oldest")} == {
        "pending": 0, "unsent": 3, "oldest": 0,
    }  # fmt: skip


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
    update(own_database, ids[0], Region="north")
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


def register_keys(database: Database, topic: str, keys: str, **options: Any) -> list[str]:
    """Register a task for each letter of `keys`, in one transaction; a dot is no key."""
    with database.batch() as batch:
        return [
            outbox.register(batch, topic, b"", ordering_key=key.strip("."), priority=n, **options)
            for n, key in enumerate(keys)
        ]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", ["block", "skip"])
def test_a_dead_head_blocks_its_key_or_is_skipped(
    emulators: Emulators, database: Database, topic: str, pubsub: PubSub, mode: str
) -> None:  # OUT-ORDER-1
    """It blocks no other key, and no task without one; once an operator has retried it, all goes out in order.

    Key s: a scheduled task blocks the tasks behind it. Key x: an expired task blocks nothing, at the head or in the
    middle, whether it was dead before or not.
    """
    subscription = pubsub.new_subscription(topic, ordered=True)
    past, future = datetime.now(UTC) - timedelta(minutes=1), datetime(2090, 1, 1, tzinfo=UTC)
    insert_undecodable(database, "head", topic, "a")
    insert_undecodable(database, "dead", topic, "x", AvailableAt=NEVER, ExpiresAt=past, Attempts=1)
    expired = register_keys(database, topic, "x", expires_at=past)
    a1, b1, loose, a2, b2, a3, x1, s1 = register_keys(database, topic, "ab.abaxs")
    expired += register_keys(database, topic, "x", expires_at=past)
    [scheduled] = register_keys(database, topic, "s", available_at=future)
    x2, s2 = register_keys(database, topic, "xs")
    stay = {"dead", *expired, scheduled, s2}
    sent = {"b": [b1, b2], "s": [s1], "x": [x1, x2]}
    options = ("--on-ordering-failure", mode, "--poll-interval", "0.2")
    with worker(emulators, database, *options, command="drain") as process:
        assert process.wait(60) == 0
        left = process.stdout.splitlines()
    received = subscription.drain()
    assert loose in {message.attributes[outbox.TASK_ID_ATTRIBUTE] for message in received}
    if mode == "skip":
        assert left == [
            f"1 blocked in topic {topic}",
            f"4 dead in topic {topic}",
            f"1 scheduled in topic {topic}",
            "drained",
        ]
        assert set(unsent(database)) == {"head", *stay}
        assert first_deliveries(received) == sent | {"a": [a1, a2, a3]}
        return
    assert left == [
        f"4 blocked in topic {topic}",
        f"4 dead in topic {topic}",
        f"1 scheduled in topic {topic}",
        "drained",
    ]
    assert set(unsent(database)) == {"head", a1, a2, a3, *stay}
    assert first_deliveries(received) == sent
    retry = "SET Data = b'', AvailableAt = NULL, Attempts = 0, ExpiresAt = NULL WHERE Id = 'head'"
    assert execute(database, f"UPDATE AsynchronousTasks {retry}") == 1
    with worker(emulators, database, *options, command="drain") as process:
        assert process.wait(60) == 0
    assert set(unsent(database)) == stay
    assert first_deliveries(subscription.drain()) == {"a": ["head", a1, a2, a3]}


def publishworker(emulators: Emulators, database: str, *arguments: str, **environment: str) -> Finished:
    """Run a command to its end, on the emulators; it writes no stack trace."""
    done = run("publishworker", *arguments, environment=variables(database, emulators) | environment)
    assert TRACE not in done.stderr
    return done


def test_a_wrong_database_or_a_missing_table_is_named(emulators: Emulators, empty_database: Database) -> None:
    """Exit 3, with the full name of the database, or the command that creates the table."""
    for command in ("run", "drain", "check"):
        done = publishworker(emulators, "no-such-database", command)
        assert done.code == 3
        assert f"projects/{PROJECT}/instances/{INSTANCE}/databases/no-such-database" in done.stdout + done.stderr
    for command in ("run", "drain"):
        done = publishworker(emulators, empty_database.database_id, command)
        assert done.code == 3
        for text in ("AsynchronousTasks", "outbox schema apply"):
            assert text in done.stderr.splitlines()[-1]


def transformed(request: Any, _context: object) -> Any:
    transforms = [{"javascript_udf": {"function_name": "redact"}}, {"disabled": True}]
    return Topic.pb()(name=request.topic, message_transforms=transforms)


@pytest.mark.parametrize(
    ("get_topic", "code", "line"),
    [
        (refuse(grpc.StatusCode.PERMISSION_DENIED), 0, "unknown "),
        (refuse(grpc.StatusCode.UNAVAILABLE), 3, "unreachable "),
        (transformed, 0, r"warning .*message transforms \(redact\)"),
    ],
    ids=["permission denied", "unavailable", "transformed"],
)
def test_check_says_what_pubsub_answers_about_a_topic(
    emulators: Emulators, database: Database, get_topic: Callable[..., Any], code: int, line: str
) -> None:
    """Publishing needs fewer permissions than reading a topic; an unavailable service is an error.

    Pub/Sub applies message transforms after a successful publish, so no worker notices what they drop.
    """
    with PubSubServer() as server:
        server.get_topic = get_topic
        members = ["serviceAccount:shop@my-project.iam.gserviceaccount.com", "serviceAccount:worker@my-project"]
        server.policy.bindings.add(role="roles/pubsub.publisher", members=members)
        host = {"PUBSUB_EMULATOR_HOST": server.address}
        done = publishworker(emulators, str(database.database_id), "check", "orders", **host)
    assert done.code == code
    found, publishers = [each for each in done.stdout.splitlines() if " topic projects" in each]
    assert re.match(line, found)
    assert re.match(rf"warning .*{', '.join(members)} may publish. .* bypasses the outbox", publishers)
    assert "AsynchronousTasks of this database has no task" in done.stdout


@pytest.mark.parametrize("words", ["publishworker run", "outbox schema apply"])
def test_missing_credentials_are_reported_with_advice(words: str) -> None:
    """No emulator, no credentials: exit 3 and the ways out."""
    nothing = {"GOOGLE_APPLICATION_CREDENTIALS": "", "NO_GCE_CHECK": "true", "HOME": "/nonexistent"}
    done = run(*words.split(), environment=variables("any-database") | nothing)
    assert done.code == 3
    assert "gcloud auth application-default login" in done.stderr.splitlines()[-1]
    assert TRACE not in done.stderr


def test_the_endpoints_win_over_the_emulators_variables(
    emulators: Emulators, empty_database: Database, topic: str, subscription: Subscription
) -> None:
    """From creating the tables to the received messages.

    So the emulator's own code paths are not used: transactions do not wait for each other in the worker, and Spanner
    aborts those that overlap.
    """
    nowhere = dict.fromkeys(("SPANNER_EMULATOR_HOST", "PUBSUB_EMULATOR_HOST"), "127.0.0.1:9")
    environment = nowhere | variables(empty_database.database_id) | {
        "OUTBOX_SPANNER_ENDPOINT": f"http://{emulators.spanner_host}",
        "OUTBOX_PUBSUB_ENDPOINT": f"http://{emulators.pubsub_host}",
        # Emulators before 1.5.38 end a session's transaction when another begins.
        "GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW": "false",
    }  # fmt: skip

    def called(*words: str) -> str:
        done = run(*words, environment=environment)
        assert done.code == 0, done
        return done.stdout

    assert "created  table AsynchronousTasks" in called("outbox", "schema", "apply")
    ids = register(empty_database, topic, 100)
    assert f"ok          topic {topic}" in called("publishworker", "check")
    assert "drained" in called("publishworker", "drain", "--concurrency", "2")
    status = json.loads(called("outbox", "status", "--json"))
    assert (status["pending"], status["sent_last_minute"]) == (0, 100)
    received = {message.attributes["asynchronous_task_id"] for message in subscription.pull_until(100)}
    assert received == set(ids)
    unknown = run("outbox", "pause", "nosuch", environment=environment)
    assert (unknown.code, f"Known topics: {topic}" in unknown.stderr) == (2, True)
