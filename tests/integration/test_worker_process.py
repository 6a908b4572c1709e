"""What a worker needs around its loop: connections, endpoints, the change stream, and `check` and `verify`."""

import contextlib
import json
import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias
from unittest import mock

import google.auth
import grpc
import pytest
from google.api_core.exceptions import DeadlineExceeded, PermissionDenied
from google.auth.credentials import AnonymousCredentials
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.instance import Instance
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport

from outbox.base.schedules import Schedule
from outbox.devtools.emulators import Emulators
from outbox.program.channels import open_pubsub
from outbox.table import connection, ddl
from outbox.table.connection import LimitedDatabase, open_database
from outbox_admin import cli as outbox_cli
from outbox_admin import verify
from outbox_admin.verify import CHECKS
from publishworker.process import cli
from publishworker.process.app import open_store
from publishworker.process.worker_settings import WorkerSettings
from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.spanner import change_stream
from publishworker.spanner.change_stream import ChangeStream
from publishworker.types import LockedRow, Published
from tests.support.commands import here
from tests.support.fakes import serialized
from tests.support.operations import update
from tests.support.proxy import Proxy
from tests.support.pubsub import PubSub
from tests.support.relays import register
from tests.support.rpc import PubSubServer
from tests.support.spanner import INSTANCE, PROJECT, fresh_database, place, query, variables
from tests.support.waiting import eventually

ENDPOINT = "europe-west1-pubsub.googleapis.com"
NAMED = {"project": PROJECT, "instance": INSTANCE, "database": "any-database"}


@pytest.mark.extended
def test_check_warns_of_ordered_tasks_without_an_endpoint(
    emulators: Emulators, database: Database, pubsub: PubSub
) -> None:
    """It names their topics and the setting. With the setting, without ordered tasks or on the emulator: no warning."""

    def warnings(**environment: str) -> list[str]:
        named = {f"OUTBOX_{name.upper()}": value for name, value in NAMED.items()}
        named |= {"OUTBOX_DATABASE": database.database_id, **environment}
        done = here("check", environment=emulators.environment() | named, program=cli.main)
        assert done.code == (3 if "PUBSUB_EMULATOR_HOST" in environment else 0)
        return [line for line in done.stdout.splitlines() if line.startswith("warning")]

    pending, scheduled, loose, done_with = topics = [pubsub.new_topic() for _ in range(4)]
    register(database, loose, 1)
    [sent] = register(database, done_with, 1, ordering_key="a")
    update(database, sent, SentAt=COMMIT_TIMESTAMP)
    assert warnings() == []
    register(database, pending, 2, ordering_key="a")
    register(database, scheduled, 1, ordering_key="a", available_at=datetime(2090, 1, 1, tzinfo=UTC))
    assert warnings() == []
    google_cloud = {"PUBSUB_EMULATOR_HOST": "", "GOOGLE_APPLICATION_CREDENTIALS": "", "NO_GCE_CHECK": "true"}
    [warning] = warnings(**google_cloud, HOME="/nonexistent")
    assert {topic for topic in topics if topic in warning} == {pending}
    assert "--pubsub-endpoint" in warning
    assert warnings(OUTBOX_PUBSUB_ENDPOINT=f"http://{emulators.pubsub_host}") == []


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    monkeypatch.delenv("PUBSUB_EMULATOR_HOST", raising=False)
    opened: list[tuple[str, dict[str, Any]]] = []

    def create_channel(host: str, **options: Any) -> grpc.Channel:
        opened.append((host, options))
        return grpc.insecure_channel("127.0.0.1:1")

    with (
        mock.patch.object(PublisherGrpcTransport, "create_channel", create_channel),
        mock.patch.object(google.auth, "default", return_value=(AnonymousCredentials(), PROJECT)),
    ):
        yield opened


def test_the_channel_connects_to_the_endpoint(
    channels: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same limits as the global one's. The endpoint wins over the emulator's variable."""
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", "127.0.0.1:1")
    for endpoint, target in {
        ENDPOINT: f"{ENDPOINT}:443",
        "pubsub.example.com:8443": "pubsub.example.com:8443",
        "[2001:db8::1]:8443": "[2001:db8::1]:8443",
    }.items():
        open_pubsub(place(pubsub_endpoint=endpoint))
        host, options = channels.pop()
        assert host == target
        assert dict(options["options"])["grpc.max_receive_message_length"] == -1
        assert "grpc.max_reconnect_backoff_ms" in dict(options["options"])
        assert "grpc.enable_http_proxy" not in dict(options["options"])
    with PubSubServer() as server:
        settings = place(pubsub_endpoint=f"http://{server.address}")
        publisher = PubSubPublisher(open_pubsub(settings), PROJECT)
        row = LockedRow("a", "orders", serialized(), "key", datetime.now(UTC), None, None)
        assert isinstance(publisher.publish("orders", [row], 5)["a"], Published)
        assert len(server.requests) == 1
    assert channels == []
    for endpoint in ("[::1]:443", "localhost", "127.0.0.1:8443"):  # no proxy
        open_pubsub(place(pubsub_endpoint=endpoint))
        assert dict(channels.pop()[1]["options"])["grpc.enable_http_proxy"] == 0
    monkeypatch.delenv("PUBSUB_EMULATOR_HOST")
    open_pubsub(place())
    assert channels.pop()[0] == "pubsub.googleapis.com:443"


@pytest.fixture(scope="module")
def streamed(spanner_instance: Instance) -> Iterator[Database]:
    """A database whose outbox has the change stream."""
    with fresh_database(spanner_instance, ddl.statements(change_stream=True)) as database:
        yield database


#: Starts a reader, with the event that it sets at an insert.
Reading: TypeAlias = Callable[[Database], tuple[ChangeStream, threading.Event]]


@pytest.fixture
def reading(emulators: Emulators) -> Iterator[Reading]:
    assert emulators
    started: list[ChangeStream] = []

    def start(database: Database) -> tuple[ChangeStream, threading.Event]:
        inserted, opened = threading.Event(), open_database(place(database.database_id))
        started.append(ChangeStream(opened, inserted.set))
        started[-1].start()
        return started[-1], inserted

    yield start
    for each in started:
        each.stop()


def test_an_insert_is_told_and_a_mark_is_not(streamed: Database, reading: Reading) -> None:
    stream, inserted = reading(streamed)
    eventually(lambda: stream.works, seconds=20)
    for _ in range(2):
        [id] = register(streamed, "orders", 1)
        assert inserted.wait(20)
        inserted.clear()

    def is_told_of_a_mark() -> bool:
        inserted.clear()
        update(streamed, id, SentAt=datetime.now(UTC))
        return inserted.wait(1)

    # The emulator ends a partition after half a minute, and then the stream wakes the worker.
    assert not all(is_told_of_a_mark() for _ in range(3))


def test_a_missing_stream_is_logged_once(
    database: Database, reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    """And the worker polls, because `inserted` is called after each attempt."""
    caplog.set_level(logging.INFO, logger="publishworker")
    stream, inserted = reading(database)
    for _ in range(2):
        assert inserted.wait(20)
        inserted.clear()
    assert not stream.works
    [line] = [record for record in caplog.records if getattr(record, "action", "") == "change_stream_failed"]
    assert "AsynchronousTasksInserts" in line.getMessage()


@pytest.mark.extended
def test_a_stream_that_falls_silent_is_read_again(
    emulators: Emulators, streamed: Database, reading: Reading,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Its requests hang: there is neither a record nor an error. That is logged once, and the worker polls."""
    caplog.set_level(logging.INFO, logger="publishworker")
    monkeypatch.setattr(change_stream, "RESTART_SECONDS", 4.0)
    with Proxy(emulators.spanner_host) as proxy:
        monkeypatch.setenv("SPANNER_EMULATOR_HOST", proxy.address)
        stream, inserted = reading(streamed)
        eventually(lambda: stream.works, seconds=20)
        proxy.hang()
        eventually(lambda: "no record for" in caplog.text, seconds=30)
        assert not stream.works
        inserted.clear()
        assert inserted.wait(20)
        proxy.forward()
        eventually(lambda: "can be read again" in caplog.text, seconds=60)
        assert stream.works
    assert [getattr(each, "action", "") for each in caplog.records] == ["change_stream_failed", "change_stream_works"]


def test_heartbeats_and_the_change_stream_have_connections_of_their_own(
    emulators: Emulators, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads and batches share another one."""
    with Proxy(emulators.spanner_host) as proxy:
        monkeypatch.setenv("SPANNER_EMULATOR_HOST", proxy.address)
        store = open_store(WorkerSettings.read({}, variables(database.database_id)))
        store.discover((), ())
        before = proxy.accepted
        store.discover((), ())
        assert proxy.accepted == before
        store.heartbeat("me", datetime.now(UTC), ())
        assert proxy.accepted == before + 1
        with store.database.on_own_connection().snapshot() as snapshot:
            assert snapshot.execute_sql("SELECT 1").one() == [1]
        assert proxy.accepted == before + 2


#: Each process of the test run has one, because all share the emulators.
NAME = f"verify-{os.getpid()}"
FLAGS = ("verify", "--project", PROJECT, "--instance", INSTANCE, "--database", NAME, "--rows", "100")


@pytest.fixture
def small(emulators: Emulators, spanner_instance: Instance, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    """Few tasks and short waits; afterwards no database and no topic is left, whatever a test did."""
    for name, value in emulators.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(verify, "HELD_SECONDS", 0.5)
    yield spanner_instance
    spanner_instance.database(NAME).drop()


def test_all_checks_run_and_nothing_is_left(small: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    """What the emulator cannot show is not available, and never counts as passed."""
    assert outbox_cli.main([*FLAGS, "--yes", "--json"]) == 0
    out, err = capsys.readouterr()
    found = {each["name"]: each for each in json.loads(out)["checks"]}
    assert list(found) == list(CHECKS)
    assert {name: each["verdict"] for name, each in found.items()} == {
        **dict.fromkeys(("schema", "load", "locks"), "passed"),
        **dict.fromkeys(("roles", "plans"), "not available"),
    }
    assert found["load"]["figures"]["rows"] == 100
    assert [line.split(": ")[1] for line in err.splitlines()] == [
        f"{name} ({number} of {len(CHECKS)})" for number, name in enumerate(CHECKS, 1)
    ]
    assert not small.database(NAME).exists()


def test_only_a_database_of_its_own_is_dropped(
    small: Instance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also at SIGTERM. One that another person creates after the check of its name stays."""
    monkeypatch.setitem(CHECKS, "load", lambda _scratch: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        outbox_cli.main([*FLAGS, "--yes"])
    assert (ended.value.code, small.database(NAME).exists()) == (143, False)
    small.database(NAME).create().result(30)
    monkeypatch.setattr(connection.LimitedDatabase, "exists", lambda _database: False)
    for keep in ([], ["--keep"]):
        assert outbox_cli.main([*FLAGS, "--yes", *keep]) == 1
    monkeypatch.undo()
    assert small.database(NAME).exists()
    assert re.search("dropped|kept", capsys.readouterr().err) is None


@pytest.mark.usefixtures("small")
def test_tasks_are_loaded_although_the_clock_of_this_machine_is_ahead(
    own_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = mock.Mock(now=lambda _zone: datetime.now(UTC) + timedelta(minutes=5))
    monkeypatch.setattr(verify, "datetime", clock, raising=False)
    settings: Any = place(own_database.database_id)
    verify.Scratch(settings, open_database(settings), 20).load()
    assert query(own_database, "SELECT COUNTIF(SentAt IS NOT NULL) FROM AsynchronousTasks") == [[18]]


class Late(LimitedDatabase):
    """A database whose commits are executed, and answered too late: every second one, or all."""

    every = 2

    def batch(self, *arguments: Any, **options: Any) -> Any:
        Late.commits += 1
        return super().batch(*arguments, **options) if Late.commits % self.every else _late(super().batch())

    commits = 0


@contextlib.contextmanager
def _late(batch: Any) -> Iterator[Any]:
    with batch as entered:
        yield entered
    raise DeadlineExceeded("no answer in time")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("every", "loaded"), [(2, "passed"), (1, "failed")])
def test_late_commits_are_repeated_by_their_ids(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], every: int, loaded: str
) -> None:
    """If commits stay late, the checks of the rows are not run, because they would judge half of them."""
    monkeypatch.setattr(verify, "LOAD_ROWS", 40)
    monkeypatch.setattr(verify, "CALL", Schedule(0.0, 0.0))
    monkeypatch.setattr(connection, "LimitedDatabase", Late)
    monkeypatch.setattr(Late, "every", every)
    monkeypatch.setattr(Late, "commits", 0)
    outbox_cli.main([*FLAGS, "--yes", "--json"])
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["checks"]}
    assert found["load"]["verdict"] == loaded
    assert (found["plans"]["verdict"] == "not run") is (loaded == "failed")


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        pytest.param(
            PermissionDenied("no updateDdl"), 1, "failed PermissionDenied: 403 no updateDdl", marks=pytest.mark.extended
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=["fails", "Ctrl-C"],
)
def test_a_check_that_raises_leaves_nothing(  # noqa: PLR0917 - cases
    small: Instance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    error: BaseException, code: int, sentence: str,
) -> None:  # fmt: skip
    """If it fails it is named, and the others run."""
    monkeypatch.setitem(CHECKS, "roles", mock.Mock(side_effect=error))
    assert outbox_cli.main([*FLAGS, "--yes"]) == code
    out = capsys.readouterr().out
    assert sentence in " ".join(out.split())
    assert not sentence or "1 failed" in out.splitlines()[-1]
    assert not small.database(NAME).exists()


def test_a_database_that_exists_is_not_touched(small: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    small.database(NAME).create().result(30)
    assert outbox_cli.main([*FLAGS, "--yes"]) == 1
    sentence = f"database {NAME} exists. `verify` creates a new one: omit --database"
    assert capsys.readouterr().err == f"outbox: {sentence}\n"
    assert small.database(NAME).exists()


def test_it_asks_before_it_creates_anything(small: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    assert outbox_cli.main([*FLAGS]) == 2
    err = capsys.readouterr().err
    assert f"This creates database {NAME} in instance {INSTANCE}" in err
    assert "This is not a terminal, so pass --yes to confirm" in err
    assert not small.database(NAME).exists()
    assert outbox_cli.main([*FLAGS, "--yes", "--rows", "7"]) == 2
    assert "--rows: '7' is not allowed" in capsys.readouterr().err
